"""The products of a layer beside a kernel that holds 16 multiprocessors as a collective does: who comes first, and
whether products can be kept off some multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable
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
BLOCKS, SPIN_US = 16, 200
"""Of the kernel that spins: NCCL's CTAs, and about as long as a gather of a layer's inputs."""
GATE, LATE = 2_000_000, 40_000
"""Cycles, about 1 ms and 20 µs: how long the host has to issue a round, and by how much one of two comes later."""
ROUNDS = 7


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """Each product alone and beside the kernel, in both orders, with and without a carve-out."""
    platform, rows = Platform.detect(), list[dict[str, Any]]()
    carves = (None, BLOCKS) if platform.is_cuda and hasattr(torch._C, "_set_sm_carveout_experimental") else (None,)
    for name, product in _products(platform, TOKENS // (64 if small else 1)).items():
        for carved in carves:
            if carved is not None:
                torch._C._set_sm_carveout_experimental(carved)
            try:
                row = {"product": name, "carved out": carved or 0, **medians_ms({"alone ms": product}, platform)}
                if platform.is_cuda:
                    row |= _beside(product, first="spin") | _beside(product, first="product")
                rows.append(row)
            finally:
                if carved is not None:
                    torch._C._set_sm_carveout_experimental(None)
            record.put("products", rows)
    if not platform.is_cuda:
        record.put("beside a kernel", NO_GPU)


def _products(platform: Platform, tokens: int) -> dict[str, Callable[[], object]]:
    """Of each linear layer the forward product, and those of the gradients of inputs and weights."""

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, device=platform.device).bfloat16()

    found: dict[str, Callable[[], object]] = {}
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
