"""Settings that make a plan fit, as they are found by planning: what is suggested is loaded and planned again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import Config, load_command, load_config, to_yaml
from megatron_hetero.config.sections import USABLE_GIB, EstimateConfig, GpuName
from megatron_hetero.estimate import search as changes
from megatron_hetero.estimate import search as fitting
from megatron_hetero.estimate.estimate import Estimate
from megatron_hetero.estimate.problems import problems_of
from megatron_hetero.estimate.search import (
    CHANGES,
    SHOWN,
    Attempt,
    Change,
    find_fitting,
    flags_of,
    smaller_micro_batches,
    with_settings,
)
from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.layout.layout import Layout
from tests.support.matrix import thinned
from tests.unit.estimate.conftest import MakePlan

PlanFlags = Callable[[str], list[str]]


@dataclass(frozen=True)
class Case:
    """Layouts on a number of ranks, and further flags."""

    ranks: int
    vision: str
    text: str
    more: str = ""

    @property
    def flags(self) -> str:
        return f"--vision-parallel {self.vision} --text-parallel {self.text} {self.more}"

    def __str__(self) -> str:
        return f"{self.vision}|{self.text} {self.more.replace('--', '')}"


CASES = [
    Case(1, "dp:1", "dp:1", "--train.micro_batch_size 4"),
    Case(2, "sp:2", "tp:2", "--train.micro_batch_size 2 --text-sequence_parallel false"),
    Case(2, "dp:1@0", "dp:1@1", "--schedule.run_ahead 4"),
    Case(4, "sp:4", "pp:4", "--train.global_batch_size 16 --schedule.waves 8"),
    Case(4, "dp:4", "tp:2,dp:2", "--train.micro_batch_size 2 --plan.images 3"),
    Case(4, "tp:2,dp:2", "cp:2,dp:2", "--text-recompute full --vision-sequence_parallel false"),
    Case(6, "dp:2@0-1", "tp:2,pp:2@2-5", "--schedule.run_ahead 3 --plan.image_side 1344"),
    Case(8, "sp:8", "tp:4,pp:2", "--train.global_batch_size 32 --train.micro_batch_size 4"),
    Case(8, "sp:4,dp:2", "tp:2,pp:2,dp:2", "--schedule.virtual_stages 2 --train.global_batch_size 32"),
    Case(8, "dp:4@0-3", "tp:2,dp:4", "--train.micro_batch_size 2 --model.freeze vision"),
]


LEAN = " ".join(
    f"--{m}-precision.master none --{m}-precision.moments 8bit --{m}-precision.gradients bfloat16 "
    f"--{m}-offload.states true"
    for m in ("vision", "text")
)
"""Of which no state is left to be kept in less."""


OFFLOADED = "--vision-offload.activations true --text-offload.activations true"
GB = r"[\d.]+ GB and [\d.]+ GB of all hosts"


def _with_flags(argv: list[str], flags: str) -> list[str]:
    """A command line with some flags added, in place of those that it has already."""
    found: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    for flag, values in re.findall(r"(--\S+)((?: (?!--)\S+)*)", flags):
        found[flag] = values.split()
    return [word for flag, values in found.items() for word in (flag, *values)]


def _suggested(attempt: Attempt, argv: list[str]) -> Estimate:
    """The plan of a user who adds the flags."""
    return Estimate.of(load_config(_with_flags(argv, attempt.flags)), attempt.estimate.world_size)


@given(case=st.sampled_from(CASES), share=st.floats(0.3, 0.99))
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_suggested_is_taken_and_fits(plan_flags: PlanFlags, case: Case, share: float) -> None:
    argv = plan_flags(case.flags)
    plan = Estimate.of(load_config(argv), case.ranks)
    limit = round(share * plan.totals.max())
    found = find_fitting(plan, limit)
    assert len(found.attempts) <= SHOWN and len({a.flags for a in found.attempts}) == len(found.attempts)
    assert [a.slowdown for a in found.attempts] == sorted(a.slowdown for a in found.attempts)
    for attempt in (*found.attempts, *filter(None, [found.larger])):
        again = _suggested(attempt, argv)
        assert again.totals.max() == attempt.needed <= limit
        assert again.job.batch.step_samples == plan.job.batch.step_samples
    if found.closest is not None:
        assert not found.attempts and found.closest.needed > limit
        assert _suggested(found.closest, argv).totals.max() == found.closest.needed


@pytest.mark.parametrize("case", thinned(CASES, 3), ids=str)
def test_one_setting_is_preferred_to_two(case: Case, plan_flags: PlanFlags) -> None:
    plan = Estimate.of(load_config(plan_flags(case.flags)), case.ranks)
    alone = [a for entry in CHANGES for c in entry(plan) if (a := fitting.planned(plan, c))]
    least = min(a.needed for a in alone)
    if least < plan.totals.max():
        [first, *_] = find_fitting(plan, least).attempts
        assert first.slowdown <= min(a.slowdown for a in alone if a.needed == least)
        assert any(first.change == a.change for a in alone)


def test_two_settings_are_found_where_one_is_too_little(make_plan: MakePlan) -> None:
    plan = make_plan(1, "dp:1", "dp:1", f"--train.micro_batch_size 2 --text-recompute selective {LEAN}")
    least = min(a.needed for entry in CHANGES for c in entry(plan) if (a := fitting.planned(plan, c)))
    found = find_fitting(plan, least - 1)
    assert found.attempts and all(len(a.change.settings) == 2 for a in found.attempts)


def test_a_smaller_budget_is_tried(make_plan: MakePlan) -> None:
    """Down to the longest sample that may come."""
    plan = make_plan(1, "dp:1", "dp:1", "--train.tokens_per_micro_batch 16000 --data.max_seq_length 2048")
    tried = [change.settings["train.tokens_per_micro_batch"] for change in smaller_micro_batches(plan)]
    assert tried == [8000, 4000]


def test_the_problem_names_flags_memory_and_time(make_plan: MakePlan) -> None:
    lean = f"{LEAN} --text-recompute selective --vision-recompute selective"
    plan = make_plan(1, "dp:1", "dp:1", f"--train.micro_batch_size 4 --plan.memory_gb 34 {lean}")
    [problem] = [p for p in problems_of(plan) if "memory_gb" in p.found]
    assert re.match(
        r".*\(plan\.memory_gb\), 34 GB, is not enough for 1 rank: rank 0 \(vision\.0\+text\.0\) needs "
        r"[\d.]+ GB, [\d.]+ GB of it allowance, .* activations",
        problem.found,
    ), problem.found
    assert re.fullmatch(
        rf"try --train\.micro_batch_size 2 \({GB}, about 1\.05 times .*\), or "
        rf"--text-offload\.activations true \({GB}, about 1\.\d\d times .*\)",
        problem.fix,
    ), problem.fix


def test_where_nothing_is_enough_the_plan_says_by_how_much_and_which_ranks_are(make_plan: MakePlan) -> None:
    plan = make_plan(1, "dp:1", "dp:1", f"--plan.memory_gb l4 {LEAN}")
    [problem] = [p for p in problems_of(plan) if "memory_gb" in p.found]
    assert "23.7 GB of l4, is not enough" in problem.found
    assert re.fullmatch(
        rf"no one or two settings .*: the closest are --\S+ true(?: --\S+ full)?, with {GB} "
        r"\([\d.]+ GB too much\)\. 2 ranks are enough: --world-size 2 .*--vision-parallel dp:2 .*\([\d.]+ GB and .*\)",
        problem.fix,
    ), problem.fix


def test_where_no_number_of_ranks_is_enough_there_is_advice(make_plan: MakePlan) -> None:
    fix = next(p.fix for p in problems_of(make_plan(1, "dp:1", "dp:1", "--plan.memory_gb 0.5")) if "GB" in p.fix)
    assert "more ranks" in fix and fix.endswith("train.micro_batch_size")


def test_layouts_of_some_ranks_grow_where_they_are(make_plan: MakePlan) -> None:
    flags = f"--train.global_batch_size 16 --plan.tokens 128 {LEAN} {OFFLOADED}"
    plan = make_plan(3, "dp:1@0", "pp:2@1-2", flags)
    larger = find_fitting(plan, round(0.85 * plan.totals.max())).larger
    assert larger is not None and larger.estimate.world_size == 6
    layouts = larger.estimate.job.layouts
    assert layouts["vision"].ranks == (0, 1) and layouts["text"].ranks == (2, 3, 4, 5)


def test_an_entry_is_a_function_in_the_table(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that saves nothing, one that is refused, and one that saves the optimizer's state."""

    def entry(plan: Estimate) -> Iterator[Change]:
        yield Change({"data.workers": 0})
        yield Change({"train.micro_batch_size": 3})
        yield Change({"optimizer.name": "sgd"}, unseen=2.0)

    monkeypatch.setattr(fitting, "CHANGES", (entry,))
    plan = make_plan(1, "dp:1", "dp:1")
    [attempt] = find_fitting(plan, round(0.8 * plan.totals.max())).attempts
    assert attempt.flags == "--optimizer.name sgd" and attempt.slowdown == 2.0


def test_entries_keep_out_of_what_is_in_use(make_plan: MakePlan) -> None:
    flags = f"--schedule.kind recompute --vision-recompute full --text-recompute full {LEAN}"
    flags += f" --vision-chunk 8192 --text-chunk 8192 {OFFLOADED} --vision-zero 3"
    plan = make_plan(4, "sp:4", "tp:4", flags)
    assert [change for entry in CHANGES for change in entry(plan)] == []


def test_long_videos_take_several_calls(make_plan: MakePlan) -> None:
    video = "--plan.images 0 --plan.videos 1 --plan.frames 512 --plan.frame_side 224 --data.max_seq_length 65536"
    plan = make_plan(1, "dp:1", "dp:1", f"{video} --train.global_batch_size 1")
    [change] = changes.several_calls(plan)
    assert change.settings == {"modules.vision.patches_per_call": changes.CALL} and change.unseen > 1
    attempt = fitting.planned(plan, change)
    assert attempt is not None
    fewer = attempt.estimate
    assert fewer.totals.max() < plan.totals.max() and fewer.simulation.seconds > plan.simulation.seconds
    assert not list(changes.several_calls(fewer))


def test_ranks_of_a_text_replica_stay_in_a_node(make_plan: MakePlan) -> None:
    plan = make_plan(16, "sp:16", "tp:4,dp:4", "--train.global_batch_size 16")
    found = [change.settings["modules.text.parallel"] for change in changes.text_over_more_ranks(plan)]
    assert found == ["tp:8,dp:2", "tp:4,dp:2,pp:2", "tp:4,pp:4", "tp:4,cp:2,dp:2", "tp:4,cp:4"]
    # Experts are divided over the ranks of a stage at most.
    folds = replace(plan.job.text, layout=Layout.parse("tp:4,ep:16", 16, views=[EXPERTS]))
    folded = replace(plan, job=replace(plan.job, modules={**plan.job.modules, "text": folds}))
    found = [str(change.settings["modules.text.parallel"]) for change in changes.text_over_more_ranks(folded)]
    assert [layout.partition(",ep:")[2] for layout in found] == ["16", "8", "4", "16", "16"]


def test_large_images_are_split_over_ranks(make_plan: MakePlan) -> None:
    """One image for two ranks: each rank gets half of it, in place of one all of it."""
    plan = make_plan(2, "dp:2", "tp:2", "--plan.image_side 3584 --plan.tokens 64")
    found = find_fitting(plan, round(0.99 * plan.totals.max())).attempts
    assert found[0].flags == "--vision-parallel sp:2" and found[0].slowdown < 1


def test_a_search_in_a_large_world_makes_few_plans(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(fitting, "planned", lambda base, change, world=None: made.append(change))
    plan = make_plan(4096, "sp:8", "tp:4,pp:4,dp:256", "--train.global_batch_size 4096")
    find_fitting(plan, 1)
    assert len(made) < 40


# --------------------------------------------------------------------------------------------------- edits


def test_settings_are_changed_together(plan_flags: PlanFlags) -> None:
    config = load_config(plan_flags("--schedule.waves 2 --vision-parallel sp:4"))
    edits = {
        "schedule.kind": "recompute", "schedule.waves": None, "modules.text.recompute": "full",
        "modules.text.parallel": "tp:4", "modules.text.sequence_parallel": True,
    }  # fmt: skip
    changed = with_settings(config, edits)
    assert (changed.schedule.kind, changed.schedule.waves) == ("recompute", None)
    assert changed.module("vision") == config.module("vision") and changed.module("text").recompute == "full"
    assert changed.module("text").parallel == "tp:4"
    assert flags_of(edits) == (
        "--schedule.kind recompute --schedule.waves none --text-recompute full --text-parallel tp:4 "
        "--text-sequence_parallel true"
    )
    assert load_config(_with_flags(plan_flags("--vision-parallel sp:4"), flags_of(edits))) == changed


def test_settings_are_checked_as_a_user_s(plan_flags: PlanFlags) -> None:
    config: Config = load_config(plan_flags(""))
    with pytest.raises(UserError, match=r"schedule\.waves"):
        with_settings(config, {"schedule.waves": 0})


# -------------------------------------------------------------------------------------- GPUs and allowance


def test_gpus_are_known_by_name(plan_flags: PlanFlags, tmp_path: Path) -> None:
    assert set(get_args(GpuName)) == USABLE_GIB.keys()
    for name, gib in USABLE_GIB.items():
        plan = load_config(["--config", str(_written(tmp_path, name)), *plan_flags("")]).plan
        assert (plan.memory_gb, plan.memory_bytes) == (name, round(gib * 2**30))
        assert EstimateConfig(memory_gb=gib * 2**30 / 1e9).memory_bytes == plan.memory_bytes
    assert EstimateConfig().memory_bytes is None


def _written(folder: Path, name: str) -> Path:
    """A configuration that names a GPU, as a run would record it."""
    (folder / "gpu.yaml").write_text(f"plan:\n  memory_gb: {name}\n", encoding="utf-8")
    return folder / "gpu.yaml"


def test_a_recorded_configuration_names_the_gpu_again(plan_flags: PlanFlags, tmp_path: Path) -> None:
    config, _ = load_command(plan_flags("--plan --plan.memory_gb rtx-4090"))
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(["--config", str(tmp_path / "config.yaml")]) == config


def test_the_allowance_is_counted(make_plan: MakePlan) -> None:
    usual = make_plan(2, "sp:2", "tp:2")
    tensors = usual.memory.sum(axis=1)
    assert (usual.allowance[:, 0] == 10**9).all() and (usual.allowance[:, 1] > 0).all()
    assert np.allclose(usual.allowance[:, 2], 0.05 * tensors, atol=1)
    assert (usual.totals == tensors + usual.allowance.sum(axis=1)).all()


def test_a_plan_just_below_the_memory_without_its_allowance_does_not_fit(make_plan: MakePlan) -> None:
    plan = make_plan(4, "sp:4", "tp:4")
    for needed, is_short in ((plan.memory.sum(axis=1).max(), True), (plan.totals.max(), False)):
        limited = make_plan(4, "sp:4", "tp:4", f"--plan.memory_gb {needed / 1e9 + 0.001}")
        assert any("memory_gb" in p.found for p in problems_of(limited)) == is_short


def test_ranks_on_a_cpu_need_no_allowance(plan_flags: PlanFlags) -> None:
    plan = Estimate.of(load_config(plan_flags("--vision-parallel sp:2 --text-parallel tp:2")), 2, gpu=False)
    assert not plan.allowance.any()
