"""Counts the rows that each rank sends, receives and stages in the crossings of a step. Pure.

`BoundaryPlan.rank` takes milliseconds per rank, and minutes for ten thousand ranks. This module computes the routes of
all rows once and counts them by rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hetero.boundary.plan import BoundaryPlan, plan_boundary
from megatron_hetero.boundary.routes import Phase, Redistribution
from megatron_hetero.estimate.shards import AssumedBatch
from megatron_hetero.layout.graph import Edge


@dataclass(frozen=True, eq=False)
class DirectionTraffic:
    """The numbers of rows of each rank in one direction of a crossing.

    `held`, `needed`, `kept`: rows that a rank holds, needs, and both holds and needs, int64 [ranks]. `sent`,
    `received`: rows exchanged with other ranks in each phase, int64 [phases, ranks]. `messages`: the number of messages
    of a point-to-point exchange, one for each pair of ranks that exchange rows in a phase.
    """

    ranks: np.ndarray
    held: np.ndarray
    needed: np.ndarray
    kept: np.ndarray
    phases: tuple[Phase, ...]
    sent: np.ndarray
    received: np.ndarray
    messages: int

    def staging(self, row_bytes: int, rounded: bool) -> np.ndarray:
        """Return the peak bytes of buffers on each rank: for rows in exchange and rows that stay on the rank, and for
        copies of all rows if they are rounded to another dtype in transit (`rounded`).
        """
        exchanged = _buffer_bytes(row_bytes, self.sent) + _buffer_bytes(row_bytes, self.received)
        staged = _buffer_bytes(row_bytes, self.kept) + exchanged.max(axis=0, initial=0)
        if rounded:
            staged += _buffer_bytes(row_bytes, self.held) + _buffer_bytes(row_bytes, self.needed)
        return staged


def _buffer_bytes(row_bytes: int, rows: np.ndarray) -> np.ndarray:
    """Return the bytes of a buffer for each of `rows`, rounded up to powers of two."""
    sizes = row_bytes * rows
    return np.where(sizes > 0, 1 << np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64), 0)


def traffic_of(plan: BoundaryPlan) -> dict[str, DirectionTraffic]:
    """Return the traffic of a boundary plan, by direction."""
    ranks = np.array(plan.ranks, np.int64)
    return {name: _direction_traffic(direction, ranks) for name, direction in plan.directions.items()}


def _direction_traffic(direction: Redistribution, ranks: np.ndarray) -> DirectionTraffic:
    rows = direction.row_table(None)
    scatter = direction.routes("scatter", rows)
    sent, received = np.zeros((2, len(direction.phases), len(ranks)), np.int64)
    messages = 0
    for number, phase in enumerate(direction.phases):
        routes = scatter if phase == "scatter" else direction.routes(phase, rows)
        moved = routes.sender != routes.receiver
        sender, receiver = routes.sender[moved], routes.receiver[moved]
        sent[number], received[number] = _counts(sender, ranks), _counts(receiver, ranks)
        messages += len(np.unique(sender * (1 + receiver.max(initial=0)) + receiver))
    kept = _counts(scatter.sender[scatter.sender == scatter.receiver], ranks)
    held, needed = (
        np.append(np.diff(side.starts), 0)[side.members.groups_of(ranks)] for side in (direction.held, direction.needed)
    )
    return DirectionTraffic(ranks, held, needed, kept, direction.phases, sent, received, messages)


def _counts(members: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return how many times each of `ranks` occurs in `members`."""
    return np.bincount(np.searchsorted(ranks, members), minlength=len(ranks))


@dataclass(frozen=True, eq=False)
class BoundaryTraffic:
    """The traffic along an edge in a step.

    `crossings`: the distinct crossings, by direction; micro-batches of one call have distinct crossings, because ranks
    hold different rows of each. `numbers`: for each micro-batch, the index of its crossing. `outputs`: the number of
    encoder outputs in one message. `row_bytes`: the bytes of a row of all outputs in transit.
    """

    edge: Edge
    outputs: int
    crossings: tuple[Mapping[str, DirectionTraffic], ...]
    numbers: tuple[int, ...]
    row_bytes: int
    point_to_point: bool

    @classmethod
    def of(cls, assumed: AssumedBatch, edge: Edge) -> BoundaryTraffic:
        """Return the traffic along an edge. It is counted once for all calls with equal numbers of micro-batches."""
        job = assumed.job
        outputs, returns = len(job.edges[edge]), job.schedule.module[edge.source].backward
        first_by_size, plans, numbers = dict[int, int](), list[BoundaryPlan](), list[int]()
        for call in assumed.calls[edge.source]:
            size = len(call)
            if size not in first_by_size:
                first_by_size[size] = len(plans)
                plans += [plan_boundary(*sides, job.row_bytes * outputs) for sides in assumed.sides(edge, size)]
            numbers += range(first_by_size[size], first_by_size[size] + size)
        crossings = [traffic_of(plan) for plan in plans]
        if not returns:
            crossings = [{"forward": crossing["forward"]} for crossing in crossings]
        plan = plans[0]
        return cls(edge, outputs, tuple(crossings), tuple(numbers), plan.row_bytes, plan.point_to_point)

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions with traffic: `forward`, and `backward` if gradients are sent back."""
        return tuple(self.crossings[0])

    @property
    def ranks(self) -> np.ndarray:
        """The ranks on either side of the edge, int64 [ranks]."""
        return self.crossings[0]["forward"].ranks

    def in_step(self, direction: str, count: Callable[[DirectionTraffic], Any]) -> Any:
        """Return the sum of `count(crossing)` over the micro-batches of a step, in one direction."""
        times = Counter(self.numbers)
        return sum(n * count(self.crossings[number][direction]) for number, n in times.items())
