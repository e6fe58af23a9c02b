"""The boundary on real process groups: exact both ways, with the exchanges and bytes that the plan states."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

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
def test_bf16_on_the_way_rounds_all_rows_equally(placement: Placement, pools: Pools) -> None:
    assert sum(pools(4).run(jobs.round_on_the_way, ALL_4, placement, range(1, 21)))


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_two_crossings_at_once(placement: Placement, last_first: bool, pools: Pools) -> None:
    pools(4).run(jobs.two_at_once, ALL_4, placement, range(1, 16), last_first)


@pytest.mark.parametrize("transport", [None, torch.bfloat16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_crossings_no_larger_than_before_allocate_their_results_only(
    placement: Placement, transport: torch.dtype | None, pools: Pools
) -> None:
    met = set().union(*pools(4).run(jobs.allocate, placement, range(12), transport))
    assert met == {"reduce", "scatter", "gather"} | ({"kept"} if placement != "disjoint" else set())


def test_buffers_grow_in_large_steps(pools: Pools) -> None:
    # Two buffers, for what leaves and what arrives, of up to 200 rows of 12 bytes, which is less than 2 ** 12.
    most = max(pools(4).run(jobs.grow, range(1, 201)))
    assert 0 < most <= 2 * 12


FIX = r"Give the boundary this batch's plan and the rows that it names\."
KINDS = {
    "width": r"rows of shape \(\d+, 4\), expected \[rows, 3\], .*",
    "dims": r"rows of shape \(1, \d+, 3\), expected \[rows, 3\], .*",
    "dtype": r"rows of torch.float32, expected torch.float64, as .*",
    "count": r"\d+ rows, expected the \d+ that this rank holds in the plan\. Plan with the ids .*",
    "part": rf"the part of rank \d of the plan, expected its own\. {FIX}",
    "plan": rf"a plan for ranks \(0, 1\), expected one for the communicator's ranks \(0, 1, 2, 3\)\. {FIX}",
}


def assert_says(message: str, direction: str, rank: int, what: str) -> None:
    assert re.fullmatch(f"boundary {direction} on rank {rank}: found {what}", message), message


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_on_one_rank_is_raised_on_all(kind: str, placement: Placement, pools: Pools) -> None:
    answers = pools(4).run(jobs.go_wrong, kind, placement, (2,), True)
    assert len({(forward, backward) for forward, backward, _ in answers}) == 1
    assert [sent for *_, sent in answers] == [0] * 4
    for direction, message in zip(("forward", "backward"), answers[0][:2], strict=True):
        assert_says(message, direction, 2, KINDS[kind])


def test_the_first_rank_s_error_is_reported(pools: Pools) -> None:
    for forward, *_ in pools(4).run(jobs.go_wrong, "width", "mixed", (1, 3), True):
        assert_says(forward, "forward", 1, KINDS["width"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_unchecked_errors_are_raised_before_anything_is_sent(kind: str, placement: Placement, pools: Pools) -> None:
    for rank, (forward, backward, sent) in enumerate(pools(4).run(jobs.go_wrong, kind, placement, ALL_4, False)):
        assert_says(forward, "forward", rank, KINDS[kind])
        assert_says(backward, "backward", rank, KINDS[kind])
        assert sent == 0


@pytest.mark.parametrize("of_ranks, other", [((0, 0, 1, 0), 2), ((1, 0, 0, 1), 1), ((0, 2, 1, 0), 1)])
def test_plans_of_different_batches_are_refused_on_all_ranks(
    of_ranks: tuple[int, ...], other: int, pools: Pools
) -> None:
    (answer,) = set(pools(4).run(jobs.mix_batches, of_ranks))
    for direction, message in zip(("forward", "backward"), answer[:2], strict=True):
        said = rf"boundary {direction}: plan: found \w{{8}} on rank 0 and \w{{8}} on rank {other}, expected the same .*"
        assert re.fullmatch(said, message), message
    assert answer[2] == 0, "nothing is sent"


def test_a_plan_that_is_equally_wrong_on_all_ranks_is_not_seen(pools: Pools) -> None:
    assert {said[:2] for said in pools(4).run(jobs.mix_batches, (1, 1, 1, 1))} == {("", "")}


@pytest.mark.parametrize("check", [True, False])
def test_a_plan_without_a_way_back_is_crossed_forward_only(check: bool, pools: Pools) -> None:
    for rank, message in enumerate(pools(4).run(jobs.forward_only, check)):
        said = r"a plan of the forward direction only, expected one of both, .*"
        assert_says(message, "backward", 0 if check else rank, said)


def test_tokens_are_embedded_while_rows_are_on_their_way(pools: Pools) -> None:
    """In the trace of `torch.profiler`: the exchange is launched before the embedding and ends after it.

    It is taken to begin with its launch: gloo's own event begins only when one of its threads gets a core.
    """
    trace = pools(2).run(jobs.trace_embedding, 0.5)[0]
    launched, arrived = trace["c10d::alltoall_base_"][0], trace["gloo:all_to_all"][1]
    begin, end = trace["text embedding"]
    assert launched < begin < end < arrived
    assert arrived - launched > 0.1e6, "rank 1 was not late"
