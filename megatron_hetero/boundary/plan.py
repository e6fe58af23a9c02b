"""Plans a boundary from its two ownerships: the rows that each rank sends and receives in both directions. The routes
of single rows are computed in `routes`. Pure data.

The text of a boundary plan: a summary, every move, and each rank's traffic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple
from zlib import crc32

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.routes import DirectionPlan, Redistribution
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


SHOWN = 256
"""The most moves, and the most ranks, that a plan's text lists."""


class Move(NamedTuple):
    """Rows that one rank sends to another in one phase of a direction. ``Move.parse(str(move)) == move``."""

    direction: str
    phase: str
    sender: int
    receiver: int
    rows: int

    def __str__(self) -> str:
        return f"{self.direction:<8}  {self.phase:<7}  {self.sender:>6} -> {self.receiver:<6}  {self.rows:>9,}"

    @classmethod
    def parse(cls, text: str) -> Move:
        """The move at the head of a line of a plan's table. Raises `ValueError`."""
        found = re.match(r"(forward|backward) +(reduce|scatter|gather) +(\d+) -> (\d+) +([\d,]+)", text)
        if found is None:
            raise ValueError(f"found {text!r}, expected a line such as 'forward scatter 0 -> 1 17'")
        direction, phase, *numbers = found.groups()
        sender, receiver, rows = (int(number.replace(",", "")) for number in numbers)
        return cls(direction, phase, sender, receiver, rows)


class _PhaseMoves(NamedTuple):
    """The moves of one phase of one direction, as columns, int64 [moves]."""

    direction: str
    phase: str
    senders: np.ndarray
    receivers: np.ndarray
    rows: np.ndarray


def _phase_moves(plan: BoundaryPlan) -> list[_PhaseMoves]:
    """All moves of a plan."""
    found: list[_PhaseMoves] = []
    for name, direction in plan.directions.items():
        rows = direction.row_table(None)
        found += [_PhaseMoves(name, phase, *direction.routes(phase, rows).row_counts()) for phase in direction.phases]
    return found


def moves_of(plan: BoundaryPlan) -> Iterator[Move]:
    """All moves of both directions, in order of execution."""
    return _moves(_phase_moves(plan))


def _moves(phases: Sequence[_PhaseMoves]) -> Iterator[Move]:
    def of_phase(phase: _PhaseMoves) -> Iterator[Move]:
        columns = zip(phase.senders, phase.receivers, phase.rows, strict=True)
        return (Move(phase.direction, phase.phase, *map(int, move)) for move in columns)

    return chain.from_iterable(map(of_phase, phases))


def describe_plan(plan: BoundaryPlan) -> Iterator[str]:
    """The lines of a plan's text: a summary, its moves, each rank's traffic, and the totals."""
    how = "batched point-to-point" if plan.point_to_point else "one uneven all-to-all per phase"
    rows = len(plan.destination.ids)
    yield f"boundary of {rows:,} rows of {plan.row_bytes:,} bytes over {len(plan.ranks)} ranks, {how}"
    for name, direction in plan.directions.items():
        phases = ", ".join(direction.phases) or "nothing moves"
        yield f"{name}: {phases}; {direction.minimum_total:,} rows received is the minimum{_gradient_note(plan, name)}"
    moves = _phase_moves(plan)
    yield "direction phase        from -> to           rows           bytes"
    yield from (f"{move}  {move.rows * plan.row_bytes:>14,}" for move in islice(_moves(moves), SHOWN))
    yield from _more(sum(len(phase.rows) for phase in moves))
    yield "direction   rank       held     needed  received bytes         minimum      sent bytes"
    traffic = {name: _traffic_of_all(plan, name, moves) for name in plan.directions}
    for name, columns in traffic.items():
        yield from _rank_lines(plan, name, columns)
    for name, (_, _, received, sent, _) in traffic.items():
        most, sent_most, total = (n * plan.row_bytes for n in (received.max(initial=0), sent.max(initial=0), sum(sent)))
        yield f"{name}: at most {most:,} bytes received and {sent_most:,} bytes sent by a rank; {total:,} bytes in all"


def _traffic_of_all(plan: BoundaryPlan, name: str, phases: Sequence[_PhaseMoves]) -> tuple[np.ndarray, ...]:
    """The columns of `Traffic` for all ranks, int64 [ranks], -1 for None. Counts moves, since planning each rank is
    slow.
    """
    ranks, direction = np.array(plan.ranks, np.int64), plan.directions[name]
    received, sent = np.zeros((2, len(ranks)), np.int64)
    for phase in phases:
        if phase.direction == name:
            np.add.at(received, np.searchsorted(ranks, phase.receivers), phase.rows)
            np.add.at(sent, np.searchsorted(ranks, phase.senders), phase.rows)
    held, needed = (
        np.append(np.diff(side.starts), 0)[side.members.groups_of(ranks)] for side in (direction.held, direction.needed)
    )
    return held, needed, received, sent, direction.missing(ranks) if direction.has_minima else np.full(len(ranks), -1)


def _rank_lines(plan: BoundaryPlan, name: str, columns: Sequence[np.ndarray]) -> Iterator[str]:
    shown = (column[:SHOWN].tolist() for column in columns)
    for rank, held, needed, received, sent, minimum in zip(plan.ranks[:SHOWN], *shown, strict=True):
        least = "shared" if minimum < 0 else f"{minimum * plan.row_bytes:,}"
        yield (
            f"{name:<8} {rank:>7} {held:>10,} {needed:>10,} {received * plan.row_bytes:>15,} {least:>15} "
            f"{sent * plan.row_bytes:>15,}"
        )
    yield from _more(len(plan.ranks))


def _more(lines: int) -> Iterator[str]:
    """How many lines a table omits."""
    if lines > SHOWN:
        yield f"… and {lines - SHOWN:,} more"


def _gradient_note(plan: BoundaryPlan, direction: str) -> str:
    if direction == "forward":
        return ""
    needed = {
        "invariant": "each destination rank holds a row's whole gradient, and one of them sends it",
        "partial": "destination ranks hold parts of a row's gradient, which are added up on the way",
    }[plan.destination.gradient]
    held = {"invariant": "every source rank gets all of it", "partial": "one source rank gets it, the others zero"}
    return f"; {needed}; {held[plan.source.gradient]}"
