"""The specification in `actions` as functions: the actions that a role executes, the dependencies of each, and the
order in which they can happen, without times.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.actions import Action, WorkKind, finish, run, start
from megatron_hetero.schedule.program import Module, Role, Schedule
from megatron_hetero.schedule.transfers import input_of, output_of


def expected_actions(schedule: Schedule, role: Role) -> list[Action]:
    """Return the actions that the role executes, each once, in no particular order."""
    found: list[Action] = []
    for name, stage in role.held_stages:
        module = schedule.module[name]
        kinds: list[WorkKind] = [*module.forward_kinds, *(["B"] if module.backward else [])]
        for kind in kinds:
            for m in range(schedule.micro_batches):
                work = run(kind, name, stage, m)
                found += [*(input_of(module, work) or ()), work, *filter(None, [output_of(module, work)])]
    for edge in schedule.edges:
        if any(schedule.crosses(role, edge)):
            for kind in ("F", "B") if schedule.returns(edge) else ("F",):
                for m in range(schedule.micro_batches):
                    found += [start(kind, edge, m), finish(kind, edge, m)]
    return found


def local_dependencies(schedule: Schedule, role: Role, action: Action) -> list[Action]:
    """Return the actions that the same rank must have executed before `action`."""
    match action.op:
        case "run":
            return _dependencies_of_work(schedule, schedule.module[action.module], action)
        case "send":
            return [run(action.kind, action.module, action.own_stage, action.micro_batch)]
        case "irecv":
            return []
        case "wait":
            return [Action("irecv", action.kind, action.module, action.micro_batch, action.stage, action.peer)]
        case "finish":
            return [start(action.kind, action.edge, action.micro_batch)]
        case "start":
            (leaves, enters), (own, stage) = schedule.crosses(role, action.edge), schedule.stages_of(action.edge)
            if action.kind == "F":
                return [run("F", action.module, own, action.micro_batch)] if leaves else []
            return [run("B", action.edge.target, stage, action.micro_batch)] if enters else []


def _dependencies_of_work(schedule: Schedule, module: Module, work: Action) -> list[Action]:
    stage, m = work.own_stage, work.micro_batch
    here = module.name, stage
    needed = [arriving[1]] if (arriving := input_of(module, work)) else []
    if work.kind == "R":
        needed.append(run("F", module.name, stage, m))
    if work.kind == "B":
        needed.append(run(module.forward_kinds[-1], module.name, stage, m))
        needed += [finish("B", edge, m) for edge in schedule.leaving.get(here, ()) if schedule.returns(edge)]
    else:
        needed += [finish("F", edge, m) for edge in schedule.entering.get(here, ())]
    return needed


class Event(NamedTuple):
    """A role has executed an action, or with `reached` has reached it, which `finish` on other roles may depend on."""

    role: int
    action: Action
    reached: bool = False


class Dependencies:
    """The dependencies of actions on other ranks, by role.

    A role depends on what any of its ranks depends on, and has executed what all of its ranks have: roles are replayed
    as if their ranks proceeded at one pace. If this finds no deadlock, there is none.
    """

    def __init__(self, schedule: Schedule):
        self._schedule = schedule

    def of(self, role: int, action: Action) -> list[Event]:
        """Return the events that the action waits for; none for actions that do not block."""
        if action.op == "wait" and isinstance(action.peer, int):
            sent = Action("send", action.kind, action.module, action.micro_batch, action.peer, action.stage)
            return [Event(other, sent) for other in self.peer_roles(role, action)]
        if action.op != "finish" or action.peer not in self._participants:
            return []
        if self._schedule.collective[action.edge]:
            return [Event(other, action, reached=True) for other in self._participants[action.edge]]
        started = start(action.kind, action.edge, action.micro_batch)
        mine, others = self.own_and_other_side(role, action.edge)
        needed = [Event(other, started) for other in others]
        if self.receives(role, action):
            needed += [Event(other, action, reached=True) for other in mine if other != role]
        return needed

    def receives(self, role: int, action: Action) -> bool:
        """Whether the role is on the receiving side of the crossing."""
        return self._schedule.crosses(self._schedule.roles[role], action.edge)[action.kind == "F"]

    def peer_roles(self, role: int, action: Action) -> tuple[int, ...]:
        """Return the roles of the peers of a pipeline transfer of `role`."""
        module = self._schedule.module.get(action.module)
        if module is None or not isinstance(action.peer, int):
            return ()
        return self._peer_roles.get((module.name, role, module.coordinate(action.peer)), ())

    def own_and_other_side(self, role: int, edge: Edge) -> tuple[list[int], list[int]]:
        """Return the roles that take part in crossings on the role's own side, and those on the other side."""
        sides = [[o for o in self._participants[edge] if self._is_source(o, edge) == s] for s in (True, False)]
        return (sides[0], sides[1]) if self._is_source(role, edge) else (sides[1], sides[0])

    def _is_source(self, role: int, edge: Edge) -> bool:
        return self._schedule.crosses(self._schedule.roles[role], edge)[0]

    @cached_property
    def _participants(self) -> dict[Edge, tuple[int, ...]]:
        """The roles that take part in the crossings of each edge."""
        roles = list(enumerate(self._schedule.roles))
        return {
            edge: tuple(i for i, role in roles if any(self._schedule.crosses(role, edge)))
            for edge in self._schedule.edges
        }

    @cached_property
    def _peer_roles(self) -> dict[tuple[str, int, int], tuple[int, ...]]:
        """The roles of peers, by module, role and adjacent pipeline coordinate."""
        found: dict[tuple[str, int, int], set[int]] = {}
        for name, here, there, pair in self._pairs():
            found.setdefault((name, pair[0], there), set()).add(pair[1])
            found.setdefault((name, pair[1], here), set()).add(pair[0])
        return {key: tuple(sorted(roles)) for key, roles in found.items()}

    def _pairs(self) -> Iterator[tuple[str, int, int, tuple[int, int]]]:
        role_of = self._schedule.role_index
        for module in self._schedule.modules:
            for here in range(module.layout.pp if module.layout.pp > 1 else 0):
                there = (here + 1) % module.layout.pp
                ends = zip(module.stage_ranks(here), module.stage_ranks(there), strict=True)
                for pair in {(role_of[a], role_of[b]) for a, b in ends}:
                    yield module.name, here, there, pair


Point = tuple[int, int]
"""A role and the index of one of its actions."""


@dataclass(frozen=True, eq=False)
class Replay:
    """The result of `replay`.

    `order`: the actions in an order in which they can happen; `done`: the number that each role executes; `needed`: the
    dependencies on other roles of each `wait` and `finish` that was reached; `happened`: all events.
    """

    schedule: Schedule
    order: list[Point]
    done: list[int]
    needed: dict[Point, list[Event]]
    happened: set[Event]

    @property
    def stuck(self) -> list[Point]:
        """The actions at which roles wait forever."""
        ends = (len(role.actions) for role in self.schedule.roles)
        return [(role, at) for role, (at, end) in enumerate(zip(self.done, ends, strict=True)) if at < end]


def replay(schedule: Schedule) -> Replay:
    """Execute all actions symbolically, each as soon as possible."""
    dependencies, found = Dependencies(schedule), Replay(schedule, [], [0] * len(schedule.roles), {}, set())
    sleeping: dict[Event, list[int]] = defaultdict(list)
    awake = deque(range(len(schedule.roles)))

    def announce(event: Event) -> None:
        found.happened.add(event)
        awake.extend(sleeping.pop(event, ()))

    while awake:
        role = awake.popleft()
        actions = schedule.roles[role].actions
        for at in range(found.done[role], len(actions)):
            if actions[at].op in ("finish", "wait"):
                announce(Event(role, actions[at], reached=True))
                needed = found.needed.setdefault((role, at), dependencies.of(role, actions[at]))
                missing = next((event for event in needed if event not in found.happened), None)
                if missing is not None:
                    sleeping[missing].append(role)
                    break
            found.order.append((role, at))
            found.done[role] = at + 1
            announce(Event(role, actions[at]))
    return found


def steps(found: Replay) -> dict[Point, int]:
    """Count steps up to each action, if each takes one. Actions that never happen follow the last one of their role."""
    roles = found.schedule.roles
    index = {(role, action): at for role, each in enumerate(roles) for at, action in enumerate(each.actions)}
    never = [(role, at) for role, first in found.stuck for at in range(first, len(roles[role].actions))]
    step: dict[Point, int] = {}

    def after(event: Event) -> int:
        """Return the first step that may follow the event. An action is reached after the action before it."""
        at = index.get((event.role, event.action), 0)
        return step.get((event.role, at - event.reached), -1) + 1

    for role, at in [*found.order, *never]:
        events = found.needed.get((role, at), ())
        step[role, at] = max([step.get((role, at - 1), -1) + 1, *map(after, events)])
    return step
