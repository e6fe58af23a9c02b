"""Times, bubbles and peaks, against what is known in closed form."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

from megatron_hetero.base.errors import UserError
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.check import ScheduleError, live_activations
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from megatron_hetero.schedule.simulator import Simulation, simulate
from tests.unit.schedule.shapes import PIPELINE, UNIT, layouts, schedules, unit, with_actions


def ends(simulation: Simulation) -> dict[str, tuple[float, float]]:
    """Start and end of each action of each role, by role and text."""
    pairs = zip(simulation.schedule.roles, simulation.spans, strict=True)
    return {f"{role.ranks[0]} {s.action}": (s.start, s.end) for role, spans in pairs for s in spans}


def peak_activations(schedule: Schedule, rank: int) -> dict[str, int]:
    """The most micro-batches (with virtual stages: stages) whose activations live at once, by module."""
    role = schedule.roles[schedule.role_index[rank]]
    names = dict.fromkeys(name for name, _ in role.held_stages)
    return {name: max(live_activations(schedule, role, name), default=0) for name in names}


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("batches", [8, 16])
def test_the_bubble_of_1f1b(pp: int, batches: int) -> None:
    """(pp - 1) of (M + pp - 1) forwards and backwards."""
    simulation = simulate(build_schedule(layouts(text=f"pp:{pp}@0-{pp - 1}"), batches), unit)
    assert simulation.seconds == 3 * (batches + pp - 1)
    assert [simulation.bubble(rank) for rank in range(pp)] == pytest.approx([(pp - 1) / (batches + pp - 1)] * pp)
    assert [peak_activations(simulation.schedule, rank) for rank in range(pp)] == [
        {"text": pp - rank} for rank in range(pp)
    ]


@pytest.mark.parametrize("pp, virtual", [(2, 2), (4, 2), (4, 3)])
def test_virtual_stages_divide_the_bubble(pp: int, virtual: int) -> None:
    """Narayanan et al. 2021, section 2.2.2: the bubble is (pp - 1) / virtual forwards and backwards."""
    schedule = build_schedule(layouts(text=f"pp:{pp}@0-{pp - 1}"), 4 * pp, ScheduleSettings(virtual_stages=virtual))
    simulation = simulate(schedule, lambda module, kind, stage: UNIT[kind] / virtual)
    assert simulation.seconds == pytest.approx(3 * (4 * pp + (pp - 1) / virtual))


def test_an_encoder_apart_is_the_stage_before_the_first() -> None:
    schedule = build_schedule(layouts(vision="dp:1@0", text="pp:3@1-3"), 8)
    assert simulate(schedule, unit).seconds == 3 * (8 + 3)


def test_encoders_side_by_side_cost_no_more_than_one() -> None:
    schedule = build_schedule(layouts(a="dp:1@0", b="dp:1@4", text="pp:3@1-3"), 8)
    assert simulate(schedule, unit).seconds == 3 * (8 + 3)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_how_far_a_fast_encoder_runs_ahead(run_ahead: int) -> None:
    """It starts a micro-batch when the text has received the one before it, or an earlier one by the run-ahead."""
    schedule = build_schedule(layouts(vision="dp:1@0", text="tp:1@1"), 6, ScheduleSettings(run_ahead=run_ahead))
    frozen = build_schedule(
        layouts(vision="dp:1@0", text="tp:1@1"), 6, ScheduleSettings(run_ahead=run_ahead), forward_only=["vision"]
    )
    for each in (schedule, frozen):
        at = ends(simulate(each, lambda module, kind, stage: 0.1 if module == "vision" else 5.0))
        for m in range(1 + run_ahead, 6):
            received = at[f"1 vision>text.F{m - 1 - run_ahead}!"][1]
            assert at[f"0 vision.0.F{m}"][0] >= received
        first = [at[f"0 vision.0.F{m}"][0] for m in range(run_ahead + 1)]
        assert max(first) < 1  # None of these waits for the text's five seconds.


def test_running_ahead_hides_transfers() -> None:
    model = layouts(vision="dp:1@0", text="tp:1@1")
    seconds = [
        simulate(build_schedule(model, 16, ScheduleSettings(run_ahead=ahead)), unit, transfers=0.5).seconds
        for ahead in (0, 1)
    ]
    assert seconds[1] == pytest.approx(16 * 3 + 1 + 0.5 + 0.5 + 2) and seconds[0] > 1.1 * seconds[1]


def test_waves_pay_for_their_turns_and_recompute_for_a_forward() -> None:
    model = layouts(vision="sp:4@0-3", text="pp:4@0-3")
    chosen = ScheduleSettings(waves=4), ScheduleSettings(waves=16), ScheduleSettings("recompute")
    waves, at_once, recompute = (simulate(build_schedule(model, 16, each), unit) for each in chosen)
    assert (waves.seconds, at_once.seconds, recompute.seconds) == (48 + 57 + 3 * 2, 48 + 57, 64 + 57)
    assert [peak_activations(s.schedule, 2)["vision"] for s in (waves, at_once, recompute)] == [7, 16, 1]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("batches", [16, 64])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_default_waves_cost_less_than_five_percent(pp: int, batches: int, share: float) -> None:
    """Over encoding everything first, for an encoder with that share of the text's work."""
    model = layouts(vision=f"sp:{pp}@0-{pp - 1}", text=f"pp:{pp}@0-{pp - 1}")
    waves, at_once = (
        simulate(
            build_schedule(model, batches, each), lambda m, k, s: UNIT[k] * (share if m == "vision" else 1)
        ).seconds
        for each in (ScheduleSettings(), ScheduleSettings(waves=batches))
    )
    assert waves <= 1.05 * at_once


def test_ranks_proceed_during_transfers() -> None:
    at = ends(
        simulate(build_schedule(layouts(text="pp:2@0-1"), 2), 1.0, {("text", "F", 0): 3.0, ("text", "B", 1): 0.0})
    )
    assert at["0 text.0.F1"] == (1, 2) and at["1 text.1<0.F0!"] == (0, 4)


@given(schedules(most_batches=6))
@settings(max_examples=80)
def test_times_agree_with_the_order(schedule: Schedule) -> None:
    simulation = simulate(schedule, unit, transfers=0.25)
    assert [tuple(s.action for s in spans) for spans in simulation.spans] == [r.actions for r in schedule.roles]
    for spans in simulation.spans:
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(spans))
        assert all(s.start <= s.end for s in spans)
    for rank in schedule.role_index:
        assert 0 <= simulation.bubble(rank) < 1 and simulation.busy(rank) <= simulation.seconds + 1e-9
    for module in schedule.modules:
        for rank in module.layout.ranks:
            bound = schedule.activation_bound(module, module.layout.coordinate(rank).pp)
            assert peak_activations(simulation.schedule, rank)[module.name] <= bound


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(UserError, match=r"simulation, durations: found nothing for \('vision', 'F', 0\)"):
        simulate(PIPELINE, {})
    lacking = with_actions(PIPELINE, 2, [a for a in PIPELINE.roles[2].actions if a.op != "send"])
    with pytest.raises(ScheduleError, match="found no `text.1>0.B0`"):
        simulate(lacking, unit)
