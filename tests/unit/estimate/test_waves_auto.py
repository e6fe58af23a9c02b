"""`schedule.waves auto`: the plan chooses how many micro-batches share an encoder call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.estimate import Estimate, with_waves
from megatron_hetero.estimate.report import assumptions
from megatron_hetero.job.job import JobSpec
from tests.unit.estimate.conftest import MakePlan

LAYOUTS = "--vision-parallel sp:8 --text-parallel tp:4,dp:2 "
AUTO = "--schedule.waves auto --train.global_batch_size 16 "


def _needed(make_plan: MakePlan, waves: int) -> int:
    flags = f"--schedule.waves {waves} --train.global_batch_size 16"
    return int(make_plan(8, "sp:8", "tp:4,dp:2", flags).totals.max())


@pytest.mark.parametrize("waves", [4, 3, 2, 1])
def test_waves_are_the_largest_that_fit(waves: int, make_plan: MakePlan) -> None:
    """A step has eight micro-batches, three calls of up to three."""
    limit = _needed(make_plan, waves) / 1e9 + 1e-6
    plan = make_plan(8, "sp:8", "tp:4,dp:2", f"{AUTO} --plan.memory_gb {limit:.9f}")
    assert plan.job.config.schedule.waves == waves
    assert int(plan.totals.max()) == _needed(make_plan, waves)
    shown = any(f"encoded in waves of {waves} micro-batches" in line for line in assumptions(plan))
    assert shown == (waves > 1)


def test_nothing_fits(make_plan: MakePlan) -> None:
    plan = make_plan(8, "sp:8", "tp:4,dp:2", f"{AUTO} --plan.memory_gb 1")
    assert plan.job.config.schedule.waves == 1


@pytest.mark.parametrize("micro_batches, waves", [(1, 1), (2, 2), (5, 3), (6, 3), (8, 4), (9, 3)])
def test_waves_of_a_step_are_equally_large(micro_batches: int, waves: int, make_plan: MakePlan) -> None:
    flags = f"--schedule.waves auto --plan.memory_gb h200 --train.global_batch_size {2 * micro_batches}"
    assert make_plan(8, "sp:8", "tp:4,dp:2", flags).job.config.schedule.waves == waves


def test_text_stages_have_waves_already(make_plan: MakePlan) -> None:
    more = "--train.global_batch_size 16"
    auto = make_plan(4, "sp:4", "pp:4", f"{more} --schedule.waves auto --plan.memory_gb 80")
    assert auto.job.config.schedule.waves is None
    assert auto.job.schedule == make_plan(4, "sp:4", "pp:4", more).job.schedule


def test_other_numbers_stay(plan_flags: Callable[[str], list[str]]) -> None:
    for given in ("", "--schedule.waves 2"):
        config = load_config(plan_flags(f"{LAYOUTS} {given} --train.global_batch_size 16"))
        assert with_waves(config, 8) is config


@pytest.mark.parametrize(
    "flags, message",
    [
        (f"{LAYOUTS} {AUTO}", r"found auto without plan\.memory_gb, .*Set plan\.memory_gb, or give a number"),
        (
            f"--vision-parallel dp:4@0-3 --text-parallel tp:4@4-7 {AUTO} --plan.memory_gb 80",
            r"because no encoder runs in waves\. Remove it",
        ),
        (f"{LAYOUTS} {AUTO} --plan.memory_gb 80 --schedule.kind recompute", "because no encoder runs in waves"),
    ],
)
def test_refused(flags: str, message: str, plan_flags: Callable[[str], list[str]]) -> None:
    with pytest.raises(UserError, match=rf"schedule\.waves.*{message}"):
        Estimate.of(load_config(plan_flags(flags)), 8)


def test_a_job_has_a_number(plan_flags: Callable[[str], list[str]]) -> None:
    config = load_config(plan_flags(f"{LAYOUTS} {AUTO} --plan.memory_gb 80"))
    with pytest.raises(AssertionError, match="the plan resolves"):
        JobSpec.of(config, 8)
