"""All ranks of a boundary in NumPy, in one process: what they send, where it arrives, and what they then hold.

The buffers of all ranks lie end to end in one array, so that a phase is one assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import BoundaryPlan, Move, RankPlan, plan_boundary
from megatron_hetero.boundary.routes import PHASES, DirectionPlan, Exchange

ROW_BYTES = 24


@dataclass(frozen=True)
class Phase:
    """All rows that move in a phase, by receiver and then sender: indices of ranks in the plan, and of rows in the
    joined buffers."""

    sender: np.ndarray
    receiver: np.ndarray
    read: np.ndarray
    write: np.ndarray

    @classmethod
    def of(cls, exchanges: Sequence[Exchange], from_starts: np.ndarray, to_starts: np.ndarray) -> Phase:
        """Checks that what each rank sends another is what that one expects, and that nobody sends to itself."""
        sent, received = (np.stack([getattr(e, name) for e in exchanges]) for name in ("send_counts", "receive_counts"))
        assert np.array_equal(sent, received.T) and not sent.diagonal().any()
        assert sent.sum(1).tolist() == [len(e.send) for e in exchanges]
        assert received.sum(1).tolist() == [len(e.receive) for e in exchanges]
        assert sent.any(), "a collective that moves nothing"
        ranks = np.arange(len(exchanges))
        sender, receiver = np.repeat(ranks, sent.sum(1)), np.repeat(np.tile(ranks, len(ranks)), sent.ravel())
        order = np.lexsort((sender, receiver))
        read, write = _joined([e.send for e in exchanges]), _joined([e.receive for e in exchanges])
        return cls(
            sender[order], receiver[order], (read + from_starts[sender])[order], write + to_starts[receiver[order]]
        )


@dataclass(frozen=True)
class SimulatedDirection:
    """One direction on all ranks. `plans`: by rank, in the order of `ranks`."""

    ranks: tuple[int, ...]
    plans: Sequence[DirectionPlan]

    @cached_property
    def held_starts(self) -> np.ndarray:
        return np.cumsum([0, *(plan.held for plan in self.plans)])

    @cached_property
    def needed_starts(self) -> np.ndarray:
        return np.cumsum([0, *(plan.needed for plan in self.plans)])

    @cached_property
    def phases(self) -> dict[str, Phase]:
        names = [tuple(e.phase for e in plan.exchanges) for plan in self.plans]
        assert len(set(names)) == 1, "ranks disagree about the collectives"
        assert list(names[0]) == [phase for phase in PHASES if phase in names[0]], "phases out of order"
        # A reduce stays among the buffers that rows leave, a gather among those that they arrive in.
        starts = {"reduce": (self.held_starts,) * 2, "scatter": (self.held_starts, self.needed_starts)}
        starts["gather"] = (self.needed_starts,) * 2
        return {
            name: Phase.of([plan.exchanges[i] for plan in self.plans], *starts[name]) for i, name in enumerate(names[0])
        }

    def run(self, buffers: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What each rank holds in the end, and how often each of its rows was written, from what each held."""
        assert [len(buffer) for buffer in buffers] == [plan.held for plan in self.plans]
        held = _joined(buffers)
        if (phase := self.phases.get("reduce")) is not None:
            before = held.copy()
            np.add.at(held, phase.write, before[phase.read])
        result, writes = np.zeros((2, self.needed_starts[-1]), np.int64)
        for plan, start, to in zip(self.plans, self.held_starts, self.needed_starts, strict=False):
            result[plan.local_to + to] = held[plan.local_from + start]
            np.add.at(writes, plan.local_to + to, 1)
        for name, source in (("scatter", held), ("gather", result)):
            if (phase := self.phases.get(name)) is not None:
                assert name == "scatter" or writes[phase.read].all(), "passed on before it arrived"
                result[phase.write] = source[phase.read]
                np.add.at(writes, phase.write, 1)
        return self.split(result), self.split(writes)

    def split(self, joined: np.ndarray) -> list[np.ndarray]:
        """Per rank, what lies end to end."""
        return np.split(joined, self.needed_starts[1:-1])

    def moves(self, direction: str) -> list[Move]:
        """Of all phases, by sender and receiver."""
        found = []
        for name, phase in self.phases.items():
            pairs, counts = np.unique(np.stack([phase.sender, phase.receiver]), axis=1, return_counts=True)
            for sender, receiver, rows in zip(*pairs.tolist(), counts.tolist(), strict=True):
                found.append(Move(direction, name, self.ranks[sender], self.ranks[receiver], rows))
        return found


@dataclass(frozen=True, repr=False)
class Boundary:
    """A plan, and the parts of all ranks."""

    plan: BoundaryPlan

    @classmethod
    def of(cls, source: Ownership, destination: Ownership) -> Boundary:
        return cls(plan_boundary(source, destination, ROW_BYTES))

    @classmethod
    def parse(cls, source: str, destination: str) -> Boundary:
        return cls.of(Ownership.parse(source), Ownership.parse(destination))

    def __repr__(self) -> str:
        return f"Boundary.parse({str(self.plan.source)!r}, {str(self.plan.destination)!r})"

    @cached_property
    def parts(self) -> list[RankPlan]:
        return [self.plan.rank(rank) for rank in self.plan.ranks]

    @cached_property
    def forward(self) -> SimulatedDirection:
        return SimulatedDirection(self.plan.ranks, [part.forward for part in self.parts])

    @cached_property
    def backward(self) -> SimulatedDirection:
        return SimulatedDirection(self.plan.ranks, [part.backward for part in self.parts if part.backward is not None])

    @property
    def directions(self) -> dict[str, tuple[Ownership, Ownership, SimulatedDirection]]:
        """By direction, the ownerships that rows leave and arrive in."""
        source, destination = self.plan.source, self.plan.destination
        return {"forward": (source, destination, self.forward), "backward": (destination, source, self.backward)}


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts])
