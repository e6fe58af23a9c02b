"""Tables of predicted steps, and what they leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.honest import STEP
from benchmarks.report import table
from benchmarks.roofline.cases import TEXT_TOKENS, TITLES, WORLD, Picture, Step
from benchmarks.roofline.costs import Ask
from benchmarks.roofline.devices import (
    AHEAD,
    ASSUMED,
    ATTENTION,
    COLLECTIVE,
    CTA,
    DYNAMIC,
    EXPANDED,
    FASTEST,
    GAP,
    HELD,
    HOST,
    LINKS,
    MEMORY,
    MIDDLE,
    NORMS,
    PRODUCTS,
    SHORTEST,
    SLOW,
    SLOWEST,
    SUMS,
    USUAL,
    Assumed,
    Gpu,
)
from benchmarks.roofline.prediction import MODULES, RECOMPUTED, Prediction
from benchmarks.roofline.replay import FITTED, Recorded

COLUMNS = (
    "layout | micro-batches × samples | recomputed | peak, GiB | vision, ms | text, ms | boundary, ms | end, ms "
    "| MFU vision | MFU text | MFU micro-batch | MFU step | patches/s | published"
)
LOST = {
    RECOMPUTED: "recomputed or padded",
    "product": "products",
    "attention": "attention",
    "memory": "other kernels",
    "wire": "waits for links",
    "host": "waits for the host",
    "once a step": "sums and update",
    "beside": "other streams",
}
"""Columns of what a step's time goes to besides operations at the peak, by kind."""
Found = tuple[Step, Mapping[str, Prediction], float]
"""A step, what is predicted of it by what is `ASSUMED`, and the peak of its memory in bytes."""
Measured = tuple[Step, Prediction, Mapping[str, float]]
"""A step, what is predicted of it, and seconds of phases that were measured, without what they wait for links."""
Replayed = tuple[Recorded, Mapping[str, float], float, Mapping[str, float]]
"""A recorded share, milliseconds that are predicted of it, the host's time for an operation in that run, and what is
predicted with it.
"""


def text_of(
    found: Sequence[Found], gpu: Gpu, measured: Sequence[Measured] = (), replays: Sequence[Replayed] = ()
) -> str:
    """The whole page."""
    models = list(dict.fromkeys(step.model for step, *_ in found))
    parts = [
        f"# Roofline of {WORLD} × {gpu.name}",
        f"`python -m benchmarks.roofline --gpu {gpu.name}`: one rank of each layout is run on a GPU that computes "
        "nothing (`tests/fake_cuda`), and what each operation asks for is divided by what the GPU reaches. "
        + ("Phases that `benchmarks.gpu` has measured take as long." if measured else "Nothing here was measured."),
        _assumed(gpu),
        *(["## The record, predicted", _about(), *map(_replayed, replays)] if replays else []),
        *(["## Measured", compared(measured)] if measured else []),
    ]
    for model in models:
        of_model = [each for each in found if each[0].model == model]
        parts.append(f"## {TITLES[model]}")
        parts += ["### Where the peak goes", _lost(of_model)]
        parts += ["### What each assumption is worth", worth(of_model)]
        parts += [_of_picture(picture, of_model) for picture in _pictures(of_model)]
        parts += ["### `sp|tp` over the best of the others", _ratios(of_model)]
    return "\n\n".join(parts)


def _about() -> str:
    file, section = FITTED
    return f"""\
Steps of two micro-batches that `benchmarks.gpu` has recorded of one rank alone, with FlashAttention-2, SwiGLU of
dynamic width and copies in place of collectives, beside what is predicted of the same operations. Fitted to `{section}`
of `{file}`: {PRODUCTS} of the peak in products; {1e6 * SHORTEST:.0f} µs for an operation at the least, and
{1e6 * GAP:.1f} µs between two; {SUMS} of the bandwidth in sums; bytes per second of SwiGLU of dynamic width and of
copies of expanded tensors; with how many blocks FlashAttention-2 reaches half of what is published of many; and
{1e6 * HOST:.0f} µs of the host for an operation. The other shares took no part in that.

How fast the host is differs between runs. The first prediction has its time of the fitted share, on the H200 in
proportion to that of launching a small kernel; the second one the time with which the forward pass of the encoder,
whose kernels wait for the host, takes as long as it did in that run. What is left: sums of gradients took up to 40 ms
longer in the shares of 32B than their bytes and kernels explain, and a backward pass of the encoder 52 ms on the H200;
steps of these shares differ by 80 to 130 ms."""


def _replayed(replay: Replayed) -> str:
    share, first, launch, own = replay
    rows = []
    for name, ms in share.measured.items():
        predictions = (f"{each[name]:.1f} | {each[name] / ms:.2f}" for each in (first, own))
        rows.append(" | ".join([name, f"{ms:.1f}", f"{ms / share.measured[STEP]:.1%}", *predictions]))
    header = (
        "phase | measured, ms | of the step | predicted, ms | predicted / measured | host of the run, ms | / measured"
    )
    return f"### {share}: host {1e6 * launch:.0f} µs\n\n{table(header, rows)}"


def compared(measured: Sequence[Measured]) -> str:
    """A table of what was measured, beside what is predicted of it."""
    rows = []
    for step, p, seconds in measured:
        for phase, found in seconds.items():
            expected = p.phases[phase].device - p.phases[phase].by_kind.get("wire", 0.0)
            step_name = f"{step.model.upper()} `{step.layouts}`".replace("|", "\\|")
            cells = step_name, step.picture, phase, f"{1e3 * found:.1f}", f"{1e3 * expected:.1f}"
            rows.append(" | ".join([*map(str, cells), f"{found / expected:.2f}"]))
    return table("layout | step | phase | measured, ms | predicted, ms | measured / predicted", rows)


def numbers_of(found: Sequence[Found]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "model": step.model,
            "layouts": str(step.layouts),
            "kind": step.layouts.kind,
            "patches": step.picture.patches,
            "tokens_of_a_sample": step.picture.length,
            "samples": step.samples,
            "micro_batches": p.micro_batches,
            "recomputed": step.recomputed,
            "peak_bytes": peak,
            "phases": {
                name: {
                    "device_s": t.device,
                    "links_s": t.links,
                    "by_kind_s": t.by_kind,
                }
                for name, t in sorted(p.phases.items())
            },
            "lost": p.lost,
            "micro_batch_s": p.micro_batch,
            "step_s": p.step,
            "mfu": {**p.mfu_of_modules, "micro_batch": p.mfu_of_micro_batch, "step": p.mfu_of_step},
            "patches_per_s": p.patches_per_second,
            "mfu_of_micro_batch_assumed": {name: each.mfu_of_micro_batch for name, each in every.items()},
            "mfu_of_step_assumed": {name: each.mfu_of_step for name, each in every.items()},
        }
        for step, every, peak in found
        for p in [every[MIDDLE]]
    ]


def _assumed(gpu: Gpu) -> str:
    few, many = 5 * 65, 7 * 65
    reach = {
        kernel: f"{attention.share(few) * gpu.peak / 1e12:.0f} to {attention.share(many) * gpu.peak / 1e12:.0f}"
        for kernel, attention in ATTENTION.items()
    }
    return f"""\
What kernels reach was fitted to a record of one H100: {PRODUCTS * gpu.peak / 1e12:.0f} of {gpu.peak / 1e12:.0f} TFLOP/s
in matrix products; {MEMORY * gpu.memory / 1e12:.2f} of {gpu.memory / 1e12:.2f} TB/s of memory, {NORMS} of the data
sheet's in norms, {SUMS} in sums; attention of 8k tokens of 5 to 7 heads, which have few blocks,
{reach["flash forward"]} TFLOP/s forward and {reach["flash backward"]} backward by FlashAttention-2. A kernel does not
begin before the host has issued it, which takes {1e6 * USUAL.launch:.0f} µs, and the host is at most {AHEAD} operations
ahead.

Assumed, and unmeasured: attention by cuDNN {reach["cudnn forward"]} and {reach["cudnn backward"]} TFLOP/s, as
FlashAttention-3 is published (tritonbench issue 1267, flash-attention issue 1310); SwiGLU at the memory's bandwidth (of
dynamic width it was measured at {DYNAMIC["swiglu forward"] / 1e12:.2f} and {DYNAMIC["swiglu backward"] / 1e12:.2f}
TB/s, where expanded tensors were copied at {EXPANDED / 1e12:.2f}); {LINKS * gpu.links / 1e9:.0f} of
{gpu.links / 1e9:.0f} GB/s of links, of which communicators with few CTAs (edges, pipelines, gradients) take
{CTA / 1e9:.0f} GB/s for each; {COLLECTIVE * 1e6:.0f} µs for a collective besides its bytes. A kernel takes as long as
what it is slowest at, and kernels of one stream follow each other. Collectives run beside kernels as streams, hardware
queues and multiprocessors let them (`roofline/timeline.py`).

Communication has a range, {SLOWEST}–{MIDDLE}–{FASTEST}, and all else is the same in it. Times are those of its middle.

- {FASTEST}: messages of any size at the rate above; collectives need no multiprocessors.
- {MIDDLE}: messages of {USUAL.ramp / 1e6:.1f} MB reach half the links' rate, of 30 to 60 MB {_rate(gpu, 30e6, USUAL)}
  to {_rate(gpu, 60e6, USUAL)} GB/s. A collective holds up to {HELD} of {gpu.processors} multiprocessors, which other
  kernels lack meanwhile. A product holds all of them until it ends. Where both wait for the same kernel the collective
  gets them first, and the product takes a second wave for what it does not get.
- {SLOWEST}: of {SLOW.ramp / 1e6:.0f} MB, {_rate(gpu, 30e6, SLOW)} to {_rate(gpu, 60e6, SLOW)} GB/s; the product gets
  them first, and the collective begins when it ends.

MFU is of the data sheet's peak, and counts no recomputation.

Left out: caches (each kernel reads and writes all it names), waiting for slower ranks (all are as the first), power
(2 to 4 points: a row of the tables), that kernels wait for FSDP2's gathers within a phase (ZeRO 3: they hold
multiprocessors, and a phase takes as long as the slower of both), that kernels of flash-linear-attention run chunk
after chunk (they are as fast as memory is: products would take a ninth of that), the loader. A sample has one picture
and {TEXT_TOKENS} tokens where nothing else is said: the published table (Ray, Qwen2.5-VL-32B on 8 H100) does not state
its texts."""


def _rate(gpu: Gpu, message: float, assumed: Assumed) -> str:
    """GB/s of a message of so many bytes."""
    return f"{message / Ask('wire', wire=message).seconds(gpu, assumed) / 1e9:.0f}"


def _lost(found: Sequence[Found]) -> str:
    """A table of MFU, and of points that other uses of a step's time cost, of the longest packs."""
    rows = []
    for step, every, _ in _first(found):
        p = every[MIDDLE]
        points = (f"{100 * p.lost.get(kind, 0.0):.1f}" for kind in LOST)
        rows.append(" | ".join([_name(step), f"{p.mfu_of_step:.1%}", *points]))
    return (
        "Of the step, at the middle of the range: MFU, and points by what else takes time. Of products and attention "
        "it is what they take longer than at the peak.\n\n"
        + table(" | ".join(["layout", "MFU step", *LOST.values()]), rows)
    )


def _first(found: Sequence[Found]) -> list[Found]:
    """Those of the first picture."""
    return [each for each in found if each[0].picture == _pictures(found)[0]]


def _pictures(found: Sequence[Found]) -> list[Picture]:
    return list(dict.fromkeys(step.picture for step, *_ in found))


def _of_picture(picture: Picture, found: Sequence[Found]) -> str:
    rows = [_row(*each) for each in found if each[0].picture == picture]
    return f"### {picture}\n\n{table(COLUMNS, rows)}"


def worth(found: Sequence[Found]) -> str:
    """A table of the MFU of a step of the longest packs by what is assumed, and points from the middle on."""
    steps, rows = _first(found), []
    for name in ASSUMED:
        cells = (
            f"{every[name].mfu_of_step:.1%}"
            + ("" if name == MIDDLE else f" ({100 * (every[name].mfu_of_step - every[MIDDLE].mfu_of_step):+.1f})")
            for _, every, _ in steps
        )
        rows.append(" | ".join([name, *cells]))
    return table(" | ".join(["assumed", *(_name(step) for step, *_ in steps)]), rows)


def _name(step: Step) -> str:
    return f"`{step.layouts}`".replace("|", "\\|")


def _row(step: Step, every: Mapping[str, Prediction], peak: float) -> str:
    p = every[MIDDLE]
    memory = f"{peak / 2**30:.1f}" + ("" if peak <= p.gpu.usable else " (does not fit)")
    published = dict(step.picture.published).get(step.layouts.kind) if step.model == "32b" else None
    boundary = p.micro_batch - sum(map(p.module, MODULES))
    ends = [every[name] for name in (SLOWEST, MIDDLE, FASTEST)]
    cells = (
        _name(step),
        f"{p.micro_batches} × {step.samples}",
        " and ".join(step.recomputed),
        memory,
        *(f"{1e3 * p.module(name):.0f}" for name in MODULES),
        f"{1e3 * boundary:.1f}",
        f"{1e3 * p.end:.0f}",
        *(f"{p.mfu_of_modules[name]:.0%}" for name in MODULES),
        "–".join(f"{100 * each.mfu_of_micro_batch:.0f}" for each in ends) + "%",
        "–".join(f"{100 * each.mfu_of_step:.0f}" for each in ends) + "%",
        "–".join(f"{each.patches_per_second:,.0f}" for each in ends),
        f"{published:,}" if published else "",
    )
    return " | ".join(cells)


def _ratios(found: Sequence[Found]) -> str:
    rows = []
    for picture in _pictures(found):
        best = _best({kind: [every[MIDDLE] for s, every, _ in found if (s.picture, s.layouts.kind) == (picture, kind)]
                      for kind in ("sp|tp", "uniform tp", "ZeRO-3")})  # fmt: skip
        published = dict(picture.published)
        over = (f"{published['sp|tp'] / published['uniform tp']:.2f}",) if published else ("",)
        ours = best["sp|tp"]
        rows.append(" | ".join([str(picture), *(f"{ours / best[k]:.2f}" for k in ("uniform tp", "ZeRO-3")), *over]))
    return table("step | over uniform tp | over ZeRO-3 | published over uniform tp (32B)", rows)


def _best(found: Mapping[str, Sequence[Prediction]]) -> dict[str, float]:
    """The most patches per second of each kind of layout."""
    return {kind: max(p.patches_per_second for p in of_kind) for kind, of_kind in found.items()}
