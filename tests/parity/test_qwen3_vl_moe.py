"""Qwen3-VL-MoE equals plain `transformers` in one process, whatever ranks its experts are divided over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hetero.schedule.settings import ScheduleSettings
from tests.parity.cases import (
    AHEAD,
    BALANCE,
    BUDGET,
    FRUGAL,
    GLOBAL_BATCH,
    IN_ORDER,
    MODELS,
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
from tests.support.oracle import Oracle
from tests.support.pool import Pools

BALANCED = (BALANCE, "0.05")
EXPERTS = ("--text-recompute", "experts")
OFFLOADED = ("--text-offload.activations", "true")


CASES = [
    Case("dp:1", "dp:1", 1, model="moe", micro=2),
    Case("dp:2", "dp:2,ep:2", 2, model="moe", flags=BALANCED, micro=2),
    Case("sp:4", "dp:4,ep:4", 4, model="moe", micro=2),
    Case("sp:4", "dp:4,ep:4", 4, model="moe-one", flags=BALANCED, micro=2),
    Case("sp:4", "dp:4,ep:2", 4, model="moe-eight", micro=1),
    Case("sp:4", "dp:4,ep:1", 4, model="moe", flags=zero(3, 3), micro=2),
    Case("sp:4", "dp:4,ep:2", 4, model="moe", flags=(*zero(3, 3), *BALANCED), micro=2),
    Case("dp:4", "tp:2,dp:2,ep:4", 4, model="moe-tied", flags=zero(2, 3), micro=2),
    Case("dp:4", "tp:4,ep:4", 4, model="moe-eight", flags=BALANCED),
    Case("dp:4", "tp:4,ep:4", 4, model="moe", flags=(*WHOLE, *BALANCED)),
    Case("tp:2,dp:2", "tp:2,cp:2,ep:4", 4, model="moe-tied", flags=(*WHOLE, *RECOMPUTE)),
    Case("cp:4", "cp:4,ep:4", 4, model="moe", flags=BALANCED, micro=2),
    Case("cp:2,dp:2", "sp:2,cp:2,ep:2", 4, model="moe-mixed", flags=(*BALANCED, *FRUGAL), micro=2),
    Case("sp:2,tp:2", "tp:2,sp:2,ep:4", 4, model="moe", flags=OVERLAPPED, micro=2),
    Case("sp:2", "tp:2,ep:1", 2, model="moe", flags=BALANCED, micro=2),
    Case("sp:2", "tp:2,ep:2", 2, model="moe-four", flags=RECOMPUTE),
    Case("sp:4", "pp:2,dp:2,ep:2", 4, model="moe", flags=(*SPLIT, *BALANCED)),
    Case("pp:2,sp:2", "pp:2,tp:2,ep:2", 4, model="moe-tied", flags=(*SPLIT, *BALANCED, *RECOMPUTE)),
    Case("dp:2", "pp:2", 2, model="moe", flags=(*VIRTUAL, *ONE_BY_ONE, *BALANCED), given_batch=8),
    Case("dp:4", "pp:2,dp:2,ep:2", 4, model="moe-tied", flags=(*VIRTUAL, *ONE_BY_ONE, *BALANCED)),
    Case("sp:4", "pp:4", 4, model="moe", flags=(*ONE_BY_ONE, *RECOMPUTED, *BALANCED)),
    Case("dp:2@0-1", "dp:4,ep:4@2-5", 6, model="moe", flags=BALANCED, micro=2),
    Case("sp:2@0-1", "tp:2,pp:2,ep:2@2-5", 6, model="moe", flags=(*SPLIT, *BALANCED)),
    Case("dp:1@0", "pp:2,dp:2,ep:2@1-4", 5, model="moe-mixed", flags=(*NOT_AHEAD, "--text-layers", "3", "2")),
    Case("sp:2@0-1", "dp:2,pp:2,ep:2@0-3", 4, model="moe", flags=(*SPLIT, *zero(2, 2))),
    Case("tp:2,dp:3", "tp:2,dp:3,ep:6", 6, model="moe", given_batch=6),
    Case("sp:4", "dp:4,ep:4", 4, model="moe", flags=BALANCED, micro=2, pictures=(0, 0, 3, 0)),
    Case("sp:4", "dp:4,ep:4", 4, model="moe", flags=BALANCED, given_batch=4, pictures=(0,)),
    Case("dp:4", "dp:4,ep:4", 4, model="moe", flags=(*IN_ORDER, *BALANCED), micro=2),
    Case("dp:2", "tp:2,ep:2", 2, model="moe", flags=("--text-recompute", "1", *BALANCED)),
    Case("sp:4", "dp:4,ep:4", 4, model="moe", flags=(*EXPERTS, *BALANCED), micro=2),
    Case("dp:4", "tp:2,dp:2,ep:2", 4, model="moe-eight", flags=(*EXPERTS, *zero(3, 3))),
    Case("sp:2,dp:2", "dp:4,ep:4", 4, model="moe", flags=(*BUDGET, *OFFLOADED, *BALANCED)),
    Case("dp:4", "cp:2,dp:2,ep:4", 4, model="moe-eight", flags=(*BUDGET, "--text-chunk", "7", *BALANCED)),
]


@pytest.mark.parametrize("case", thinned(CASES, 3), ids=str)
def test_gradients(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


UPDATED = [
    Case("sp:4", "dp:4,ep:2", 4, model="moe", flags=(*zero(3, 3), *BALANCED), micro=2),
    Case("dp:4", "tp:4,ep:4", 4, model="moe", flags=(*WHOLE, *BALANCED)),
    Case("dp:4", "pp:2,dp:2,ep:2", 4, model="moe-tied", flags=(*VIRTUAL, *ONE_BY_ONE, *BALANCED)),
    Case("sp:2@0-1", "tp:2,dp:2,ep:4@2-5", 6, model="moe-mixed"),
    Case("dp:2", "dp:2,ep:2", 2, model="moe", flags=(*OFFLOADED, "--text-offload.states", "true", *BALANCED), micro=2),
]


@pytest.mark.parametrize("case", thinned(UPDATED, 3), ids=str)
def test_three_adamw_steps(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "adamw", expected(case), pools(case.ranks))


@pytest.mark.parametrize("name", [name for name, choice in MODELS.items() if choice.family == "qwen3_vl_moe"])
def test_routers_choose_by_more_than_rounding(name: str, expected: Ask) -> None:
    """Otherwise a difference of one process would say nothing."""
    oracle, leads = Oracle.load(*expected(Case("dp:1", "dp:1", 1, model=name)).paths), list[float]()

    def note(router: Any, given: tuple[Tensor, ...], _: object) -> None:
        logits = torch.nn.functional.linear(given[0], router.weight).sort(dim=-1, descending=True).values
        leads.append(float((logits[:, router.top_k - 1] - logits[:, router.top_k]).detach().min()))

    for module_name, module in oracle.model.named_modules():
        if module_name.endswith(".mlp.gate"):
            module.register_forward_hook(note)
    oracle.step(range(GLOBAL_BATCH))
    assert min(leads) > 5e-5


SHARED = [*WAVES, ScheduleSettings("recompute")]
SCHEDULES = {
    "replicas in step": (Case("sp:4", "dp:4,ep:4", 4, model="moe", flags=BALANCED), SHARED),
    "stages": (Case("sp:4", "pp:2,dp:2,ep:2", 4, model="moe", flags=(*SPLIT, *BALANCED)), SHARED),
    "virtual stages": (
        Case("dp:4", "pp:2,dp:2,ep:2", 4, model="moe", flags=(*VIRTUAL, *ONE_BY_ONE, *BALANCED)),
        [replace(settings, virtual_stages=2) for settings in SHARED],
    ),
    "apart": (Case("dp:2@0-1", "dp:2,ep:2@2-3", 4, model="moe", flags=BALANCED), AHEAD),
}


@pytest.mark.parametrize("name", thinned(SCHEDULES, 3))
def test_no_schedule_changes_the_loss(name: str, expected: Ask, pools: Pools) -> None:
    case, others = SCHEDULES[name]
    schedules_agree(case, others, expected(case), pools(case.ranks))


FREEZING = [
    Case("sp:4", "tp:2,dp:2,ep:4", 4, model="moe", flags=BALANCED),
    Case("dp:4", "pp:2,dp:2,ep:2", 4, model="moe", flags=(*SPLIT, *BALANCED)),
]


@pytest.mark.parametrize("case, frozen", thinned(((c, f) for f in (("vision",), ("text",)) for c in FREEZING), 3))
def test_frozen_parts(case: Case, frozen: tuple[str, ...], expected: Ask, pools: Pools) -> None:
    """Gradients of a frozen text module's input have what the loss that balances its experts adds."""
    gradients_equal(case, expected(case), pools(case.ranks), frozen)
