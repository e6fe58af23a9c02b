"""What each rank sends, receives and stages in a crossing, for all ranks at once. Pure.

`BoundaryPlan.rank` gives one rank's part in milliseconds; for ten thousand ranks that would be minutes. Here the routes
of all rows are computed once and counted by rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_hetero.boundary.plan import BoundaryPlan
from megatron_hetero.boundary.routes import Phase, Redistribution, Routes


@dataclass(frozen=True, eq=False)
class Indexed:
    """Rows of a buffer that each rank takes or puts: how many (`counts`), and whether they are one run (`runs`)."""

    counts: np.ndarray
    runs: np.ndarray

    def staged(self) -> np.ndarray:
        """Rows that go through a staging buffer: those that are not one run."""
        return np.where(self.runs, 0, self.counts)


@dataclass(frozen=True, eq=False)
class StageTraffic:
    """One exchange: rows that each of the plan's ranks sends and receives, and the pairs of ranks that exchange any."""

    stage: Phase
    send: Indexed
    receive: Indexed
    pairs: int


@dataclass(frozen=True, eq=False)
class DirectionTraffic:
    """One direction of a crossing for all `ranks` of the plan, in their order.

    `held`, `needed`: rows that leave and arrive; `kept`: rows that stay, as they are taken.
    """

    ranks: np.ndarray
    held: np.ndarray
    needed: np.ndarray
    kept: Indexed
    stages: tuple[StageTraffic, ...]

    @property
    def received(self) -> np.ndarray:
        """Rows that reach each rank from others."""
        return sum((s.receive.counts for s in self.stages), np.zeros(len(self.ranks), np.int64))

    @property
    def sent(self) -> np.ndarray:
        """Rows that each rank sends to others."""
        return sum((s.send.counts for s in self.stages), np.zeros(len(self.ranks), np.int64))

    def staging(self, row_bytes: int, rounded: bool) -> np.ndarray:
        """About the bytes of the buffers that a crossing borrows at once on each rank: for rows of an exchange that are
        not one run, with those that stay; and where the wire has a type of its own (`rounded`), for all rows.
        """
        buffers, most = partial(_buffers, row_bytes), np.zeros(len(self.ranks), np.int64)
        for stage in self.stages:
            most = np.maximum(most, buffers(stage.send.staged()) + buffers(stage.receive.staged()))
        return buffers(self.kept.staged()) + most + rounded * (buffers(self.held) + buffers(self.needed))

    @property
    def pairs(self) -> int:
        """Pairs of ranks that exchange rows, over all stages: the messages where exchanges are point-to-point."""
        return sum(stage.pairs for stage in self.stages)


def _buffers(row_bytes: int, rows: np.ndarray) -> np.ndarray:
    """Bytes of buffers for so many rows, powers of two; 0 for none."""
    sizes = row_bytes * rows
    return np.where(sizes > 0, 1 << np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64), 0)


def traffic_of(plan: BoundaryPlan) -> dict[str, DirectionTraffic]:
    """Both directions of a plan."""
    ranks = np.array(plan.ranks, np.int64)
    return {name: _direction(direction, ranks) for name, direction in plan.directions.items()}


def _direction(direction: Redistribution, ranks: np.ndarray) -> DirectionTraffic:
    rows = direction.row_table(None)
    scatter = direction.routes("scatter", rows)
    routes: dict[Phase, Routes] = {}
    for stage in direction.phases:
        routes[stage] = scatter if stage == "scatter" else direction.routes(stage, rows)
    held, needed = (
        np.append(np.diff(side.starts), 0)[side.members.groups_of(ranks)] for side in (direction.held, direction.needed)
    )
    stays = scatter.sender == scatter.receiver
    kept = _indexed(scatter.sender[stays], scatter.sender[stays], scatter.source_index[stays], ranks)
    return DirectionTraffic(ranks, held, needed, kept, tuple(_stage(name, r, ranks) for name, r in routes.items()))


def _stage(name: Phase, routes: Routes, ranks: np.ndarray) -> StageTraffic:
    moved = routes.sender != routes.receiver
    sender, receiver = routes.sender[moved], routes.receiver[moved]
    return StageTraffic(
        name,
        _indexed(sender, receiver, routes.source_index[moved], ranks),
        _indexed(receiver, sender, routes.target_index[moved], ranks),
        len(np.unique(sender * (1 + receiver.max(initial=0)) + receiver)),
    )


def _indexed(own: np.ndarray, other: np.ndarray, places: np.ndarray, ranks: np.ndarray) -> Indexed:
    """By rank, the rows at `places`, ordered by the other side as buffers are."""
    order = np.lexsort((other, own))
    at, ordered = np.searchsorted(ranks, own[order]), places[order]
    breaks = np.flatnonzero((np.diff(ordered) != 1) & (np.diff(at) == 0))
    counts = np.bincount(at, minlength=len(ranks))
    return Indexed(counts, np.bincount(at[breaks], minlength=len(ranks)) == 0)
