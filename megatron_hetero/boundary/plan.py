"""Plans a boundary from its two ownerships: the rows that each rank sends and receives in both directions. The routes
of single rows are computed in `routes`. Pure data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple
from zlib import crc32

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.routes import DirectionPlan, Index, Redistribution
from megatron_hetero.layout.grammar import format_ranks

SHOWN = 256
"""Maximum number of moves that the text of a plan lists."""


@dataclass(frozen=True, eq=False)
class RankPlan(Generic[Index]):
    """The plan of one rank: what it sends and receives in a crossing of one batch.

    `ranks`: all participating ranks, ascending; counts are in this order. `digest`: `BoundaryPlan.digest` of the whole
    plan. `point_to_point`: whether exchanges are batches of sends and receives, or else all-to-alls over `ranks`.
    `copies`: the ranks that need the same rows as this rank, including it; `summed`: whether the gradients of these
    rows are partial sums. `backward`: None if no gradients return.
    """

    rank: int
    ranks: tuple[int, ...]
    digest: int
    point_to_point: bool
    copies: tuple[int, ...]
    summed: bool
    forward: DirectionPlan[Index]
    backward: DirectionPlan[Index] | None


class Move(NamedTuple):
    """Rows that one rank sends to another in one phase of a direction."""

    direction: str
    phase: str
    sender: int
    receiver: int
    rows: int

    def __str__(self) -> str:
        return f"{self.direction:<8}  {self.phase:<7}  {self.sender:>6} -> {self.receiver:<6}  {self.rows:>9,}"


@dataclass(frozen=True, eq=False)
class BoundaryPlan:
    """The plan of a boundary: moves of rows from `source` to `destination`, and of gradients back. `row_bytes`: number
    of bytes of a row on the wire.

    `rank` returns the plan of one rank; `print` shows the whole plan.
    """

    source: Ownership
    destination: Ownership
    row_bytes: int

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All participating ranks, ascending."""
        return tuple(np.union1d(self.source.members.ranks, self.destination.members.ranks).tolist())

    @property
    def point_to_point(self) -> bool:
        """Whether source and destination share no rank."""
        return len(self.ranks) == len(self.source.members.ranks) + len(self.destination.members.ranks)

    @cached_property
    def digest(self) -> int:
        """CRC-32 of both ownerships, by which ranks detect that their plans differ."""
        digest = 0
        for side in (self.source, self.destination):
            digest = crc32(side.gradient.encode(), digest)
            for numbers in (side.members.starts, side.members.ranks, side.starts, side.ids):
                digest = crc32(numbers.astype(np.int32).data, digest)
        return digest

    def rank(self, rank: int, *, backward: bool = True) -> RankPlan[np.ndarray]:
        """Return what `rank`, one of `ranks`, sends and receives. `backward=False`: plan the forward direction only."""
        forward, back = self.directions.values()
        return RankPlan(
            rank,
            self.ranks,
            self.digest,
            self.point_to_point,
            self.destination.peers_of(rank),
            self.destination.gradient == "partial",
            forward.plan(rank, self.ranks),
            back.plan(rank, self.ranks) if backward else None,
        )

    @cached_property
    def directions(self) -> dict[str, Redistribution]:
        """The redistributions of both directions, by the names `forward` and `backward`."""
        source, destination = self.source, self.destination
        forward = Redistribution(source, destination, summed=False, once=False)
        summed, once = destination.gradient == "partial", source.gradient == "partial"
        return {"forward": forward, "backward": Redistribution(destination, source, summed, once, mirror=forward)}

    def moves(self) -> tuple[Move, ...]:
        """Return all moves of both directions, in order of execution."""
        moves: list[Move] = []
        for name, each in self.directions.items():
            rows = each.row_table(None)
            for phase in each.phases:
                columns = (column.tolist() for column in each.routes(phase, rows).row_counts())
                moves += [Move(name, phase, *counted) for counted in zip(*columns, strict=True)]
        return tuple(moves)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the plan's text: a summary, the moves, and the totals."""
        how = "batched point-to-point" if self.point_to_point else "one uneven all-to-all per phase"
        rows = len(self.destination.ids)
        yield f"boundary of {rows:,} rows of {self.row_bytes:,} bytes over {len(self.ranks)} ranks, {how}"
        for name, each in self.directions.items():
            phases = ", ".join(each.phases) or "nothing moves"
            yield f"{name}: {phases}; {each.minimum_total:,} rows received is the minimum"
        moves = self.moves()
        yield "direction phase        from -> to           rows           bytes"
        yield from (f"{move}  {move.rows * self.row_bytes:>14,}" for move in moves[:SHOWN])
        if len(moves) > SHOWN:
            yield f"… and {len(moves) - SHOWN:,} more"
        for name in self.directions:
            received, sent = Counter[int](), Counter[int]()
            for move in (move for move in moves if move.direction == name):
                received[move.receiver] += move.rows
                sent[move.sender] += move.rows
            most_received, most_sent = (max(rows.values(), default=0) * self.row_bytes for rows in (received, sent))
            largest = f"at most {most_received:,} bytes received and {most_sent:,} bytes sent by a rank"
            yield f"{name}: {largest}; {sent.total() * self.row_bytes:,} bytes in all"


def plan_boundary(source: Ownership, destination: Ownership, row_bytes: int) -> BoundaryPlan:
    """Return the plan of a boundary. `row_bytes`: number of bytes of a row on the wire.

    Raises:
        UserError: no rank holds a row that is needed.
    """
    plan = BoundaryPlan(source, destination, row_bytes)
    if plan.directions["forward"].num_rows < len(destination.ids):
        group, _ = source.locate(destination.ids)
        at = int(np.flatnonzero(group < 0)[0])
        ranks = destination.groups[int(destination.group_of_entry[at])]
        raise UserError.at(
            "plan_boundary",
            found=f"{np.sum(group < 0)} rows that are needed but held by nobody, such as row {destination.ids[at]}, "
            f"needed by ranks {format_ranks(ranks)}",
            expected=f"the destination's rows to be among the {len(source.ids)} of the source",
            fix="plan with ownerships of the same batch",
        )
    return plan
