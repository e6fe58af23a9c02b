"""Rows that each rank sends, receives and stages in a crossing. Pure.

`BoundaryPlan.rank` takes milliseconds per rank, minutes for ten thousand ranks. Here the routes of all rows are
computed once and counted by rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_hetero.boundary.plan import BoundaryPlan
from megatron_hetero.boundary.routes import Phase, Redistribution


@dataclass(frozen=True, eq=False)
class StageTraffic:
    """One exchange: rows that each rank sends and receives, and the number of pairs of ranks that exchange any."""

    stage: Phase
    send: np.ndarray
    receive: np.ndarray
    pairs: int


@dataclass(frozen=True, eq=False)
class DirectionTraffic:
    """One direction of a crossing: rows that leave (`held`), arrive (`needed`) and stay (`kept`), by rank."""

    ranks: np.ndarray
    held: np.ndarray
    needed: np.ndarray
    kept: np.ndarray
    stages: tuple[StageTraffic, ...]

    @property
    def received(self) -> np.ndarray:
        """Rows that reach each rank from others."""
        return sum((s.receive for s in self.stages), np.zeros(len(self.ranks), np.int64))

    @property
    def sent(self) -> np.ndarray:
        """Rows that each rank sends to others."""
        return sum((s.send for s in self.stages), np.zeros(len(self.ranks), np.int64))

    def staging(self, row_bytes: int, rounded: bool) -> np.ndarray:
        """Peak bytes of buffers on each rank: for the rows of an exchange and those that stay, and for all rows where
        the wire has a dtype of its own (`rounded`).
        """
        buffers, most = partial(_buffers, row_bytes), np.zeros(len(self.ranks), np.int64)
        for stage in self.stages:
            most = np.maximum(most, buffers(stage.send) + buffers(stage.receive))
        return buffers(self.kept) + most + rounded * (buffers(self.held) + buffers(self.needed))

    @property
    def pairs(self) -> int:
        """Messages of a point-to-point exchange: pairs of ranks that exchange rows, over all stages."""
        return sum(stage.pairs for stage in self.stages)


def _buffers(row_bytes: int, rows: np.ndarray) -> np.ndarray:
    """Bytes of buffers for `rows`, rounded up to powers of two."""
    sizes = row_bytes * rows
    return np.where(sizes > 0, 1 << np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64), 0)


def traffic_of(plan: BoundaryPlan) -> dict[str, DirectionTraffic]:
    """The traffic of both directions of a plan."""
    ranks = np.array(plan.ranks, np.int64)
    return {name: _direction(direction, ranks) for name, direction in plan.directions.items()}


def _direction(direction: Redistribution, ranks: np.ndarray) -> DirectionTraffic:
    rows = direction.row_table(None)
    scatter = direction.routes("scatter", rows)
    stages = []
    for phase in direction.phases:
        routes = scatter if phase == "scatter" else direction.routes(phase, rows)
        moved = routes.sender != routes.receiver
        sender, receiver = routes.sender[moved], routes.receiver[moved]
        pairs = len(np.unique(sender * (1 + receiver.max(initial=0)) + receiver))
        stages.append(StageTraffic(phase, _counted(sender, ranks), _counted(receiver, ranks), pairs))
    held, needed = (
        np.append(np.diff(side.starts), 0)[side.members.groups_of(ranks)] for side in (direction.held, direction.needed)
    )
    kept = _counted(scatter.sender[scatter.sender == scatter.receiver], ranks)
    return DirectionTraffic(ranks, held, needed, kept, tuple(stages))


def _counted(members: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The number of times that each rank is a member."""
    return np.bincount(np.searchsorted(ranks, members), minlength=len(ranks))
