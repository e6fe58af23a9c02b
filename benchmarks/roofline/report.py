"""Tables of predicted steps, and what they leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import table
from benchmarks.roofline.cases import TEXT_TOKENS, TITLES, WORLD, Picture, Step
from benchmarks.roofline.costs import Ask
from benchmarks.roofline.devices import (
    ASSUMED,
    ATTENTION,
    BEST,
    COLLECTIVE,
    CTA,
    FLASH_3,
    LEAST,
    LINKS,
    MEMORY,
    PRODUCTS,
    WORST,
    Gpu,
)
from benchmarks.roofline.prediction import MODULES, Prediction

COLUMNS = (
    "layout | micro-batches × samples | recomputed | peak, GiB | vision, ms | text, ms | boundary, ms | end, ms "
    "| waits for the host, ms | MFU vision | MFU text | MFU micro-batch | with FlashAttention-3 "
    "| MFU step | patches/s | published"
)
Found = tuple[Step, Mapping[str, Prediction], float]
"""A step, what is predicted of it by what is `ASSUMED`, and the peak of its memory in bytes."""
Measured = tuple[Step, Prediction, Mapping[str, float]]
"""A step, what is predicted of it, and seconds of phases that were measured, without what they wait for links."""


def text_of(found: Sequence[Found], gpu: Gpu, measured: Sequence[Measured] = ()) -> str:
    """The whole page."""
    models = list(dict.fromkeys(step.model for step, *_ in found))
    parts = [
        f"# Roofline of {WORLD} × {gpu.name}",
        f"`python -m benchmarks.roofline --gpu {gpu.name}`: one rank of each layout is run on a GPU that computes "
        "nothing (`tests/fake_cuda`), and what each kernel asks for is divided by what the GPU reaches. "
        + ("Phases that `benchmarks.gpu` has measured take as long." if measured else "Nothing here was measured."),
        _assumed(gpu),
        *(["## Measured", compared(measured)] if measured else []),
    ]
    for model in models:
        of_model = [each for each in found if each[0].model == model]
        parts.append(f"## {TITLES[model]}")
        parts += ["### What each assumption is worth", worth(of_model)]
        parts += [_of_picture(picture, of_model) for picture in _pictures(of_model)]
        parts += ["### `sp|tp` over the best of the others", _ratios(of_model)]
    return "\n\n".join(parts)


def compared(measured: Sequence[Measured]) -> str:
    """A table of what was measured, beside what is predicted of it."""
    rows = []
    for step, p, seconds in measured:
        for phase, found in seconds.items():
            expected = p.phases[phase].seconds - p.phases[phase].by_kind.get("wire", 0.0)
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
                    "host_s": t.host,
                    "links_s": t.links,
                    "kernels": t.kernels,
                    "by_kind_s": t.by_kind,
                }
                for name, t in sorted(p.phases.items())
            },
            "micro_batch_s": p.micro_batch,
            "step_s": p.step,
            "mfu": {**p.mfu_of_modules, "micro_batch": p.mfu_of_micro_batch, "step": p.mfu_of_step},
            "patches_per_s": p.patches_per_second,
            "mfu_of_micro_batch_assumed": {name: each.mfu_of_micro_batch for name, each in every.items()},
            "mfu_of_step_assumed": {name: each.mfu_of_step for name, each in every.items()},
        }
        for step, every, peak in found
        for p in [every[BEST]]
    ]


def _assumed(gpu: Gpu) -> str:
    return f"""\
Assumed of the device: {PRODUCTS * gpu.peak / 1e12:.0f} of {gpu.peak / 1e12:.0f} TFLOP/s in matrix products,
{PRODUCTS * gpu.single / 1e12:.0f} of {gpu.single / 1e12:.0f} in those in single precision, as the delta rule has in
PyTorch, {gpu.attention * gpu.peak / 1e12:.0f} in attention (FlashAttention-2 reaches {ATTENTION:.0%} of an H100: arXiv
2407.08608; FlashAttention-3 {FLASH_3["forward"]} times that forward and {FLASH_3["backward"]} times backward: middle of
its ranges),
{MEMORY * gpu.memory / 1e12:.2f} of {gpu.memory / 1e12:.2f} TB/s of memory, {LINKS * gpu.links / 1e9:.0f} of
{gpu.links / 1e9:.0f} GB/s of links, of which communicators with few CTAs (edges, pipelines, gradients) take
{CTA / 1e9:.0f} GB/s for each; {COLLECTIVE * 1e6:.0f} µs for a collective besides its bytes; of the host
{ASSUMED[BEST].launch * 1e6:.0f} µs for a kernel. The second number of each pair is the data sheet's. A kernel takes as
long as what it is slowest at, kernels of one stream follow each other, and a phase takes as long as the slower of
device and host. Collectives run beside kernels as streams and hardware queues let them (`roofline/timeline.py`).

That is the optimistic end of what is predicted. Times of phases, MFU by module and the MFU with FlashAttention-3 are
of it, and of ranges it is the second number. The first, the pessimistic end, assumes besides: {WORST.launch * 1e6:.0f}
µs of the host for a kernel; messages of {WORST.ramp / 1e6:.0f} MB reach half the links' rate, of 30 to 60 MB
{_rate(gpu, 30e6)} to {_rate(gpu, 60e6)} GB/s, larger ones up to {_rate(gpu, 1e12)}; a collective holds up to
{WORST.held} of {gpu.processors} multiprocessors, which other kernels lack meanwhile; a product holds all of them until
it ends, and gets them before a collective that waited for the same kernel, so that the collective begins when the
product ends, or takes a second wave for what it does not get at first; products take whole waves of tiles, and reach
{WORST.products:.0%} of the rate above, attention {WORST.attention:.0%}.

MFU is of the data sheet's peak, and counts no recomputation.

Left out: caches (each kernel reads and writes all it names), waiting for slower ranks (all are as the first), that
attention in small windows reaches less than in large ones, that kernels of flash-linear-attention run chunk after chunk
(they are as fast as memory is: products would take a ninth of that), that some kernels are several launches
(`_foreach`, AdamW), the loader. Functions that a GPU compiles run here as the kernels they are made of. A sample has
one picture and {TEXT_TOKENS} tokens where nothing else is said: the published table (Ray, Qwen2.5-VL-32B on 8 H100)
does not state its texts."""


def _rate(gpu: Gpu, message: float) -> str:
    """GB/s at the pessimistic end."""
    return f"{message / Ask('wire', wire=message).seconds(gpu, WORST) / 1e9:.0f}"


def _pictures(found: Sequence[Found]) -> list[Picture]:
    return list(dict.fromkeys(step.picture for step, *_ in found))


def _of_picture(picture: Picture, found: Sequence[Found]) -> str:
    rows = [_row(*each) for each in found if each[0].picture == picture]
    return f"### {picture}\n\n{table(COLUMNS, rows)}"


def worth(found: Sequence[Found]) -> str:
    """A table of the MFU of a micro-batch, and of a step, of the longest packs by what is assumed."""
    steps = [each for each in found if each[0].picture == _pictures(found)[0]]
    rows = []
    for name in ASSUMED:
        cells = [f"{every[name].mfu_of_micro_batch:.1%} / {every[name].mfu_of_step:.1%}" for _, every, _ in steps]
        rows.append(" | ".join([name, *cells]))
    return table(" | ".join(["assumed", *(_name(step) for step, *_ in steps)]), rows)


def _name(step: Step) -> str:
    return f"`{step.layouts}`".replace("|", "\\|")


def _row(step: Step, every: Mapping[str, Prediction], peak: float) -> str:
    p, least = every[BEST], every[LEAST]
    memory = f"{peak / 2**30:.1f}" + ("" if peak <= p.gpu.usable else " (does not fit)")
    waits = sum(max(0.0, t.host - t.device) for t in p.phases.values())
    published = dict(step.picture.published).get(step.layouts.kind) if step.model == "32b" else None
    boundary = p.micro_batch - sum(map(p.module, MODULES))
    cells = (
        _name(step),
        f"{p.micro_batches} × {step.samples}",
        " and ".join(step.recomputed),
        memory,
        *(f"{1e3 * p.module(name):.0f}" for name in MODULES),
        f"{1e3 * boundary:.1f}",
        f"{1e3 * p.end:.0f}",
        f"{1e3 * waits:.0f}",
        *(f"{p.mfu_of_modules[name]:.0%}" for name in MODULES),
        f"{100 * least.mfu_of_micro_batch:.0f}–{p.mfu_of_micro_batch:.0%}",
        f"{p.with_attention(**FLASH_3).mfu_of_micro_batch:.0%}" if p.gpu.is_hopper else "",
        f"{100 * least.mfu_of_step:.0f}–{p.mfu_of_step:.0%}",
        f"{least.patches_per_second:,.0f}–{p.patches_per_second:,.0f}",
        f"{published:,}" if published else "",
    )
    return " | ".join(cells)


def _ratios(found: Sequence[Found]) -> str:
    rows = []
    for picture in _pictures(found):
        best = _best({kind: [every[BEST] for s, every, _ in found if (s.picture, s.layouts.kind) == (picture, kind)]
                      for kind in ("sp|tp", "uniform tp", "ZeRO-3")})  # fmt: skip
        published = dict(picture.published)
        over = (f"{published['sp|tp'] / published['uniform tp']:.2f}",) if published else ("",)
        ours = best["sp|tp"]
        rows.append(" | ".join([str(picture), *(f"{ours / best[k]:.2f}" for k in ("uniform tp", "ZeRO-3")), *over]))
    return table("step | over uniform tp | over ZeRO-3 | published over uniform tp (32B)", rows)


def _best(found: Mapping[str, Sequence[Prediction]]) -> dict[str, float]:
    """The most patches per second of each kind of layout."""
    return {kind: max(p.patches_per_second for p in of_kind) for kind, of_kind in found.items()}
