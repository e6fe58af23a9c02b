"""Broken schedules are caught, and shown where they are broken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measuring.actions import parsed
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.check import ScheduleError, check_schedule
from megatron_hetero.schedule.program import Module, Schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from tests.unit.schedule.oracle import Failure, execute
from tests.unit.schedule.shapes import PIPELINE, layouts, schedules, with_actions


def point(draw: st.DrawFn, schedule: Schedule) -> tuple[int, int]:
    """Any role, and any of its actions."""
    role = draw(st.integers(0, len(schedule.roles) - 1))
    return role, draw(st.integers(0, len(schedule.roles[role].actions) - 1))


@st.composite
def removals(draw: st.DrawFn) -> Schedule:
    schedule = draw(schedules(most_batches=5))
    role, at = point(draw, schedule)
    actions = schedule.roles[role].actions
    return with_actions(schedule, role, [*actions[:at], *actions[at + 1 :]])


@st.composite
def repetitions(draw: st.DrawFn) -> Schedule:
    schedule = draw(schedules(most_batches=5))
    role, at = point(draw, schedule)
    actions = schedule.roles[role].actions
    to = draw(st.integers(0, len(actions)))
    return with_actions(schedule, role, [*actions[:to], actions[at], *actions[to:]])


@st.composite
def changes(draw: st.DrawFn) -> Schedule:
    """A field of an action has another value: its micro-batch, stage, peer, kind, module or sort."""
    schedule = draw(schedules(most_batches=5))
    role, at = point(draw, schedule)
    actions = list(schedule.roles[role].actions)
    old = actions[at]
    others = {
        "micro_batch": [m for m in range(schedule.micro_batches + 1) if m != old.micro_batch],
        "kind": [kind for kind in "FRB" if kind != old.kind],
        "op": [op for op in ("run", "send", "irecv", "wait", "start", "finish") if op != old.op],
        "module": [name for name in [*schedule.module, "nobody"] if name != old.module],
    }
    if old.stage is not None:
        others["stage"] = [stage for stage in range(9) if stage != old.stage]
    if isinstance(old.peer, int):
        others["peer"] = [stage for stage in range(9) if stage != old.peer]
    field = draw(st.sampled_from(sorted(others)))
    actions[at] = replace(old, **{field: draw(st.sampled_from(others[field]))})
    return with_actions(schedule, role, actions)


@st.composite
def disorders(draw: st.DrawFn) -> Schedule:
    """An action is somewhere else in its role's list: often harmless, else a deadlock or a use before the wait."""
    schedule = draw(schedules(most_batches=5))
    role, at = point(draw, schedule)
    actions = list(schedule.roles[role].actions)
    moved = actions.pop(at)
    near = draw(st.booleans())
    to = draw(st.integers(max(0, at - 4), min(len(actions), at + 4)) if near else st.integers(0, len(actions)))
    actions.insert(to, moved)
    return with_actions(schedule, role, actions)


@given(st.one_of(removals(), repetitions(), changes()))
@settings(max_examples=120)
def test_wrong_actions_are_always_caught(broken: Schedule) -> None:
    with pytest.raises(ScheduleError, match="<-- ERROR HERE"):
        check_schedule(broken)


@given(disorders(), st.integers(0, 1000))
@settings(max_examples=120)
def test_what_cannot_be_executed_does_not_pass(schedule: Schedule, seed: int) -> None:
    try:
        execute(schedule, seed)
    except Failure:
        with pytest.raises(ScheduleError, match="<-- ERROR HERE"):
            check_schedule(schedule)


# ------------------------------------------------------------------------------------- what is said, and where


def swapped(schedule: Schedule, role: int, one: str, other: str) -> Schedule:
    """The schedule with two of a role's actions, given by their texts, in each other's place."""
    actions = list(schedule.roles[role].actions)
    a, b = (actions.index(parsed(text)) for text in (one, other))
    actions[a], actions[b] = actions[b], actions[a]
    return with_actions(schedule, role, actions)


def message(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as raised:
        check_schedule(schedule)
    return str(raised.value)


COLOCATED = build_schedule(layouts(a="sp:2@0-1", b="dp:1@0", text="tp:2@0-1"), 2)


def test_a_role_of_ranks_that_hold_other_stages() -> None:
    schedule = build_schedule(layouts(a="dp:1@2", text="tp:2,pp:2@0-3"), 2)
    first, second, _ = schedule.roles
    said = "found ranks 0-1,3 .text.0., rank 2 .*, expected ranks 0-1 .text.0., rank 2 .*, rank 3 .text.1."
    with pytest.raises(ScheduleError, match=said):
        check_schedule(replace(schedule, roles=(replace(first, ranks=(0, 1, 3)), second)))


def test_a_missing_receive() -> None:
    kept = [a for a in PIPELINE.roles[2].actions if str(a) != "text.1<0.F1"]
    said = message(with_actions(PIPELINE, 2, kept))
    assert "rank 2 (text.1), at `text.1<0.F1!`: found no `text.1<0.F1`" in said
    marked = next(line for line in said.splitlines() if "ERROR HERE" in line)
    assert "text.1<0.F1! <-- ERROR HERE" in marked


def test_a_missing_last_action_is_marked_at_the_end() -> None:
    actions = PIPELINE.roles[0].actions
    said = message(with_actions(PIPELINE, 0, list(actions[:-1])))
    assert f"at the end: found no `{actions[-1]}`" in said and "<-- ERROR HERE" in said


def test_another_micro_batch() -> None:
    changed = [replace(a, micro_batch=0) if str(a) == "text.1.F1" else a for a in PIPELINE.roles[2].actions]
    said = message(with_actions(PIPELINE, 2, changed))
    assert "found `text.1.F0` twice" in said and "`text.1.F1` is missing" in said


def test_use_before_the_wait() -> None:
    said = message(swapped(PIPELINE, 1, "vision>text.F1!", "text.0.F1"))
    assert "at `text.0.F1`: found `vision>text.F1!` after it" in said


def moved(schedule: Schedule, role: int, texts: list[str], before: str) -> Schedule:
    """The schedule with some of a role's actions in front of another one."""
    rest = [str(a) for a in schedule.roles[role].actions if str(a) not in texts]
    at = rest.index(before)
    return with_actions(schedule, role, [parsed(text) for text in [*rest[:at], *texts, *rest[at:]]])


def test_a_deadlock_names_who_waits_for_whom() -> None:
    """The first stage wants a gradient before it runs F1, the second runs F1 before it computes that gradient."""
    gradient = ["text.0<1.B0", "text.0<1.B0!", "text.0.B0", "text>vision.B0"]
    broken = moved(PIPELINE, 1, gradient, before="vision>text.F1!")
    broken = moved(broken, 2, ["text.1<0.F1!", "text.1.F1"], before="text.1.B0")
    said = message(moved(broken, 2, ["text.1<0.F1"], before="text.1.F0"))
    assert "a deadlock" in said and "wait in a cycle" in said
    assert "rank 2 (text.1) for rank 1 (text.0) for rank 2 (text.1)" in said
    backward, forward = "communicator `text backward from stage 1`", "communicator `text forward from stage 0`"
    assert said.splitlines()[1:7] == [
        f"rank 2 (text.1): `text.1>0.B0` on {backward} begins after `text.1<0.F1!`",
        "rank 2 (text.1): `text.1<0.F1!` waits for the end of `text.1<0.F1`",
        f"rank 2 (text.1): `text.1<0.F1` on {forward} waits for rank 1 (text.0) to begin `text.0>1.F1`",
        f"rank 1 (text.0): `text.0>1.F1` on {forward} begins after `text.0<1.B0!`",
        "rank 1 (text.0): `text.0<1.B0!` waits for the end of `text.0<1.B0`",
        f"rank 1 (text.0): `text.0<1.B0` on {backward} waits for rank 2 (text.1) to begin `text.1>0.B0`",
    ]
    assert said.count("<-- ERROR HERE") == 6


def test_crossings_of_an_edge_in_different_orders() -> None:
    apart = build_schedule(layouts(vision="dp:2@0-1", text="dp:1@2"), 3, ScheduleSettings(run_ahead=2))
    said = message(moved(apart, 1, ["vision>text.F1"], before="vision>text.F0"))
    assert "on communicator `vision>text` is queued behind" in said


def test_crossings_that_share_ranks_in_different_orders() -> None:
    said = message(moved(COLOCATED, 1, ["b>text.F0!"], before="a>text.F0!"))
    assert "a deadlock" in said and "waits for rank 0 (a.0+b.0+text.0) to begin" in said


def test_messages_in_another_order_than_they_are_sent() -> None:
    irecvs = [str(a) for a in PIPELINE.roles[1].actions if str(a).startswith("text.0<1") and not str(a).endswith("!")]
    actions = [str(a) for a in PIPELINE.roles[1].actions if str(a) not in irecvs]
    said = message(with_actions(PIPELINE, 1, list(map(parsed, [*reversed(irecvs), *actions]))))
    assert "on communicator `text backward from stage 1` is queued behind `text.1>0.B0`" in said


def test_too_many_activations() -> None:
    model = layouts(vision="sp:2@0-1", text="pp:2@0-1")
    schedule = build_schedule(model, 6, ScheduleSettings(waves=6))
    claimed = tuple(
        Module(m.name, m.layout, m.style, 3 if m.style == "waves" else 0) for m in schedule.modules
    )  # The same order, of a module that is to run in waves of 3, so that 4 live.
    said = message(replace(schedule, modules=claimed))
    assert "at `vision.0.F4`: found activations of 5 micro-batches of `vision`, expected at most 4" in said
    assert "vision.0.F4 <-- ERROR HERE" in said


def test_an_excerpt_shows_what_is_near() -> None:
    schedule = build_schedule(layouts(text="pp:16@0-15"), 32)
    actions = [a for a in schedule.roles[9].actions if str(a) != "text.9<8.F20"]
    said, at = message(with_actions(schedule, 9, actions)).splitlines(), actions.index(parsed("text.9<8.F20!"))
    near = [f"{n:6}  {actions[n]}" for n in range(at - 4, at + 5)]
    near[4] += " <-- ERROR HERE"
    assert said[1:] == ["rank 9 (text.9):", *near]
