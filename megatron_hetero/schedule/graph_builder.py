"""Schedules of any acyclic graph of stages, such as text > generator or audio > text > talker, on any ranks: one
pipeline with branches, see docs/schedules.md, "Other graphs".

The orders of all ranks come from one simulated run, in which a forward takes one unit of time and a backward two, and a
stage runs when all its ranks are free. It records one sequence: work when it begins, just after the ends of what it
waits for; and when work ends, the beginnings of the transfers and crossings of its output, on both sides. Each rank
executes the part of the sequence that concerns it. Everything in it follows what it depends on, so that the first
action that has not ended can proceed, and nothing deadlocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.graph import Edge, as_edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.schedule.actions import Action, WorkKind, finish, run, start
from megatron_hetero.schedule.program import Module, Schedule, StageId, find_roles
from megatron_hetero.schedule.transfers import input_of, output_of, receive_of

_UNITS: dict[WorkKind, int] = {"F": 1, "B": 2}


def build_graph_schedule(
    layouts: Mapping[str, Layout], edges: Collection[Edge], micro_batches: int, forward_only: Collection[str]
) -> Schedule:
    """Build the schedule of a step. Arguments and errors are those of `build_schedule`."""
    _require_edges(layouts, edges)
    named = tuple(dict.fromkeys(as_edge(edge, layouts) for edge in edges))
    modules = tuple(
        Module(name, layout, "graph", backward=name not in forward_only) for name, layout in layouts.items()
    )
    graph = _Graph(Schedule(modules, named, micro_batches, find_roles(modules)))
    require_trained_through(graph.schedule)
    bounded = tuple(replace(m, window=max(graph.depth[m.name, stage] for stage in range(m.stages))) for m in modules)
    schedule = replace(graph.schedule, modules=bounded)
    orders: list[list[Action]] = [[] for _ in schedule.roles]
    for action in _Run(graph).sequence():
        for role in graph.executing(action):
            orders[role].append(action)
    roles = (replace(role, actions=tuple(order)) for role, order in zip(schedule.roles, orders, strict=True))
    return replace(schedule, roles=tuple(roles))


def _require_edges(layouts: Mapping[str, Layout], edges: Collection[Edge]) -> None:
    for edge in edges:
        for name, stage in ((edge.source, edge.source_stage), (edge.target, edge.target_stage)):
            if name not in layouts or (stage or 0) >= layouts[name].pp:
                stages = ", ".join(f"`{module}` with {layout.pp}" for module, layout in layouts.items())
                expected, fix = f"stages of {stages}", "name modules that have a layout, and number stages from 0"
                raise UserError.at("edges", found=f"`{edge}`", expected=expected, fix=fix)


def require_trained_through(schedule: Schedule) -> None:
    """Check that modules with a backward pass feed only modules with one. Raises `UserError`."""
    for edge in schedule.edges:
        source, target = schedule.module[edge.source], schedule.module[edge.target]
        if source.backward and not target.backward:
            raise UserError.at(
                "forward_only",
                found=f"`{target.name}` without `{source.name}`",
                expected="all modules that feed it, too",
                because=f"`{source.name}` gets its gradients through it",
                fix=f"add `{source.name}`, or leave `{target.name}` out (its parameters may be frozen all the same)",
            )


@dataclass(frozen=True, eq=False)
class _Graph:
    """The stages of a schedule without actions, and what follows what."""

    schedule: Schedule

    @cached_property
    def following(self) -> dict[StageId, tuple[StageId, ...]]:
        """The stages that each stage feeds: the next of its module, and those that its rows enter."""
        found: dict[StageId, list[StageId]] = {}
        for module in self.schedule.modules:
            stages = [(module.name, stage) for stage in range(module.stages)]
            found.update({stage: [] for stage in stages})
            for stage, after in pairwise(stages):
                found[stage].append(after)
        for edge in self.schedule.edges:
            own, stage = self.schedule.stages_of(edge)
            found[edge.source, own].append((edge.target, stage))
        return {stage: tuple(dict.fromkeys(after)) for stage, after in found.items()}

    @cached_property
    def preceding(self) -> dict[StageId, tuple[StageId, ...]]:
        """The stages that feed each stage."""
        return {stage: tuple(s for s, after in self.following.items() if stage in after) for stage in self.following}

    @cached_property
    def order(self) -> tuple[StageId, ...]:
        """All stages, each after those that feed it. Raises `UserError`."""
        try:
            return tuple(TopologicalSorter(self.preceding).static_order())
        except CycleError as error:
            cycle = " > ".join(f"{module}.{stage}" for module, stage in error.args[1])
            raise UserError.at(
                "edges",
                found=f"a cycle, {cycle}",
                expected="none",
                because="a stage would need rows of its own micro-batch before it has run it",
                fix="remove one of these edges",
            ) from None

    @cached_property
    def depth(self) -> dict[StageId, int]:
        """One more than the changes of ranks on the longest path from each stage."""
        found: dict[StageId, int] = {}
        for stage in reversed(self.order):
            roles = self.schedule.roles_of_stages
            after = ((n, roles[n].isdisjoint(roles[stage])) for n in self.following[stage])
            found[stage] = max((found[n] + moves for n, moves in after), default=1)
        return found

    def has_backward(self, stage: StageId) -> bool:
        """Whether the stage has a backward pass."""
        return self.schedule.module[stage[0]].backward

    def executing(self, action: Action) -> set[int]:
        """Return the roles that execute the action, by index."""
        if action.op in ("start", "finish"):
            sources, targets = self.schedule.roles_of_sides(action.edge)
            return sources | targets
        return self.schedule.roles_of_stages[action.module, action.own_stage]


class _Work(NamedTuple):
    kind: WorkKind
    stage: StageId
    micro_batch: int


class _Run:
    """A simulated run. `begun` and `ended`: how many micro-batches of each kind and stage have."""

    def __init__(self, graph: _Graph):
        self.graph = graph
        works = [(kind, stage) for stage in graph.order for kind in ("F", "B")]
        self.begun, self.ended = dict.fromkeys(works, 0), dict.fromkeys(works, 0)
        self.running: dict[_Work, int] = {}  # and when it ends
        self.to_the_end = {stage: n for n, stage in enumerate(reversed(graph.order))}

    def sequence(self) -> Iterator[Action]:
        """Yield all actions of the step."""
        now = 0
        while True:
            for work in self._startable():
                self.begun[work.kind, work.stage] += 1
                self.running[work] = now + _UNITS[work.kind]
                yield from self._crossings(work, before=True)
                yield from self._with_wait(run(work.kind, *work.stage, work.micro_batch))
            if not self.running:
                break
            now = min(self.running.values())
            for work in [work for work, end in self.running.items() if end == now]:
                del self.running[work]
                self.ended[work.kind, work.stage] += 1
                yield from self._transfer(run(work.kind, *work.stage, work.micro_batch))
                yield from self._crossings(work, before=False)
        every = self.graph.schedule.micro_batches
        assert all(n == every for (kind, s), n in self.ended.items() if kind == "F" or self.graph.has_backward(s)), (
            "work is left"
        )

    def _with_wait(self, work: Action) -> Iterator[Action]:
        """Yield the work, after what it waits for from another stage of its module."""
        if arriving := input_of(self.graph.schedule.module[work.module], work):
            yield arriving[1]
        yield work

    def _transfer(self, work: Action) -> Iterator[Action]:
        """Transfer the output of work to another stage of its module. The receive is not posted later: a send blocks
        those behind it until then.
        """
        if sending := output_of(self.graph.schedule.module[work.module], work):
            yield sending
            yield receive_of(sending)

    def _crossings(self, work: _Work, *, before: bool) -> Iterator[Action]:
        """Finish crossings `before` the work, or start them after it."""
        schedule = self.graph.schedule
        entering, leaving = (side.get(work.stage, ()) for side in (schedule.entering, schedule.leaving))
        for edge in entering if before == (work.kind == "F") else leaving:
            if work.kind == "F" or schedule.returns(edge):
                yield (finish if before else start)(work.kind, edge, work.micro_batch)

    def _startable(self) -> list[_Work]:
        """Find the work that begins now. Work that waits for some of its ranks reserves the others."""
        taken = {role for work in self.running for role in self.graph.schedule.roles_of_stages[work.stage]}
        waiting = [work for stage in self.graph.order for work in self._ready(stage)]
        found: list[_Work] = []
        for work in sorted(waiting, key=self._urgency):
            roles = self.graph.schedule.roles_of_stages[work.stage]
            if taken.isdisjoint(roles):
                found.append(work)
            taken |= roles
        return found

    def _urgency(self, work: _Work) -> tuple[bool, int, int]:
        """Sort backwards first, then what is nearer to an end of the graph."""
        return work.kind == "F", self.to_the_end[work.stage], work.micro_batch

    def _ready(self, stage: StageId) -> Iterator[_Work]:
        """Yield the next backward and forward of the stage, where they depend on nothing more."""
        graph, every = self.graph, self.graph.schedule.micro_batches
        following, m = graph.following[stage], self.begun["B", stage]
        back = (self.ended["B", other] for other in following if graph.has_backward(other))
        if graph.has_backward(stage) and m < min(self.ended["F", stage], *back, every):
            yield _Work("B", stage, m)
        m, arrived = self.begun["F", stage], (self.ended["F", other] for other in graph.preceding[stage])
        if m < min(every, self._done_with(stage) + graph.depth[stage], *arrived):
            yield _Work("F", stage, m)

    def _done_with(self, stage: StageId) -> int:
        """Count the micro-batches whose activations the stage no longer needs."""
        if self.graph.has_backward(stage):
            return self.ended["B", stage]
        return min((self.ended["F", n] for n in self.graph.following[stage]), default=self.ended["F", stage])


def fed_by_all(modules: Collection[str], edges: Collection[Edge]) -> str | None:
    """Return the module that all edges enter, from all others; None if there is no such module."""
    targets, sources = {edge.target for edge in edges}, {edge.source for edge in edges}
    return targets.pop() if len(targets) == 1 and sources == {*modules} - targets else None
