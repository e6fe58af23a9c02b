"""Loss, every gradient and the weights after three steps equal plain `transformers` in one process, whatever the
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from megatron_hetero.schedule.settings import ScheduleSettings
from tests.parity import runs
from tests.parity.cases import (
    AHEAD,
    BUDGET,
    FRUGAL,
    IN_ORDER,
    NOT_AHEAD,
    OVERLAPPED,
    RECOMPUTE,
    RECOMPUTED,
    UNEVEN,
    VIRTUAL,
    WAVES,
    WHOLE,
    Ask,
    Case,
    flags_of,
    gradients_equal,
    norm_of,
    schedules_agree,
    three_steps_equal,
)
from tests.support.matrix import thinned
from tests.support.pool import Pool

CASES = [
    Case("dp:1", "dp:1", 1, micro=2),
    Case("dp:1", "dp:1", 1, model="tied"),
    Case("sp:2", "tp:2", 2, model="tied", micro=2),
    Case("sp:2", "tp:2", 2, flags=WHOLE),
    Case("tp:2", "dp:2", 2, model="tied", flags=WHOLE),
    Case("sp:4", "tp:4", 4, micro=2),
    Case("sp:4", "tp:4", 4, model="tied", flags=WHOLE),
    Case("sp:4", "tp:4", 4, model="one-kv-head", micro=2),
    Case("tp:4", "tp:4", 4, micro=2),
    Case("tp:4", "tp:4", 4, model="one-kv-head", flags=WHOLE),
    Case("tp:4", "tp:4", 4, model="tied", flags=RECOMPUTE),
    Case("dp:4", "tp:2,dp:2", 4, model="tied", micro=2),
    Case("dp:4", "tp:2,dp:2", 4, flags=WHOLE),
    Case("sp:2,dp:2", "tp:4", 4, model="one-kv-head"),
    Case("sp:2,dp:2", "tp:4", 4, micro=2, flags=WHOLE),
    Case("tp:2,dp:2", "tp:2,dp:2", 4, micro=2, flags=OVERLAPPED),
    Case("tp:2,dp:2", "tp:2,dp:2", 4, model="tied", flags=WHOLE),
    Case("dp:4", "dp:4", 4, micro=2),
    Case("dp:4", "dp:4", 4, model="tied"),
    Case("sp:4", "tp:2,dp:2", 4, model="tied", micro=2),
    Case("sp:4", "tp:2,dp:2", 4, flags=("--vision-recompute", "full")),
    Case("sp:2,tp:2", "tp:4", 4, micro=2),
    Case("sp:2,tp:2", "dp:4", 4, model="tied", flags=WHOLE),
    Case("cp:2", "dp:2", 2, micro=2),
    Case("sp:2", "cp:2", 2, micro=2),
    Case("sp:2", "cp:2", 2, model="tied"),
    Case("cp:2", "tp:2", 2, micro=4),
    Case("sp:2", "sp:2", 2, micro=2),
    Case("cp:4", "cp:2,tp:2", 4, micro=2, flags=OVERLAPPED[2:]),
    Case("cp:4", "cp:2,tp:2", 4, model="one-kv-head", flags=WHOLE),
    Case("sp:4", "sp:2,tp:2", 4, micro=2),
    Case("sp:4", "sp:2,tp:2", 4, model="one-kv-head", flags=WHOLE),
    Case("sp:2,cp:2", "cp:4", 4, micro=4),
    Case("sp:2,cp:2", "cp:4", 4, model="tied", flags=RECOMPUTE),
    Case("tp:2,cp:2", "sp:2,cp:2", 4, model="tied", micro=2),
    Case("dp:4", "sp:4", 4, model="one-kv-head", micro=2),
    Case("sp:2,dp:3", "tp:3,dp:2", 6, model="twelve-heads", micro=2),
    Case("sp:2,dp:3", "cp:3,dp:2", 6, model="twelve-heads", micro=2),
    Case("sp:6", "tp:2,dp:3", 6, model="twelve-heads", micro=2, given_batch=6),
    Case("tp:2,sp:2,cp:2", "dp:2,cp:2,sp:2", 8, micro=2),
    Case("dp:1@0", "tp:1@1", 2, given_batch=8),
    Case("dp:2@0-1", "tp:2@2-3", 4, micro=2),
    Case("sp:2@0-1", "tp:2,pp:2@2-5", 6, model="deep-tied"),
    Case("dp:3@0-2", "tp:1,dp:2@3-4", 5, model="twelve-heads", micro=2),
    Case("sp:4", "pp:4", 4, model="deep", given_batch=8),
    Case("sp:4", "pp:4", 4, model="deep", flags=RECOMPUTED),
    Case("sp:4", "pp:4", 4, model="deep", micro=4),
    Case("sp:4", "pp:4", 4, model="deep", micro=8),
    Case("sp:4", "tp:2,pp:2", 4, model="deep-tied"),
    Case("dp:4", "pp:2,dp:2", 4, model="deep-tied", micro=2),
    Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", given_batch=8),
    Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", micro=4),
    Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", micro=8),
    Case("pp:2@0-1", "tp:2@2-3", 4, model="deep"),
    Case("pp:2,sp:2", "pp:2,tp:2", 4, model="deep-tied", flags=UNEVEN),
    Case("dp:1@0", "pp:2@1-2", 3, model="deep", flags=VIRTUAL),
    Case("dp:1@0", "dp:1@1", 2, micro=8),
    Case("dp:1@0", "dp:1@1", 2, micro=4, flags=NOT_AHEAD),
    Case("dp:4", "tp:2,dp:2", 4, micro=2, flags=IN_ORDER),
    Case("sp:2,dp:2", "cp:2,dp:2", 4, micro=2, flags=IN_ORDER),
    Case("sp:3", "tp:3", 3, model="twelve-heads", micro=2),
    Case("dp:3", "tp:3", 3, model="twelve-heads", flags=WHOLE),
    Case("sp:2", "tp:2", 2, model="two-encoders", micro=2, detail="dp:2"),
    Case("dp:1@0", "tp:2@2-3", 4, model="two-encoders", detail="dp:1@1"),
    Case("sp:2@1-2", "pp:2@1-2", 3, model="two-encoders-deep", detail="dp:1@0"),
    Case("dp:2@0-1", "tp:2,pp:2@2-5", 6, model="two-encoders-deep", detail="sp:2@2-3"),
    Case("sp:4", "tp:2,dp:2", 4, flags=FRUGAL, micro=2),
    Case("tp:2,cp:2", "sp:2,tp:2", 4, model="one-kv-head", flags=FRUGAL, micro=2),
    Case("sp:2", "pp:2", 2, model="deep", flags=("--text-recompute", "1", "--vision-recompute", "3")),
]


@pytest.mark.parametrize("case", thinned(CASES, 7), ids=str)
def test_gradients(case: Case, expected: Ask, pools: Callable[[int], Pool]) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


def test_rounded_transport(expected: Ask, pools: Callable[[int], Pool]) -> None:
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
def test_no_schedule_changes_the_loss(
    case: Case, others: list[ScheduleSettings], expected: Ask, pools: Callable[[int], Pool]
) -> None:
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
def test_a_token_budget_changes_nothing(case: Case, expected: Ask, pools: Callable[[int], Pool]) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


@pytest.mark.parametrize("case", thinned(BUDGETED[1:2] + BUDGETED[:1], 2), ids=str)
def test_three_steps_of_a_token_budget(case: Case, expected: Ask, pools: Callable[[int], Pool]) -> None:
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
def test_three_adamw_steps(case: Case, expected: Ask, pools: Callable[[int], Pool]) -> None:
    three_steps_equal(case, "adamw", expected(case), pools(case.ranks))


# Plain SGD shows what the distributed optimizer hides: whole gradients of tied weights on every rank.
@pytest.mark.parametrize("case", thinned([case for case in CASES if case.model == "tied"][:6:2], 2), ids=str)
def test_three_sgd_steps(case: Case, expected: Ask, pools: Callable[[int], Pool]) -> None:
    three_steps_equal(case, "sgd", expected(case), pools(case.ranks))
