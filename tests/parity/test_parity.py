"""Loss, every gradient and the weights after three steps equal plain `transformers` in one process, whatever the
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron_hetero.schedule.settings import ScheduleSettings
from tests.parity import runs
from tests.parity.cases import (
    AHEAD,
    BUDGET,
    CASES,
    VIRTUAL,
    WAVES,
    Ask,
    Case,
    flags_of,
    gradients_equal,
    norm_of,
    schedules_agree,
    three_steps_equal,
)
from tests.support.matrix import thinned
from tests.support.pool import Pools


@pytest.mark.parametrize("case", thinned(CASES, 7), ids=str)
def test_gradients(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


def test_rounded_transport(expected: Ask, pools: Pools) -> None:
    """Rows sent as bfloat16 give nearly the same gradients, and not the very same ones."""
    case = Case("dp:2", "tp:2", 2)
    want = expected(case)
    found = [
        pools(2).run(runs.gradients, flags_of(case, want.folder, "--boundary.transport", transport))[0]["gradients"]
        for transport in ("exact", "bfloat16")
    ]
    difference = {name: torch.from_numpy(found[0][name] - found[1][name]) for name in found[0]}
    assert 1e-5 < norm_of(difference) / norm_of(want.gradients) < 2e-2


@pytest.mark.parametrize(
    "case, others",
    thinned(
        [
            (Case("sp:2", "pp:2", 2, model="deep", given_batch=8), [*WAVES, ScheduleSettings("recompute")]),
            (Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", given_batch=8), [*WAVES, ScheduleSettings("recompute")]),
            (Case("dp:1@0", "pp:2@1-2", 3, model="deep", given_batch=8), AHEAD),
            (
                Case("sp:2", "pp:2", 2, model="deep", flags=VIRTUAL, given_batch=8),
                [replace(s, virtual_stages=2) for s in WAVES],
            ),
            (
                Case("dp:1@0", "pp:2@1-2", 3, model="deep", flags=VIRTUAL, given_batch=8),
                [replace(s, virtual_stages=2) for s in AHEAD],
            ),
        ],
        2,
    ),
    ids=["colocated", "mixed", "disjoint", "colocated, virtual stages", "disjoint, virtual stages"],
)
def test_no_schedule_changes_the_loss(case: Case, others: list[ScheduleSettings], expected: Ask, pools: Pools) -> None:
    schedules_agree(case, others, expected(case), pools(case.ranks))


BUDGETED = [
    Case("dp:4", "tp:2,dp:2", 4, flags=BUDGET),
    Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", flags=BUDGET, given_batch=8),
    Case("sp:2", "cp:2", 2, model="tied", flags=BUDGET, given_batch=8),
    Case("dp:1@0", "dp:3@1-3", 4, model="two-encoders", flags=BUDGET, detail="dp:2@2-3"),
    # Waves and a run ahead of more micro-batches than there are.
    Case("sp:4", "pp:4", 4, model="deep", flags=(*BUDGET, "--schedule.waves", "7"), given_batch=8),
    Case("dp:1@0", "pp:2@1-2", 3, model="deep", flags=(*BUDGET, "--schedule.run_ahead", "9"), given_batch=8),
]
"""Micro-batches of as many samples as a number of tokens has room for, and as many as it takes."""


@pytest.mark.parametrize("case", thinned(BUDGETED, 3), ids=str)
def test_a_token_budget_changes_nothing(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


@pytest.mark.parametrize("case", thinned(BUDGETED[1:2] + BUDGETED[:1], 2), ids=str)
def test_three_steps_of_a_token_budget(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "adamw", expected(case), pools(case.ranks))


def _covering(cases: Sequence[Case]) -> list[Case]:
    """Cases in which every layout of every module occurs: an optimizer knows its own module's only, and what else
    differs between cases shows in the gradients.
    """
    seen: set[tuple[str, str | None]] = set()
    kept = []
    for case in cases:
        mine = {("vision", case.vision), ("detail", case.detail), ("text", case.text)}
        if not mine <= seen:
            kept.append(case)
            seen |= mine
    return kept


@pytest.mark.parametrize("case", thinned(_covering(CASES), 13), ids=str)
def test_three_adamw_steps(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "adamw", expected(case), pools(case.ranks))


# Plain SGD shows what the distributed optimizer hides: whole gradients of tied weights on every rank.
@pytest.mark.parametrize("case", thinned([case for case in CASES if case.model == "tied"][:6:2], 2), ids=str)
def test_three_sgd_steps(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "sgd", expected(case), pools(case.ranks))
