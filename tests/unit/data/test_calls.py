"""Which micro-batches an encoder may compute in one call, and that schedules are sound if it does."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.data.balance import PATCHES_OF_A_CALL, cut_calls
from megatron_hetero.layout.layout import Layout
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from tests.unit.schedule.oracle import execute
from tests.unit.schedule.shapes import layouts, schedules


def called(schedule: Schedule) -> Schedule:
    """The schedule as it is executed where calls are as large as they may be: forwards with the first of a call,
    backwards with the last.
    """
    calls = {
        (module.name, m): call
        for module in schedule.modules
        for call in schedule.in_one_call(module.name)
        for m in call
    }
    roles = []
    for role in schedule.roles:
        computed = dict[Action, list[Action]]()
        for action in role.actions:
            call = calls[action.module, action.micro_batch]
            at = replace(action, micro_batch=call[-1 if action.kind == "B" else 0]) if action.op == "run" else action
            computed.setdefault(at, []).append(action)
        together = (computed[action] for action in role.actions if action in computed)
        roles.append(replace(role, actions=tuple(chain.from_iterable(together))))
    return replace(schedule, roles=tuple(roles))


@given(schedules(), st.integers(0, 1000))
@settings(max_examples=40)
def test_calls_as_large_as_they_may_be_keep_a_schedule_sound(schedule: Schedule, seed: int) -> None:
    """Also where the streams of a GPU share one queue."""
    for module in schedule.modules:
        assert [m for call in schedule.in_one_call(module.name) for m in call] == list(range(schedule.micro_batches))
    merged = called(schedule)
    check_schedule(merged)
    execute(merged, seed)


@pytest.mark.parametrize(
    "vision, text, batches, chosen, expected",
    [
        ("sp:2@0-1", "tp:2@0-1", 5, ScheduleSettings(waves=2), "0-1 2-3 4"),
        ("sp:2@0-1", "tp:2@0-1", 3, ScheduleSettings(), "0 1 2"),
        # When the next wave is encoded, the last pp - 1 micro-batches of this one are on their way.
        ("sp:2@0-1", "pp:2@0-1", 12, ScheduleSettings(), "0-4 5 6-11"),
        ("sp:4@0-3", "pp:4@0-3", 24, ScheduleSettings(), "0-8 9-11 12-23"),
        ("sp:2@0-1", "pp:2@0-1", 8, ScheduleSettings(waves=4, virtual_stages=2), "0-3 4-7"),
        ("sp:2@0-1", "pp:2@0-1", 4, ScheduleSettings("recompute"), "0 1 2 3"),
        ("pp:2@0-1", "pp:2@0-1", 4, ScheduleSettings(waves=4), "0 1 2 3"),
        ("dp:1@0", "pp:2@1-2", 3, ScheduleSettings(), "0 1 2"),
    ],
)
def test_together(vision: str, text: str, batches: int, chosen: ScheduleSettings, expected: str) -> None:
    schedule = build_schedule(layouts(vision=vision, text=text), batches, chosen)
    assert _runs(schedule.in_one_call("vision")) == expected


def test_without_gradients_a_wave_is_whole() -> None:
    model = layouts(vision="sp:2@0-1", text="pp:2@0-1")
    schedule = build_schedule(model, 8, ScheduleSettings(waves=4), forward_only=["vision"])
    assert _runs(schedule.in_one_call("vision")) == "0-3 4-7"


def _runs(calls: tuple[range, ...]) -> str:
    return " ".join(f"{call[0]}-{call[-1]}" if len(call) > 1 else str(call[0]) for call in calls)


MOST = PATCHES_OF_A_CALL


@pytest.mark.parametrize(
    "patches, expected",
    [
        ([MOST // 2, MOST // 2, 8, 0, 0], "0-1 2-3 4"),
        ([2 * MOST, 0, 8, MOST, 0], "0 1-2 3 4"),
        ([0, 0, 0, 0, 0], "0-3 4"),
        ([MOST, MOST, MOST, MOST, MOST], "0 1 2 3 4"),
    ],
)
def test_a_call_takes_what_it_has_room_for(patches: list[int], expected: str) -> None:
    runs, one, eight = [range(4), range(4, 5)], Layout.parse("dp:1", 1), Layout.parse("sp:2,dp:2,pp:3,tp:2", 24)
    smaller = [n // 8 for n in patches]
    assert _runs(cut_calls(smaller, runs, one, MOST // 8)) == _runs(cut_calls(patches, runs, one, 2 * MOST)) == expected
    assert _runs(cut_calls(patches, runs, eight, MOST // 4)) == expected, "four shards, which two ranks share"
    assert _runs(cut_calls(patches, runs, one)) == _runs(cut_calls([8 * n for n in patches], runs, eight)) == expected
