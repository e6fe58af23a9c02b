"""Checks a schedule before it runs, and reports the first error with its location. Writes schedules as text.

In this order, since each check relies on those before:

  1. the actions of a role: none missing (such as the receive for another role's send), duplicated, or of a module,
     stage or micro-batch that is not its own;
  2. their order on the role: nothing is used before it has been waited for, or sent before it is computed;
  3. deadlock: no cycle of ranks that wait for each other, by the rules of NCCL (`deadlock`). Receives in another order
     than their sends are one, and crossings of an edge in different orders. The message shows it;
  4. residency: what a rank's GPU has begun and waits for other ranks leaves SMs for the rest (`most_resident`): a CTA
     of NCCL has up to 640 threads, and is counted as an SM;
  5. memory: no rank holds activations of more micro-batches than its module's style allows.

The text of a schedule has a line per step and a column per role. Columns wait for each other as specified in `actions`:

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

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import NamedTuple

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.communicators import gradient_uses, max_ctas
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.deadlock import find_cycle, issues
from megatron_hetero.schedule.program import Role, Schedule, use_of
from megatron_hetero.schedule.semantics import Point, expected_actions, local_dependencies, replay, steps

EMPTY = "-"
MARK = "<-- ERROR HERE"
SHOWN_ROLES = 6
"""The most columns of an excerpt."""


def format_schedule(schedule: Schedule) -> str:
    """Write a schedule as text, each action of which `Action.parse` reads."""
    roles = range(len(schedule.roles))
    lines = _aligned([*_titles(schedule, roles), *_cells(schedule, roles, steps(replay(schedule)))])
    edges = f"edges: {' '.join(map(str, schedule.edges)) or EMPTY}"
    return "\n".join([f"micro-batches: {schedule.micro_batches}", edges, *map(str, schedule.modules), *lines])


def excerpt(schedule: Schedule, points: Sequence[Point], around: int = 4) -> str:
    """Write the grid around `points`, which are marked. Their roles come first."""
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


class ScheduleError(UserError):
    """A schedule that cannot run."""


@dataclass(frozen=True)
class ScheduleProblem:
    """An error in a schedule. `points`: its location, as roles and indices of actions, the main one first. `details`:
    further lines of the message.
    """

    points: tuple[Point, ...]
    found: str
    expected: str
    because: str
    details: tuple[str, ...] = ()
    fix: str = "fix the order of actions, or build the schedule with `build_schedule`"


def check_schedule(schedule: Schedule) -> None:
    """Raise `ScheduleError` for the first problem, if any."""
    problem = find_problem(schedule)
    if problem is None:
        return
    role, at = problem.points[0]
    actions = schedule.roles[role].actions
    what = f"`{actions[at]}`" if at < len(actions) else "the end"
    message = UserError.at(
        f"schedule, {schedule.roles[role]}, at {what}",
        found=problem.found,
        expected=problem.expected,
        because=problem.because,
        fix=problem.fix,
    )
    raise ScheduleError("\n".join([str(message), *problem.details, excerpt(schedule, problem.points)]))


def find_problem(schedule: Schedule) -> ScheduleProblem | None:
    """Return the first problem of the schedule, if any."""
    for find in (_wrong_actions, _wrong_order, _deadlocks, _too_many_resident, _too_many_activations):
        problem = next(find(schedule), None)
        if problem is not None:
            return problem
    return None


# ---------------------------------------------------------------------------------------- 1. the actions


def _wrong_actions(schedule: Schedule) -> Iterator[ScheduleProblem]:
    once, because = "each of its actions once", "every action is executed once, on all ranks that take part"
    for index, role in enumerate(schedule.roles):
        expected = expected_actions(schedule, role)
        missing = list(Counter(expected) - Counter(role.actions))
        known, seen = set(expected), set[Action]()
        for at, action in enumerate(role.actions):
            if action not in known or action in seen:
                found = f"`{action}` twice" if action in known else f"`{action}`, which is none of its actions"
                closest = f"; `{_closest(action, missing)}` is missing" if missing else ""
                yield ScheduleProblem(((index, at),), found, once, because + closest)
            seen.add(action)
        if missing:
            needing = (
                at for at, each in enumerate(role.actions) if missing[0] in local_dependencies(schedule, role, each)
            )
            point = index, next(needing, len(role.actions))
            yield ScheduleProblem((point,), f"no `{missing[0]}`", once, because)


def _closest(action: Action, others: Sequence[Action]) -> Action:
    """Return the action that differs from `action` in the fewest fields."""
    names = [each.name for each in fields(Action)]
    return max(others, key=lambda other: sum(getattr(action, name) == getattr(other, name) for name in names))


# ------------------------------------------------------------------------------------- 2. order on a rank


def _wrong_order(schedule: Schedule) -> Iterator[ScheduleProblem]:
    for index, role in enumerate(schedule.roles):
        done: set[Action] = set()
        for at, action in enumerate(role.actions):
            for needed in local_dependencies(schedule, role, action):
                if needed not in done:
                    found, because = f"`{needed}` after it", f"`{action}` depends on it"
                    yield ScheduleProblem(
                        ((index, at), (index, role.actions.index(needed))), found, "it before", because
                    )
            done.add(action)


# --------------------------------------------------------------------------------------------- 3. deadlock


def _deadlocks(schedule: Schedule) -> Iterator[ScheduleProblem]:
    if cycle := find_cycle(schedule):
        names = [name for name, _ in groupby((*cycle, cycle[0]), key=lambda each: each.ranks)]
        yield ScheduleProblem(
            tuple(dict.fromkeys((schedule.role_index[each.rank], each.at) for each in cycle)),
            "a deadlock",
            "an order in which all can proceed",
            f"on NCCL they wait in a cycle: {' for '.join(names)}",
            tuple(map(str, cycle)),
        )


# -------------------------------------------------------------------------------------------- 4. residency

MOST_CTAS = 80
"""The most CTAs of operations that wait. They leave room for a collective of the layers and some products: of the 132
SMs of an H100, on which NCCL gives a collective up to 32 CTAs, and of the 108 of an A100, on which it gives up to 24.
"""


class Resident(NamedTuple):
    """CTAs on a rank's GPU before the action at index `at` ends, and the communicators that they are of."""

    ctas: int
    at: int
    communicators: tuple[str, ...]


def most_resident(schedule: Schedule, role: Role) -> Resident:
    """Return the most CTAs that a rank of the role may have at a time. An operation is taken to last until it is waited
    for, a send to the end of the step.
    """
    held = {name: schedule.module[name] for name, _ in role.held_stages}
    sums = [use for m in held.values() if m.backward for use in gradient_uses(m.name, m.layout)]
    # By communicator, the index of its last operation and the CTAs of one.
    pending = {str(use): (-1, max_ctas(use) or 0) for use in sums}
    most = Resident(sum(ctas for _, ctas in pending.values()), 0, tuple(pending))
    issued = issues(schedule, role)
    for index, issue in enumerate(issued):
        if issue.waits is not None:
            stream = issued[issue.waits].stream
            if stream in pending and pending[stream][0] <= issue.waits:
                del pending[stream]  # A communicator is a queue: what came before has ended too.
        elif issue.stream is not None:
            pending[issue.stream] = index, max_ctas(use_of(schedule, role.actions[issue.at])) or 0
            if (now := sum(ctas for _, ctas in pending.values())) > most.ctas:
                most = Resident(now, issue.at, tuple(pending))
    return most


def _too_many_resident(schedule: Schedule) -> Iterator[ScheduleProblem]:
    for index, role in enumerate(schedule.roles):
        most = most_resident(schedule, role)
        if most.ctas > MOST_CTAS:
            yield ScheduleProblem(
                ((index, most.at),),
                f"communication that may occupy {most.ctas} SMs of a GPU at a time",
                f"at most {MOST_CTAS}",
                "waiting kernels may occupy the SMs that the kernels they wait for need",
                (f"operations that have begun: {', '.join(most.communicators)}",),
                "give modules ranks of their own, so that a rank takes part in fewer edges and pipelines",
            )


# ----------------------------------------------------------------------------------------------- 5. memory


def live_activations(schedule: Schedule, role: Role, module: str) -> list[int]:
    """Count, after each action of the role, the micro-batches (with virtual stages: the stages) whose activations of
    the module are live.
    """
    saves = schedule.module[module].forward_kinds[-1] if schedule.module[module].backward else None
    counts: list[int] = []
    live = 0
    for action in role.actions:
        if action.op == "run" and action.module == module:
            live += (action.kind == saves) - (action.kind == "B")
        counts.append(live)
    return counts


def _too_many_activations(schedule: Schedule) -> Iterator[ScheduleProblem]:
    for index, role in enumerate(schedule.roles):
        coordinates = ((name, schedule.module[name].coordinate(stage)) for name, stage in role.held_stages)
        for name, coordinate in dict.fromkeys(coordinates):
            bound = schedule.activation_bound(schedule.module[name], coordinate)
            counts = live_activations(schedule, role, name)
            if max(counts, default=0) > bound:
                at = next(i for i, count in enumerate(counts) if count > bound)
                found, expected = f"activations of {counts[at]} micro-batches of `{name}`", f"at most {bound}"
                because = f"`{schedule.module[name]}` bounds them, however many micro-batches there are"
                yield ScheduleProblem(((index, at),), found, expected, because)
