"""The products of a layer beside a kernel that holds 16 multiprocessors as a collective does: who comes first, and
whether products can be kept off some multiprocessors. And what is lost if products are taken apart by ranks, to fuse
them with exchanges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.hopper.timing import NO_GPU, medians_ms
from benchmarks.gpu.record import Record
from megatron_hetero.groups.platform import Platform

TOKENS = 8208
LINEARS = {"qkv": (3584, 1152), "out": (896, 3584), "gate and up": (3584, 9472), "down": (4736, 3584)}
"""Inputs and outputs of a layer's linear layers: 7B on tp:4."""
RANKS = 4
"""Into which the rows of a product are taken apart."""
BLOCKS, SPIN_US = 16, 200
"""Of the kernel that spins: NCCL's CTAs, and about as long as a gather of a layer's inputs."""
GATE, LATE = 2_000_000, 40_000
"""Cycles, about 1 ms and 20 µs: how long the host has to issue a round, and by how much one of two comes later."""
ROUNDS = 7


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """Each product alone and beside the kernel, in both orders, with and without a carve-out."""
    platform, rows, tokens = Platform.detect(), list[dict[str, Any]](), TOKENS // (64 if small else 1)
    parts = _by_ranks(platform, tokens)
    carves = (None, BLOCKS) if platform.is_cuda and hasattr(torch._C, "_set_sm_carveout_experimental") else (None,)
    for name, product in _products(platform, tokens).items():
        for carved in carves:
            if carved is not None:
                torch._C._set_sm_carveout_experimental(carved)
            try:
                works = {"alone ms": product} | ({"by ranks ms": parts[name]} if name in parts else {})
                row = {"product": name, "carved out": carved or 0, **medians_ms(works, platform)}
                if platform.is_cuda:
                    row |= _beside(product, first="spin") | _beside(product, first="product")
                rows.append(row)
            finally:
                if carved is not None:
                    torch._C._set_sm_carveout_experimental(None)
            record.put("products", rows)
    if not platform.is_cuda:
        record.put("beside a kernel", NO_GPU)


def _drawn(platform: Platform, *size: int) -> torch.Tensor:
    return torch.randn(size, device=platform.device).bfloat16()


def _by_ranks(platform: Platform, tokens: int) -> dict[str, Callable[[], object]]:
    """The products that are fused with exchanges, a rank's rows after another's and on two streams in turn."""
    other = torch.cuda.Stream() if platform.is_cuda else None

    def work(x: torch.Tensor, matrix: torch.Tensor) -> None:
        out = x.new_empty(len(x), matrix.shape[1])
        if other is not None:
            other.wait_stream(torch.cuda.current_stream())
        for number, (rows, result) in enumerate(zip(x.chunk(RANKS), out.chunk(RANKS), strict=True)):
            with torch.cuda.stream(other if number % 2 else None):
                torch.mm(rows, matrix, out=result)
        if other is not None:
            torch.cuda.current_stream().wait_stream(other)

    found: dict[str, Callable[[], object]] = {}
    for name, (inputs, outputs) in LINEARS.items():
        weight = _drawn(platform, outputs, inputs)
        found[f"{name}, forward"] = partial(work, _drawn(platform, tokens, inputs), weight.t())
        found[f"{name}, inputs"] = partial(work, _drawn(platform, tokens, outputs), weight)
    return found


def _products(platform: Platform, tokens: int) -> dict[str, Callable[[], object]]:
    """Of each linear layer the forward product, and those of the gradients of inputs and weights."""
    drawn, found = partial(_drawn, platform), dict[str, Callable[[], object]]()
    for name, (inputs, outputs) in LINEARS.items():
        x, weight, grad = drawn(tokens, inputs), drawn(outputs, inputs), drawn(tokens, outputs)
        found[f"{name}, forward"] = lambda x=x, weight=weight: x @ weight.t()
        found[f"{name}, inputs"] = lambda grad=grad, weight=weight: grad @ weight
        found[f"{name}, weights"] = lambda grad=grad, x=x: grad.t() @ x
    return found


def _beside(product: Callable[[], object], first: str) -> dict[str, float]:
    """Median milliseconds of the product, and what the kernel takes beyond its own time, when the other one of the two
    can begin `LATE` cycles after `first`.
    """
    # Only a PyTorch for GPUs brings Triton.
    from benchmarks.gpu.hopper import spin

    kernel: Any = spin.spin
    rounds, other = list[tuple[float, float]](), torch.cuda.Stream()
    ends = torch.zeros(BLOCKS, dtype=torch.int64, device="cuda")
    kernel[(BLOCKS,)](ends, SPIN_US * 1000, num_warps=spin.WARPS)
    for _ in range(ROUNDS):
        gate, *marks = (torch.cuda.Event(enable_timing=True) for _ in range(5))
        torch.cuda.synchronize()
        torch.cuda._sleep(GATE)
        gate.record()
        with torch.cuda.stream(other):
            other.wait_event(gate)
            if first == "product":
                torch.cuda._sleep(LATE)
            marks[0].record()
            kernel[(BLOCKS,)](ends, SPIN_US * 1000, num_warps=spin.WARPS)
            marks[1].record()
        if first == "spin":
            torch.cuda._sleep(LATE)
        marks[2].record()
        product()
        marks[3].record()
        torch.cuda.synchronize()
        rounds.append((marks[2].elapsed_time(marks[3]), marks[0].elapsed_time(marks[1]) - SPIN_US / 1000))
    products, waits = zip(*rounds, strict=True)
    return {f"{first} first, product ms": median(products), f"{first} first, wait ms": median(waits)}
