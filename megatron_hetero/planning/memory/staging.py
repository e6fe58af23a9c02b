"""The buffers that a boundary's communicator borrows in a step, followed loan by loan. Pure.

`BoundaryCommunicator` lends buffers whose sizes are powers of two and keeps them for later crossings. A crossing
borrows, in this order, and gives back when it has been waited for:

    arriving rows, and leaving ones         where the wire has a type of its own
    rows that it sends, rows that arrive    of each exchange, where they are not one run of a buffer; until it has ended
    rows that stay                          where they are not one run; given back at once

Where a rank takes part in no crossing, or rows are runs everywhere, there is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_hetero.planning.traffic import DirectionTraffic
from megatron_hetero.schedule.actions import Action


@dataclass(frozen=True)
class CrossingLoans:
    """What one crossing borrows on one rank, in bytes, in order. `whole`: until the end of the crossing. `scatter`,
    `gather`: until the exchange has ended, where 0 is nothing; None where there is none. `kept`: returned at once.
    """

    whole: tuple[int, ...]
    scatter: tuple[int, ...] | None
    kept: int
    gather: tuple[int, ...] | None


def loan_sizes(direction: DirectionTraffic, row_bytes: int) -> np.ndarray:
    """The bytes that each rank of a direction borrows, int64 [ranks, loans], as `loans_of` takes them. `row_bytes`: on
    the wire.

    Rows that are sums of parts, which nothing in this program sends, would need more.
    """
    assert direction.stage("reduce") is None, "no module holds its rows' gradients in parts"
    staged = {stage.stage: [stage.send.staged(), stage.receive.staged()] for stage in direction.stages}
    columns = [direction.needed, direction.held, direction.kept.staged()]
    columns += [*staged.get("scatter", []), *staged.get("gather", [])]
    return np.stack(columns, axis=1) * row_bytes


def loans_of(direction: DirectionTraffic, sizes: Sequence[int], rounded: bool) -> CrossingLoans:
    """What a rank borrows. `sizes`: its row of `loan_sizes`. `rounded`: the wire has a type of its own."""
    return CrossingLoans(
        whole=tuple(sizes[:2]) if rounded else (),
        scatter=tuple(sizes[3:5]) if direction.stage("scatter") else None,
        kept=sizes[2],
        gather=tuple(sizes[-2:]) if direction.stage("gather") else None,
    )


@dataclass
class SimulatedBufferPool:
    """The communicator's `BufferPool`, of sizes only. `peak`: the most bytes that it held."""

    free: list[int] = field(default_factory=list)
    held: int = 0
    peak: int = 0

    def take(self, size: int) -> int:
        """Lend a buffer of at least `size` bytes; returns its size."""
        fitting = [buffer for buffer in self.free if buffer >= size]
        if fitting:
            self.free.remove(min(fitting))
            return min(fitting)
        if self.free:
            self.held -= min(self.free)
            self.free.remove(min(self.free))
        made = 1 << max(0, size - 1).bit_length()
        self.held += made
        self.peak = max(self.peak, self.held)
        return made


def peak_staging(actions: Iterable[Action], loans: Mapping[str, Sequence[CrossingLoans]]) -> int:
    """The most bytes that the communicator of one boundary holds on a rank that executes `actions`, those of the
    boundary alone. `loans`: by kind, F or B, those of each micro-batch's crossing; without a kind that does not cross.
    """
    pool, crossings = SimulatedBufferPool(), {}
    for action in actions:
        key = action.kind, action.micro_batch
        if action.op == "start" and action.kind in loans:
            crossings[key] = _crossing(pool, loans[action.kind][action.micro_batch])
            next(crossings[key], None)
        elif action.op == "finish" and key in crossings:
            for _ in crossings.pop(key):
                pass
    return pool.peak


def _crossing(pool: SimulatedBufferPool, loans: CrossingLoans) -> Iterator[None]:
    """A crossing, with a yield wherever an exchange is in flight, or once where there is none."""
    whole = [pool.take(size) for size in loans.whole]
    flight = _borrow(pool, loans.scatter or ())
    pool.free += _borrow(pool, (loans.kept,))
    if loans.scatter is not None:
        yield
        pool.free += reversed(flight)
    if loans.gather is not None:
        flight = _borrow(pool, loans.gather)
        yield
        pool.free += reversed(flight)
    if loans.scatter is None and loans.gather is None:
        yield
    pool.free += reversed(whole)


def _borrow(pool: SimulatedBufferPool, sizes: Iterable[int]) -> list[int]:
    """Rows that are none, or one run, are not staged."""
    return [pool.take(size) for size in sizes if size]
