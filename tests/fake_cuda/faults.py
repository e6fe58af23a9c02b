"""What the fake device has to notice, and what it has to let pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_hetero import place_rows
from tests.fake_cuda.device import GPU, FakeGpu

WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool(x.any()),
    "list": lambda x: x.tolist(),
    "integer": lambda x: int(x[0]),
    "to the host": lambda x: x.cpu(),
    "into the host's": lambda x: torch.zeros(4).copy_(x),
    "into pinned memory, blocking": lambda x: torch.zeros(4).pin_memory().copy_(x),
    "of unpinned memory": lambda x: torch.zeros(4).to(GPU, non_blocking=True),
    "of pinned memory, blocking": lambda x: torch.zeros(4).pin_memory().to(GPU),
    "new on the device": lambda x: torch.tensor([1.0, 2.0], device=GPU),
    "where": lambda x: x.nonzero(),
    "chosen": lambda x: x[x > 0],
    "repeated": lambda x: x.repeat_interleave((x > 0).long()),
    "rows in places": lambda x: place_rows(x.view(1, 4, 1), x.view(4, 1), (x > 0).view(1, 4)),
    "device": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.Event().synchronize(),
}
PASSES: dict[str, Callable[[Tensor], object]] = {
    "pinned": lambda x: torch.zeros(4).pin_memory().to(GPU, non_blocking=True),
    "into pinned memory": lambda x: torch.zeros(4).pin_memory().copy_(x, non_blocking=True),
    "number": lambda x: x + torch.tensor(1.0),
    "filled": lambda x: x.clone().index_put_((x > 0,), torch.tensor(0.0)),
    "repeated": lambda x: x.repeat_interleave(3),
    "host": lambda x: torch.arange(4)[torch.arange(4) > 1].tolist(),
    "rows in places of the host": lambda x: (
        place_rows(x.view(1, 4, 1).clone().requires_grad_(), x.view(4, 1), torch.ones(1, 4, dtype=torch.bool))
        .sum()
        .backward()
    ),
    "backward": lambda x: x.clone().requires_grad_().square().sum().backward(),
}
MIXED: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda x: x + torch.zeros(4),
    "index": lambda x: x[torch.tensor([0, 1])],
}


def noticed(gpu: FakeGpu) -> dict[str, dict[str, list[Any]]]:
    """For each group above and each of its names the kinds of things that were noticed: "waits", "mixed"."""
    return {
        group: {name: _noticed(gpu, do) for name, do in members.items()}
        for group, members in {"waits": WAITS, "passes": PASSES, "mixed": MIXED}.items()
    }


def _noticed(gpu: FakeGpu, do: Callable[[Tensor], object]) -> list[str]:
    values = torch.empty(4, device=GPU)
    gpu.usage.start_again()
    with contextlib.suppress(Exception):  # what cannot go on without values has been noted before
        do(values)
    found = [name for name in ("waits", "mixed") if getattr(gpu.usage, name)]
    gpu.usage.start_again()
    return found
