"""Plans, simulated for all ranks in NumPy: rows arrive where they belong, once, at the least cost, and nowhere else."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import SHOWN, plan_boundary
from megatron_hetero.boundary.routes import is_identity
from tests.unit.boundary.cases import PLACEMENTS, random_boundary
from tests.unit.boundary.checks import check_everything, check_received
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
    return settings(max_examples=number)


# ------------------------------------------------------------------------------------------- properties


@cases(200)
@given(boundaries())
def test_random_boundaries(boundary: Boundary) -> None:
    check_everything(boundary)


@cases(25)
@given(boundaries(worlds=(24, 64), most_rows=600))
def test_random_boundaries_of_up_to_64_ranks(boundary: Boundary) -> None:
    check_everything(boundary)


# ------------------------------------------------------------------------------------------ known cases

KNOWN = [
    # source, destination, phases forward and backward
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


@pytest.mark.parametrize(
    "source, destination, kept",
    [
        ("0: 0-3; 1: 4-7", "0: 0-3; 1: 4-7", True),
        ("0:; 1:", "0:; 1:", True),
        ("0: 0-3; 1: 4-7", "0: 3,0-2; 1: 4-7", False),
        ("0: 0-3", "0: 2,3", False),
        ("0: 0-3; 1: 4-7", "0: 0-3; 1: 4-6", True),
        ("0: 0-3; 1: 4-7,9", "0: 0-3; 1: 4-7; 2: 9", False),
    ],
)
def test_rows_that_all_stay_in_place(source: str, destination: str, kept: bool) -> None:
    """On rank 0, which may have to take part in what others exchange."""
    plan = plan_boundary(Ownership.parse(source), Ownership.parse(destination), ROW_BYTES)
    assert is_identity(plan.rank(0).forward) is kept


@pytest.mark.parametrize("source, destination, forward, backward", KNOWN)
def test_phases(source: str, destination: str, forward: str, backward: str) -> None:
    boundary = Boundary.parse(source, destination)
    for name, expected in (("forward", forward), ("backward", backward)):
        assert boundary.plan.directions[name].phases == tuple(expected.split())
        assert {len(part.exchanges) for part in boundary.directions[name][2].plans} <= {len(expected.split())}
    check_everything(boundary)


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
    assert f" {(SHOWN - 1) // n} -> " in lines[3 + SHOWN]
    assert lines[5 + SHOWN :] == [
        f"{name}: at most {24 * n} bytes received and {24 * n} bytes sent by a rank; {24 * n * n:,} bytes in all"
        for name in ("forward", "backward")
    ]


def test_the_text_states_bytes() -> None:
    text = str(Boundary.parse("0: 0-2999", "1: 0-2999 partial").plan)
    assert text.startswith("boundary of 3,000 rows of 24 bytes over 2 ranks, batched point-to-point\n")
    assert "forward   scatter       0 -> 1           3,000          72,000\n" in text


def test_rows_that_nobody_holds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"found 2 rows .*row 7, needed by ranks 1-2, .* the 3 "):
        plan_boundary(Ownership.parse("0: 0-2"), Ownership.parse("0: 1; 1,2: 0,7,8"), ROW_BYTES)


def test_a_rank_that_takes_no_part_is_not_among_the_ranks() -> None:
    plan = plan_boundary(Ownership.parse("5: 0-2"), Ownership.parse("3: 2; 9: 0,1"), ROW_BYTES)
    assert plan.ranks == (3, 5, 9) and plan.point_to_point
    assert plan.rank(3).forward.exchanges[0].receive_counts == [0, 1, 0]


def test_without_backward_only_the_way_forward_is_planned() -> None:
    plan = Boundary.parse("0: 0-3; 1: 4-7", "0,1: 0-7 partial").plan
    both, forward = plan.rank(1), plan.rank(1, backward=False)
    assert both.backward is not None and forward.backward is None
    assert (forward.rank, forward.ranks, forward.digest) == (both.rank, both.ranks, both.digest)
    [one], [other] = forward.forward.exchanges, both.forward.exchanges
    assert one.receive.tolist() == other.receive.tolist() and one.send.tolist() == other.send.tolist()


def test_plans_of_the_same_ownerships_have_one_digest_and_others_another() -> None:
    sides = ("0: 0-3; 1: 4-7", "0,1: 0-7")
    others = (
        "0: 0-4; 1: 5-7",
        "1: 0-3; 0: 4-7",
        "0: 3,0-2; 1: 4-7",
        "0: 0-3; 1: 4-7 partial",
        "0: 0-8; 1:",
        "0,1: 0-7",
    )
    assert len({Boundary.parse(*sides).plan.rank(rank).digest for rank in (0, 1)}) == 1
    digests = [Boundary.parse(source, sides[1]).plan.digest for source in (sides[0], *others)]
    digests += [Boundary.parse(sides[0], text).plan.digest for text in ("0: 0-7", "0,1: 0-7 partial", "1,0: 0-7", "")]
    assert len(set(digests)) == len(digests)


def test_nobody_and_nothing() -> None:
    plan = plan_boundary(Ownership.parse(""), Ownership.parse(""), ROW_BYTES)
    assert plan.ranks == plan.moves() == () and str(plan).startswith("boundary of 0 rows of 24 bytes over 0 ranks")
