"""A plan of a boundary for people to read: what it is, every move, and each rank's traffic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from megatron_hetero.boundary.plan import BoundaryPlan

SHOWN = 256
"""Moves, and ranks, that a plan's text lists at most."""


class Move(NamedTuple):
    """Rows that one rank sends to another in one stage of a direction. ``Move.parse(str(move)) == move``."""

    direction: str
    stage: str
    sender: int
    receiver: int
    rows: int

    def __str__(self) -> str:
        return f"{self.direction:<8}  {self.stage:<7}  {self.sender:>6} -> {self.receiver:<6}  {self.rows:>9,}"

    @classmethod
    def parse(cls, text: str) -> Move:
        """The move at the head of a line of a plan's table. Raises `ValueError`."""
        found = re.match(r"(forward|backward) +(reduce|scatter|gather) +(\d+) -> (\d+) +([\d,]+)", text)
        if found is None:
            raise ValueError(f"found {text!r}, expected a line such as 'forward scatter 0 -> 1 17'")
        direction, stage, *numbers = found.groups()
        sender, receiver, rows = (int(number.replace(",", "")) for number in numbers)
        return cls(direction, stage, sender, receiver, rows)


class _Counted(NamedTuple):
    """The moves of one stage of one direction, as columns."""

    direction: str
    stage: str
    senders: np.ndarray
    receivers: np.ndarray
    rows: np.ndarray


def _counted(plan: BoundaryPlan) -> list[_Counted]:
    """All moves of a plan."""
    found = []
    for name, direction in plan.directions.items():
        everything = direction.rows_of(None)
        found += [_Counted(name, stage, *direction.routes(stage, everything).counted()) for stage in direction.stages]
    return found


def moves_of(plan: BoundaryPlan) -> Iterator[Move]:
    """All moves of both directions, in the order in which they happen."""
    return _moves(_counted(plan))


def _moves(counted: Sequence[_Counted]) -> Iterator[Move]:
    def of_stage(stage: _Counted) -> Iterator[Move]:
        columns = zip(stage.senders, stage.receivers, stage.rows, strict=True)
        return (Move(stage.direction, stage.stage, *map(int, move)) for move in columns)

    return chain.from_iterable(map(of_stage, counted))


def described(plan: BoundaryPlan) -> Iterator[str]:
    """The lines of a plan's text: what it is, its moves, each rank's traffic, and what they come to."""
    how = "batched point-to-point" if plan.point_to_point else "one uneven all-to-all a stage"
    rows = len(plan.destination.ids)
    yield f"boundary of {rows:,} rows of {plan.row_bytes:,} bytes over {len(plan.ranks)} ranks, {how}"
    for name, direction in plan.directions.items():
        stages = ", ".join(direction.stages) or "nothing moves"
        yield f"{name}: {stages}; {direction.minimum_total:,} rows received is the minimum{_gradient_note(plan, name)}"
    counted = _counted(plan)
    yield "direction stage        from -> to           rows           bytes"
    yield from (f"{move}  {move.rows * plan.row_bytes:>14,}" for move in islice(_moves(counted), SHOWN))
    yield from _more(sum(len(stage.rows) for stage in counted))
    yield "direction   rank       held     needed  received bytes         minimum      sent bytes"
    traffic = {name: _traffic_of_all(plan, name, counted) for name in plan.directions}
    for name, columns in traffic.items():
        yield from _rank_lines(plan, name, columns)
    for name, (_, _, received, sent, _) in traffic.items():
        most, sent_most, total = (n * plan.row_bytes for n in (received.max(initial=0), sent.max(initial=0), sum(sent)))
        yield f"{name}: at most {most:,} bytes received and {sent_most:,} bytes sent by a rank; {total:,} bytes in all"


def _traffic_of_all(plan: BoundaryPlan, name: str, counted: Sequence[_Counted]) -> tuple[np.ndarray, ...]:
    """The columns of `Traffic` for all ranks, from the moves: planning each rank would take long. -1 for None."""
    ranks, direction = np.array(plan.ranks, np.int64), plan.directions[name]
    received, sent = np.zeros((2, len(ranks)), np.int64)
    for stage in counted:
        if stage.direction == name:
            np.add.at(received, np.searchsorted(ranks, stage.receivers), stage.rows)
            np.add.at(sent, np.searchsorted(ranks, stage.senders), stage.rows)
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
    """What a table leaves out."""
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
