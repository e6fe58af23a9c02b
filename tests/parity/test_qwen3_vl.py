"""Qwen3-VL equals plain `transformers` in one process, whatever the layout: rows of several encoder layers enter the
language model at several depths, on whichever stages these are.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron_hetero.schedule.settings import ScheduleSettings
from tests.parity.cases import (
    AHEAD,
    FRUGAL,
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
)
from tests.support.matrix import long, thinned
from tests.support.pool import Pools

CASES = [
    Case("dp:1", "dp:1", 1, model="qwen3", micro=2),
    Case("dp:1", "dp:1", 1, model="qwen3-tied", flags=RECOMPUTE),
    Case("sp:2", "tp:2", 2, model="qwen3", micro=2),
    Case("tp:2", "dp:2", 2, model="qwen3-tied", micro=2),
    Case("tp:2", "sp:2", 2, model="qwen3", flags=WHOLE),
    Case("cp:2", "cp:2", 2, model="qwen3", micro=2),
    Case("tp:4", "tp:4", 4, model="qwen3-one-kv-head", flags=WHOLE),
    Case("tp:4", "tp:4", 4, model="qwen3-one-kv-head", flags=OVERLAPPED),
    Case("sp:4", "tp:2,dp:2", 4, model="qwen3-one-kv-head", micro=2),
    Case("sp:2,tp:2", "cp:2,tp:2", 4, model="qwen3", micro=2),
    Case("cp:2,tp:2", "sp:2,cp:2", 4, model="qwen3-tied", micro=2),
    Case("sp:2,cp:2", "sp:2,tp:2", 4, model="qwen3", flags=WHOLE),
    Case("sp:2,dp:3", "tp:3,dp:2", 6, model="qwen3-twelve-heads", micro=2),
    Case("sp:6", "cp:3,dp:2", 6, model="qwen3-twelve-heads", micro=2),
    Case("sp:4", "pp:4", 4, model="qwen3-tied", flags=(*ONE_BY_ONE, *RECOMPUTED)),
    Case("dp:2", "pp:2", 2, model="qwen3", flags=VIRTUAL, given_batch=8),
    Case("tp:2", "pp:2", 2, model="qwen3-tied", flags=(*VIRTUAL, *ONE_BY_ONE, *RECOMPUTE)),
    Case("dp:2,tp:2", "pp:2,dp:2", 4, model="qwen3-tied", flags=SPLIT, micro=2),
    Case("pp:2,sp:2", "pp:2,tp:2", 4, model="qwen3", flags=(*SPLIT, "--vision-layers", "1", "3")),
    Case("pp:2,dp:2", "pp:4", 4, model="qwen3", flags=ONE_BY_ONE),
    Case("pp:3", "pp:3", 3, model="qwen3-deep", flags=("--text-layers", "1", "1", "4"), given_batch=8),
    Case("sp:2@0-1", "tp:2,pp:2@2-5", 6, model="qwen3-tied", flags=SPLIT),
    Case("dp:1@0", "pp:4@1-4", 5, model="qwen3-tied", flags=(*ONE_BY_ONE, *NOT_AHEAD)),
    Case("dp:1@0", "pp:2@1-2", 3, model="qwen3-deep", flags=(*VIRTUAL, "--text-layers", "3", "1", "1", "1")),
    Case("sp:2", "tp:2", 2, model="qwen3-two-encoders", micro=2, detail="dp:2"),
    Case("sp:2@1-2", "pp:2@1-2", 3, model="qwen3-two-encoders", detail="dp:1@0", flags=SPLIT),
    Case("dp:1@0", "tp:2@2-3", 4, model="qwen3-two-qwen3-encoders", detail="pp:1@1"),
    Case("dp:2", "pp:2", 2, model="qwen3-two-qwen3-encoders", detail="pp:2", flags=SPLIT),
    Case("tp:2", "tp:2", 2, model="qwen3", flags=FRUGAL, micro=2),
    Case("cp:2", "sp:2", 2, model="qwen3-tied", flags=FRUGAL, micro=2),
    Case("sp:2", "pp:2", 2, model="qwen3", flags=("--text-recompute", "2", "--vision-recompute", "1")),
]
MORE = [
    Case("pp:3@0-2", "pp:2@3-4", 5, model="qwen3-deep", flags=("--text-layers", "1", "5"), given_batch=8),
    Case("dp:3@0-2", "tp:1,dp:2@3-4", 5, model="qwen3-twelve-heads", micro=2),
    Case("dp:4", "dp:4", 4, model="qwen3", micro=2),
    Case("pp:2@0-1", "pp:3@1-3", 4, model="qwen3-deep", flags=("--text-layers", "1", "1", "4")),
    Case("sp:2@0-1", "pp:2@1-2", 3, model="qwen3", flags=SPLIT, given_batch=8),
    Case("sp:2", "tp:2", 2, model="qwen3-tied", flags=WHOLE),
    Case("dp:2", "cp:2", 2, model="qwen3-one-kv-head"),
    Case("tp:4", "tp:4", 4, model="qwen3", micro=2, flags=RECOMPUTE),
    Case("sp:4", "pp:4", 4, model="qwen3", flags=ONE_BY_ONE, given_batch=8),
    Case("sp:4", "tp:2,pp:2", 4, model="qwen3-tied", flags=SPLIT),
    Case("pp:2,dp:2", "pp:4", 4, model="qwen3-tied", flags=(*ONE_BY_ONE, *RECOMPUTED)),
    Case("dp:1@0", "tp:1@1", 2, model="qwen3", given_batch=8),
    Case("dp:1@0", "pp:4@1-4", 5, model="qwen3", flags=ONE_BY_ONE, given_batch=8),
    Case("pp:2@0-1", "tp:2,pp:2@2-5", 6, model="qwen3", flags=SPLIT),
]
"""For `make matrix`: whatever these have, a row above has, if with something else beside it."""


@pytest.mark.parametrize("case", thinned(CASES, 7) + long(MORE), ids=str)
def test_gradients(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


def properties(case: Case) -> set[object]:
    """What a row shows: axes of each module and their products, placement, cuts, model, and what else is set."""
    axes = [(module, frozenset(re.findall("[a-z]+", layout))) for module, layout in _layouts(case)]
    placed = any("@" in layout for _, layout in _layouts(case))
    return {*axes, placed, case.model, case.micro, *(flag for flag in case.flags if flag.startswith("--"))}


def _layouts(case: Case) -> list[tuple[str, str]]:
    return [("vision", case.vision), ("text", case.text), *([("vision", case.detail)] if case.detail else [])]


def test_rows_for_make_matrix_have_nothing_that_the_others_lack() -> None:
    assert len(CASES) >= 30
    assert set.union(*map(properties, MORE)) <= set.union(*map(properties, CASES))


UPDATED = [
    Case("pp:2,dp:2", "pp:4", 4, model="qwen3", flags=ONE_BY_ONE),
    Case("sp:2", "tp:2", 2, model="qwen3-tied", flags=WHOLE),
    Case("dp:2", "pp:2", 2, model="qwen3", flags=VIRTUAL, given_batch=8),
    Case("pp:2@0-1", "tp:2,pp:2@2-5", 6, model="qwen3", flags=SPLIT),
    Case("dp:2,tp:2", "pp:2,dp:2", 4, model="qwen3-tied", flags=SPLIT, micro=2),
    Case("sp:2,cp:2", "sp:2,tp:2", 4, model="qwen3", flags=WHOLE),
    Case("tp:2", "pp:2", 2, model="qwen3-tied", flags=(*VIRTUAL, *ONE_BY_ONE, *RECOMPUTE)),
]


@pytest.mark.parametrize("case", thinned(UPDATED, 4), ids=str)
def test_three_adamw_steps(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "adamw", expected(case), pools(case.ranks))


# Plain SGD shows what the distributed optimizer hides: whole gradients of tied weights on every rank.
@pytest.mark.parametrize("case", thinned([case for case in UPDATED if case.model == "qwen3-tied"], 2), ids=str)
def test_three_sgd_steps(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "sgd", expected(case), pools(case.ranks))


SHARED = [*WAVES, ScheduleSettings("recompute")]
SCHEDULES = {
    "split text stages": (Case("sp:2", "pp:2", 2, model="qwen3", flags=SPLIT, given_batch=8), SHARED),
    "split text stages, mixed": (
        Case("dp:2@0-1", "pp:3@1-3", 4, model="qwen3", flags=("--text-layers", "1", "1", "2"), given_batch=8),
        SHARED,
    ),
    "encoder stages, apart": (
        Case("pp:2@0-1", "pp:2@2-3", 4, model="qwen3", flags=SPLIT, given_batch=8),
        AHEAD,
    ),
    "encoder stages": (
        Case("pp:2,sp:2", "pp:4", 4, model="qwen3", flags=ONE_BY_ONE, given_batch=8),
        SHARED,
    ),
    "virtual stages": (
        Case("dp:2", "pp:2", 2, model="qwen3", flags=(*VIRTUAL, *ONE_BY_ONE), given_batch=8),
        [replace(settings, virtual_stages=2) for settings in SHARED],
    ),
    "encoder apart": (Case("dp:1@0", "pp:4@1-4", 5, model="qwen3", flags=ONE_BY_ONE, given_batch=8), AHEAD),
}


@pytest.mark.parametrize("name", thinned(SCHEDULES, 3))
def test_no_schedule_changes_the_loss(name: str, expected: Ask, pools: Pools) -> None:
    case, others = SCHEDULES[name]
    schedules_agree(case, others, expected(case), pools(case.ranks))


FREEZING = [
    Case("pp:2@0-1", "pp:2@1-2", 3, model="qwen3", flags=SPLIT),
    Case("sp:2", "tp:2", 2, model="qwen3", micro=2),
    Case("dp:2", "pp:2", 2, model="qwen3", flags=(*SPLIT, *RECOMPUTED), given_batch=8),
    Case("pp:2@0-1", "pp:2@2-3", 4, model="qwen3", flags=SPLIT, given_batch=8),
    Case("pp:2,dp:2", "pp:4", 4, model="qwen3", flags=ONE_BY_ONE),
]
PARTS = [("vision",), ("vision", "projector"), ("text",), ("text", "projector"), ("projector",)]


@pytest.mark.parametrize("case, frozen", thinned(((case, frozen) for frozen in PARTS for case in FREEZING), 6), ids=str)
def test_frozen_parts(case: Case, frozen: tuple[str, ...], expected: Ask, pools: Pools) -> None:
    """Mergers in the midst of a frozen encoder learn, on whichever stages they are; the others do not notice."""
    gradients_equal(case, expected(case), pools(case.ranks), frozen)


FEW_PICTURES = [
    Case("sp:2", "pp:2", 2, model="qwen3", flags=SPLIT, pictures=(0, 0, 3, 0)),
    Case("dp:2", "tp:2", 2, model="qwen3", pictures=(0,)),
    Case("pp:2@0-1", "pp:2@1-2", 3, model="qwen3", flags=SPLIT, pictures=(0,)),
    Case("dp:1@0", "pp:4@1-4", 5, model="qwen3", flags=ONE_BY_ONE, pictures=(0, 0, 3, 0)),
    Case("dp:2", "pp:2", 2, model="qwen3", flags=(*VIRTUAL, *ONE_BY_ONE), pictures=(0, 0, 3, 0)),
    Case("sp:4", "cp:2,dp:2", 4, model="qwen3", micro=2, pictures=(4, 0, 0, 0)),
    Case("dp:4", "dp:4", 4, model="qwen3", micro=2, pictures=(0, 0, 3, 0)),
    Case("pp:2,dp:2", "pp:4", 4, model="qwen3", flags=(*ONE_BY_ONE, *RECOMPUTED), pictures=(0, 4)),
]


@pytest.mark.parametrize("case", thinned(FEW_PICTURES, 3), ids=str)
def test_many_pictures_and_none(case: Case, expected: Ask, pools: Pools) -> None:
    """Samples of several pictures, micro-batches without any, and steps without any."""
    gradients_equal(case, expected(case), pools(case.ranks))
