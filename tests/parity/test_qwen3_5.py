"""Qwen3.5, dense and with experts, equals plain `transformers` in one process, one sample at a time, in any layout."""

from __future__ import annotations

import pytest

from megatron_hetero.schedule.settings import ScheduleSettings
from tests.parity.cases import (
    AHEAD,
    BALANCE,
    BUDGET,
    FRUGAL,
    IN_ORDER,
    NOT_AHEAD,
    ONE_BY_ONE,
    OVERLAPPED,
    RECOMPUTE,
    RECOMPUTED,
    SPLIT,
    VIRTUAL,
    WAVES,
    WHOLE,
    Ask,
    Case,
    gradients_equal,
    schedules_agree,
    three_steps_equal,
    zero,
)
from tests.support.matrix import thinned
from tests.support.pool import Pools

BALANCED = (BALANCE, "0.05")
OFFLOADED = ("--text-offload.activations", "true")
FEW_PATCHES = ("--vision-patches_per_call", "64")
SELECTIVE = ("--text-recompute", "selective")

CASES = [
    Case("dp:1", "dp:1", 1, model="delta", micro=4),
    Case("dp:2", "tp:2", 2, model="delta", micro=2),
    Case("dp:2", "sp:2", 2, model="delta", micro=2),
    Case("dp:2", "cp:2", 2, model="delta", micro=2, flags=SELECTIVE),
    Case("sp:2", "pp:2", 2, model="delta", flags=SPLIT),
    Case("dp:4", "tp:4", 4, model="delta", micro=2),
    Case("sp:4", "sp:4", 4, model="delta", micro=2, flags=RECOMPUTE),
    Case("cp:4", "cp:4", 4, model="delta", micro=4),
    Case("tp:2,dp:2", "tp:2,sp:2", 4, model="delta", micro=2, flags=OVERLAPPED),
    Case("tp:2,sp:2", "tp:2,cp:2", 4, model="delta", micro=2, flags=(*OVERLAPPED, *SELECTIVE)),
    Case("sp:2,dp:2", "sp:2,cp:2", 4, model="delta", micro=2, flags=FRUGAL),
    Case("dp:4", "tp:4", 4, model="delta", micro=2, flags=WHOLE),
    Case("dp:3", "cp:3", 3, model="delta", micro=2, given_batch=6),
    Case("dp:3", "tp:3", 3, model="delta-six-heads", micro=2, given_batch=6),
    Case("dp:6", "tp:2,cp:3", 6, model="delta-six-heads", micro=2, given_batch=6),
    Case("sp:2,dp:3", "tp:3,sp:2", 6, model="delta-six-heads", micro=2, given_batch=6, flags=SELECTIVE),
    Case("sp:4", "tp:4", 4, model="delta-one-key-head", micro=2),
    Case("cp:5", "cp:5", 5, model="delta-one-key-head", micro=2, given_batch=4),
    Case("dp:4", "sp:4", 4, model="delta-one-key-head", flags=(*BUDGET, *FEW_PATCHES)),
    Case("dp:4", "dp:4", 4, model="delta-tied", micro=2, flags=zero(3, 3)),
    Case("sp:4", "tp:2,dp:2", 4, model="delta-tied", micro=2, flags=zero(2, 2)),
    Case("dp:4", "cp:2,dp:2", 4, model="delta-tied", micro=2, flags=zero(3, 3, *OFFLOADED)),
    Case("dp:4", "pp:4", 4, model="delta-tied", flags=ONE_BY_ONE),
    Case("pp:2,sp:2", "pp:2,tp:2", 4, model="delta-tied", flags=(*SPLIT, *RECOMPUTE)),
    Case("dp:2", "pp:2", 2, model="delta", flags=(*VIRTUAL, *ONE_BY_ONE), given_batch=8),
    Case("sp:4", "pp:2,cp:2", 4, model="delta-deep", flags=(*RECOMPUTED, "--text-layers", "4", "2")),
    Case("sp:2@0-1", "tp:2@2-3", 4, model="delta", micro=2),
    Case("dp:1@0", "cp:2,pp:2@1-4", 5, model="delta", flags=(*NOT_AHEAD, *SPLIT)),
    Case("dp:2@0-1", "sp:2@1-2", 3, model="delta", micro=2),
    Case("sp:4", "cp:2,dp:2", 4, model="delta", micro=2, pictures=(0, 0, 3, 0)),
    Case("sp:4", "tp:2,cp:2", 4, model="delta", given_batch=4, pictures=(0,)),
    Case("dp:4", "sp:2,dp:2", 4, model="delta", flags=(*IN_ORDER, *BUDGET, "--text-chunk", "7")),
    Case("sp:2", "tp:2", 2, model="delta-two-encoders", micro=2, detail="dp:2"),
    Case("dp:1", "dp:1", 1, model="delta-moe", micro=4, flags=BALANCED),
    Case("sp:4", "dp:4,ep:4", 4, model="delta-moe", micro=2, flags=BALANCED),
    Case("dp:4", "tp:2,cp:2,ep:4", 4, model="delta-moe", micro=2, flags=BALANCED),
    Case("dp:4", "tp:4,ep:2", 4, model="delta-moe-tied", flags=(*WHOLE, *BALANCED)),
    Case("sp:4", "cp:2,dp:2,ep:4", 4, model="delta-moe", micro=2, flags=(*zero(3, 3), *BALANCED)),
    Case("sp:4", "sp:4,ep:4", 4, model="delta-moe-tied", micro=2, flags=(*FRUGAL, *BALANCED)),
    Case("dp:4", "pp:2,dp:2,ep:2", 4, model="delta-moe-tied", flags=(*VIRTUAL, *ONE_BY_ONE, *BALANCED)),
    Case("dp:1@0", "pp:2,dp:2,ep:2@1-4", 5, model="delta-moe", flags=(*SPLIT, *BALANCED, *RECOMPUTE)),
]


@pytest.mark.parametrize("case", thinned(CASES, 8), ids=str)
def test_gradients(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


UPDATED = [
    Case("sp:4", "tp:2,cp:2", 4, model="delta", flags=RECOMPUTE),
    Case("dp:4", "cp:2,dp:2", 4, model="delta-tied", micro=2, flags=zero(3, 3)),
    Case("sp:4", "pp:2,sp:2", 4, model="delta-tied", flags=SPLIT),
    Case("sp:2@0-1", "tp:2,dp:2,ep:4@2-5", 6, model="delta-moe", flags=BALANCED),
]


@pytest.mark.parametrize("case", thinned(UPDATED, 3), ids=str)
def test_three_adamw_steps(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "adamw", expected(case), pools(case.ranks))


SHARED = [*WAVES, ScheduleSettings("recompute")]
SCHEDULES = {
    "replicas in step": (Case("sp:4", "tp:2,sp:2", 4, model="delta"), SHARED),
    "stages": (Case("sp:4", "pp:2,cp:2", 4, model="delta", flags=SPLIT), SHARED),
    "ahead": (Case("dp:1@0", "pp:2@1-2", 3, model="delta", flags=SPLIT), AHEAD),
}


@pytest.mark.parametrize("case, others", thinned(list(SCHEDULES.values()), 2), ids=str)
def test_schedules(case: Case, others: list[ScheduleSettings], expected: Ask, pools: Pools) -> None:
    schedules_agree(case, others, expected(case), pools(case.ranks))
