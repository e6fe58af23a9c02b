"""The boundary on real process groups: exact both ways, with the exchanges and bytes that the plan states."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.pool import Pool
from tests.unit.boundary import jobs
from tests.unit.boundary.cases import PLACEMENTS, Placement

Pools = Callable[[int], Pool]

ALL_4, ALL_8 = tuple(range(4)), tuple(range(8))
RANKS = [(4, ALL_4), (8, ALL_8), (8, (1, 3, 6)), (8, (0, 2, 5, 7)), (8, (0, 1, 4, 5, 7))]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("world, ranks", RANKS)
def test_random_ownerships(world: int, ranks: tuple[int, ...], placement: Placement, pools: Pools) -> None:
    met = pools(world).run(jobs.cross, ranks, placement, range(16))
    total = {what: sum(rank[what] for rank in met) for what in met[0]}
    assert total["no rows"] == 2 * len(ranks)
    assert total["rows sent"] and total["summed"]
    assert (total["rows kept"] > 0) == (placement != "disjoint")
    # Mixed sides may happen to have no rank in common.
    assert bool(total["all-to-alls"]) == (placement != "disjoint") and (placement != "disjoint" or total["batches"])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bf16_on_the_way_rounds_all_rows_alike(placement: Placement, pools: Pools) -> None:
    assert sum(pools(4).run(jobs.round_on_the_way, ALL_4, placement, range(1, 21)))


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_two_crossings_at_once(placement: Placement, last_first: bool, pools: Pools) -> None:
    pools(4).run(jobs.two_at_once, ALL_4, placement, range(1, 16), last_first)


def test_a_crossing_of_usual_size_allocates_its_result_only(pools: Pools) -> None:
    # Places alternate, so that both what is sent and what arrives goes through a buffer.
    source, destination = "0: 0,1,2,3; 1: 4,5,6,7; 2,3: 8", "0: 4,1,6,3; 1: 0,5,2,7; 2,3: 8"
    for first, *others in pools(4).run(jobs.count_allocations, source, destination, 4)[:2]:
        assert first == 3 and others == [1, 1, 1]


KINDS = {
    "width": r"rows of shape \(\d+, 4\), expected \[rows, 3\]",
    "dims": r"rows of shape \(1, \d+, 3\), expected \[rows, 3\]",
    "dtype": r"rows of torch.float32, expected torch.float64, as .*",
    "count": r"\d+ rows, expected the \d+ that the plan says this rank holds; .*",
}
OTHER_PLAN = r"a plan for ranks \(0, 1\), expected one for the communicator's ranks \(0, 1, 2, 3\)"


def assert_says(message: str, direction: str, rank: int, what: str) -> None:
    assert re.fullmatch(f"boundary {direction} on rank {rank}: found {what}", message), message


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_on_one_rank_is_raised_on_all(kind: str, placement: Placement, pools: Pools) -> None:
    answers = pools(4).run(jobs.go_wrong, kind, placement, (2,), True)
    assert len({(forward, backward) for forward, backward, _ in answers}) == 1
    assert_says(answers[0][0], "forward", 2, KINDS[kind])
    assert_says(answers[0][1], "backward", 2, KINDS[kind])


def test_all_that_is_wrong_is_told(pools: Pools) -> None:
    for forward, *_ in pools(4).run(jobs.go_wrong, "width", "mixed", (1, 3), True):
        for rank, line in zip((1, 3), forward.splitlines(), strict=True):
            assert_says(line, "forward", rank, KINDS["width"])


@pytest.mark.parametrize("kind, what", [*KINDS.items(), ("plan", OTHER_PLAN)])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_unchecked_errors_are_raised_before_anything_is_sent(
    kind: str, what: str, placement: Placement, pools: Pools
) -> None:
    for rank, (forward, backward, sent) in enumerate(pools(4).run(jobs.go_wrong, kind, placement, ALL_4, False)):
        assert_says(forward, "forward", rank, what)
        assert_says(backward, "backward", rank, what)
        assert sent == 0


@pytest.mark.parametrize("placement", ["equal", "disjoint"])
def test_nobody_waits_for_a_rank_whose_plan_is_for_others(placement: Placement, pools: Pools) -> None:
    said = pools(4).run(jobs.take_no_part, placement, 2)
    assert all(seconds < 3 for _, seconds in said), "waited until the time-out"
    expected = (
        "boundary: rank 2 takes no part, because its plan is for other ranks than the communicator's (0, 1, 2, 3)"
    )
    for rank, (message, _) in enumerate(said):
        assert re.match(
            f"boundary forward on rank 2: found {OTHER_PLAN}" if rank == 2 else re.escape(expected), message
        )


def test_tokens_are_embedded_while_rows_are_on_their_way(pools: Pools) -> None:
    """In the trace of `torch.profiler`: the exchange is launched before the embedding and ends after it.

    It is taken to begin with its launch: gloo's own event begins only when one of its threads gets a core.
    """
    trace = pools(2).run(jobs.trace_embedding, 0.5)[0]
    launched, arrived = trace["c10d::alltoall_base_"][0], trace["gloo:all_to_all"][1]
    begin, end = trace["text embedding"]
    assert launched < begin < end < arrived
    assert arrived - launched > 0.1e6, "rank 1 was not late"
