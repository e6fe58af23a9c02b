"""Plans a boundary from its two ownerships: the rows that each rank sends and receives in both directions. The routes
of single rows are computed in `routes`. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from zlib import crc32

import numpy as np

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan_text import Move, describe_plan, moves_of
from megatron_hetero.boundary.routes import DirectionPlan, Redistribution
from megatron_hetero.errors import UserError
from megatron_hetero.layout.grammar import format_ranks


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One boundary for one rank and one batch.

    `ranks`: all participants, ascending; counts are in their order. `digest`: `BoundaryPlan.digest` of the whole plan.
    `point_to_point`: whether exchanges are batches of sends and receives, or else all-to-alls over all of `ranks`.
    `copies`: the ranks that need the same rows as this one, itself included; `summed`: whether their gradients of these
    rows are parts. `backward`: None where no gradients return.
    """

    rank: int
    ranks: tuple[int, ...]
    digest: int
    point_to_point: bool
    copies: tuple[int, ...]
    summed: bool
    forward: DirectionPlan
    backward: DirectionPlan | None


class Traffic(NamedTuple):
    """Rows that one rank moves in one direction. `minimum`: the fewest it could receive; None where only the sum over
    all ranks has a minimum, since in a reduce ranks can trade shares.
    """

    held: int
    needed: int
    received: int
    sent: int
    minimum: int | None


@dataclass(frozen=True, eq=False)
class BoundaryPlan:
    """Moves rows from `source` to `destination`, and their gradients back. `row_bytes`: bytes of a row on the wire.

    `rank` returns one rank's part; `print` shows the whole plan.
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
        """CRC-32 of both ownerships, by which ranks detect that they hold parts of different plans."""
        digest = 0
        for side in (self.source, self.destination):
            digest = crc32(side.gradient.encode(), digest)
            for numbers in (side.members.starts, side.members.ranks, side.starts, side.ids):
                digest = crc32(numbers.astype(np.int32).data, digest)
        return digest

    def rank(self, rank: int, *, backward: bool = True) -> RankPlan:
        """The part of `rank`, one of `ranks`. `backward=False`: of the forward direction only."""
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
        """The redistributions named `forward` and `backward`."""
        source, destination = self.source, self.destination
        forward = Redistribution(source, destination, summed=False, once=False)
        summed, once = destination.gradient == "partial", source.gradient == "partial"
        return {"forward": forward, "backward": Redistribution(destination, source, summed, once, mirror=forward)}

    def moves(self) -> tuple[Move, ...]:
        """All moves of both directions, in order of execution."""
        return tuple(moves_of(self))

    def traffic(self, direction: str, rank: int) -> Traffic:
        """The traffic of `rank` in "forward" or "backward"; another direction is a `KeyError`."""
        if direction not in self.directions:
            raise KeyError(f"no direction `{direction}`; there are {', '.join(self.directions)}")
        chosen = self.directions[direction]
        plan = chosen.plan(rank, self.ranks)
        return Traffic(plan.held, plan.needed, plan.received_rows, plan.sent_rows, chosen.minimum(rank))

    def __str__(self) -> str:
        return "\n".join(describe_plan(self))


def plan_boundary(source: Ownership, destination: Ownership, row_bytes: int) -> BoundaryPlan:
    """Plan a boundary. `row_bytes`: bytes of a row on the wire.

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
