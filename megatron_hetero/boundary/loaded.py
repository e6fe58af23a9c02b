"""Boundary plans with indices on the device, indexed copies of rows, and the staging buffers of a communicator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.plan import RankPlan
from megatron_hetero.boundary.routes import DirectionPlan, Exchange
from megatron_hetero.groups.platform import on_device

RowIndex = slice | Tensor
"""Indices of rows in a buffer: a slice for a contiguous run, which needs no copy, or int64 on the device."""


class BufferPool:
    """A free list of byte buffers, so that a crossing allocates only its result after earlier crossings of its size.

    Buffers are untyped, for rows of any dtype. Sizes are powers of two, so that slowly growing batches reuse
    buffers.
    """

    def __init__(self, width: int, device: torch.device):
        self.width = width
        self._device = device
        self._free: list[Tensor] = []

    def acquire(self, size: int) -> Tensor:
        """Return an uninitialized buffer of at least `size` bytes, free or newly allocated."""
        fitting = [i for i, buffer in enumerate(self._free) if len(buffer) >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        if self._free:  # Replace the smallest buffer: the pool never has more than are in use at once.
            self._free.pop(min(range(len(self._free)), key=lambda i: len(self._free[i])))
        return torch.empty(1 << max(0, size - 1).bit_length(), dtype=torch.uint8, device=self._device)

    def release(self, buffer: Tensor) -> None:
        """Add a buffer to the free list."""
        self._free.append(buffer)


class BufferLease:
    """Buffers acquired from a pool, which `close` releases together."""

    def __init__(self, pool: BufferPool):
        self._pool = pool
        self._acquired: list[Tensor] = []

    def acquire(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized buffer, [rows, width]."""
        width = self._pool.width
        size = rows * width * dtype.itemsize
        buffer = self._pool.acquire(size)
        self._acquired.append(buffer)
        return buffer[:size].view(dtype).view(rows, width)

    def close(self) -> None:
        """Release all buffers. On a GPU, later work on the current stream may overwrite the buffers."""
        while self._acquired:
            self._pool.release(self._acquired.pop())


# ------------------------------------------------------------------------------------------------ indices


def load_index(index: np.ndarray, device: torch.device) -> RowIndex:
    """Copy `index`, int64 [rows], to the device; if it is a contiguous run, return a slice instead."""
    if not len(index):
        return slice(0, 0)
    if index[-1] - index[0] == len(index) - 1 and np.all(np.diff(index) == 1):
        return slice(int(index[0]), int(index[-1]) + 1)
    return on_device(torch.from_numpy(index), device)


def gather_rows(rows: Tensor, index: RowIndex, lease: BufferLease) -> Tensor:
    """Return the contiguous tensor `rows[index]`, in a buffer of `lease` unless the rows are contiguous already."""
    if not isinstance(index, slice):
        return torch.index_select(rows, 0, index, out=lease.acquire(len(index), rows.dtype))
    run = rows[index]
    return run if run.is_contiguous() else lease.acquire(len(run), rows.dtype).copy_(run)


def scatter_rows(target: Tensor, index: RowIndex, rows: Tensor) -> None:
    """Set `target[index]` to `rows`."""
    if isinstance(index, slice):
        target[index] = rows
    else:
        target.index_copy_(0, index, rows)


def scatter_add_rows(target: Tensor, index: RowIndex, rows: Tensor, lease: BufferLease) -> None:
    """Add `rows` to `target[index]`, in the dtype of `target`."""
    if rows.dtype != target.dtype:
        rows = lease.acquire(len(rows), target.dtype).copy_(rows)
    if isinstance(index, slice):
        target[index] += rows
    else:
        target.index_add_(0, index, rows)


@dataclass(frozen=True, eq=False)
class LoadedPlan(RankPlan[RowIndex]):
    """A `RankPlan` whose indices are on the device. `edge`: the edge that the plan is for; empty for any edge."""

    edge: str = ""


def load_plan(plan: RankPlan[np.ndarray], device: torch.device, *, edge: str = "") -> LoadedPlan:
    """Return `plan` with its indices copied to the device asynchronously. `edge`: the plan's edge; by default any.

    Raises:
        UserError: `plan` is not the plan of one rank.
    """
    if not isinstance(plan, RankPlan):
        found, expected = f"a {type(plan).__name__}", "the plan of one rank, a RankPlan"
        raise UserError.at("load_plan: plan", found=found, expected=expected, fix="give it `plan.rank(rank)`")
    forward = _load_direction(plan.forward, device)
    backward = None if plan.backward is None else _load_direction(plan.backward, device)
    return LoadedPlan(**vars(plan) | {"forward": forward, "backward": backward}, edge=edge)


def _load_direction(plan: DirectionPlan[np.ndarray], device: torch.device) -> DirectionPlan[RowIndex]:
    load = partial(load_index, device=device)
    exchanges = tuple(
        Exchange(e.phase, load(e.send), e.send_counts, load(e.receive), e.receive_counts) for e in plan.exchanges
    )
    return DirectionPlan(plan.held, plan.needed, load(plan.local_from), load(plan.local_to), exchanges, plan.complete)
