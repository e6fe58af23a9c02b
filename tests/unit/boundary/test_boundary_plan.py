"""Plans, simulated for all ranks in NumPy: rows arrive where they belong, once, at the least cost, and nowhere else."""

from __future__ import annotations

import itertools
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import SHOWN, Move, plan_boundary
from tests.unit.boundary.cases import PLACEMENTS, random_boundary
from tests.unit.boundary.simulation import ROW_BYTES, Boundary


@st.composite
def boundaries(draw: st.DrawFn, worlds: tuple[int, int] = (2, 9), most_rows: int = 24) -> Boundary:
    """Any two ownerships of ragged groups, over ranks with gaps."""
    world, rows = draw(st.integers(*worlds)), draw(st.integers(0, most_rows))
    placement = draw(st.sampled_from(PLACEMENTS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks = np.sort(rng.permutation(2 * world)[:world]).tolist()
    return Boundary.of(*random_boundary(rng, ranks, rows, placement))


def cases(number: int) -> settings:
    return settings(max_examples=number, deadline=None)


large = boundaries(worlds=(24, 64), most_rows=600)


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
        return [self._rng.integers(1, 1000, side.rows_of(rank)) for rank in self.boundary.plan.ranks]

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
    for name, (held, needed, course) in boundary.courses.items():
        direction = boundary.plan.directions[name]
        for rank, plan in zip(course.ranks, course.plans, strict=True):
            least = np.setdiff1d(np.intersect1d(needed.held_by(rank), held.ids), held.held_by(rank))
            traffic = boundary.plan.traffic(name, rank)
            assert traffic[:4] == (held.rows_of(rank), needed.rows_of(rank), plan.received_rows, plan.sent_rows)
            assert traffic.minimum in (None, plan.received_rows)
            assert traffic.minimum in (None, len(least))
            assert traffic.minimum is not None or not plain(name, held, needed)
        received, sent = (sum(getattr(p, f"{what}_rows") for p in course.plans) for what in ("received", "sent"))
        assert received == sent == direction.minimum_total


def plain(direction: str, held: Ownership, needed: Ownership) -> bool:
    """Whether rows only go from holders to all that need them, so that each rank's minimum is known."""
    whole = held.gradient == "invariant" or all(len(group) == 1 for group in held.groups)
    return direction == "forward" or (whole and needed.gradient == "invariant")


def check_even_shares(boundary: Boundary) -> None:
    """What the members of a group send to one receiver, and what those of a group get from another, differs by one row
    at most."""
    for held, needed, course in boundary.courses.values():
        if (stage := course.stages.get("scatter")) is None:
            continue
        ranks = np.array(course.ranks)
        loads = Counter(zip(ranks[stage.sender].tolist(), ranks[stage.receiver].tolist(), strict=True))
        for giving, taking in itertools.product(held.groups, needed.groups):
            table = np.array([[loads[sender, receiver] for sender in giving] for receiver in taking])
            assert np.all(np.ptp(table, axis=1) <= 1) and np.ptp(table.sum(1)) <= 1
            assert not table.any() or not set(giving) & set(taking), "the group holds these rows"


def check_text(boundary: Boundary) -> None:
    moves = [move for name, (*_, course) in boundary.courses.items() for move in course.moves(name)]
    listed = list(boundary.plan.moves())
    assert listed == moves
    lines = str(boundary.plan).splitlines()[4:]  # after what the plan is, both directions, and the table's head
    assert [Move.parse(line) for line in lines[: min(SHOWN, len(moves))]] == moves[:SHOWN]
    assert all(Move.parse(str(move)) == move for move in moves)


@cases(700)
@given(boundaries())
def test_every_row_arrives_where_it_is_needed_and_nowhere_else(boundary: Boundary) -> None:
    check_forward(boundary)


@cases(700)
@given(boundaries())
def test_gradients_arrive_at_those_that_hold_the_rows(boundary: Boundary) -> None:
    check_backward(boundary)


@cases(300)
@given(boundaries())
def test_backward_is_the_adjoint_of_forward(boundary: Boundary) -> None:
    check_adjoint(boundary)


@cases(300)
@given(boundaries())
def test_received_rows_are_the_minimum(boundary: Boundary) -> None:
    check_received(boundary)


@cases(150)
@given(boundaries())
def test_replicas_share_sending_and_receiving_evenly(boundary: Boundary) -> None:
    check_even_shares(boundary)


@cases(150)
@given(boundaries())
def test_the_text_lists_what_all_ranks_do(boundary: Boundary) -> None:
    check_text(boundary)


@cases(40)
@given(large)
def test_all_of_this_on_up_to_64_ranks(boundary: Boundary) -> None:
    for check in (check_forward, check_backward, check_adjoint, check_received, check_even_shares, check_text):
        check(boundary)


# ------------------------------------------------------------------------------------------ known cases

KNOWN = [
    # source, destination, stages forward and backward
    ("0: 0-3; 1: 4-7", "0: 0-3; 1: 4-7", "", ""),
    ("0: 0-3", "1: 0-3", "scatter", "scatter"),
    ("0: 0-3; 1: 4-7", "0: 0-2; 1: 3-7", "scatter", "scatter"),
    ("0: 0-3; 1: 4-7", "2,3: 0-7", "scatter gather", "scatter"),
    ("0: 0-3; 1: 4-7", "2,3: 0-7 partial", "scatter gather", "reduce scatter"),
    ("0: 0-3; 1: 4-7", "0,1: 0-7", "gather", ""),
    ("0: 0-3; 1: 4-7", "0,1: 0-7 partial", "gather", "reduce"),
    ("0,1: 0-7", "2: 0-3; 3: 4-7", "scatter", "scatter gather"),
    ("0,1: 0-7 partial", "2: 0-3; 3: 4-7", "scatter", "scatter"),
    ("0,1: 0-7", "0: 0-3; 1: 4-7", "", "gather"),
    ("0,1: 0-7 partial", "0: 0-3; 1: 4-7", "", ""),
    ("0,1: 0-7", "0,1: 0-7", "", ""),
    ("0,1: 0-7", "0,1: 0-7 partial", "", "reduce gather"),
    ("0,1: 0-7 partial", "0,1: 0-7 partial", "", "reduce"),
    ("0,1: 0-7", "1,2: 0-7", "gather", "gather"),
    ("0,1: 0-7", "2,3: 0-7", "scatter gather", "scatter gather"),
    ("0,1: 0-7 partial", "2,3: 0-7 partial", "scatter gather", "reduce scatter"),
    ("0,1: 0-7", "2,3: 0-7 partial", "scatter gather", "reduce scatter gather"),
    ("0: 0-3", "0: 2,3", "", ""),
    ("0: 0-3; 1:", "1:; 2:", "", ""),
    ("0:; 1:", "2,3:", "", ""),
    ("0: 0-3", "", "", ""),
]  # fmt: skip


@pytest.mark.parametrize("source, destination, forward, backward", KNOWN)
def test_stages(source: str, destination: str, forward: str, backward: str) -> None:
    boundary = Boundary.parse(source, destination)
    for name, expected in (("forward", forward), ("backward", backward)):
        assert boundary.plan.directions[name].stages == tuple(expected.split())
        assert {part.collectives for part in boundary.courses[name][2].plans} <= {len(expected.split())}
    for check in (check_forward, check_backward, check_adjoint, check_received, check_even_shares, check_text):
        check(boundary)


def test_shards_reach_replicas_in_even_portions() -> None:
    forward = Boundary.parse("0: 0-3; 1: 4-7; 2: 8-11; 3: 12-15", "4,5,6,7: 0-15").forward
    scatter, gather = (np.stack([plan.exchanges[i].receive_counts for plan in forward.plans]) for i in (0, 1))
    assert scatter.sum(1).tolist() == [0] * 4 + [4] * 4
    assert gather.sum(1).tolist() == [0] * 4 + [12] * 4


def fewest_messages(held: tuple[int, ...], needed: tuple[int, ...], *, summed: bool, once: bool) -> int:
    """By search: until all (or one) of `needed` know the row of `held`, or all of its parts. Three ranks."""
    start = tuple((1 << rank if summed else 1) if rank in held else 0 for rank in range(3))
    everything = max(start) if not summed else sum(1 << rank for rank in held)
    enough = any if once else all
    queue, seen = deque([(start, 0)]), {start}
    while True:
        state, messages = queue.popleft()
        if enough(state[rank] == everything for rank in needed):
            return messages
        for sender, receiver in itertools.permutations(range(3), 2):
            after = tuple(known | state[sender] * (i == receiver) for i, known in enumerate(state))
            if after not in seen:
                seen.add(after)
                queue.append((after, messages + 1))


SUBSETS = [group for size in (1, 2, 3) for group in itertools.combinations(range(3), size)]


@pytest.mark.parametrize("summed, once", [(False, False), (False, True), (True, False), (True, True)])
def test_no_fewer_messages_would_do(summed: bool, once: bool) -> None:
    for held, needed in itertools.product(SUBSETS, repeat=2):
        source = Ownership.of({needed: [0]}, "partial" if once else "invariant")
        destination = Ownership.of({held: [0]}, "partial" if summed else "invariant")
        boundary = Boundary.of(source, destination)
        least = fewest_messages(held, needed, summed=summed, once=once)
        assert boundary.plan.directions["backward"].minimum_total == least
        check_received(boundary)


# ------------------------------------------------------------------------------------------ text, errors


def test_a_long_text_says_how_much_it_leaves_out() -> None:
    n = 24
    source = Ownership.of({(rank,): [rank * n + i for i in range(n)] for rank in range(n)})
    destination = Ownership.of({(n + rank,): [i * n + rank for i in range(n)] for rank in range(n)})
    lines = str(plan_boundary(source, destination, ROW_BYTES)).splitlines()
    assert lines[4 + SHOWN] == f"… and {2 * n * n - SHOWN:,} more"
    assert Move.parse(lines[3 + SHOWN]).sender == (SHOWN - 1) // n
    assert len([line for line in lines if line.startswith("forward") and "->" not in line]) == 1 + 2 * n


def test_the_text_states_bytes() -> None:
    text = str(Boundary.parse("0: 0-2999", "1: 0-2999 partial").plan)
    assert text.startswith("boundary of 3,000 rows of 24 bytes over 2 ranks, batched point-to-point\n")
    assert "forward   scatter       0 -> 1           3,000          72,000\n" in text
    assert Move.parse("forward   scatter       0 -> 1           3,000") == ("forward", "scatter", 0, 1, 3000)


@pytest.mark.parametrize("text", ["", "forward", "sideways scatter 0 -> 1 3", "forward scatter 0 -> 1"])
def test_what_is_no_move_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a line such as"):
        Move.parse(text)


def test_rows_that_nobody_holds_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"found 2 rows .* held by nobody, such as row 7, needed by ranks \(1, 2\); .* source's 3;"
    ):
        plan_boundary(Ownership.parse("0: 0-2"), Ownership.parse("0: 1; 1,2: 0,7,8"), ROW_BYTES)


def test_a_rank_that_takes_no_part_is_not_among_the_ranks() -> None:
    plan = plan_boundary(Ownership.parse("5: 0-2"), Ownership.parse("3: 2; 9: 0,1"), ROW_BYTES)
    assert plan.ranks == (3, 5, 9) and plan.point_to_point
    assert plan.rank(3).forward.exchanges[0].receive_counts.tolist() == [0, 1, 0]


def test_nobody_and_nothing() -> None:
    plan = plan_boundary(Ownership.parse(""), Ownership.parse(""), ROW_BYTES)
    assert plan.ranks == plan.moves() == () and str(plan).startswith("boundary of 0 rows of 24 bytes over 0 ranks")
