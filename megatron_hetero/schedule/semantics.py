"""The specification in `actions` as functions: the actions that a role executes, and the dependencies of each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from megatron_hetero.layout.edge import Edge
from megatron_hetero.schedule.actions import Action, WorkKind, finish, run, start
from megatron_hetero.schedule.program import Module, Role, Schedule
from megatron_hetero.schedule.transfers import input_of, output_of


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
