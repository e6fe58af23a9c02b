"""Checks a schedule before it runs, and reports the first error with its location.

Each check relies on the checks before it:

  1. actions: no action of a role is missing (such as the receive for another role's send), duplicated, or of a module,
     stage or micro-batch that the role does not have;
  2. order on a role: nothing is used before it has been waited for, or sent before it is computed;
  3. deadlock: no cycle of ranks that wait for each other, by the rules of NCCL (`deadlock`), such as receives in
     another order than their sends, or crossings of an edge in different orders. The message shows the cycle;
  4. residency: operations that have begun on a GPU and wait for other ranks leave SMs for other kernels
     (`peak_resident`): a CTA of NCCL has up to 640 threads, and is counted as an SM;
  5. memory: no rank holds activations of more micro-batches than its module's style allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.communicators import gradient_uses, max_ctas
from megatron_hetero.schedule.actions import Action, WorkKind, finish, run, start
from megatron_hetero.schedule.deadlock import find_cycle, issues
from megatron_hetero.schedule.program import Role, Schedule, find_roles, use_of
from megatron_hetero.schedule.transfers import input_of, output_of

Point = tuple[int, int]
"""The index of a role, and the index of one of its actions."""
AROUND = 4
"""Number of actions that an error message shows before and after the wrong action."""
SHOWN_ROLES = 6
"""Maximum number of roles whose actions an error message shows."""


class ScheduleError(UserError):
    """An error that describes why a schedule cannot run, and where."""


def check_schedule(schedule: Schedule) -> None:
    """Check that a schedule can run. Raises `ScheduleError` for the first problem."""
    _check_roles(schedule)
    _check_actions(schedule)
    _check_order(schedule)
    _check_deadlock(schedule)
    _check_residency(schedule)
    _check_activations(schedule)


def _error(
    schedule: Schedule,
    points: Sequence[Point],
    found: str,
    expected: str,
    because: str,
    fix: str = "fix the order of actions, or build the schedule with `build_schedule`",
    details: Sequence[str] = (),
) -> ScheduleError:
    """Return an error that shows the actions at `points`, the main point first. `details`: further lines of text."""
    role, at = points[0]
    actions = schedule.roles[role].actions
    what = f"`{actions[at]}`" if at < len(actions) else "the end"
    where = f"schedule, {schedule.roles[role]}, at {what}"
    message = UserError.at(where, found=found, expected=expected, because=because, fix=fix)
    return ScheduleError("\n".join([str(message), *details, *_excerpt(schedule, points)]))


def _excerpt(schedule: Schedule, points: Sequence[Point]) -> list[str]:
    """Return lines that show the actions around `points`, role by role, and mark the actions at `points`."""
    marked: dict[int, set[int]] = {}
    for role, at in points:
        marked.setdefault(role, set()).add(at)
    lines: list[str] = []
    for role, errors in [*marked.items()][:SHOWN_ROLES]:
        lines.append(f"{schedule.roles[role]}:")
        for at, action in enumerate([*schedule.roles[role].actions, "the end"]):
            if any(abs(at - error) <= AROUND for error in errors):
                lines.append(f"{at:6}  {action}{' <-- ERROR HERE' if at in errors else ''}")
    return lines


# ---------------------------------------------------------------------------------------- 1. the actions


def _check_roles(schedule: Schedule) -> None:
    expected = find_roles(schedule.modules)
    if tuple(replace(role, actions=()) for role in schedule.roles) != expected:
        where, found = "schedule, roles", ", ".join(map(str, schedule.roles))
        because, fix = "ranks of a role hold the same stages", "take the roles of `find_roles`"
        raise ScheduleError.at(where, found=found, expected=", ".join(map(str, expected)), because=because, fix=fix)


def expected_actions(schedule: Schedule, role: Role) -> list[Action]:
    """Return all actions that the role must execute, each once, in no particular order."""
    actions: list[Action] = []
    for name, stage in role.held_stages:
        module = schedule.module[name]
        kinds: list[WorkKind] = [*module.forward_kinds, *(["B"] if module.backward else [])]
        for kind in kinds:
            for m in range(schedule.micro_batches):
                work = run(kind, name, stage, m)
                actions += [*(input_of(schedule, work) or ()), work, *filter(None, [output_of(schedule, work)])]
    for edge in schedule.edges:
        if any(schedule.crosses(role, edge)):
            for kind in ("F", "B") if schedule.returns(edge) else ("F",):
                for m in range(schedule.micro_batches):
                    actions += [start(kind, edge, m), finish(kind, edge, m)]
    return actions


def _check_actions(schedule: Schedule) -> None:
    once, because = "each of its actions once", "every action is executed once, on all ranks that take part"
    for index, role in enumerate(schedule.roles):
        expected, present = expected_actions(schedule, role), set(role.actions)
        missing = [action for action in expected if action not in present]
        known, seen = set(expected), set[Action]()
        for at, action in enumerate(role.actions):
            if action not in known or action in seen:
                found = f"`{action}` twice" if action in known else f"`{action}`, which is none of its actions"
                instead = f"; `{missing[0]}` is missing" if missing else ""
                raise _error(schedule, [(index, at)], found, once, because + instead)
            seen.add(action)
        if missing:
            needing = (
                at for at, each in enumerate(role.actions) if missing[0] in local_dependencies(schedule, role, each)
            )
            at = next(needing, len(role.actions))
            raise _error(schedule, [(index, at)], f"no `{missing[0]}`", once, because)


# ------------------------------------------------------------------------------------- 2. order on a rank


def local_dependencies(schedule: Schedule, role: Role, action: Action) -> list[Action]:
    """Return the actions that the same rank must have executed before `action`."""
    match action.op:
        case "run":
            return _dependencies_of_work(schedule, action)
        case "send":
            return [run(action.kind, action.module, action.own_stage, action.micro_batch)]
        case "irecv":
            return []
        case "wait" | "finish":
            return [action.posted]
        case "start":
            leaves, enters = schedule.crosses(role, action.edge)
            source_stage, target_stage = schedule.stages_of(action.edge)
            if action.kind == "F":
                return [run("F", action.module, source_stage, action.micro_batch)] if leaves else []
            return [run("B", action.edge.target, target_stage, action.micro_batch)] if enters else []


def _dependencies_of_work(schedule: Schedule, work: Action) -> list[Action]:
    place, m = work.place, work.micro_batch
    needed = [arriving[1]] if (arriving := input_of(schedule, work)) else []
    if work.kind == "B":
        needed.append(run(schedule.module[work.module].forward_kinds[-1], *place, m))
        return needed + [finish("B", edge, m) for edge in schedule.leaving.get(place, ()) if schedule.returns(edge)]
    if work.kind == "R":
        needed.append(run("F", *place, m))
    return needed + [finish("F", edge, m) for edge in schedule.entering.get(place, ())]


def _check_order(schedule: Schedule) -> None:
    for index, role in enumerate(schedule.roles):
        done: set[Action] = set()
        for at, action in enumerate(role.actions):
            for needed in local_dependencies(schedule, role, action):
                if needed not in done:
                    points = [(index, at), (index, role.actions.index(needed))]
                    because = f"`{action}` depends on it"
                    raise _error(schedule, points, f"`{needed}` after it", "it before", because)
            done.add(action)


# --------------------------------------------------------------------------------------------- 3. deadlock


def _check_deadlock(schedule: Schedule) -> None:
    if cycle := find_cycle(schedule):
        names = [str(role) for role, _ in groupby([*cycle, cycle[0]], key=lambda each: each.role)]
        raise _error(
            schedule,
            [*dict.fromkeys((schedule.role_index[each.role.ranks[0]], each.at) for each in cycle)],
            "a deadlock",
            "an order in which all can proceed",
            f"on NCCL they wait in a cycle: {' for '.join(names)}",
            details=[each.text for each in cycle],
        )


# -------------------------------------------------------------------------------------------- 4. residency

MAX_CTAS = 80
"""Maximum number of CTAs of waiting operations. The remaining SMs fit a collective of the layers and some matrix
products: an H100 has 132 SMs, and NCCL collectives use up to 32 CTAs on it; an A100 has 108 SMs, and up to 24 CTAs.
"""


class Resident(NamedTuple):
    """The number of CTAs on a rank's GPU during the action at index `at`, and the communicators that use the CTAs."""

    ctas: int
    at: int
    communicators: tuple[str, ...]


def peak_resident(schedule: Schedule, role: Role) -> Resident:
    """Return the peak number of NCCL CTAs on a rank of the role. An operation is assumed to last until it is waited
    for, a send until the end of the step.
    """
    held = {name: schedule.module[name] for name, _ in role.held_stages}
    sums = [use for m in held.values() if m.backward for use in gradient_uses(m.name, m.layout)]
    # By communicator: the index of its latest operation, and the CTAs of one operation.
    pending = {str(use): (-1, max_ctas(use) or 0) for use in sums}
    peak = Resident(sum(ctas for _, ctas in pending.values()), 0, tuple(pending))
    issued = issues(schedule, role)
    for index, issue in enumerate(issued):
        if issue.waits is not None:
            stream = issued[issue.waits].stream
            if stream in pending and pending[stream][0] <= issue.waits:
                del pending[stream]  # A communicator is a queue: all its earlier operations have ended too.
        elif issue.stream is not None:
            pending[issue.stream] = index, max_ctas(use_of(schedule, role.actions[issue.at])) or 0
            if (now := sum(ctas for _, ctas in pending.values())) > peak.ctas:
                peak = Resident(now, issue.at, tuple(pending))
    return peak


def _check_residency(schedule: Schedule) -> None:
    for index, role in enumerate(schedule.roles):
        peak = peak_resident(schedule, role)
        if peak.ctas > MAX_CTAS:
            raise _error(
                schedule,
                [(index, peak.at)],
                f"communication that may occupy {peak.ctas} SMs of a GPU at a time",
                f"at most {MAX_CTAS}",
                "waiting kernels may occupy the SMs that the kernels they wait for need",
                "give modules ranks of their own, so that a rank takes part in fewer edges and pipelines",
                [f"operations that have begun: {', '.join(peak.communicators)}"],
            )


# ----------------------------------------------------------------------------------------------- 5. memory


def live_activations(schedule: Schedule, role: Role, module: str) -> list[int]:
    """Return, after each action of the role, the number of micro-batches (with virtual stages: of stages) whose
    activations of the module are live.
    """
    saves = schedule.module[module].forward_kinds[-1] if schedule.module[module].backward else None
    counts: list[int] = []
    live = 0
    for action in role.actions:
        if action.op == "run" and action.module == module:
            live += (action.kind == saves) - (action.kind == "B")
        counts.append(live)
    return counts


def _check_activations(schedule: Schedule) -> None:
    for index, role in enumerate(schedule.roles):
        coordinates = ((name, schedule.module[name].coordinate(stage)) for name, stage in role.held_stages)
        for name, coordinate in dict.fromkeys(coordinates):
            bound = schedule.activation_bound(schedule.module[name], coordinate)
            for at, count in enumerate(live_activations(schedule, role, name)):
                if count > bound:
                    found, expected = f"activations of {count} micro-batches of `{name}`", f"at most {bound}"
                    because = f"`{schedule.module[name]}` bounds them, however many micro-batches there are"
                    raise _error(schedule, [(index, at)], found, expected, because)
