"""The program on a process group with NCCL's rules: every placement under every schedule ends, and computes what plain
`transformers` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity import lora_cases, runs
from tests.parity.cases import (
    BALANCE,
    BUDGET,
    CASES,
    OVERLAPPED,
    RECOMPUTE,
    SPLIT,
    VIRTUAL,
    Ask,
    Case,
    flags_of,
    gradients_equal,
    norm_of,
    three_steps_equal,
    zero,
)
from tests.parity.lora_cases import Adapters, Choice, ask_peft
from tests.support.matrix import thinned
from tests.support.pool import Pools

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


QWEN3 = {
    "colocated": (SHARING, ("sp:2", "pp:2", 2), ("pp:2,dp:2", "pp:4", 4), ("dp:2", "pp:2", 2, "pp:2")),
    "mixed": (SHARING, ("pp:2@0-1", "pp:2@1-2", 3), ("sp:2@1-2", "pp:2@1-2", 3, "dp:1@0")),
    "disjoint": (APART, ("dp:1@0", "pp:4@1-4", 5), ("pp:2@0-1", "pp:2@2-3", 4), ("dp:1@0", "pp:2@2-3", 4, "pp:1@1")),
}
"""The same for rows that enter several text stages."""


def rows_of_qwen3() -> Iterator[tuple[str, Case]]:
    """Every placement and schedule, by name; without virtual stages and, where these can be, with them."""
    for place, (schedules, *layouts) in QWEN3.items():
        for name, flags in schedules.items():
            for vision, text, ranks, *detail in layouts:
                model = "qwen3-two-encoders" if detail else "qwen3"
                one_by_one = ("--text-layers", "1", "1", "1", "1")
                cut: dict[str, tuple[str, ...]] = {"": one_by_one if text.startswith("pp:4") else SPLIT}
                if "pp:2" in text and place == "colocated":
                    cut["virtual"] = ("--schedule.virtual_stages", "2", *one_by_one)
                for kind, of_kind in cut.items():
                    yield (
                        f"{place}, {name}, {'+'.join([vision, *detail])}|{text}{', ' * bool(kind)}{kind}",
                        Case(
                            vision, text, ranks, model, flags=(*flags, *of_kind), given_batch=8,
                            detail=(*detail, None)[0],
                        ),
                    )  # fmt: skip


ROWS = dict(rows())
ROWS_OF_QWEN3 = dict(rows_of_qwen3())
OTHERS = CASES[2::10]
"""Other axes, micro-batches of several samples, tied embeddings."""


# Of the rows that `make test` has, each placement comes with each of its schedules.
@pytest.mark.parametrize("name", thinned(ROWS, 11))
def test_placements_and_schedules(name: str, expected: Ask, rules_pools: Pools) -> None:
    case = ROWS[name]
    gradients_equal(case, expected(case), rules_pools(case.ranks))


@pytest.mark.parametrize("name", thinned(ROWS_OF_QWEN3, 8))
def test_rows_that_enter_several_stages(name: str, expected: Ask, rules_pools: Pools) -> None:
    case = ROWS_OF_QWEN3[name]
    gradients_equal(case, expected(case), rules_pools(case.ranks))


@pytest.mark.parametrize("case", thinned(OTHERS, 3), ids=str)
def test_axes(case: Case, expected: Ask, rules_pools: Pools) -> None:
    gradients_equal(case, expected(case), rules_pools(case.ranks))


PARTS = ("--vision-patches_per_call", "24")
IN_PARTS = [
    Case("dp:2", "pp:2", 2, "deep", flags=PARTS, given_batch=8),
    Case("pp:2", "pp:2", 2, "qwen3-deep", flags=(*PARTS, "--schedule.kind", "recompute"), given_batch=8),
    Case("pp:2@0-1", "pp:2@2-3", 4, "deep", flags=PARTS, given_batch=8),
    Case("sp:2@0-1", "pp:2@1-2", 3, "qwen3-deep", flags=PARTS, given_batch=8),
    Case("dp:2", "dp:2", 2, "untied", 2, (*PARTS, "--vision-zero", "3", "--text-zero", "3")),
    Case("cp:2,tp:2", "tp:4", 4, "one-kv-head", 2, PARTS),
]


@pytest.mark.parametrize("case", thinned(IN_PARTS, 2), ids=str)
def test_several_calls(case: Case, expected: Ask, rules_pools: Pools) -> None:
    gradients_equal(case, expected(case), rules_pools(case.ranks))


BALANCED = (BALANCE, "0.05")
WITH_EXPERTS = [
    Case("sp:4", "dp:4,ep:4", 4, "moe", flags=("--schedule.waves", "2", *RECOMPUTE, *BALANCED)),
    Case("sp:4", "pp:2,dp:2,ep:2", 4, "moe", flags=(*SPLIT, *BALANCED)),
    Case("dp:1@0", "tp:2,dp:2,ep:4@1-4", 5, "moe", flags=("--text-zero", "3", "--schedule.run_ahead", "1")),
    Case("sp:4", "dp:4,ep:4", 4, "moe", flags=("--text-recompute", "experts", *BALANCED)),
    Case("dp:4", "tp:2,dp:2,ep:4", 4, "moe", flags=("--text-recompute", "experts", *zero(3, 3))),
]


@pytest.mark.parametrize("case", WITH_EXPERTS, ids=str)
def test_exchanges_over_replicas(case: Case, expected: Ask, rules_pools: Pools) -> None:
    gradients_equal(case, expected(case), rules_pools(case.ranks))


ADAPTERS = Choice(
    {"vision": Adapters(3, alpha=2), "text": Adapters(2, patterns={"down_proj": (4, None)})}, whole=("projector",)
)
WITH_ADAPTERS = [
    Case("sp:4", "tp:4", 4, model="one-kv-head", micro=2, flags=OVERLAPPED[2:]),
    Case("sp:2@0-1", "tp:2,pp:2@2-5", 6, model="deep", flags=("--vision-zero", "2", "--schedule.run_ahead", "1")),
    Case("pp:2", "pp:2", 2, model="deep", flags=VIRTUAL, given_batch=8),
    Case("tp:2,dp:2", "cp:2,dp:2", 4, model="delta", micro=2, flags=zero(3, 3)),
    Case("sp:2,dp:2", "tp:2,sp:2", 4, model="qwen3", micro=2, flags=(*RECOMPUTE, *OVERLAPPED[2:])),
    Case("dp:4", "tp:2,dp:2", 4, model="delta", flags=(*BUDGET, *PARTS)),
]


@pytest.mark.parametrize("case", thinned(WITH_ADAPTERS, 3), ids=str)
def test_adapters(case: Case, tmp_path: Path, rules_pools: Pools) -> None:
    lora_cases.gradients_equal(case, ADAPTERS, ask_peft(tmp_path, case, ADAPTERS), rules_pools(case.ranks))


@pytest.mark.parametrize("case", thinned(OTHERS[::2], 3), ids=str)
def test_three_steps(case: Case, expected: Ask, rules_pools: Pools) -> None:
    three_steps_equal(case, "adamw", expected(case), rules_pools(case.ranks))


def test_shares_that_differ_between_the_ranks_of_tp(expected: Ask, rules_pools: Pools) -> None:
    """Four key heads over three ranks: what two ranks hold of one lies in different buckets, of which each rank has the
    sums of a half.
    """
    case = Case("sp:2,dp:3", "tp:3,dp:2", 6, model="twelve-heads", micro=2)
    want = expected(case)
    loss, norm = rules_pools(6).run(runs.losses_in_buckets, flags_of(case, want.folder, "--optimizer.name", "adamw"))[0]
    assert loss == pytest.approx(want.loss, rel=1e-5)
    assert norm == pytest.approx(norm_of(want.gradients), rel=1e-4)
