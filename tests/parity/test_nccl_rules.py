"""The program on a process group with NCCL's rules: every placement under every schedule ends, and computes what plain
`transformers` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.parity.cases import Ask, Case, gradients_equal, three_steps_equal
from tests.parity.test_parity import CASES
from tests.support.pool import Pool

SHARING = {"waves": (), "waves of 1": ("--schedule.waves", "1"), "recompute": ("--schedule.kind", "recompute")}
APART = {f"ahead {ahead}": ("--schedule.run_ahead", str(ahead)) for ahead in (0, 1, 3)}
PLACES = {
    "colocated": (SHARING, ("sp:2", "pp:2", 2), ("pp:2", "pp:2", 2), ("sp:2", "pp:2", 2, "dp:2")),
    "mixed": (SHARING, ("sp:2@0-1", "pp:2@1-2", 3), ("pp:2@0-1", "pp:2@1-2", 3), ("sp:2@1-2", "pp:2@1-2", 3, "dp:1@0")),
    "disjoint": (APART, ("dp:1@0", "pp:2@1-2", 3), ("pp:2@0-1", "pp:2@2-3", 4), ("dp:1@0", "pp:2@2-3", 4, "dp:1@1")),
}
"""Schedules that the placement can have; layouts of an encoder without stages, of one with them, and of two encoders.
Micro-batches are single samples, and every fourth is without images.
"""


def rows() -> Iterator[tuple[str, Case]]:
    """Every placement, schedule and number of virtual stages, by name."""
    for place, (schedules, *layouts) in PLACES.items():
        for name, flags in schedules.items():
            for vision, text, ranks, *detail in layouts:
                for virtual in (1, 2):
                    model = "two-encoders-deep" if detail else "deep"
                    set_flags = (*flags, "--schedule.virtual_stages", str(virtual))
                    yield (
                        f"{place}, {name}, {'+'.join([vision, *detail])}|{text}, {virtual} virtual",
                        Case(vision, text, ranks, model, flags=set_flags, given_batch=8, detail=(*detail, None)[0]),
                    )


ROWS = dict(rows())
OTHERS = CASES[2::10]
"""Other axes, micro-batches of several samples, tied embeddings."""


@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS.keys())
def test_placements_and_schedules(case: Case, expected: Ask, rules_pools: Callable[[int], Pool]) -> None:
    gradients_equal(case, expected(case), rules_pools(case.ranks))


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_axes(case: Case, expected: Ask, rules_pools: Callable[[int], Pool]) -> None:
    gradients_equal(case, expected(case), rules_pools(case.ranks))


@pytest.mark.parametrize("case", OTHERS[::2], ids=str)
def test_three_steps(case: Case, expected: Ask, rules_pools: Callable[[int], Pool]) -> None:
    three_steps_equal(case, "adamw", expected(case), rules_pools(case.ranks))
