"""What must hold of every boundary, simulated for all ranks in NumPy: rows arrive where they belong, once, at the least
cost, and nowhere else; gradients return by the adjoint; the text says what happens.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import SHOWN
from tests.support.sizes import received_rows, sent_rows
from tests.unit.boundary.simulation import ROW_BYTES, Boundary, SimulatedDirection


def check_everything(boundary: Boundary) -> None:
    """All of the below."""
    check_forward(boundary)
    check_backward(boundary)
    check_adjoint(boundary)
    check_received(boundary)
    check_even_shares(boundary)
    check_text(boundary)


# ---------------------------------------------------------------------------------------------- values


class Values:
    """A value per row, and for each rank of a side a gradient per row that it holds."""

    def __init__(self, boundary: Boundary, seed: int = 0):
        self.boundary = boundary
        self._rng = np.random.default_rng(seed)
        ids = boundary.plan.source.ids
        self.rows = self._rng.integers(1, 1000, 1 + ids.max(initial=0))

    def held(self, side: Ownership) -> list[np.ndarray]:
        """The rows of each rank of the boundary."""
        return [self.rows[side.held_by(rank)] for rank in self.boundary.plan.ranks]

    def gradients(self, side: Ownership) -> list[np.ndarray]:
        """Random ones: equal on all holders, or another part on each."""
        whole = self._rng.integers(1, 1000, self.rows.shape)
        if side.gradient == "invariant":
            return [whole[side.held_by(rank)] for rank in self.boundary.plan.ranks]
        return [self._rng.integers(1, 1000, side.num_rows(rank)) for rank in self.boundary.plan.ranks]

    def total(self, side: Ownership, gradients: list[np.ndarray]) -> np.ndarray:
        """The whole gradient of each row, 0 where nobody holds it."""
        total = np.zeros_like(self.rows)
        for rank, gradient in zip(self.boundary.plan.ranks, gradients, strict=True):
            if side.gradient == "partial":
                total[side.held_by(rank)] += gradient
            else:
                total[side.held_by(rank)] = gradient
        return total


def inner_product(side: Ownership, ranks: tuple[int, ...], values: list[np.ndarray], grads: list[np.ndarray]) -> int:
    """⟨values, grads⟩ over all ranks: an invariant row counts once, of a partial one each holder's part."""
    first = {group[0] for group in side.groups}
    counted = [side.gradient == "partial" or rank in first for rank in ranks]
    return sum(int(np.dot(v, g)) for v, g, counts in zip(values, grads, counted, strict=True) if counts)


# ------------------------------------------------------------------------------------------- properties


def check_forward(boundary: Boundary) -> None:
    values = Values(boundary)
    results, writes = boundary.forward.run(values.held(boundary.plan.source))
    for plan, result, written, expected in zip(
        boundary.forward.plans, results, writes, values.held(boundary.plan.destination), strict=True
    ):
        assert result.tolist() == expected.tolist()
        assert np.all(written == 1) and plan.complete


def check_backward(boundary: Boundary) -> None:
    source, destination = boundary.plan.source, boundary.plan.destination
    values, ranks = Values(boundary), boundary.plan.ranks
    gradients = values.gradients(destination)
    results, writes = boundary.backward.run(gradients)
    total, needed = values.total(destination, gradients), np.zeros_like(values.rows)
    needed[destination.ids] = 1
    assert values.total(source, results)[source.ids].tolist() == total[source.ids].tolist()
    assert values.total(source, writes)[source.ids].tolist() == needed[source.ids].tolist()
    for rank, plan, result, written in zip(ranks, boundary.backward.plans, results, writes, strict=True):
        assert plan.complete == bool(np.all(written == 1))
        assert source.gradient == "partial" or np.array_equal(result, total[source.held_by(rank)])


def check_adjoint(boundary: Boundary) -> None:
    source, destination, ranks = boundary.plan.source, boundary.plan.destination, boundary.plan.ranks
    values = Values(boundary)
    x, c = values.held(source), values.gradients(destination)
    a_x, at_c = boundary.forward.run(x)[0], boundary.backward.run(c)[0]
    assert inner_product(destination, ranks, a_x, c) == inner_product(source, ranks, x, at_c)


def check_received(boundary: Boundary) -> None:
    for name, (held, needed, simulated) in boundary.directions.items():
        if plain(name, held, needed):
            for rank, plan in zip(simulated.ranks, simulated.plans, strict=True):
                least = np.setdiff1d(np.intersect1d(needed.held_by(rank), held.ids), held.held_by(rank))
                assert received_rows(plan) == len(least)
        received, sent = map(sum, _traffic(simulated))
        assert received == sent == boundary.plan.directions[name].minimum_total


def plain(direction: str, held: Ownership, needed: Ownership) -> bool:
    """Whether rows only go from holders to all that need them, so that each rank's minimum is known."""
    whole = held.gradient == "invariant" or all(len(group) == 1 for group in held.groups)
    return direction == "forward" or (whole and needed.gradient == "invariant")


def check_even_shares(boundary: Boundary) -> None:
    """What the members of a group send to one receiver, and what those of a group get from another, differs by one row
    at most."""
    for held, needed, simulated in boundary.directions.values():
        if (phase := simulated.phases.get("scatter")) is None:
            continue
        ranks = np.array(simulated.ranks)
        senders, receivers = ranks[phase.sender], ranks[phase.receiver]
        loads = Counter(zip(senders.tolist(), receivers.tolist(), strict=True))
        pairs = np.stack([held.members.groups_of(senders), needed.members.groups_of(receivers)], axis=1)
        for giving, taking in np.unique(pairs, axis=0).tolist():
            givers, takers = held.groups[giving], needed.groups[taking]
            table = np.array([[loads[sender, receiver] for sender in givers] for receiver in takers])
            assert np.all(np.ptp(table, axis=1) <= 1) and np.ptp(table.sum(1)) <= 1
            assert not set(givers) & set(takers), "the group holds these rows"


def check_text(boundary: Boundary) -> None:
    moves = [move for name, (*_, simulated) in boundary.directions.items() for move in simulated.moves(name)]
    assert list(boundary.plan.moves()) == moves
    lines = str(boundary.plan).splitlines()[4:]  # after what the plan is, both directions, and the table's head
    assert [line[: len(str(move))] for line, move in zip(lines, moves[:SHOWN], strict=False)] == list(
        map(str, moves[:SHOWN])
    )
    for line, (name, (*_, simulated)) in zip(lines[-2:], boundary.directions.items(), strict=True):
        received, sent = ([n * ROW_BYTES for n in column] for column in _traffic(simulated))
        summary = f"{max(received, default=0):,} bytes received and {max(sent, default=0):,} bytes sent by a rank"
        assert line == f"{name}: at most {summary}; {sum(sent):,} bytes in all"


def _traffic(simulated: SimulatedDirection) -> tuple[list[int], list[int]]:
    """Rows that each rank receives and sends."""
    return [received_rows(plan) for plan in simulated.plans], [sent_rows(plan) for plan in simulated.plans]
