"""Schedules: modules, and the actions of every rank in a step, with their peers and communicators. Pure data.
`megatron_hetero.schedule.actions` specifies the actions.

Ranks that hold the same stages of the same modules share one *role* and one list of actions, so that the size of a
schedule grows with the number of roles (about the number of pipeline stages), not of ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Literal, TypeVar

from megatron_hetero.layout.communicators import Direction, EdgeUse, Link
from megatron_hetero.layout.grammar import format_ranks
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.schedule.actions import Action, WorkKind

Style = Literal["text", "waves", "recompute", "ahead", "graph"]
StageId = tuple[str, int]
"""The name of a module and the number of one of its stages."""
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Module:
    """The properties of a module that determine its schedule.

    `style`: `text` for the module that all others feed; for an encoder `waves` of `window` micro-batches, `recompute`
    (save only rows, run forward again before backward) or `ahead` of the text module by at most `window` more
    micro-batches; `graph` for a module of any other graph, which stores activations of at most `window` micro-batches.
    `virtual`: the number of stages per pipeline rank. `backward`: whether the module has a backward pass.
    """

    name: str
    layout: Layout
    style: Style
    window: int = 0
    virtual: int = 1
    backward: bool = True

    @property
    def stages(self) -> int:
        """The number of pipeline stages, virtual stages included."""
        return self.layout.pp * self.virtual

    def coordinate(self, stage: int) -> int:
        """Return the pipeline coordinate of the ranks that hold `stage`."""
        return stage % self.layout.pp

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold `stage`, in ascending order. The i-th ranks of two stages are peers."""
        return self._ranks[self.coordinate(stage)]

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        ranks, size = self.layout.ranks, self.layout.stage_size  # `pp` is the slowest-varying axis of ranks.
        return tuple(ranks[first : first + size] for first in range(0, len(ranks), size))

    @cached_property
    def forward_kinds(self) -> tuple[WorkKind, ...]:
        """The kinds of forward work: F, and R if the module recomputes."""
        return ("F", "R") if self.recomputes else ("F",)

    @property
    def recomputes(self) -> bool:
        """Whether F saves no activations, and the recomputed forward R runs before each backward B."""
        return self.style == "recompute" and self.backward

    def __str__(self) -> str:
        window = f" {self.window}" if self.style in ("waves", "ahead", "graph") else ""
        virtual = f" virtual {self.virtual}" if self.virtual > 1 else ""
        only = "" if self.backward else " forward-only"
        return f"{self.name}: {self.layout} {self.style}{window}{virtual}{only}"


@dataclass(frozen=True)
class Role:
    """A group of ranks that hold the same `held_stages` and execute the same `actions`."""

    held_stages: tuple[StageId, ...]
    ranks: tuple[int, ...]
    actions: tuple[Action, ...] = ()

    @property
    def name(self) -> str:
        """The name of the role, such as ``vision.0+text.1``."""
        return "+".join(f"{module}.{stage}" for module, stage in self.held_stages)

    @property
    def label(self) -> str:
        """The ranks and the name of the role, such as ``0-3 vision.0+text.1``."""
        return f"{format_ranks(self.ranks)} {self.name}"

    def __str__(self) -> str:
        return f"{'rank' if len(self.ranks) == 1 else 'ranks'} {format_ranks(self.ranks)} ({self.name})"


def find_roles(modules: Sequence[Module]) -> tuple[Role, ...]:
    """Return the roles of all ranks, without actions, sorted by first rank."""
    held_stages: dict[int, tuple[StageId, ...]] = {}
    for module in modules:
        for coordinate in range(module.layout.pp):
            held = tuple((module.name, stage) for stage in range(coordinate, module.stages, module.layout.pp))
            for rank in module.stage_ranks(coordinate):
                held_stages[rank] = held_stages.get(rank, ()) + held
    return tuple(Role(held, ranks) for held, ranks in _grouped(held_stages).items())


def _grouped(keys: Mapping[int, _Key]) -> dict[_Key, tuple[int, ...]]:
    """Return the ranks that have each key, sorted by first rank."""
    members: dict[_Key, list[int]] = {}
    for rank in sorted(keys):
        members.setdefault(keys[rank], []).append(rank)
    return {key: tuple(ranks) for key, ranks in members.items()}


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of every rank in a step of `micro_batches`. `edges`: the edges of the graph of `modules`. If the
    graph consists of encoders that all feed one text module, the text module is the last of `modules`.

    `megatron_hetero.schedule.check` checks the invariants of schedules.
    """

    modules: tuple[Module, ...]
    edges: tuple[Edge, ...]
    micro_batches: int
    roles: tuple[Role, ...]

    def __repr__(self) -> str:
        return f"Schedule({'; '.join(map(str, self.modules))}; {self.micro_batches} micro-batches)"

    @cached_property
    def module(self) -> dict[str, Module]:
        """All modules, by name."""
        return {module.name: module for module in self.modules}

    @property
    def encoders(self) -> tuple[Module, ...]:
        """All modules except the text module."""
        return self.modules[:-1]

    @property
    def text(self) -> Module:
        """The text module, which all others feed."""
        return self.modules[-1]

    @cached_property
    def role_index(self) -> dict[int, int]:
        """The index of the role of each rank."""
        return {rank: index for index, role in enumerate(self.roles) for rank in role.ranks}

    def actions_of(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of `rank`. Raises `KeyError` if it holds no module."""
        if rank not in self.role_index:
            raise KeyError(f"rank {rank} holds no module; ranks {format_ranks(sorted(self.role_index))} do")
        return self.roles[self.role_index[rank]].actions

    def peer_rank(self, rank: int, action: Action) -> int:
        """Return the rank at the other end of a `send`, `irecv` or `wait` of `rank`."""
        module = self.module[action.module]
        return module.stage_ranks(action.peer_stage)[module.stage_ranks(action.own_stage).index(rank)]

    def with_split_roles(self) -> Schedule:
        """Return the schedule with roles split until all peers of a role's ranks in one stage have the same role."""
        rings: list[dict[int, int]] = []  # for each pipelined module, the peer of each rank in the next stage
        for module in self.modules:
            if module.layout.pp > 1:
                stages = [module.stage_ranks(coordinate) for coordinate in range(module.layout.pp)]
                rings.append(dict(zip(chain(*stages), chain(*stages[1:], stages[0]), strict=True)))
        key_of_rank, count = self.role_index, 0
        while len(groups := _grouped(key_of_rank)) > count:
            count = len(groups)
            group_of_rank = {rank: number for number, ranks in enumerate(groups.values()) for rank in ranks}
            key_of_rank = {
                rank: (group, *(group_of_rank.get(ring.get(rank, -1)) for ring in rings))
                for rank, group in group_of_rank.items()
            }
        roles = (replace(self.roles[self.role_index[ranks[0]]], ranks=ranks) for ranks in groups.values())
        return replace(self, roles=tuple(roles))

    @cached_property
    def roles_of_stages(self) -> dict[StageId, set[int]]:
        """The indices of the roles that hold each stage."""
        roles: dict[StageId, set[int]] = {}
        for index, role in enumerate(self.roles):
            for stage in role.held_stages:
                roles.setdefault(stage, set()).add(index)
        return roles

    def roles_of_sides(self, edge: Edge) -> tuple[set[int], set[int]]:
        """Return the indices of the roles that rows of an edge leave, and of the roles that they enter."""
        source_stage, target_stage = self.stages_of(edge)
        return self.roles_of_stages[edge.source, source_stage], self.roles_of_stages[edge.target, target_stage]

    def roles_of(self, action: Action) -> set[int]:
        """Return the indices of the roles whose ranks execute an action."""
        if action.op in ("start", "finish"):
            return set[int]().union(*self.roles_of_sides(action.edge))
        return self.roles_of_stages[action.place]

    @cached_property
    def leaving(self) -> dict[StageId, tuple[Edge, ...]]:
        """The edges that leave each stage, by module and stage."""
        return _by_stage((edge.source, self.stages_of(edge)[0], edge) for edge in self.edges)

    @cached_property
    def entering(self) -> dict[StageId, tuple[Edge, ...]]:
        """The edges that enter each stage, by module and stage."""
        return _by_stage((edge.target, self.stages_of(edge)[1], edge) for edge in self.edges)

    def returns(self, edge: Edge) -> bool:
        """Return whether gradients of the edge's rows are sent back to its source."""
        return self.module[edge.source].backward and self.module[edge.target].backward

    def stages_of(self, edge: Edge) -> tuple[int, int]:
        """Return the stage that rows of an edge leave, and the stage that they enter."""
        if edge.source_stage is None:
            return self.module[edge.source].stages - 1, 0
        assert edge.target_stage is not None, f"{edge} names one stage"
        return edge.source_stage, edge.target_stage

    def sides(self, edge: Edge) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks that rows of an edge leave, and the ranks that they enter."""
        source_stage, target_stage = self.stages_of(edge)
        return self.module[edge.source].stage_ranks(source_stage), self.module[edge.target].stage_ranks(target_stage)

    @cached_property
    def collective(self) -> dict[Edge, bool]:
        """For each edge, whether its crossings are collectives, because its two sides share ranks."""
        sides = {edge: self.sides(edge) for edge in self.edges}
        return {edge: not set(source).isdisjoint(target) for edge, (source, target) in sides.items()}

    def crosses(self, role: Role, edge: Edge) -> tuple[bool, bool]:
        """Return whether rows of the edge leave the role, and whether they enter it."""
        source_stage, target_stage = self.stages_of(edge)
        return (edge.source, source_stage) in role.held_stages, (edge.target, target_stage) in role.held_stages

    def returns_early(self, edge: Edge) -> bool:
        """Return whether gradients start to return as soon as possible, during the backward that computes them.

        Where modules take turns and the text module has stages, the other ranks cannot take part before their turn.
        Communication that waits for these ranks gains nothing, and may even block the text module's computation on a
        GPU whose streams share a queue (CUDA_DEVICE_MAX_CONNECTIONS). In a graph, ranks of one stage may have other
        crossings to run first.
        """
        style = self.module[edge.source].style
        return style == "ahead" or (style != "graph" and self.text.layout.pp == 1)

    @cached_property
    def waves(self) -> tuple[range, ...]:
        """The micro-batches that are encoded in each turn of encoders that take turns with the text module."""
        size = max((e.window for e in self.encoders if e.style == "waves"), default=0) or self.micro_batches
        return tuple(
            range(first, min(first + size, self.micro_batches)) for first in range(0, self.micro_batches, size)
        )

    @cached_property
    def returned(self) -> tuple[range, ...]:
        """The micro-batches whose gradients return to the encoders in each turn. Before each wave except the first,
        these are micro-batches whose backward the first text stage has run since the last turn; at the end, the rest.
        """
        ends = [max(0, wave[0] - self.in_flight_between_waves) for wave in self.waves[1:]] + [self.micro_batches]
        return tuple(range(*pair) for pair in pairwise([0, *ends]))

    def in_one_call(self, name: str) -> tuple[range, ...]:
        """Return the ranges of micro-batches that a module may compute in one call: all are encoded in the same turn,
        and their gradients return in the same turn. A range has one micro-batch for a module that does not run in
        waves, and for an encoder with pipeline stages, which overlap micro-batches already.
        """
        module = self.module[name]
        if module.style != "waves" or module.stages > 1:
            return tuple(range(m, m + 1) for m in range(self.micro_batches))
        runs = [*self.waves, *(self.returned if module.backward else ())]
        return tuple(range(*pair) for pair in pairwise(sorted({0, *(run.stop for run in runs)})))

    @property
    def in_flight_between_waves(self) -> int:
        """The number of micro-batches between forward and backward on the first text stage when the next wave is
        encoded; 0 with interleaved stages, which drain first.
        """
        return self.text.layout.pp - 1 if self.text.virtual == 1 else 0

    def activation_bound(self, module: Module, coordinate: int) -> int:
        """Return the maximum number of micro-batches (with virtual stages: stages) with live activations on a rank."""
        pp, left = module.layout.pp, module.layout.pp - 1 - coordinate
        match module.style:
            case "text" if module.virtual == 1:
                return left + 1
            case "text":
                return 2 * left + (module.virtual - 1) * pp + 1
            case "waves":
                return module.window + self.in_flight_between_waves
            case "graph":
                return module.window
            case "recompute":
                return 2 * left + 1
            case "ahead":
                # Micro-batches between F and B of the first text stage, and micro-batches encoded ahead of this stage.
                in_flight = self.text.layout.pp * (1 if self.text.virtual == 1 else 2)
                return in_flight + 1 + module.window + left


def _by_stage(ends: Iterable[tuple[str, int, Edge]]) -> dict[StageId, tuple[Edge, ...]]:
    edges: dict[StageId, tuple[Edge, ...]] = {}
    for module, stage, edge in ends:
        edges[module, stage] = (*edges.get((module, stage), ()), edge)
    return edges


def use_of(schedule: Schedule, action: Action) -> Link | EdgeUse:
    """Return the communicator use of a transfer or crossing: its pipeline link or its edge, with the direction."""
    direction: Direction = "backward" if action.kind == "B" else "forward"
    if action.op in ("start", "finish"):
        return EdgeUse(action.edge, direction)
    sender = action.own_stage if action.op == "send" else action.peer_stage
    return Link(action.module, direction, schedule.module[action.module].coordinate(sender))


def early_start(schedule: Schedule, actions: Sequence[Action], at: int) -> Action | None:
    """Return the crossing that starts during the backward at index `at`: the next crossing of the rank, if it returns
    the gradients of rows that entered this stage; else None.
    """
    work, later = actions[at], map(actions.__getitem__, range(at, len(actions)))
    following = next((action for action in later if action.op in ("start", "finish")), None)
    if following is None or (following.op, following.kind, following.micro_batch) != ("start", "B", work.micro_batch):
        return None
    entered = following.edge in schedule.entering.get(work.place, ())
    return following if entered and schedule.returns_early(following.edge) else None


def describe_action(schedule: Schedule, rank: int, action: Action) -> str:
    """Describe an action of `rank` for messages: its micro-batch, its peers and its communicator."""
    if action.op == "run":
        others = "the other ranks of its stage"
    elif action.op in ("start", "finish"):
        source, destination = schedule.sides(action.edge)
        others = f"ranks {format_ranks(sorted({*source, *destination} - {rank}))} over {use_of(schedule, action)}"
    else:
        others = f"rank {schedule.peer_rank(rank, action)} over {use_of(schedule, action)}"
    return f"action {action} of micro-batch {action.micro_batch}, with {others},"
