"""Plans of models with experts: memory, traffic, time, problems and what is suggested against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_hetero.config.schema import load_config
from megatron_hetero.data.token_shards import SequenceShard
from megatron_hetero.estimate.allocations import SubmoduleBytes
from megatron_hetero.estimate.estimate import KINDS, Estimate
from megatron_hetero.estimate.experts import experts_of_ranks
from megatron_hetero.estimate.measured import Measured, Submodule, measure
from megatron_hetero.estimate.problems import problems_of
from megatron_hetero.estimate.report import print_estimate
from megatron_hetero.estimate.search import experts_over_more_ranks, find_fitting, planned
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.models.layers import experts

MakeMoe = Callable[..., Estimate]
DENSE, SPARSE = Submodule("layer", 0), Submodule("layer", 1)
EXPERT = 3 * 2048 * 768
"""Elements of an expert."""


@pytest.fixture
def make_moe(moe_folder: Path) -> MakeMoe:
    """`make_moe(world size, text layout, more flags)`."""

    def make(world: int, text: str, more: str = "") -> Estimate:
        vision = "" if "--vision-parallel" in more else f"--vision-parallel dp:{world}"
        of_text = "" if "--text-parallel" in more else f"--text-parallel {text}"
        flags = (
            f"--model.hf_path {moe_folder} --data.registry.d.annotations none.json --data.datasets d "
            f"--train.global_batch_size {world} {vision} {of_text} {more}"
        )
        return Estimate.of(load_config(flags.split()), world)

    return make


def measured(
    plan: Estimate, part: Submodule = SPARSE, imbalance: float = 1.5, compiled: bool = False, **settings: Any
) -> SubmoduleBytes:
    """Memory of a layer of the text module with other settings, for a pack of 4,096 tokens."""
    module = replace(plan.job.text, settings=replace(plan.job.text.settings, **settings), compiled=compiled)
    layout, tokens = module.layout, 4096 // (module.layout.sp * module.layout.cp)
    local = tokens // layout.tp if module.sequence_parallel else tokens
    member, keys = 4096 // layout.cp, np.zeros(4096, np.int64) if layout.cp > 1 else None
    segments, lengths = AttentionSegments((member,), (4096,), keys), ((tokens,) * layout.sp, (member,) * layout.cp)
    shard = SequenceShard(tokens, local, tokens // local, *lengths, segments)
    return measure(Measured.of(module, gpu=True, imbalance=imbalance), part, shard)


# -------------------------------------------------------------------------------------------------- memory


def test_a_rank_has_its_part_of_the_experts(make_moe: MakeMoe) -> None:
    whole = make_moe(8, "dp:8").parameters["text", 0]
    for ranks in (2, 4, 8):
        own = make_moe(8, f"dp:8,ep:{ranks}").parameters["text", 0]
        away = 4 * EXPERT * (128 - 128 // ranks)
        assert whole.parameters - own.parameters == away
        # Eight ranks share the states of all experts, and 8 / ep those of a rank's.
        assert own.optimizer == pytest.approx(whole.optimizer, rel=1e-6)
    tp = make_moe(8, "tp:4,dp:2,ep:8").parameters["text", 0]
    assert tp.parameters < own.parameters and tp.trained == tp.parameters


def test_the_rank_with_most_experts_is_planned(make_moe: MakeMoe) -> None:
    assert experts_of_ranks(128, 6) == (21, 22) and experts_of_ranks(6, 4) == (1, 2)
    most, even = (make_moe(6, f"dp:6,ep:{n}").parameters["text", 0].parameters for n in (6, 2))
    assert even - most == 4 * EXPERT * (64 - 22)


@pytest.mark.parametrize(
    "text, compiled",
    [("dp:8,ep:8", False), ("tp:4,dp:2,ep:8", False), ("tp:4,dp:2,ep:8", True), ("sp:2,cp:2,dp:2,ep:4", True)],
)
def test_layers_with_experts_are_measured_in_every_way(text: str, compiled: bool, make_moe: MakeMoe) -> None:
    plan = make_moe(8, text)
    ways = {
        "plain": measured(plan, compiled=compiled),
        "selective": measured(plan, compiled=compiled, recompute="selective"),
        "experts": measured(plan, compiled=compiled, recompute="experts"),
        "chunks": measured(plan, compiled=compiled, chunk=512),
        "copies": measured(plan, compiled=compiled, sequence_parallel=False),
    }
    dense = measured(plan, DENSE, compiled=compiled)
    assert len({found.saved for found in (*ways.values(), dense)}) >= 4 - (plan.job.layouts["text"].tp == 1)
    assert ways["experts"].saved < ways["selective"].saved < ways["plain"].saved <= ways["copies"].saved
    assert all(found.memo > 0 for found in ways.values()) and dense.memo == 0
    even = measured(plan, compiled=compiled, imbalance=1.0)
    assert even.saved < ways["plain"].saved and even.memo < ways["plain"].memo


def test_without_ep_no_rank_gets_more_than_others(make_moe: MakeMoe) -> None:
    plan = make_moe(8, "dp:8")
    assert measured(plan) == measured(plan, imbalance=1.0)


def test_saved_bytes_are_those_of_rows_and_hidden_activations(make_moe: MakeMoe) -> None:
    """Of a layer with experts on eight ranks, beyond one whose experts are all here."""
    plan = make_moe(8, "dp:8,ep:8")
    even, busy = measured(plan, imbalance=1.0), measured(plan, imbalance=1.5)
    rows, pairs = 8 * round(4096 * (1 - (7 / 8) ** 8)), 8 * 4096
    growth = rows / 2 * 2 * 2048 + pairs / 2 * 2 * (2 * 768)
    assert busy.saved - even.saved == pytest.approx(growth, rel=0.1)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("text", ["dp:8,ep:8", "dp:8,ep:2", "tp:4,dp:2,ep:8"])
def test_exchanges_beside_other_work_take_no_more_memory(text: str, recompute: str, make_moe: MakeMoe) -> None:
    """Than where nothing is computed ahead beside them."""
    plan = make_moe(8, text)
    for imbalance in (1.0, 1.5):
        found = measured(plan, imbalance=imbalance, recompute=recompute)
        with mock.patch.object(experts, "ahead", return_value=lambda: None):
            assert found == measured(plan, imbalance=imbalance, recompute=recompute)


def test_experts_that_are_recomputed_save_no_gate_and_up(make_moe: MakeMoe) -> None:
    plan = make_moe(8, "dp:8,ep:8")
    for imbalance in (1.0, 1.5):
        saved = [measured(plan, imbalance=imbalance, recompute=how).saved for how in ("selective", "experts")]
        assert saved[0] - saved[1] == 8 * 4096 * imbalance * 2 * 768 * 2
    dense = [measured(plan, DENSE, recompute=how) for how in ("selective", "experts")]
    assert dense[0] == dense[1]


def test_experts_that_are_recomputed_repeat_their_first_product(make_moe: MakeMoe) -> None:
    plans = [make_moe(8, "dp:8,ep:8", f"--text-recompute {how}") for how in ("selective", "experts")]
    (selective, again), tokens = (plan.work["text", "B", 0] for plan in plans), sum(plans[0].assumed.lengths)
    assert again - selective == pytest.approx(tokens * 4 * 2 * 8 * 2 * 2048 * 768 * 1.5)


def test_recomputed_layers_keep_where_tokens_went(make_moe: MakeMoe) -> None:
    activations = KINDS.index("activations")

    def peak(layers: int, more: str = "") -> int:
        return int(make_moe(8, "dp:8,ep:8", f"--text-recompute {layers} {more}").memory[0, activations])

    assert peak(6) < peak(1)
    busy, even = (peak(6, f"--plan.expert_imbalance {imbalance}") for imbalance in (2, 1))
    assert busy > even


def test_imbalance_is_memory_and_time(make_moe: MakeMoe) -> None:
    plans = [make_moe(8, "dp:8,ep:8", f"--plan.expert_imbalance {imbalance}") for imbalance in (1, 1.5, 2)]
    activations = [plan.memory[0, KINDS.index("activations")] for plan in plans]
    assert activations[0] < activations[1] < activations[2]
    work = [plan.work["text", "F", 0] for plan in plans]
    tokens, layers = sum(plans[0].assumed.lengths), 4
    assert work[1] - work[0] == work[2] - work[1] == tokens * layers * 2 * 8 * EXPERT / 2
    whole = make_moe(8, "dp:8", "--plan.expert_imbalance 2").work["text", "F", 0]
    assert whole == work[0], "on average ranks compute what their own tokens need"
    of_tp = make_moe(8, "tp:4,dp:2,ep:8", "--plan.expert_imbalance 1").work["text", "F", 0]
    assert of_tp == work[0] / 4


# ------------------------------------------------------------------------------------------------- traffic


@pytest.mark.parametrize("recompute", ["none", "selective", "experts", "full"])
@pytest.mark.parametrize("text, ranks, tokens", [("dp:8,ep:8", 8, 1), ("tp:4,dp:2,ep:8", 8, 4), ("dp:8,ep:2", 2, 1)])
def test_traffic_is_that_of_rows_that_are_sent_once(
    text: str, ranks: int, tokens: int, recompute: str, make_moe: MakeMoe
) -> None:
    plan = make_moe(8, text, f"--text-recompute {recompute}")
    [traffic], times = plan.experts, plan.job.batch.micro_batches
    of_rank = sum(plan.assumed.lengths) / tokens
    assert traffic.rows == pytest.approx(of_rank * (ranks - 1) * (1 - (1 - 1 / ranks) ** 8), abs=ranks)
    assert traffic.waits == 4 * times
    again = recompute == "full"
    assert traffic.exchanges == 4 * times * (4 + 3 + 2 * again)
    # A chosen expert has as many bytes as its weight, and both cross once; so do the weight's gradient.
    of_rows, of_weights = traffic.rows * 2 * 2048 * 2, traffic.rows * 8 * 2
    sizes = 8 * 2 * (ranks - 1)
    assert traffic.received == 4 * times * (of_rows * (2 + again) + 3 * of_weights + sizes)


def test_stages_have_the_traffic_of_their_layers(make_moe: MakeMoe) -> None:
    """Layers 0 to 2 and 3 to 5, the first of either dense."""
    assert [t.waits for t in make_moe(8, "pp:2,dp:4,ep:4").experts] == [4, 4]
    assert [t.waits for t in make_moe(8, "pp:2,dp:4,ep:4", "--text-layers 1 5").experts] == [8]
    assert make_moe(8, "dp:8").experts == ()


@pytest.mark.parametrize(
    "text, more, waits",
    [
        ("dp:8,ep:8", "", 1),
        ("dp:8,ep:8", "--text-chunk 512", 2),
        ("dp:8,ep:8", "--model.dtype float32", 2),
        ("dp:8", "--text-chunk 512", 1),
        ("dp:8", "--model.dtype float32", 1),
        ("dp:8", "--text-chunk 1000000", 0),
    ],
)
def test_hosts_wait_for_exchanges_and_for_products_in_parts(
    text: str, more: str, waits: int, make_moe: MakeMoe, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_moe(8, text, more)
    times = 4 * plan.job.batch.micro_batches
    assert [traffic.waits for traffic in plan.experts] == [waits * times] * (waits > 0)
    assert [traffic.exchanges for traffic in plan.experts] == [7 * times * ("ep" in text)] * (waits > 0)
    print_estimate(plan)
    assert ("sparse layer" in " ".join(capsys.readouterr().out.split())) == (waits > 0)


def test_the_table_of_experts_is_printed(make_moe: MakeMoe, capsys: pytest.CaptureFixture[str]) -> None:
    print_estimate(make_moe(6, "dp:6,ep:6", "--plan.expert_imbalance 1.25"))
    shown = capsys.readouterr().out
    assert "Experts, in a step" in shown and "21 to 22" in shown and "1.25 times the mean" in shown
    print_estimate(make_moe(6, "dp:6"))
    assert "Experts, in a step" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------- problems and fixes


def _of_experts(plan: Estimate) -> list[str]:
    return [f"{p.found} -> {p.fix}" for p in problems_of(plan) if "experts" in p.found]


@pytest.mark.parametrize(
    "world, text, more, found, fix",
    [
        (96, "dp:96,ep:96", "", "1 to 2 for a rank, 1.50 times the mean", "--text-parallel dp:96,ep:48"),
        (16, "dp:16,ep:16", "", "ep:16 ranks of 2 nodes", "--text-parallel dp:16,ep:8"),
        (8, "dp:8", "--text-zero 3", "gathers 128 experts of a layer (--text-zero 3)", "--text-parallel dp:8,ep:8"),
        (8, "dp:8,ep:2", "--text-zero 3", "gathers 64 experts of a layer (--text-zero 3)", "--text-parallel dp:8,ep:8"),
    ],
)
def test_problems_of_experts_are_found_and_their_fixes_planned(
    world: int, text: str, more: str, found: str, fix: str, make_moe: MakeMoe
) -> None:
    problem = _of_experts(make_moe(world, text, more))[0]
    assert found in problem and fix in problem
    better = make_moe(world, fix.split()[1], more)
    assert not any(found[:12] in each for each in _of_experts(better))


def test_a_good_plan_has_no_problem_of_experts(make_moe: MakeMoe) -> None:
    assert not _of_experts(make_moe(8, "dp:8,ep:8", "--text-zero 3")) and not _of_experts(make_moe(8, "tp:4,dp:2,ep:4"))


def test_experts_over_more_ranks_need_less(make_moe: MakeMoe) -> None:
    plan = make_moe(8, "tp:2,dp:4,ep:2")
    changes = list(experts_over_more_ranks(plan))
    assert [change.settings for change in changes] == [
        {"modules.text.parallel": f"tp:2,dp:4,ep:{ranks}"} for ranks in (4, 8)
    ]
    attempts = [planned(plan, change) for change in changes]
    needed = [attempt.needed for attempt in attempts if attempt]
    assert plan.totals.max() > needed[0] > needed[1]
    assert list(experts_over_more_ranks(make_moe(8, "tp:2,dp:4,ep:8"))) == []


def test_what_is_suggested_for_models_with_experts_is_planned(make_moe: MakeMoe) -> None:
    plan = make_moe(8, "dp:8")
    found = find_fitting(plan, round(0.8 * plan.totals.max()))
    assert found.attempts
    for attempt in found.attempts:
        assert make_moe(8, "dp:8", attempt.flags).totals.max() == attempt.needed <= 0.8 * plan.totals.max()
