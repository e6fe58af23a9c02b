"""The specification in `actions` as functions: the actions that a role executes, and the dependencies of each.

Simulates the order in which the actions of a schedule can happen, and finds those that wait forever. No times.

Which ranks share weights, what each keeps, and after which runs of a stage what is gathered stays. Pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.actions import Action, WorkKind, finish, run, start
from megatron_hetero.schedule.graph import input_of, output_of
from megatron_hetero.schedule.program import Module, Role, Schedule


def expected_actions(schedule: Schedule, role: Role) -> list[Action]:
    """The actions that the role executes, each once, in no particular order."""
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
    """The actions that the same rank must have executed before `action`."""
    match action.op:
        case "run":
            return _dependencies_of_work(schedule, schedule.module[action.module], action)
        case "send":
            assert action.stage is not None, "a send has a stage"
            return [run(action.kind, action.module, action.stage, action.micro_batch)]
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
    stage, m = work.stage, work.micro_batch
    assert stage is not None, "work has a stage"
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
    as if their ranks kept pace. If this finds no deadlock, there is none.
    """

    def __init__(self, schedule: Schedule):
        self._schedule = schedule

    def of(self, role: int, action: Action) -> list[Event]:
        """The events that the action waits for; none for actions that do not block."""
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
        """The roles of the peers of a pipeline transfer of `role`."""
        module = self._schedule.module.get(action.module)
        if module is None or action.stage is None or not isinstance(action.peer, int):
            return ()
        return self._peer_roles.get((module.name, role, module.coordinate(action.peer)), ())

    def own_and_other_side(self, role: int, edge: Edge) -> tuple[list[int], list[int]]:
        """The roles that take part in crossings on the role's own side, and those on the other side."""
        sides = [[o for o in self._participants[edge] if self._is_source(o, edge) == s] for s in (True, False)]
        return (sides[0], sides[1]) if self._is_source(role, edge) else (sides[1], sides[0])

    def _is_source(self, role: int, edge: Edge) -> bool:
        return self._schedule.crosses(self._schedule.roles[role], edge)[0]

    @cached_property
    def _participants(self) -> dict[Edge, tuple[int, ...]]:
        """By edge, the roles that take part in crossings."""
        roles = list(enumerate(self._schedule.roles))
        return {
            edge: tuple(i for i, role in roles if any(self._schedule.crosses(role, edge)))
            for edge in self._schedule.edges
        }

    @cached_property
    def _peer_roles(self) -> dict[tuple[str, int, int], tuple[int, ...]]:
        """By module, role and adjacent pipeline coordinate: the roles of its ranks' peers there."""
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
    """The step of each action, if each takes one step. Actions that never happen follow the last one of their role."""
    roles = found.schedule.roles
    index = {(role, action): at for role, each in enumerate(roles) for at, action in enumerate(each.actions)}
    never = [(role, at) for role, first in found.stuck for at in range(first, len(roles[role].actions))]
    step: dict[Point, int] = {}

    def after(event: Event) -> int:
        """The first step that may follow the event. An action is reached after the action before it."""
        at = index.get((event.role, event.action), 0)
        return step.get((event.role, at - event.reached), -1) + 1

    for role, at in [*found.order, *never]:
        events = found.needed.get((role, at), ())
        step[role, at] = max([step.get((role, at - 1), -1) + 1, *map(after, events)])
    return step


Span = Literal["run", "wave", "step"]
"""How long gathered weights stay: for one run of a stage, which may be that of several micro-batches; for all runs of a
wave, once forward and once backward; or for all runs of a step.
"""
BUCKET, BUCKETS = 40_000_000, 8
"""Elements of a bucket of gradients, at least, and about the most buckets of a module on a rank."""


def shares_weights(zero: int, ranks: int, trains: bool) -> bool:
    """Whether `ranks` that hold the same parameters keep only shares of them, at a ZeRO stage. `trains`: whether any
    of these does; without gradients ZeRO-2 shares nothing.
    """
    return ranks > 1 and (zero == 3 or (zero == 2 and trains))


def rows_of_share(rows: int, ranks: int) -> int:
    """Rows of a parameter on the first of `ranks` that share it, which has the most."""
    return -(-rows // ranks)


def bucket_elements(trained: int, ranks: int) -> int:
    """Elements of parameters that a bucket of gradients is closed at. `trained`: of all parameters that train of a
    module on a rank, where `ranks` share their sum. Megatron's size, and at most so many buckets.
    """
    return max(BUCKET, BUCKET // 40 * ranks, -(-trained // BUCKETS))


def span_of(module: Module, zero: int) -> Span:
    """That of a module whose weights are shared at a ZeRO stage: 2 or 3."""
    if zero == 2:
        return "step"
    return "wave" if module.style == "waves" and module.window > 1 else "run"


def stays_gathered(actions: Iterable[Action], module: Module, zero: int) -> frozenset[Action]:
    """Those of a rank's runs of `module` after which its weights stay gathered, for the next run of the stage."""
    span, stays = span_of(module, zero), set[Action]()
    last: dict[int | None, Action] = {}
    for action in actions:
        if action.op != "run" or action.module != module.name:
            continue
        before = last.get(action.stage)
        if before is not None and (span == "step" or (span == "wave" and before.kind == action.kind)):
            stays.add(before)
        last[action.stage] = action
    return frozenset(stays)
