"""Schedules of hundreds of shapes pass the check and an independent execution rank by rank, and are what was asked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.check import check_schedule, live_activations
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleKind, ScheduleSettings, resolve_settings
from megatron_hetero.schedule.simulator import simulate
from tests.support.work import calls
from tests.unit.schedule.oracle import execute
from tests.unit.schedule.shapes import LARGE_AND_SMALL, layouts, schedules


def works(schedule: Schedule, rank: int, module: str | None = None) -> str:
    """What a rank runs, such as ``F0 F1 B0 B1``; with the module and stage where no module is given."""
    runs = [a for a in schedule.actions_of(rank) if a.op == "run" and a.module == (module or a.module)]
    return " ".join(f"{a.kind}{a.micro_batch}" if module else str(a) for a in runs)


def peak(schedule: Schedule, rank: int, module: str) -> int:
    """The most activations of the module that live on the rank."""
    return max(live_activations(schedule, schedule.roles[schedule.role_index[rank]], module))


@given(schedules(), st.integers(0, 1000))
@settings(max_examples=100)
def test_every_schedule_passes_and_runs(schedule: Schedule, seed: int) -> None:
    check_schedule(schedule)
    execute(schedule, seed)


@given(schedules())
@settings(max_examples=100)
def test_roles_part_the_ranks(schedule: Schedule) -> None:
    ranks = sorted(rank for module in schedule.modules for rank in set(module.layout.ranks))
    assert sorted(schedule.role_index) == sorted(set(ranks))
    for role in schedule.roles:
        for name, stage in role.held_stages:
            assert set(role.ranks) <= set(schedule.module[name].stage_ranks(stage))


def test_colocated_without_stages() -> None:
    schedule = build_schedule(layouts(vision="sp:8@0-7", text="tp:8@0-7"), 2)
    assert [str(a) for a in schedule.actions_of(3)][:8] == [
        "vision.0.F0", "vision>text.F0", "vision>text.F0!", "text.0.F0", "text.0.B0",
        "text>vision.B0", "text>vision.B0!", "vision.0.B0",
    ]  # fmt: skip
    assert len(schedule.roles) == 1 and peak(schedule, 0, "vision") == peak(schedule, 0, "text") == 1


def test_two_encoders_cross_concurrently() -> None:
    schedule = build_schedule(layouts(a="sp:2@0-1", b="tp:2@0-1", text="tp:2@0-1"), 1)
    assert [str(a) for a in schedule.actions_of(0)] == [
        "a.0.F0", "a>text.F0", "b.0.F0", "b>text.F0", "a>text.F0!", "b>text.F0!", "text.0.F0", "text.0.B0",
        "text>a.B0", "text>b.B0", "text>a.B0!", "a.0.B0", "text>b.B0!", "b.0.B0",
    ]  # fmt: skip


def test_one_forward_one_backward() -> None:
    schedule = build_schedule(layouts(text="pp:3@0-2"), 5)
    assert works(schedule, 0, "text") == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert works(schedule, 1, "text") == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert works(schedule, 2, "text") == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_interleaved_stages() -> None:
    """As in figure 4 of Narayanan et al. 2021 (arXiv 2104.04473), for two ranks with two stages each."""
    schedule = build_schedule(layouts(text="pp:2@0-1"), 4, ScheduleSettings(virtual_stages=2))
    assert works(schedule, 0).split()[:9] == [
        "text.0.F0", "text.0.F1", "text.2.F0", "text.2.F1", "text.0.F2", "text.2.B0", "text.0.F3", "text.2.B1",
        "text.2.F2",
    ]  # fmt: skip
    assert works(schedule, 1).split()[:6] == [
        "text.1.F0", "text.1.F1", "text.3.F0", "text.3.B0", "text.3.F1", "text.3.B1",
    ]  # fmt: skip


@pytest.mark.parametrize("pp", range(2, 7))
@pytest.mark.parametrize("virtual", range(2, 5))
def test_interleaved_micro_batches_need_not_fill_the_last_group(pp: int, virtual: int) -> None:
    for batches in range(1, 3 * pp):
        schedule = build_schedule(
            layouts(text=f"pp:{pp}@0-{pp - 1}"), batches, ScheduleSettings(virtual_stages=virtual)
        )
        check_schedule(schedule)


def test_waves() -> None:
    schedule = build_schedule(layouts(vision="sp:2@0-1", text="pp:2@0-1"), 5, ScheduleSettings(waves=2))
    assert works(schedule, 0, "vision") == works(schedule, 1, "vision") == "F0 F1 B0 F2 F3 B1 B2 F4 B3 B4"
    assert works(schedule, 0, "text") == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert works(schedule, 1).startswith(
        "vision.0.F0 vision.0.F1 text.1.F0 text.1.B0 text.1.F1 text.1.B1 vision.0.B0 vision.0.F2 vision.0.F3 text.1.F2"
    )


def test_a_later_stage_turns_to_the_encoder_earlier_in_its_own_order() -> None:
    """The example at the head of `builders`; the number of text works before the second encoding, by stage."""
    schedule = build_schedule(layouts(vision="sp:4@0-3", text="pp:4@0-3"), 8, ScheduleSettings(waves=4))
    before = [works(schedule, rank).split("vision.0.F4")[0].count("text") for rank in range(4)]
    assert before == [5, 6, 7, 6]


def test_virtual_stages_drain_between_waves() -> None:
    model = layouts(vision="sp:2@0-1", text="pp:2@0-1")
    schedule = build_schedule(model, 4, ScheduleSettings(waves=2, virtual_stages=2))
    assert works(schedule, 0, "vision") == "F0 F1 B0 B1 F2 F3 B2 B3"
    assert peak(schedule, 0, "vision") == 2


def test_recompute_keeps_only_rows() -> None:
    model = layouts(vision="sp:2@0-1", text="pp:2@0-1")
    schedule = build_schedule(model, 3, ScheduleSettings("recompute"))
    assert works(schedule, 0, "vision") == "F0 F1 F2 R0 B0 R1 B1 R2 B2"
    assert works(schedule, 1, "text") == "F0 B0 F1 B1 F2 B2"


@pytest.mark.parametrize("vision, text", [("sp:4@0-3", "pp:4@0-3"), ("sp:2@0-1", "pp:2@1-2"), ("pp:2@0-1", "pp:2@1-2")])
@pytest.mark.parametrize("kind", ["waves", "recompute"])
def test_encoder_activations_do_not_grow_with_micro_batches(vision: str, text: str, kind: ScheduleKind) -> None:
    waves = 4 if kind == "waves" else None
    model = layouts(vision=vision, text=text)
    built = [build_schedule(model, batches, ScheduleSettings(kind, waves)) for batches in (8, 16, 64)]
    peaks = [[peak(schedule, rank, "vision") for rank in model["vision"].ranks] for schedule in built]
    first, last = model["vision"].pp, 1
    assert peaks[0] == peaks[1] == peaks[2]
    in_waves = 4 + model["text"].pp - 1
    assert max(peaks[0]) == (in_waves if waves else 2 * (first - last) + 1) and peaks[0][-1] == (
        in_waves if waves else 1
    )


@pytest.mark.parametrize("run_ahead", range(4))
@pytest.mark.parametrize("vision", ["dp:1@0", "pp:2@0-1", "dp:2@0-1"])
def test_an_encoder_is_ahead_by_no_more_than_it_may(vision: str, run_ahead: int) -> None:
    model = layouts(vision=vision, text="pp:3@2-4")
    for batches in (8, 16):
        schedule = build_schedule(model, batches, ScheduleSettings(run_ahead=run_ahead))
        last = model["vision"].ranks[-1]
        assert peak(schedule, last, "vision") == 3 + 1 + run_ahead
        assert peak(schedule, 0, "vision") == 3 + 1 + run_ahead + model["vision"].pp - 1


@pytest.mark.parametrize("run_ahead", range(5))
@pytest.mark.parametrize("virtual", [1, 2])
def test_rows_leave_one_micro_batch_after_the_other(run_ahead: int, virtual: int) -> None:
    """So that on NCCL none stand behind others, where they would keep a GPU with one hardware queue from computing."""
    model = layouts(vision="pp:2@0-1", text="pp:2@2-3")
    chosen = ScheduleSettings(run_ahead=run_ahead, virtual_stages=virtual)
    for batches in range(1, 9):
        actions = build_schedule(model, batches, chosen).actions_of(1)
        crossings = [str(a) for a in actions if a.op in ("start", "finish") and a.kind == "F"]
        assert crossings == [f"vision>text.F{m}{end}" for m in range(batches) for end in ("", "!")]


def test_concurrent_encoders_and_their_order() -> None:
    schedule = build_schedule(layouts(a="dp:1@0", b="dp:1@1", text="pp:2@2-3"), 5, ScheduleSettings(run_ahead=0))
    assert works(schedule, 0, "a") == works(schedule, 1, "b") == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"


def test_an_encoder_apart_runs_ahead_of_one_that_shares_ranks() -> None:
    schedule = build_schedule(layouts(a="sp:2@0-1", b="dp:1@2", text="pp:2@0-1"), 4, ScheduleSettings(waves=2))
    assert [str(m) for m in schedule.modules] == ["a: sp:2@0-1 waves 2", "b: dp:1@2 ahead 1", "text: pp:2@0-1 text"]
    assert works(schedule, 2, "b") == "F0 F1 F2 F3 B0 B1 B2 B3"


def test_modules_without_backward() -> None:
    model = layouts(vision="dp:1@0", text="pp:2@1-2")
    frozen = build_schedule(model, 3, forward_only=["vision"])
    assert works(frozen, 0) == "vision.0.F0 vision.0.F1 vision.0.F2" and peak(frozen, 0, "vision") == 0
    assert "B" in works(frozen, 1) and not any(a.kind == "B" and a.op == "start" for a in frozen.actions_of(1))
    assert works(build_schedule(model, 3, forward_only=model), 1, "text") == "F0 F1 F2"


def test_partners_have_the_same_other_coordinates() -> None:
    schedule = build_schedule(layouts(text="tp:2,pp:2,dp:2@0-7"), 1)
    sent = next(a for a in schedule.actions_of(3) if a.op == "send")
    assert schedule.peer_rank(3, sent) == 7


def test_defaults_follow_from_the_layouts() -> None:
    assert resolve_settings(ScheduleSettings(), layouts(vision="sp:8@0-7", text="tp:8@0-7"), 8) == ScheduleSettings(
        "waves", 1
    )
    assert resolve_settings(
        ScheduleSettings(), layouts(vision="sp:8@0-7", text="tp:2,pp:4@0-7"), 20
    ) == ScheduleSettings("waves", 10)
    assert resolve_settings(
        ScheduleSettings(), layouts(vision="dp:2@0-1", text="tp:2,pp:3@2-7"), 20
    ) == ScheduleSettings("ahead", None, 1)
    assert resolve_settings(ScheduleSettings(), layouts(text="pp:2@0-1"), 20) == ScheduleSettings("ahead")


@pytest.mark.parametrize(
    "settings_, batches, said",
    [
        (ScheduleSettings("wave"), 1, "did you mean `waves`"),  # pyright: ignore[reportArgumentType]
        (ScheduleSettings("ahead"), 1, "`vision` and `text` share ranks"),
        (ScheduleSettings(waves=0), 1, "ScheduleSettings.waves: found 0, expected .*1 or more"),
        (ScheduleSettings(run_ahead=1), 1, "ScheduleSettings.run_ahead: found 1, expected no value"),
        (ScheduleSettings("recompute", waves=2), 1, "because the schedule is `recompute`"),
        (ScheduleSettings(virtual_stages=2), 1, "give `text` a pp of 2 or more"),
        (ScheduleSettings(), 0, "micro-batches: found 0"),
    ],
)
def test_settings_that_do_not_fit(settings_: ScheduleSettings, batches: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_schedule(layouts(vision="sp:2@0-1", text="tp:2@0-1"), batches, settings_)


def test_settings_that_do_not_fit_separate_ranks() -> None:
    model = layouts(vision="dp:1@0", text="tp:1@1")
    for wrong in (ScheduleSettings("waves"), ScheduleSettings(waves=2), ScheduleSettings("recompute")):
        with pytest.raises(UserError, match="Set ScheduleSettings.kind to auto|Leave ScheduleSettings.waves out"):
            build_schedule(model, 2, wrong)
    with pytest.raises(UserError, match="found `text` without `vision`"):
        build_schedule(model, 2, forward_only=["text"])
    with pytest.raises(UserError, match="Name modules"):
        build_schedule(model, 2, forward_only=["audio"])
    with pytest.raises(UserError, match="no layout for module `text`"):
        build_schedule({"vision": model["vision"]}, 2)


@pytest.mark.parametrize("large, small, roles", LARGE_AND_SMALL.values(), ids=LARGE_AND_SMALL)
@pytest.mark.parametrize("virtual", [1, 4])
def test_sixteen_thousand_ranks_are_hardly_more_work_than_their_roles(
    large: dict[str, str], small: dict[str, str], roles: int, virtual: int
) -> None:
    made: list[Schedule] = []

    def all_of(shape: dict[str, str]) -> None:
        made.append(build_schedule(layouts(**shape), 16, ScheduleSettings(virtual_stages=virtual)))
        check_schedule(made[-1])
        simulate(made[-1], 1.0)

    work = [calls(all_of, shape) / len(made[-1].roles) for shape in (small, large)]
    assert len(made[1].roles) == roles and work[1] < 2 * work[0]
