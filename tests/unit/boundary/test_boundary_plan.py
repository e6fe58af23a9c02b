"""Ownerships and plans, simulated for all ranks in NumPy: rows arrive where they belong, once, and nowhere else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import BoundaryPlan, DirectionPlan, Moves, minimum_received_rows, plan_boundary


@dataclass(frozen=True)
class Boundary:
    """Two ownerships of the same rows over a world, and the plans of all its ranks."""

    source: Ownership
    destination: Ownership
    plans: tuple[BoundaryPlan, ...]

    @classmethod
    def of(cls, source: Ownership, destination: Ownership, world_size: int) -> Boundary:
        return cls(
            source, destination, tuple(plan_boundary(source, destination, r, world_size) for r in range(world_size))
        )

    @property
    def directions(self) -> tuple[tuple[Ownership, Ownership, list[DirectionPlan]], ...]:
        """(from, to, plans of all ranks) for forward and backward."""
        return (
            (self.source, self.destination, [plan.forward for plan in self.plans]),
            (self.destination, self.source, [plan.backward for plan in self.plans]),
        )


def random_ownership(rng: np.random.Generator, world_size: int, rows: int) -> Ownership:
    """Replica groups of 1 to 4 ranks in any order, perhaps not of all ranks; each row in one of them, in any order."""
    ranks = rng.permutation(world_size)[: rng.integers(1, world_size + 1)].tolist()
    most = int(rng.integers(1, 5))
    groups = []
    while ranks:
        size = int(rng.integers(1, most + 1))
        groups.append(tuple(ranks[:size]))
        ranks = ranks[size:]
    weights = rng.random(len(groups)) * (rng.random(len(groups)) < 0.7) + 1e-9  # some groups get few rows or none
    holder = rng.choice(len(groups), rows, p=weights / weights.sum())
    return Ownership.of({group: rng.permutation(np.flatnonzero(holder == i)) for i, group in enumerate(groups)})


@st.composite
def boundaries(draw: st.DrawFn) -> Boundary:
    world_size, rows = draw(st.integers(1, 8)), draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    source, destination = (random_ownership(rng, world_size, rows) for _ in range(2))
    return Boundary.of(source, destination, world_size)


many = settings(max_examples=300, deadline=None)


def exchange(stage: list[Moves], buffers: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank receives of an all-to-all, ordered by sender; checks that the counts of all pairs match."""
    sent = []
    for moves, buffer in zip(stage, buffers, strict=True):
        assert sum(moves.send_counts) == len(moves.send) and sum(moves.receive_counts) == len(moves.receive)
        sent.append(np.split(buffer[moves.send], np.cumsum(moves.send_counts)[:-1]))
    for sender, moves in enumerate(stage):
        assert moves.send_counts[sender] == 0, "a rank sends rows to itself"
        for receiver, count in enumerate(moves.send_counts):
            assert stage[receiver].receive_counts[sender] == count
    return [np.concatenate([sent[sender][receiver] for sender in range(len(stage))]) for receiver in range(len(stage))]


def simulate(plans: list[DirectionPlan], buffers: list[np.ndarray]) -> list[np.ndarray]:
    """All ranks' results; every place of a result is written exactly once."""
    results = [np.full(plan.rows, -1) for plan in plans]
    writes = [np.zeros(plan.rows, int) for plan in plans]
    for plan, buffer, result, written in zip(plans, buffers, results, writes, strict=True):
        result[plan.kept_to] = buffer[plan.kept_from]
        np.add.at(written, plan.kept_to, 1)
    for name, inputs in (("scatter", buffers), ("gather", results)):
        stage = [getattr(plan, name) for plan in plans]
        if stage[0] is None:
            assert all(moves is None for moves in stage), "ranks disagree on whether the collective exists"
            continue
        assert any(len(moves.send) for moves in stage), "a collective that moves nothing"
        arrived = exchange(stage, inputs)
        for moves, rows, result, written in zip(stage, arrived, results, writes, strict=True):
            result[moves.receive] = rows
            np.add.at(written, moves.receive, 1)
    assert all((written == 1).all() for written in writes)
    return results


@many
@given(boundaries())
def test_every_row_arrives_where_it_is_needed_and_nowhere_else(boundary: Boundary) -> None:
    ranks = range(len(boundary.plans))
    for source, destination, plans in boundary.directions:
        results = simulate(plans, [source.held_by(rank) for rank in ranks])
        for rank in ranks:
            assert results[rank].tolist() == destination.held_by(rank).tolist()


@many
@given(boundaries())
def test_received_rows_are_the_minimum(boundary: Boundary) -> None:
    for source, destination, plans in boundary.directions:
        for rank, plan in enumerate(plans):
            minimum = len(set(destination.held_by(rank).tolist()) - set(source.held_by(rank).tolist()))
            assert plan.received_rows == minimum == minimum_received_rows(source, destination, rank)
        assert sum(plan.sent_rows for plan in plans) == sum(plan.received_rows for plan in plans)
        assert len({plan.collectives for plan in plans}) == 1
        if all(len(group) == 1 for group in destination.groups):
            assert plans[0].gather is None


@many
@given(boundaries())
def test_a_row_crosses_into_a_destination_group_at_most_once(boundary: Boundary) -> None:
    for source, destination, plans in boundary.directions:
        if plans[0].scatter is None:
            continue
        crossings: Counter[int] = Counter()
        for sender, _receiver, row in moves_of([plan.scatter for plan in plans], source):
            members = destination.groups[location(destination, row)]
            assert sender not in members, "the destination group holds the row already"
            assert not set(members) & set(source.groups[location(source, row)])
            crossings[row] += 1
        assert max(crossings.values(), default=0) <= 1


@many
@given(boundaries())
def test_replicas_share_the_sending_evenly(boundary: Boundary) -> None:
    """For each source group and receiver, what the members of the group send differs by one row at most."""
    for source, destination, plans in boundary.directions:
        for stage, held in (("scatter", source), ("gather", destination)):
            sent: dict[tuple[int, int, int], Counter[int]] = {}
            for sender, receiver, row in moves_of([getattr(plan, stage) for plan in plans], held):
                key = location(source, row), location(destination, row), receiver
                sent.setdefault(key, Counter())[sender] += 1
            for (from_group, to_group, receiver), loads in sent.items():
                holders, members = source.groups[from_group], destination.groups[to_group]
                shared = [rank for rank in members if rank in holders]
                senders = holders if stage == "scatter" else [r for r in shared or members if r != receiver]
                counts = [loads[rank] for rank in senders]
                assert set(loads) <= set(senders) and max(counts) - min(counts) <= 1


def moves_of(stage: list[Moves | None], held: Ownership) -> list[tuple[int, int, int]]:
    """(sender, receiver, row) of an all-to-all. `held`: what the buffers hold that it sends from."""
    found = []
    for sender, moves in enumerate(stage):
        if moves is None:
            continue
        receivers = np.repeat(np.arange(len(moves.send_counts)), moves.send_counts)
        rows = held.held_by(sender)[moves.send]
        found += [(sender, int(receiver), int(row)) for receiver, row in zip(receivers, rows, strict=True)]
    return found


def location(ownership: Ownership, row: int) -> int:
    return next(i for i, rows in enumerate(ownership.rows) if row in rows)


@many
@given(boundaries())
def test_backward_is_the_forward_of_the_sides_exchanged(boundary: Boundary) -> None:
    swapped = Boundary.of(boundary.destination, boundary.source, len(boundary.plans))
    for plan, other in zip(boundary.plans, swapped.plans, strict=True):
        for a, b in ((plan.backward, other.forward), (plan.forward, other.backward)):
            assert a.rows == b.rows and a.received_rows == b.received_rows and a.sent_rows == b.sent_rows


def test_a_shard_to_replicas_takes_two_collectives_and_even_portions() -> None:
    source = Ownership.of({(rank,): range(rank * 4, rank * 4 + 4) for rank in range(4)})
    whole = Ownership.of({(4, 5, 6, 7): range(16)})
    boundary = Boundary.of(source, whole, 8)
    forward = [plan.forward for plan in boundary.plans]
    assert {plan.collectives for plan in forward} == {2}
    assert [plan.received_rows for plan in forward] == [0] * 4 + [16] * 4
    assert [sum(plan.scatter.receive_counts) for plan in forward] == [0] * 4 + [4] * 4  # pyright: ignore
    backward = [plan.backward for plan in boundary.plans]
    assert {plan.collectives for plan in backward} == {1}
    assert [plan.sent_rows for plan in backward] == [0] * 4 + [4] * 4


def test_rows_that_stay_cost_nothing() -> None:
    same = Ownership.of({(0, 1): [2, 0, 1], (2,): [3]})
    for plan in Boundary.of(same, same, 4).plans:
        assert plan.forward.collectives == plan.backward.collectives == 0
        assert plan.forward.received_rows == plan.backward.sent_rows == 0


def test_a_row_held_twice_is_refused() -> None:
    once = Ownership.of({(0,): [0, 1]})
    for twice in (Ownership.of({(0,): [0, 1], (1,): [1]}), Ownership.of({(0, 1): [0, 1, 0]})):
        with pytest.raises(ValueError, match=r"rows \[\d\] of group .* are held twice"):
            plan_boundary(twice, once, 0, 2)
        with pytest.raises(ValueError, match="held twice"):
            plan_boundary(once, twice, 0, 2)


def test_a_row_that_nobody_holds_is_refused() -> None:
    source, destination = Ownership.of({(0,): [0, 1]}), Ownership.of({(1,): [0, 1, 2]})
    with pytest.raises(ValueError, match=r"rows \[2\] are needed by ranks \(1,\), but held by nobody"):
        plan_boundary(source, destination, 0, 2)


def test_ranks_outside_an_ownership_hold_nothing() -> None:
    ownership = Ownership.of({(3, 1): [5, 2]})
    assert ownership.group_index(3) == 0 and ownership.group_index(0) is None
    assert ownership.held_by(1).tolist() == [5, 2] and ownership.held_by(0).shape == (0,)
    assert ownership.total == 6 and Ownership.of({}).total == 0
