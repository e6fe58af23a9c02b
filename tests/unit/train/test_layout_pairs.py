"""Pairs of layouts on real process groups: exact both ways, with the collectives and bytes that the plan states."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.support.matrix import thinned
from tests.support.pool import Pool
from tests.unit.train import jobs_pairs as jobs
from tests.unit.train.jobs_packs import BATCHES

SHARDED, WHOLE = (True, True), (False, False)
FOUR = ["dp:4", "tp:4", "sp:4", "cp:4", "tp:2,dp:2", "sp:2,tp:2", "cp:2,tp:2", "sp:2,cp:2"]
EIGHT = [
    ("sp:8", "tp:8"),
    ("tp:8", "sp:8"),
    ("cp:8", "sp:8"),
    ("sp:8", "cp:4,tp:2"),
    ("sp:2,cp:2,tp:2", "dp:2,cp:2,sp:2"),
    ("sp:4,dp:2", "tp:2,dp:4"),
    ("tp:2,sp:2,dp:2", "tp:4,dp:2"),
    ("cp:2,dp:4", "sp:2,cp:4"),
    ("tp:4,dp:2", "tp:2,sp:2,cp:2"),
    ("dp:8", "tp:8"),
]
# Degrees that do not divide each other.
SIX = [("sp:2,dp:3", "tp:3,dp:2"), ("sp:6", "tp:2,dp:3"), ("tp:3,dp:2", "sp:2,cp:3"), ("cp:3,dp:2", "cp:2,dp:3")]
CASES = [
    *((4, vision, text, SHARDED) for vision, text in product(FOUR, FOUR)),
    *((4, vision, text, WHOLE) for vision, text in product(("tp:4", "sp:2,tp:2", "dp:4"), ("tp:4", "cp:2,tp:2"))),
    (4, "tp:4", "tp:4", (True, False)),
    (4, "tp:2,dp:2", "tp:4", (False, True)),
    *((6, vision, text, SHARDED) for vision, text in SIX),
    *((6, vision, text, WHOLE) for vision, text in SIX),
    *((8, vision, text, SHARDED) for vision, text in EIGHT),
    *((8, vision, text, WHOLE) for vision, text in EIGHT[:5]),
]


@pytest.mark.parametrize("ranks, vision, text, sharded", thinned(CASES, 7))
def test_crossing(ranks: int, vision: str, text: str, sharded: tuple[bool, bool], pools: Callable[[int], Pool]) -> None:
    by_rank = pools(ranks).run(jobs.cross, vision, text, dict(zip(("vision", "text"), sharded, strict=True)), 7)
    for batch, results in zip(BATCHES, zip(*by_rank, strict=True), strict=True):
        assert len({result["collectives"] for result in results}) == 1
        if batch in ("no rows", "no tokens"):
            assert results[0]["collectives"] == (0, 0)
            continue
        # <A x, c> = <x, A^T c>, exactly, and A is a permutation of rows once replicas count once.
        forward = sum(result["forward product"] for result in results)
        backward = sum(result["backward product"] for result in results)
        assert forward == backward == results[0]["total"]
        # One all-to-all each way, and one more where ranks of a tp group need the same rows.
        replicated = ["tp" in text and not sharded[1], "tp" in vision and not sharded[0]]
        assert all(n <= 1 + more for n, more in zip(results[0]["collectives"], replicated, strict=True))


def test_there_are_sixty_pairs_of_layouts() -> None:
    assert len({(ranks, vision, text) for ranks, vision, text, _ in CASES if ranks in (4, 8)}) >= 60
