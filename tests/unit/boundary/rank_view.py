"""A boundary seen from one rank of the pool, and a count of what it exchanges. Values are integers: sums are exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.loaded import LoadedPlan, load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import BoundaryPlan, RankPlan, plan_boundary
from megatron_hetero.groups.platform import CPU
from tests.unit.boundary.cases import Placement, random_boundary

WIDTH = 3


class Spy:
    """Inside, counts the exchanges of this rank, and the bytes that leave and reach it."""

    def __init__(self) -> None:
        self.all_to_alls, self.batches, self.checks = 0, 0, 0
        self.sent, self.received = 0, 0
        self.staging: set[int] = set()
        self._real = {
            name: getattr(dist, name) for name in ("all_to_all_single", "batch_isend_irecv", "all_gather_into_tensor")
        }

    def watching(self) -> Any:
        """Inside, this is what runs in place of the functions of `torch.distributed`."""
        return mock.patch.multiple(dist, **{name: getattr(self, f"_{name}") for name in self._real})

    def _all_to_all_single(
        self, output: Tensor, sent: Tensor, receive: list[int], send: list[int], **options: Any
    ) -> Any:
        assert len(sent) == sum(send) and len(output) == sum(receive)
        assert send[options["group"].rank()] == receive[options["group"].rank()] == 0
        self.all_to_alls += 1
        self._count(sent=sent, received=output)
        return self._real["all_to_all_single"](output, sent, receive, send, **options)

    def _batch_isend_irecv(self, batch: list[dist.P2POp]) -> Any:
        self.batches += 1
        for operation in batch:
            assert operation.peer != dist.get_rank() and len(operation.tensor)
            self._count(**{"sent" if operation.op is dist.isend else "received": operation.tensor})
        return self._real["batch_isend_irecv"](batch)

    def _all_gather_into_tensor(self, output: Tensor, mine: Tensor, **options: Any) -> Any:
        assert mine.nbytes == 56
        self.checks += 1
        return self._real["all_gather_into_tensor"](output, mine, **options)

    def _count(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, getattr(self, name) + tensor.nbytes)


@dataclass(frozen=True)
class Boundary:
    """A boundary on a group of ranks, seen from this one, with a value and a gradient for each row."""

    plan: BoundaryPlan
    loaded: LoadedPlan
    x: Tensor
    seed: int

    @classmethod
    def random(cls, seed: int, ranks: Sequence[int], placement: Placement, most_rows: int = 40) -> Boundary:
        """The same on all ranks."""
        rng = np.random.default_rng(seed)
        rows = int(rng.integers(0, most_rows)) * bool(seed % 8)
        return cls.between(*random_boundary(rng, ranks, rows, placement), seed)

    @classmethod
    def between(cls, source: Ownership, destination: Ownership, seed: int = 0) -> Boundary:
        plan = plan_boundary(source, destination, WIDTH * 8)
        size = 1 + int(source.ids.max(initial=0))
        return cls(plan, load_plan(plan.rank(dist.get_rank()), CPU), _integers(size, seed), seed)

    @property
    def part(self) -> RankPlan:
        return self.plan.rank(dist.get_rank())

    @property
    def held(self) -> np.ndarray:
        return self.plan.source.held_by(dist.get_rank())

    @property
    def needed(self) -> np.ndarray:
        return self.plan.destination.held_by(dist.get_rank())

    def gradient(self, rank: int) -> Tensor:
        """Of each row that `rank` needs: another part on each rank, or the same on all."""
        seed = self.seed + 1000 * (1 + rank if self.plan.destination.gradient == "partial" else 1)
        return _integers(len(self.x), seed)[self.plan.destination.held_by(rank)]

    def total(self) -> Tensor:
        """The whole gradient of each row, 0 where nobody needs it."""
        total = torch.zeros_like(self.x)
        for rank in self.plan.destination.ranks:
            ids, gradient = self.plan.destination.held_by(rank), self.gradient(rank)
            total[ids] = gradient + (total[ids] if self.plan.destination.gradient == "partial" else 0)
        return total

    def check_gradient(self, found: Tensor, group: dist.ProcessGroup, total: Tensor | None = None) -> None:
        """Invariant: whole on every holder. Partial: the parts of the holders add up to it. `total`: that of all rows
        where it is another one than `total()`.
        """
        total = self.total() if total is None else total
        if self.plan.source.gradient == "partial":
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, (self.held, found), group=group)
            summed = torch.zeros_like(self.x)
            for ids, part in parts:
                summed[ids] += part
            found = summed[self.held]
        assert torch.equal(found, total[self.held])


def _integers(rows: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-50, 50, (rows, WIDTH)).astype(np.float64))
