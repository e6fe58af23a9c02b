"""Builds schedules of any acyclic graph of stages, such as text > generator or audio > text > talker, on any ranks: one
pipeline with branches, see docs/schedules.md, "Other graphs".

The orders of all ranks come from one simulated run, in which a forward takes one unit of time and a backward two, and a
stage runs when all its ranks are free. The run records one sequence. When work begins, it records the ends of the
transfers and crossings of its input, then the work; when work ends, it records the beginnings of the transfers and
crossings of its output, on both sides. Each rank executes its actions of the sequence. Each action comes after all
actions on which it depends, so the first action that has not ended can always proceed, and there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

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
    """Build the schedule of a step for any acyclic graph of stages. Raises `UserError` as `build_schedule` does."""
    _require_edges(layouts, edges)
    named = tuple(dict.fromkeys(as_edge(edge, layouts) for edge in edges))
    modules = tuple(
        Module(name, layout, "graph", backward=name not in forward_only) for name, layout in layouts.items()
    )
    schedule = Schedule(modules, named, micro_batches, find_roles(modules))
    require_trained_through(schedule)
    simulated = _Run(schedule)
    orders: list[list[Action]] = [[] for _ in schedule.roles]
    for action in simulated.sequence():
        for role in schedule.roles_of(action):
            orders[role].append(action)
    depth = {name: max(depth for (owner, _), depth in simulated.depth.items() if owner == name) for name in layouts}
    bounded = tuple(replace(module, window=depth[module.name]) for module in modules)
    roles = (replace(role, actions=tuple(order)) for role, order in zip(schedule.roles, orders, strict=True))
    return replace(schedule, modules=bounded, roles=tuple(roles))


def _require_edges(layouts: Mapping[str, Layout], edges: Collection[Edge]) -> None:
    for edge in edges:
        for name, stage in ((edge.source, edge.source_stage), (edge.target, edge.target_stage)):
            if name not in layouts or (stage or 0) >= layouts[name].pp:
                stages = ", ".join(f"`{module}` with {layout.pp}" for module, layout in layouts.items())
                expected, fix = f"stages of {stages}", "name modules that have a layout, and number stages from 0"
                raise UserError.at("edges", found=f"`{edge}`", expected=expected, fix=fix)


def require_trained_through(schedule: Schedule) -> None:
    """Check that modules with a backward pass feed only modules with a backward pass. Raises `UserError`."""
    for edge in schedule.edges:
        source, target = schedule.module[edge.source], schedule.module[edge.target]
        if source.backward and not target.backward:
            where, found = "forward_only", f"`{target.name}` without `{source.name}`"
            because = f"`{source.name}` gets its gradients through it"
            fix = f"add `{source.name}`, or leave `{target.name}` out (its parameters may be frozen all the same)"
            raise UserError.at(where, found=found, expected="also all modules that feed it", because=because, fix=fix)


def _following(schedule: Schedule) -> dict[StageId, list[StageId]]:
    """Return the stages that each stage feeds: the next stage of its module, and stages of other modules over edges."""
    following: dict[StageId, list[StageId]] = {}
    for module in schedule.modules:
        stages = [(module.name, stage) for stage in range(module.stages)]
        following |= {stage: stages[at + 1 : at + 2] for at, stage in enumerate(stages)}
    for edge in schedule.edges:
        source_stage, target_stage = schedule.stages_of(edge)
        fed = following[edge.source, source_stage]
        if (edge.target, target_stage) not in fed:
            fed.append((edge.target, target_stage))
    return following


def _sorted(preceding: Mapping[StageId, Collection[StageId]]) -> tuple[StageId, ...]:
    """Return all stages in topological order. Raises `UserError` if there is a cycle."""
    try:
        return tuple(TopologicalSorter(preceding).static_order())
    except CycleError as error:
        cycle = " > ".join(f"{module}.{stage}" for module, stage in error.args[1])
        because = "a stage would need rows of its own micro-batch before it has run it"
        fix = "remove one of these edges"
        raise UserError.at("edges", found=f"a cycle, {cycle}", expected="none", because=because, fix=fix) from None


class _Run:
    """A simulated run of a schedule that has no actions yet.

    `following`, `preceding`: the stages that each stage feeds, and the stages that feed it. `depth`: for each stage,
    one more than the largest number of changes of ranks on a path from it. `begun`, `ended`: for each kind of work and
    stage, the number of micro-batches begun or ended. `running`: the running work and the time at which it ends.
    """

    def __init__(self, schedule: Schedule):
        self.schedule, self.roles = schedule, schedule.roles_of_stages
        self.following = _following(schedule)
        self.preceding = {n: [s for s, after in self.following.items() if n in after] for n in self.following}
        self.order = _sorted(self.preceding)
        self.to_the_end = {stage: n for n, stage in enumerate(reversed(self.order))}
        self.depth: dict[StageId, int] = {}
        for stage in self.to_the_end:
            after = ((n, self.roles[n].isdisjoint(self.roles[stage])) for n in self.following[stage])
            self.depth[stage] = max((self.depth[n] + moves for n, moves in after), default=1)
        works = [(kind, stage) for stage in self.order for kind in ("F", "B")]
        self.begun, self.ended = dict.fromkeys(works, 0), dict.fromkeys(works, 0)
        self.running: dict[Action, int] = {}

    def has_backward(self, stage: StageId) -> bool:
        """Return whether the module of `stage` has a backward pass."""
        return self.schedule.module[stage[0]].backward

    def sequence(self) -> Iterator[Action]:
        """Yield all actions of the step in the order of the simulated run."""
        now = 0
        while True:
            for work in self._startable():
                self.begun[work.kind, work.place] += 1
                self.running[work] = now + _UNITS[work.kind]
                yield from self._crossings(work, before=True)
                if arriving := input_of(self.schedule, work):
                    yield arriving[1]
                yield work
            if not self.running:
                break
            now = min(self.running.values())
            for work in [work for work, end in self.running.items() if end == now]:
                del self.running[work]
                self.ended[work.kind, work.place] += 1
                if sending := output_of(self.schedule, work):
                    # Post the receive right away: until then, the send blocks later sends.
                    yield from (sending, receive_of(sending))
                yield from self._crossings(work, before=False)
        total = self.schedule.micro_batches
        left = [s for (kind, s), n in self.ended.items() if n < total and (kind == "F" or self.has_backward(s))]
        assert not left, f"work of {left} has not run"

    def _crossings(self, work: Action, *, before: bool) -> Iterator[Action]:
        """Yield the ends of crossings that the work waits for (`before`), or the starts of crossings of its results."""
        is_forward = work.kind == "F"
        edges = self.schedule.entering if before == is_forward else self.schedule.leaving
        for edge in edges.get(work.place, ()):
            if is_forward or self.schedule.returns(edge):
                yield (finish if before else start)(work.kind, edge, work.micro_batch)

    def _startable(self) -> list[Action]:
        """Return the work that begins now. Work that waits for some of its ranks reserves its free ranks."""
        taken = {role for work in self.running for role in self.roles[work.place]}
        waiting = [work for stage in self.order for work in self._ready(stage)]
        startable: list[Action] = []
        for work in sorted(waiting, key=self._urgency):
            if taken.isdisjoint(self.roles[work.place]):
                startable.append(work)
            taken |= self.roles[work.place]
        return startable

    def _urgency(self, work: Action) -> tuple[bool, int, int]:
        """Return the sort key of work: backwards first, then stages that are later in topological order."""
        return work.kind == "F", self.to_the_end[work.place], work.micro_batch

    def _ready(self, stage: StageId) -> Iterator[Action]:
        """Yield the next backward and the next forward of the stage, each if the work on which it depends has ended."""
        total = self.schedule.micro_batches
        m = self.begun["B", stage]
        returned = (self.ended["B", other] for other in self.following[stage] if self.has_backward(other))
        if self.has_backward(stage) and m < min(self.ended["F", stage], *returned, total):
            yield run("B", *stage, m)
        m = self.begun["F", stage]
        arrived = (self.ended["F", other] for other in self.preceding[stage])
        if m < min(total, self._done_with(stage) + self.depth[stage], *arrived):
            yield run("F", *stage, m)

    def _done_with(self, stage: StageId) -> int:
        """Return the number of micro-batches whose activations `stage` no longer needs."""
        if self.has_backward(stage):
            return self.ended["B", stage]
        return min((self.ended["F", n] for n in self.following[stage]), default=self.ended["F", stage])


def fed_by_all(modules: Collection[str], edges: Collection[Edge]) -> str | None:
    """Return the one module that all other modules feed and all edges enter; None if there is no such module."""
    targets, sources = {edge.target for edge in edges}, {edge.source for edge in edges}
    return targets.pop() if len(targets) == 1 and sources == {*modules} - targets else None
