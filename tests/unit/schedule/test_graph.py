"""Schedules of graphs in which several modules are fed, on any ranks."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.check import check_schedule, live_activations
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from megatron_hetero.schedule.simulator import simulate
from tests.unit.schedule.gpus import Gpus
from tests.unit.schedule.oracle import execute
from tests.unit.schedule.shapes import graph_schedules, layouts

CHAIN = [("vision", "text"), ("text", "generator")]


def works(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{a.module[0]}{a.kind}{a.micro_batch}" for a in schedule.actions_of(rank) if a.op == "run")


def seconds(module: str, kind: str, stage: int) -> float:
    return {"F": 1.0, "B": 2.0}[kind]


@given(graph_schedules(), st.integers(0, 1000))
@settings(max_examples=50)
def test_every_graph_ends(schedule: Schedule, seed: int) -> None:
    check_schedule(schedule)
    execute(schedule, seed)
    assert not Gpus(schedule).run()


def test_modules_that_share_their_ranks_run_depth_first() -> None:
    model = layouts(vision="dp:2@0-1", text="tp:2@0-1", generator="sp:2@0-1")
    schedule = build_schedule(model, 2, edges=CHAIN)
    assert works(schedule, 0) == "vF0 tF0 gF0 gB0 tB0 vB0 vF1 tF1 gF1 gB1 tB1 vB1"


def test_a_chain_on_ranks_of_its_own_is_a_pipeline() -> None:
    """1F1B over four stages of three modules: eight micro-batches take no longer than in one module of four stages."""
    chain = layouts(vision="dp:2@0-1", text="pp:2@2-3", generator="tp:2@4-5")
    schedule = build_schedule(chain, 8, edges=CHAIN)
    alone = build_schedule(layouts(text="pp:4@0-3"), 8)
    assert simulate(schedule, seconds).seconds == simulate(alone, seconds).seconds == 33.0
    assert works(schedule, 4) == " ".join(f"gF{m} gB{m}" for m in range(8))
    assert works(schedule, 0).startswith("vF0 vF1 vF2 vF3 vB0 vF4 vB1 vF5")
    live = [live_activations(schedule, role, name) for role in schedule.roles for name, _ in role.held_stages]
    assert [max(each) for each in live] == [4, 3, 2, 1]


def test_what_lives_does_not_grow_with_the_number_of_micro_batches() -> None:
    model = layouts(audio="dp:1@0", vision="dp:2@1-2", text="pp:2@1-2", talker="dp:2@0,3")
    edges = [("audio", "text"), ("vision", "text"), ("text", "talker"), ("audio", "talker")]
    for micro_batches in (4, 32):
        schedule = build_schedule(model, micro_batches, edges=edges)
        assert [module.window for module in schedule.modules] == [4, 3, 3, 1]


def test_a_frozen_module_runs_as_far_ahead_as_one_that_trains() -> None:
    model = layouts(vision="dp:1@0", text="dp:1@1", generator="dp:1@2")
    schedule = build_schedule(model, 5, edges=CHAIN, forward_only=["vision"])
    assert works(schedule, 0) == "vF0 vF1 vF2 vF3 vF4"
    actions = [str(a) for a in schedule.actions_of(0)]
    assert actions.index("vision.0.F3") > actions.index("vision>text.F0!")
    assert works(build_schedule(model, 2, edges=CHAIN, forward_only=model), 2) == "gF0 gF1"


def test_stages_may_feed_a_module_that_feeds_them() -> None:
    """Rows come back to a later stage of the module that they left."""
    model, edges = layouts(text="pp:2@0-1", tool="dp:1@2"), [Edge("text", "tool", 0, 0), Edge("tool", "text", 0, 1)]
    schedule = build_schedule(model, 3, edges=edges)
    check_schedule(schedule)
    execute(schedule)


def test_the_module_that_all_others_feed_is_found() -> None:
    model = layouts(vision="dp:1@0", sound="dp:1@1", decoder="dp:2@2-3")
    edges = [("vision", "decoder"), ("sound", "decoder")]
    schedule = build_schedule(model, 2, ScheduleSettings(run_ahead=2), edges=edges)
    assert schedule.text.name == "decoder" and schedule.edges == (Edge("vision", "decoder"), Edge("sound", "decoder"))


@pytest.mark.parametrize(
    "edges, options, message",
    [
        (
            [("a", "b"), ("b", "c"), ("c", "a")],
            {},
            r"edges: found a cycle, .*a\.0 > b\.0 > c\.0 > a\.0|b\.0 > c\.0|c\.0 > a",
        ),
        ([("a", "b"), ("b", "b")], {}, r"edges: found a cycle, b\.0 > b\.0"),
        ([("a", "b"), ("b", "x")], {}, r"edges: found `b>x`, expected stages of `a` with 1, `b` with 1, `c` with 2"),
        ([("a", "b"), Edge("b", "c", 0, 2)], {}, r"edges: found `b\.0>c\.2`, expected stages of"),
        ([("a", "b"), ("b", "c")], {"forward_only": ["b"]}, r"forward_only: found `b` without `a`"),
        ([("a", "b"), ("b", "c")], {"forward_only": ["x"]}, r"forward_only: found `x`, expected some of a, b, c"),
        (
            [("a", "b"), ("b", "c")],
            {"settings": ScheduleSettings(waves=2)},
            r"settings: found .*waves=2.* expected none",
        ),
    ],
)
def test_what_cannot_run_is_refused(
    edges: Collection[Edge | tuple[str, str]], options: dict[str, object], message: str
) -> None:
    model = layouts(a="dp:1@0", b="dp:1@1", c="pp:2@2-3")
    with pytest.raises(UserError, match=message):
        build_schedule(model, 2, edges=edges, **options)  # pyright: ignore[reportArgumentType]
