"""Schedules as text and as pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

import megatron_hetero.schedule.actions as actions
from megatron_hetero.base.errors import UserError
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.drawing import draw, timeline, timelines_of
from megatron_hetero.schedule.settings import ScheduleSettings
from megatron_hetero.schedule.simulator import simulate
from tests.unit.schedule.shapes import layouts, unit

SCHEDULE = build_schedule(layouts(vision="dp:1@0", text="pp:2@1-2"), 2, ScheduleSettings(run_ahead=0))


def test_the_grid_in_the_specification_is_what_is_built() -> None:
    """Its columns are the actions of the roles, as far as it goes."""
    lines = (actions.__doc__ or "").split("step  vision.0 ")[1].strip().splitlines()[2:]
    columns = zip(*(line.split()[1:] for line in lines if line.strip()[0].isdigit()), strict=True)
    shown = [[cell for cell in column if cell != "-"] for column in columns]
    built = [list(map(str, role.actions)) for role in SCHEDULE.roles]
    assert len(shown) == 3 and [own[: len(cells)] for own, cells in zip(built, shown, strict=True)] == shown


def test_timeline() -> None:
    assert timeline(simulate(SCHEDULE, unit)).splitlines() == [
        "0 vision.0  vF0 vF1                     vB0 =       vB1 =",
        "1 text.0        tF0 tF1         tB0 =       tB1 =",
        "2 text.1            tF0 tB0 =   tF1 tB1 =",
    ]


def test_a_long_timeline_is_cut() -> None:
    shown = timeline(
        simulate(build_schedule(layouts(vision="dp:1@0", view="dp:1@2", text="tp:1@1"), 50), unit), columns=5
    )
    assert [line.split()[2] for line in shown.splitlines()] == ["visF0", "tF0", "vieF0"]
    assert all(line.endswith(" …") for line in shown.splitlines())


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    simulation = simulate(SCHEDULE, unit, 0.1)
    for name in ("a.svg", "a.png"):
        draw({"simulated": simulation, "recorded": timelines_of(simulation)}, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    assert "vision forward" in (tmp_path / "a.svg").read_text() or "<path" in (tmp_path / "a.svg").read_text()
    with pytest.raises(UserError, match=r"ends in .svg or .png"):
        draw({}, tmp_path / "a.jpg")
