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

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import cast, get_args

from megatron_hetero.layout.edge import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.schedule.actions import NAME, Action
from megatron_hetero.schedule.checks.replay import Point, replay, steps
from megatron_hetero.schedule.program import Module, Role, Schedule, Style, find_roles

EMPTY = "-"
MARK = "<-- ERROR HERE"
SHOWN_ROLES = 6
"""The most columns of an excerpt."""


def format_schedule(schedule: Schedule) -> str:
    """The text of a schedule; `parse_schedule` is the inverse."""
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


# ------------------------------------------------------------------------------------------------- reading


def parse_schedule(text: str) -> Schedule:
    """The inverse of `format_schedule`. Raises `ValueError`."""
    lines = [line for line in text.splitlines() if line.strip()]
    head = next((i for i, line in enumerate(lines) if line.split()[0] == "step"), None)
    found, edges = (re.fullmatch(p, line) for p, line in zip((_COUNT, _EDGES), [*lines, "", ""], strict=False))
    if head is None or head + 1 >= len(lines) or not found or not edges:
        raise ValueError(
            "found no schedule, expected `micro-batches: N`, `edges:`, a line per module, `step` and the grid"
        )
    modules = tuple(_parse_module(line) for line in lines[2:head])
    roles = {role.name: role for role in find_roles(modules)}
    names, rows = lines[head].split()[1:], [line.split()[1:] for line in lines[head + 2 :]]
    if set(names) != set(roles):
        raise ValueError(f"found columns {', '.join(names)}, expected those of the modules: {', '.join(roles)}")
    if wrong := next((row for row in rows if len(row) != len(names)), None):
        raise ValueError(f"found {len(wrong)} cells in `{' '.join(wrong)}`, expected {len(names)}")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    filled = [_with_actions(roles[name], column) for name, column in zip(names, columns, strict=True)]
    return Schedule(modules, tuple(Edge.parse(edge) for edge in (edges[1] or "").split()), int(found[1]), tuple(filled))


def _with_actions(role: Role, cells: Sequence[str]) -> Role:
    return replace(role, actions=tuple(Action.parse(cell) for cell in cells if cell != EMPTY))


_MODULE = re.compile(
    rf"({NAME}): (\S+) ({'|'.join(get_args(Style))})(?: (\d+))?(?: virtual (\d+))?"
    r"( forward-only)?"
)
_COUNT, _EDGES = r"micro-batches: (\d+)", rf"edges: (?:{EMPTY}|(.+))"


def _parse_module(line: str) -> Module:
    found = _MODULE.fullmatch(line.strip())
    if not found:
        raise ValueError(f"found `{line}`, expected a module such as `vision: sp:8@0-7 waves 4`")
    name, layout, style, window, virtual, forward_only = found.groups()
    return Module(
        name,
        Layout.parse(layout, module=name),
        cast(Style, style),
        int(window or 0),
        int(virtual or 1),
        not forward_only,
    )
