"""The gated delta rule and the convolution before it, with `transformers`': `python -m benchmarks.delta_rule [--help]`.

Forward and backward pass, fp32, on the same tensors on a CPU, in turn in every round: of one sequence, and of a pack
of short ones, which `transformers` computes one at a time. Memory is what each adds to the peak of a process of its
own, and what autograd saves. Wants idle cores; writes a table and the numbers to `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from benchmarks.measuring.memory import Memory
from benchmarks.report import Ratio, table, verdict
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.models.layers.delta_rule import delta_rule
from megatron_hetero.models.layers.sequences import Sequences
from megatron_hetero.models.layers.short_convolution import convolved

RESULTS = Path(__file__).parent / "results"
KEY_HEADS, VALUE_HEADS, DIM, TAPS = 4, 8, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
WANTED = {1024: 1.5, 4096: 1.8, 16384: 2.5}
"""Least ratio of the times of the rule by tokens of one sequence."""
PACK = (64,) * 16 + (100,) * 20 + (17,) * 30
SYSTEMS = ("ours", "transformers")

Case = tuple[str, tuple[int, ...]]
"""`rule` or `convolution`, and the lengths of the sequences."""


def main() -> None:
    """Measure, print, write."""
    options = _options()
    packs = [(tokens,) for tokens in options.tokens] + [PACK]
    cases = [("rule", lengths) for lengths in packs] + [("convolution", lengths) for lengths in packs]
    rows = [_row(case, threads, options.rounds) for threads in options.threads for case in cases]
    text = _text(rows)
    print(text)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "delta_rule.md").write_text(text + "\n", encoding="utf-8")
    (options.results / "delta_rule.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta_rule", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(WANTED), help="lengths of single sequences")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of PyTorch")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    return parser.parse_args()


def _row(case: Case, threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    leaves, steps = _inputs(case), {system: _step(system, case) for system in SYSTEMS}
    seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    results = {system: step(leaves) for system, step in steps.items()}  # The first ones warm up.
    for turn in range(rounds):
        for system in SYSTEMS[:: 1 if turn % 2 == 0 else -1]:
            start = time.perf_counter()
            steps[system](leaves)
            seconds[system].append(time.perf_counter() - start)
    memory = {system: _in_a_process(system, case) for system in SYSTEMS}
    row: dict[str, Any] = {"what": case[0], "lengths": case[1], "threads": threads, "seconds": seconds}
    row["difference"] = max(
        float((a - b).norm() / b.norm()) for a, b in zip(*(results[system] for system in SYSTEMS), strict=True)
    )
    row |= {"peak_bytes": {k: m[0] for k, m in memory.items()}, "saved_bytes": {k: m[1] for k, m in memory.items()}}
    print(_cells(row), flush=True)
    return row


def _inputs(case: Case) -> list[Tensor]:
    draw, (what, lengths) = torch.Generator().manual_seed(0), case
    if what == "rule":
        sizes = [(KEY_HEADS, DIM), (KEY_HEADS, DIM), (VALUE_HEADS, DIM)]
        inputs = [torch.randn(sum(lengths), *size, generator=draw) for size in sizes]
        inputs.append(-torch.rand(sum(lengths), VALUE_HEADS, generator=draw))
        inputs.append(torch.rand(sum(lengths), VALUE_HEADS, generator=draw))
    else:
        inputs = [torch.randn(size, generator=draw) for size in ((sum(lengths), CHANNELS), (CHANNELS, TAPS))]
    return [x.requires_grad_() for x in inputs]


def _step(system: str, case: Case) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return what computes results and gradients."""
    forward = _forward(system, case)

    def step(leaves: list[Tensor]) -> list[Tensor]:
        out = forward(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]

    return step


def _forward(system: str, case: Case) -> Callable[..., Tensor]:
    what, lengths = case
    if system == "ours":
        sequences = Sequences(lengths, CPU)
        return lambda *inputs: (delta_rule if what == "rule" else convolved)(*inputs, sequences=sequences)

    def rule(*inputs: Any) -> Tensor:
        each = zip(*(x[None].split(lengths, dim=1) for x in inputs), strict=True)
        return torch.cat([torch_chunk_gated_delta_rule(*one, use_qk_l2norm_in_kernel=True)[0][0] for one in each])

    def convolution(x: Tensor, weight: Tensor) -> Tensor:
        each = [one.t()[None] for one in x.split(lengths)]
        mixed = (F.conv1d(one, weight[:, None], padding=TAPS - 1, groups=CHANNELS)[..., : one.shape[2]] for one in each)
        return torch.cat([F.silu(one)[0].t() for one in mixed])

    return rule if what == "rule" else convolution


def _in_a_process(system: str, case: Case) -> tuple[int, int]:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_memory, (system, case))


def _memory(system: str, case: Case) -> tuple[int, int]:
    """Return bytes that a step adds to the peak, and that autograd saves in it beside the inputs."""
    torch.set_num_threads(1)
    small = case[0], (64,)
    _step(system, small)(_inputs(small))
    leaves, step, saved = _inputs(case), _step(system, case), dict[int, int]()

    def pack(x: Tensor) -> Tensor:
        if all(x.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr() for leaf in leaves):
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    peak = Memory(Platform(CPU, "gloo")).peak(lambda: step(leaves))
    with saved_tensors_hooks(pack, lambda x: x):
        _forward(system, case)(*leaves)
    return peak, sum(saved.values())


def _cells(row: dict[str, Any]) -> str:
    lengths, seconds = row["lengths"], row["seconds"]
    shape = f"{sum(lengths)}" + (f" in {len(lengths)}" if len(lengths) > 1 else "")
    ratio = Ratio.of(seconds["transformers"], seconds["ours"])
    peaks, saved = ([f"{row[key][system] / 1e6:,.0f}" for system in SYSTEMS] for key in ("peak_bytes", "saved_bytes"))
    times = [f"{median(seconds[system]):.3f}" for system in SYSTEMS]
    cells = row["what"], shape, row["threads"], *times, ratio, " / ".join(peaks), " / ".join(saved)
    return " | ".join([*map(str, cells), f"{row['difference']:.0e}"])


def _text(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        if row["what"] == "rule" and row["lengths"][0] in WANTED:
            ratio = Ratio.of(row["seconds"]["transformers"], row["seconds"]["ours"])
            least, peaks = WANTED[row["lengths"][0]], row["peak_bytes"]
            passed = ratio.median >= least and peaks["ours"] <= peaks["transformers"]
            claim = (
                f"{row['lengths'][0]} tokens, {row['threads']} threads: at least {least} times faster, no more memory"
            )
            lines.append(verdict(passed, f"{claim}; {ratio}"))
    header = "what | tokens | threads | s | `transformers`, s | over ours | peak, MB | saved, MB | difference"
    return "\n".join(
        [
            f"Forward and backward pass in fp32 on a CPU, {KEY_HEADS} key and {VALUE_HEADS} value heads of {DIM}.\n",
            table(header, [_cells(row) for row in rows]),
            "\nOver ours: ratio of times, median [min, max] of rounds. Memory: ours / `transformers`; saved: beside "
            "the inputs. Difference: the largest of results and gradients, over their norm.\n",
            *(f"- {line}" for line in lines),
        ]
    )


if __name__ == "__main__":
    main()
