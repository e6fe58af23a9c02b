"""The text of a boundary plan: a summary, every move, and each rank's traffic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from megatron_hetero.boundary.plan import BoundaryPlan

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
    found = []
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
