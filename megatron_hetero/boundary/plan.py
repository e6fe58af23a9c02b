"""Plans a boundary: which rows each rank sends and receives in both directions, from who holds and who needs them. How
they travel is in `routes`. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from zlib import crc32

import numpy as np

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan_text import Move, described, moves_of
from megatron_hetero.boundary.routes import Direction, DirectionPlan


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One boundary for one rank and one batch.

    `ranks`: those that take part, ascending; counts are in their order. `digest`: the `BoundaryPlan.digest` of the plan
    that this is a part of. `point_to_point`: whether exchanges are batches of sends and receives, rather than
    all-to-alls over all of `ranks`. `backward`: None where nothing will come back.
    """

    rank: int
    ranks: tuple[int, ...]
    digest: int
    point_to_point: bool
    forward: DirectionPlan
    backward: DirectionPlan | None


class Traffic(NamedTuple):
    """Rows that one rank moves in one direction, and the least that it could receive (None where only the sum over all
    ranks has a least value: in a reduce the ranks can take over each other's share).
    """

    held: int
    needed: int
    received: int
    sent: int
    minimum: int | None


@dataclass(frozen=True, eq=False)
class BoundaryPlan:
    """How rows get from `source` to `destination`, and their gradients back. `row_bytes`: bytes of a row on the wire.

    `rank` gives one rank's part; `print` shows the whole.
    """

    source: Ownership
    destination: Ownership
    row_bytes: int

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return tuple(np.union1d(self.source.members.ranks, self.destination.members.ranks).tolist())

    @property
    def point_to_point(self) -> bool:
        """Whether source and destination have no rank in common."""
        return len(self.ranks) == len(self.source.members.ranks) + len(self.destination.members.ranks)

    @cached_property
    def digest(self) -> int:
        """A number of 32 bits that follows from who holds and who needs what: ranks with parts of plans that differ
        can tell by it.
        """
        digest = 0
        for side in (self.source, self.destination):
            digest = crc32(side.gradient.encode(), digest)
            for numbers in (side.members.starts, side.members.ranks, side.starts, side.ids):
                digest = crc32(numbers.astype(np.int32).data, digest)
        return digest

    def rank(self, rank: int, *, backward: bool = True) -> RankPlan:
        """The part of `rank`, which is one of `ranks`; without `backward` of the forward direction only."""
        forward, back = self.directions.values()
        return RankPlan(
            rank,
            self.ranks,
            self.digest,
            self.point_to_point,
            forward.plan(rank, self.ranks),
            back.plan(rank, self.ranks) if backward else None,
        )

    @cached_property
    def directions(self) -> dict[str, Direction]:
        """Forward and backward."""
        source, destination = self.source, self.destination
        forward = Direction(source, destination, summed=False, once=False)
        summed, once = destination.gradient == "partial", source.gradient == "partial"
        return {"forward": forward, "backward": Direction(destination, source, summed, once, mirror=forward)}

    def moves(self) -> tuple[Move, ...]:
        """All moves of both directions, in the order in which they happen."""
        return tuple(moves_of(self))

    def traffic(self, direction: str, rank: int) -> Traffic:
        """What `rank` moves in "forward" or "backward"."""
        chosen = self.directions[direction]
        plan = chosen.plan(rank, self.ranks)
        return Traffic(plan.held, plan.rows, plan.received_rows, plan.sent_rows, chosen.minimum(rank))

    def __str__(self) -> str:
        return "\n".join(described(self))


def plan_boundary(source: Ownership, destination: Ownership, row_bytes: int) -> BoundaryPlan:
    """Plan a boundary. `row_bytes`: bytes of a row on the wire.

    Raises:
        ValueError: a row is needed that nobody holds.
    """
    plan = BoundaryPlan(source, destination, row_bytes)
    if plan.directions["forward"].rows < len(destination.ids):
        group, _ = source.locate(destination.ids)
        at = int(np.flatnonzero(group < 0)[0])
        ranks = destination.groups[int(destination.group_of_entry[at])]
        raise ValueError(
            f"boundary: found {np.sum(group < 0)} rows that are needed but held by nobody, such as row "
            f"{destination.ids[at]}, needed by ranks {ranks}; expected the destination's rows to be among the "
            f"source's {len(source.ids)}; plan with ownerships of the same batch"
        )
    return plan
