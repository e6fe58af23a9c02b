"""The exact moves that turn one ownership of rows into another. Pure data.

Two stages, each one all-to-all with uneven splits:

  1. *scatter*: every row that no member of its destination group holds crosses once, to one member of that group.
     Where the source is replicated over n ranks, each sends about 1/n of the rows; where the destination is
     replicated over n ranks, each receives about 1/n of them.
  2. *gather* (only where some destination is replicated): inside each destination group, each member passes on its
     portion to the members that do not hold those rows.

Cases, for a row r with source group S and destination group D:

     S and D share ranks            the shared ranks keep r; one of them passes it on to the rest of D
     they share none, |D| = 1       one member of S sends r to D
     they share none, |D| > 1       one member of S sends r to one member of D, which passes it on to the rest

Nobody receives a row that it does not need or already holds, so that received bytes are the minimum for the pair of
ownerships. The backward pass is the adjoint. All replicas hold the whole gradient (it is invariant), so that the
gradient of r travels once from D to S and is then passed on inside S: the same plan with the sides exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hetero.boundary.ownership import Ownership


@dataclass(frozen=True, eq=False)
class Moves:
    """One all-to-all as one rank sees it, in row indices of its buffers.

    `send`: int64, indices into the rank's source buffer, ordered by receiver; `send_counts`: rows for each rank of the
    world.
    `receive`: int64, indices into its destination buffer at which the rows that arrive are put, ordered by sender;
    `receive_counts`: rows from each rank.
    """

    send: np.ndarray
    send_counts: tuple[int, ...]
    receive: np.ndarray
    receive_counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DirectionPlan:
    """One direction of a boundary for one rank: scatter, then gather. A stage that moves nothing on any rank is None.

    `kept_from`, `kept_to`: indices of rows that stay on the rank. The gather reads and writes the destination buffer of
    `rows` rows.
    """

    rows: int
    kept_from: np.ndarray
    kept_to: np.ndarray
    scatter: Moves | None
    gather: Moves | None

    @property
    def stages(self) -> tuple[Moves, ...]:
        """The all-to-alls of this direction."""
        return tuple(moves for moves in (self.scatter, self.gather) if moves is not None)

    @property
    def received_rows(self) -> int:
        """Rows that reach this rank from others."""
        return sum(sum(moves.receive_counts) for moves in self.stages)

    @property
    def sent_rows(self) -> int:
        """Rows that this rank sends to others."""
        return sum(sum(moves.send_counts) for moves in self.stages)

    @property
    def collectives(self) -> int:
        """All-to-alls that this direction takes: the same number on every rank."""
        return len(self.stages)


@dataclass(frozen=True, eq=False)
class BoundaryPlan:
    """Both directions of one boundary for one rank and one micro-batch."""

    forward: DirectionPlan
    backward: DirectionPlan


def plan_boundary(source: Ownership, destination: Ownership, rank: int, world_size: int) -> BoundaryPlan:
    """Plan the moves of `rank`. Raises `ValueError` where a row is needed that nobody holds."""
    return BoundaryPlan(
        forward=_plan_direction(source, destination, rank, world_size),
        backward=_plan_direction(destination, source, rank, world_size),
    )


def minimum_received_rows(source: Ownership, destination: Ownership, rank: int) -> int:
    """The least rows that `rank` must receive: those it needs less those it holds."""
    return len(np.setdiff1d(destination.held_by(rank), source.held_by(rank)))


def _plan_direction(source: Ownership, destination: Ownership, rank: int, world_size: int) -> DirectionPlan:
    needed = [np.sort(rows) for rows in destination.rows]
    total = max(source.total, destination.total)
    source_group, source_place = source.location(total)
    _, destination_place = destination.location(total)
    scatter, gather = _Collector(rank, world_size), _Collector(rank, world_size)
    for members, rows in zip(destination.groups, needed, strict=True):
        if np.any(source_group[rows] < 0):
            raise ValueError(
                f"rows {rows[source_group[rows] < 0][:5]} are needed by ranks {members}, but held by nobody"
            )
        for index in np.unique(source_group[rows]):
            part = rows[source_group[rows] == index]
            _route(part, source.groups[index], members, source_place, destination_place, scatter, gather)
    return DirectionPlan(
        rows=len(destination.held_by(rank)),
        kept_from=_joined([places for places, _ in scatter.kept]),
        kept_to=_joined([places for _, places in scatter.kept]),
        scatter=scatter.moves(),
        gather=gather.moves(),
    )


def _route(
    rows: np.ndarray,
    holders: tuple[int, ...],
    members: tuple[int, ...],
    source_place: np.ndarray,
    destination_place: np.ndarray,
    scatter: _Collector,
    gather: _Collector,
) -> None:
    """Add the moves of `rows`, held by all of `holders`, to all of `members`."""
    shared = tuple(rank for rank in members if rank in holders)
    for rank in shared:
        scatter.add(rank, rank, source_place[rows], destination_place[rows])
    first = shared or members
    for portion, receiver in zip(np.array_split(rows, len(first)), first, strict=True):
        if not shared:
            for part, sender in zip(np.array_split(portion, len(holders)), holders, strict=True):
                scatter.add(sender, receiver, source_place[part], destination_place[part])
        for other in members:
            if other != receiver and other not in shared:
                gather.add(receiver, other, destination_place[portion], destination_place[portion])


class _Collector:
    """Collects the moves of one all-to-all that concern one rank."""

    def __init__(self, rank: int, world_size: int):
        self.rank = rank
        self.sent: list[list[np.ndarray]] = [[] for _ in range(world_size)]
        self.received: list[list[np.ndarray]] = [[] for _ in range(world_size)]
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []
        self.used = False

    def add(self, sender: int, receiver: int, from_places: np.ndarray, to_places: np.ndarray) -> None:
        # Every rank sees every move, so that all agree on whether the collective is needed.
        self.used = self.used or (sender != receiver and len(from_places) > 0)
        if sender == receiver == self.rank:
            self.kept.append((from_places, to_places))
        elif sender == receiver:
            pass
        elif sender == self.rank:
            self.sent[receiver].append(from_places)
        elif receiver == self.rank:
            self.received[sender].append(to_places)

    def moves(self) -> Moves | None:
        if not self.used:
            return None
        return Moves(
            send=_joined([a for arrays in self.sent for a in arrays]),
            send_counts=tuple(sum(map(len, arrays)) for arrays in self.sent),
            receive=_joined([a for arrays in self.received for a in arrays]),
            receive_counts=tuple(sum(map(len, arrays)) for arrays in self.received),
        )


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
