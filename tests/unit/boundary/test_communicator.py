"""The boundary on real process groups: exact both ways, with the collectives and bytes that the plan states."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.pool import Pool
from tests.unit.boundary import jobs
from tests.unit.training.jobs_packs import BATCHES

SHARDED, WHOLE, MIXED = (True, True), (False, False), (True, False)
CASES = [
    (4, "sp:4", "tp:4", SHARDED),
    (4, "sp:4", "tp:4", WHOLE),
    (4, "tp:4", "tp:4", SHARDED),
    (4, "tp:4", "tp:4", WHOLE),
    (4, "tp:4", "tp:4", MIXED),
    (4, "dp:4", "tp:2,dp:2", SHARDED),
    (4, "dp:4", "tp:2,dp:2", WHOLE),
    (4, "tp:2,dp:2", "tp:4", SHARDED),
    (4, "tp:2,dp:2", "tp:4", WHOLE),
    (4, "sp:2,tp:2", "tp:2,dp:2", SHARDED),
    (4, "sp:2,tp:2", "dp:4", WHOLE),
    (4, "sp:2,dp:2", "tp:4", MIXED),
    (4, "dp:4", "dp:4", WHOLE),
    (4, "sp:4", "tp:2,dp:2", WHOLE),
    (8, "sp:8", "tp:8", SHARDED),
    (8, "sp:8", "tp:8", WHOLE),
    (8, "sp:4,dp:2", "tp:2,dp:4", WHOLE),
    (8, "tp:2,sp:2,dp:2", "tp:4,dp:2", MIXED),
]


@pytest.mark.parametrize("ranks, vision, text, sharded", CASES)
def test_crossing(ranks: int, vision: str, text: str, sharded: tuple[bool, bool], pools: Callable[[int], Pool]) -> None:
    by_rank = pools(ranks).run(jobs.cross, vision, text, dict(zip(("vision", "text"), sharded, strict=True)), 7)
    for batch, results in zip(BATCHES, zip(*by_rank, strict=True), strict=True):
        assert len({result["collectives"] for result in results}) == 1
        if batch == "no rows":
            assert results[0]["collectives"] == (0, 0)
            continue
        whole = (not sharded[1], not sharded[0])  # what the rows are gathered for, forward and backward
        # <A x, c> = <x, A^T c>, exactly, and A is a permutation of rows once replicas count once.
        forward = sum(result["forward product"] for result in results)
        backward = sum(result["backward product"] for result in results)
        assert forward == backward == results[0]["total"]
        assert all(n <= 1 + gathers for n, gathers in zip(results[0]["collectives"], whole, strict=True))


def test_bf16_rows_cross_unchanged(pools: Callable[[int], Pool]) -> None:
    assert all(pools(4).run(jobs.bf16))


def test_rows_of_another_width_are_refused_before_anything_is_sent(pools: Callable[[int], Pool]) -> None:
    assert set(pools(4).run(jobs.wrong_width)) == {"boundary: found rows of shape (3, 6), expected [rows, 5]"}
