"""Schedules as text: a line per step, a column per role. Columns wait for each other as specified in `actions`.

micro-batches: 2
edges: vision>text
vision: dp:1@0 ahead 0
text: pp:2@1-2 text
step  vision.0         text.0           text.1
      @0               @1               @2
   0  vision.0.F0      vision>text.F0   text.1<0.F0
   1  vision>text.F0   -                -
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatron_hetero.schedule.checks.replay import Point, replay, steps
from megatron_hetero.schedule.program import Schedule

EMPTY = "-"
MARK = "<-- ERROR HERE"
SHOWN_ROLES = 6
"""The most columns of an excerpt."""


def format_schedule(schedule: Schedule) -> str:
    """The text of a schedule, each action of which `Action.parse` reads."""
    roles = range(len(schedule.roles))
    lines = _aligned([*_titles(schedule, roles), *_cells(schedule, roles, steps(replay(schedule)))])
    edges = f"edges: {' '.join(map(str, schedule.edges)) or EMPTY}"
    return "\n".join([f"micro-batches: {schedule.micro_batches}", edges, *map(str, schedule.modules), *lines])


def excerpt(schedule: Schedule, points: Sequence[Point], around: int = 4) -> str:
    """The grid around `points`, which are marked. Their roles come first."""
    step = steps(replay(schedule))
    marks = dict.fromkeys(points, f" {MARK}")
    near = {step.get(point, step.get((point[0], point[1] - 1), 0)) for point in points}
    roles = list(dict.fromkeys([role for role, _ in points] + list(range(len(schedule.roles)))))[:SHOWN_ROLES]
    cells = _cells(schedule, roles, step, marks)
    shown = [cell for cell in cells if any(abs(int(cell[0]) - at) <= around for at in near)]
    left = len(schedule.roles) - len(roles)
    more = [f"({left} other roles are left out)"] if left else []
    return "\n".join([*_aligned([*_titles(schedule, roles), *shown]), *more])


def _titles(schedule: Schedule, roles: Collection[int]) -> list[list[str]]:
    held = [schedule.roles[role] for role in roles]
    return [["step", *(role.name for role in held)], ["", *(role.ranks_text for role in held)]]


def _cells(
    schedule: Schedule, roles: Collection[int], step: Mapping[Point, int], marks: Mapping[Point, str] | None = None
) -> list[list[str]]:
    marks = marks or {}
    height = max(step.values(), default=-1) + 1
    columns: list[list[str]] = []
    for role in roles:
        actions = schedule.roles[role].actions
        column = [EMPTY] * (height + 1)
        for at, action in enumerate(actions):
            column[step[role, at]] = f"{action}{marks.get((role, at), '')}"
        if (role, len(actions)) in marks:
            column[step.get((role, len(actions) - 1), -1) + 1] = marks[role, len(actions)].strip()
        columns.append(column)
    used = height + any(column[height] != EMPTY for column in columns)
    return [[str(at), *(column[at] for column in columns)] for at in range(used)]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned: list[str] = []
    for first, *rest in lines:
        cells = (cell.ljust(width) for cell, width in zip(rest, widths[1:], strict=True))
        aligned.append("  ".join([first.rjust(widths[0]) if first.isdigit() else first.ljust(widths[0]), *cells]))
    return [line.rstrip() for line in aligned]
