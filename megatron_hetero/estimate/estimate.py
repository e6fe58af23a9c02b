"""The estimate of `--plan`: memory, traffic and time of each rank under a configuration. Pure but for reading the
model's `config.json`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np

from megatron_hetero.base.errors import TEXT
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.config.schema import Config
from megatron_hetero.estimate.communicator_memory import ALLOWANCES, allowance_bytes
from megatron_hetero.estimate.lifetimes import RankBytes, StageBytes, peak_activations, stage_bytes
from megatron_hetero.estimate.measured import MeasuredModule
from megatron_hetero.estimate.parameters import (
    GatheredBytes,
    Parameter,
    ParameterBytes,
    gathered_bytes,
    gathered_span,
    gradient_itemsize,
    parameter_bytes,
    parameters_of,
)
from megatron_hetero.estimate.shards import AssumedBatch, ModuleShards, SequenceShard, encoder_shards, text_shards
from megatron_hetero.estimate.time import durations, with_copies
from megatron_hetero.estimate.traffic import DirectionTraffic, traffic_of
from megatron_hetero.job import BatchShape, JobSpec
from megatron_hetero.layout.axes import View
from megatron_hetero.layout.communicators import CommunicatorKind, communicators
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.pipeline import PipelineStage, stages_of_rank
from megatron_hetero.models.layers.recompute import Recompute
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import prefix_of
from megatron_hetero.schedule.gathering import shares_weights
from megatron_hetero.schedule.program import Role, Schedule
from megatron_hetero.schedule.simulator import DurationKey, Simulation, simulate

KINDS: tuple[str, ...] = ("weights", "gradients", "optimizer", "activations", "boundary", "workspace")
"""Kinds of memory, in the order of the columns of `Plan.memory`."""
_Place = tuple[str, int]
"""A module and a coordinate of its pipeline."""
_Call = tuple[str, int]
"""A module and the number of micro-batches in a call of it."""
PLANNED_TURNS = 1 << 13
"""The most turns of all stages that are simulated, some seconds' work; a larger batch is estimated as this one."""


@dataclass(frozen=True, eq=False)
class BoundaryTraffic:
    """Traffic along an edge in a step.

    `crossings`: the distinct ones, by direction; those of one call differ, since ranks hold other rows of each.
    `numbers`: for each micro-batch, the index of its crossing. `outputs`: encoder outputs that cross side by side;
    `row_bytes`: of a row of all of them on the wire.
    """

    edge: Edge
    outputs: int
    crossings: tuple[Mapping[str, DirectionTraffic], ...]
    numbers: tuple[int, ...]
    row_bytes: int
    point_to_point: bool

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions with traffic: `forward`, and `backward` where gradients return."""
        return tuple(self.crossings[0])

    @property
    def ranks(self) -> np.ndarray:
        """The ranks that take part, int64."""
        return self.crossings[0]["forward"].ranks

    def of_step(self, direction: str, count: Callable[[DirectionTraffic], Any]) -> Any:
        """Sum `count(crossing)` over the micro-batches of a step."""
        times = Counter(self.numbers).items()
        return sum(number * count(self.crossings[which][direction]) for which, number in times)


@dataclass(frozen=True, eq=False)
class Estimate:
    """Memory, traffic and time of a job on `world_size` ranks.

    `parameters`, `gathered`: by module and pipeline coordinate. `shards`: by module, for an encoder of its largest
    call. `memory`: bytes, int64 [ranks, kinds], see `KINDS`. `host_activations`: bytes in host memory, int64 [ranks].
    `work`: operations of a rank in a micro-batch, by module, kind and stage, or those that fit in the time of its
    copies. `simulation`: the schedule, timed in these operations. `gpu`: whether the ranks are GPUs.
    """

    job: JobSpec
    world_size: int
    assumed: AssumedBatch
    parameters: Mapping[_Place, ParameterBytes]
    gathered: Mapping[_Place, GatheredBytes]
    boundaries: tuple[BoundaryTraffic, ...]
    shards: Mapping[str, ModuleShards]
    memory: np.ndarray
    host_activations: np.ndarray
    work: Mapping[DurationKey, float]
    simulation: Simulation
    gpu: bool = True

    @property
    def config(self) -> Config:
        """The job's configuration."""
        return self.job.config

    @property
    def shapes(self) -> ModelShapes:
        """Shapes of the job's modules."""
        return self.job.shapes

    @property
    def batch(self) -> BatchShape:
        """Samples of a step."""
        return self.job.batch

    @classmethod
    def of(cls, config: Config, world_size: int, *, gpu: bool = True) -> Estimate:
        """Estimate a configuration. `gpu`: whether the ranks are GPUs; on a CPU, layers save more.

        Raises `UserError` where the configuration does not fit the model or the world.
        """
        job = JobSpec.of(config, world_size)
        job.require_turns(PLANNED_TURNS)
        schedule, assumed = job.schedule, AssumedBatch.of(job)
        places = [(name, at) for name, layout in job.layouts.items() for at in range(layout.pp)]
        parameters = {place: _parameter_bytes(job, place) for place in places}
        gathered = {place: _gathered(job, assumed, place) for place in places}
        calls = {(TEXT, 1): text_shards(assumed), **_encoder_calls(assumed)}
        shards = {TEXT: calls[TEXT, 1]}
        shards |= {name: calls[name, assumed.sizes_of_calls(name)[0]] for name in job.shapes.encoders}
        boundaries = tuple(_boundary(job, assumed, edge) for edge in job.edges if shards[edge.source].used)
        images = {name: _mean_images(assumed, name) for name in job.shapes.encoders}
        sizes = _MemoryTable(job, assumed, parameters, gathered, boundaries, calls, gpu)
        memory, on_host = sizes.table(world_size)
        work = with_copies(durations(config, assumed, job.stages, images, job.frozen), sizes.copied, schedule)
        found = simulate(schedule, work)
        return cls(
            job, world_size, assumed, parameters, gathered, boundaries, shards, memory, on_host, work, found, gpu
        )

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Layouts by module."""
        return self.job.layouts

    @property
    def stages(self) -> Mapping[str, tuple[PipelineStage, ...]]:
        """Pipeline stages by module."""
        return self.job.stages

    @property
    def schedule(self) -> Schedule:
        """The schedule of a step."""
        return self.job.schedule

    @cached_property
    def communicators(self) -> tuple[CommunicatorKind, ...]:
        """The communicators that a run creates after the world's, in order."""
        layouts, edges, job = tuple(self.layouts.items()), tuple(self.job.edges), self.job
        return _communicators(layouts, edges=edges, tied=job.tied, interleaved=job.interleaved)

    @cached_property
    def allowance(self) -> np.ndarray:
        """Bytes besides tensors, int64 [ranks, allowances], see `ALLOWANCES`; zero on a CPU."""
        if not self.gpu:
            return np.zeros((self.world_size, len(ALLOWANCES)), np.int64)
        return allowance_bytes(self.communicators, self.memory.sum(axis=1))

    @cached_property
    def totals(self) -> np.ndarray:
        """Device memory of each rank, allowance included, int64 [ranks]."""
        return self.memory.sum(axis=1) + self.allowance.sum(axis=1)

    @cached_property
    def host_states(self) -> np.ndarray:
        """Bytes of optimizer states in host memory, int64 [ranks]."""
        found = np.zeros(self.world_size, np.int64)
        for (name, at), sizes in self.parameters.items():
            found[np.array(self.layouts[name].stage(at).ranks)] += sizes.host
        return found

    @property
    def host_memory(self) -> np.ndarray:
        """Bytes in host memory, int64 [ranks]."""
        return self.host_states + self.host_activations

    @cached_property
    def kinds_of_ranks(self) -> tuple[tuple[Role, np.ndarray, np.ndarray], ...]:
        """Ranks with equal memory: role, ascending ranks, and bytes by kind and allowance."""
        found, table = [], np.hstack([self.memory, self.allowance])
        for role in self.schedule.roles:
            ranks = np.array(role.ranks)
            rows, which = np.unique(table[ranks], axis=0, return_inverse=True)
            found += [(role, ranks[which.ravel() == i], row) for i, row in enumerate(rows)]
        return tuple(sorted(found, key=lambda kind: int(kind[1][0])))


@lru_cache(maxsize=8)
def _communicators(
    layouts: tuple[tuple[str, Layout], ...], **wanted: tuple[Edge | str, ...]
) -> tuple[CommunicatorKind, ...]:
    """Cached: estimates that are compared mostly have the same layouts."""
    return communicators(dict(layouts), **wanted)  # pyright: ignore[reportArgumentType]


def _parameters_in(job: JobSpec, place: _Place, view: View) -> tuple[Parameter, ...]:
    name, at = place
    layout = job.layouts[name]
    stages, holders = stages_of_rank(job.stages[name], at, layout.pp), layout.ways("weights", "experts", view=view)
    return parameters_of(name, job.shapes, holders, stages, job.frozen.tensors, view.name)


def _parameter_bytes(job: JobSpec, place: _Place) -> ParameterBytes:
    """Memory of the parameters of all views on the ranks of a stage."""
    config, (name, _) = job.config, place
    layout, every = job.layouts[name], list[ParameterBytes]()
    for view in layout.every_view:
        of_view = parameter_bytes(
            _parameters_in(job, place, view),
            layout.ways("tokens", "samples", view=view),
            job.dtype.itemsize,
            job.optimizer,
            config.precision_of(name),
            on_host=config.offload_of(name).states,
            zero=config.zero_of(name),
        )
        every.append(of_view)
    return reduce(add, every)


def _gathered(job: JobSpec, assumed: AssumedBatch, place: _Place) -> GatheredBytes:
    config, (name, _), itemsize = job.config, place, job.dtype.itemsize
    layout, zero = job.layouts[name], config.zero_of(name)
    held = [parameter for view in layout.every_view for parameter in _parameters_in(job, place, view)]
    ranks = max(layout.ways("tokens", "samples", view=view) for view in layout.every_view)
    if not shares_weights(zero, ranks, any(parameter.trains for parameter in held)):
        return GatheredBytes()
    is_head = name == TEXT and job.shapes.text.tied and layout.pp == 1
    exchanged = gradient_itemsize(itemsize, config.precision_of(name))
    # Gradients of chunks are summed in the dtype of the sum.
    whole = exchanged if config.model.chunk.get(name, 0) else itemsize
    span = gathered_span(job.schedule, name, zero, assumed.calls.get(name, ()))
    return gathered_bytes(held, itemsize, whole + exchanged, span, is_head=is_head)


def _encoder_calls(assumed: AssumedBatch) -> dict[_Call, ModuleShards]:
    """The shards of all encoders in calls of each size that occurs."""
    names = assumed.shapes.encoders
    return {(name, n): encoder_shards(assumed, name, n) for name in names for n in assumed.sizes_of_calls(name)}


def _mean_images(assumed: AssumedBatch, encoder: str) -> float:
    """Images per micro-batch of the replica with the most, averaged over the calls of a step."""
    calls = assumed.calls[encoder]
    most = {n: max(map(len, assumed.assigned(encoder, n))) for n in assumed.sizes_of_calls(encoder)}
    return sum(most[len(call)] for call in calls) / sum(map(len, calls))


def _boundary(job: JobSpec, assumed: AssumedBatch, edge: Edge) -> BoundaryTraffic:
    outputs, returns = len(job.edges[edge]), job.schedule.module[edge.source].backward
    first, crossings, numbers = dict[int, int](), [], []
    for call in assumed.calls[edge.source]:
        if len(call) not in first:
            first[len(call)] = len(crossings)
            crossings += [plan_boundary(*s, job.row_bytes * outputs) for s in assumed.sides(edge, len(call))]
        numbers += range(first[len(call)], first[len(call)] + len(call))
    traffic = ({d: t for d, t in traffic_of(plan).items() if returns or d == "forward"} for plan in crossings)
    one = crossings[0]
    return BoundaryTraffic(edge, outputs, tuple(traffic), tuple(numbers), one.row_bytes, one.point_to_point)


@dataclass(frozen=True, eq=False)
class _MemoryTable:
    """Computes the table of memory, once for all ranks with equal work."""

    job: JobSpec
    assumed: AssumedBatch
    parameters: Mapping[_Place, ParameterBytes]
    gathered: Mapping[_Place, GatheredBytes]
    boundaries: Sequence[BoundaryTraffic]
    shards: Mapping[_Call, ModuleShards]
    gpu: bool

    @property
    def copied(self) -> dict[tuple[str, int], int]:
        """Bytes of offloaded activations per micro-batch on the rank with the most, by module and stage; for an
        encoder, averaged over its largest call.
        """
        found = {}
        for name, stages in self.job.stages.items():
            if self.job.config.offload_of(name).activations:
                size = max(n for module, n in self.shards if module == name)
                for number in range(len(stages)):
                    of_shards = (self._stage(name, number, shard).host for shard in self.shards[name, size].shards)
                    found[name, number] = max(of_shards, default=0) // size
        return found

    def table(self, world_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of all ranks by kind, and of activations on the host."""
        table, on_host = np.zeros((world_size, len(KINDS)), np.int64), np.zeros(world_size, np.int64)
        for (name, at), held in self.parameters.items():
            layout = self.assumed.layouts[name]
            ranks = np.array(layout.stage(at).ranks)
            table[ranks, 0] += held.weights
            table[ranks, 1] += held.gradients
            table[ranks, 2] += held.optimizer
        table[:, 4] = self._staging(world_size)
        rows = [_by_rank(boundary, world_size) for boundary in self.boundaries]
        for role in self.job.schedule.roles:
            found = self._activations(role, rows)
            table[np.ix_(role.ranks, (3, 5))], on_host[list(role.ranks)] = found[:, :2], found[:, 2]
        table[:, 5] += self._gathered(world_size)
        if self.gpu:  # Updates run when there are no activations.
            table[:, 5] = np.maximum(table[:, 5], self._updates(world_size) - table[:, 3])
        return table, on_host

    def _updates(self, world_size: int) -> np.ndarray:
        """Bytes of each rank during updates, one module after the other."""
        found = np.zeros(world_size, np.int64)
        for (name, at), held in self.parameters.items():
            layout = self.assumed.layouts[name]
            ranks = np.array(layout.stage(at).ranks)
            found[ranks] = np.maximum(found[ranks], held.update)
        return found

    def _gathered(self, world_size: int) -> np.ndarray:
        """Bytes of gathered weights: those that stay add up over modules, which run one at a time."""
        stays, running = np.zeros((2, world_size), np.int64)
        for (name, at), of_module in self.gathered.items():
            ranks = np.array(self.assumed.layouts[name].stage(at).ranks)
            stays[ranks] += of_module.stays
            running[ranks] = np.maximum(running[ranks], of_module.running)
        return stays + running

    def _staging(self, world_size: int) -> np.ndarray:
        """Bytes of communicators' buffers on each rank: the largest crossing times the crossings in flight."""
        found, schedule = np.zeros(world_size, np.int64), self.job.schedule
        for boundary in self.boundaries:
            rounded = self.job.transport != self.job.dtype
            traffic = [crossing[d] for d in boundary.directions for crossing in boundary.crossings]
            most = np.max([each.staging(boundary.row_bytes, rounded) for each in traffic], axis=0)
            flying = [_most_in_flight(role, boundary.edge) for role in schedule.roles]
            found[boundary.ranks] += most * [flying[schedule.role_index[rank]] for rank in boundary.ranks.tolist()]
        return found

    def _activations(self, role: Role, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Peak bytes of activations, workspace, and activations on the host of a role's ranks, int64 [ranks, 3].
        `rows`: see `_by_rank`, for each boundary.
        """
        names = {name for name, _ in role.held_stages}
        held, ranks = [call for call in self.shards if call[0] in names], np.array(role.ranks)
        columns = [self._shard_numbers(call, ranks) for call in held]
        columns += [side[ranks] for of_boundary in rows for crossing in of_boundary for side in crossing]
        kinds, which = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        found = []
        for kind in kinds.tolist():
            numbers = dict(zip(held, kind, strict=False))
            of_rank = self._rank_bytes(role, numbers, kind[len(held) :])
            found.append(peak_activations(self.job.schedule, role, of_rank))
        return np.array(found)[which.ravel()]

    def _shard_numbers(self, call: _Call, ranks: np.ndarray) -> np.ndarray:
        places = np.searchsorted(np.array(self.assumed.layouts[call[0]].ranks), ranks)
        return self.shards[call].of_rank[places]

    def _rank_bytes(self, role: Role, numbers: Mapping[_Call, int], rows: Sequence[int]) -> RankBytes:
        """`rows`: numbers held and needed in each crossing of each boundary."""
        width, left = self.assumed.shapes.text.hidden * self.job.dtype.itemsize, iter(rows)
        held, needed = dict[Edge, list[int]](), dict[Edge, list[int]]()
        for boundary in self.boundaries:
            of_row = boundary.outputs * width
            crossings = [(next(left) * of_row, next(left) * of_row) for _ in boundary.crossings]
            leaves, enters = self.job.schedule.crosses(role, boundary.edge)
            if leaves:
                held[boundary.edge] = [crossings[which][0] for which in boundary.numbers]
            if enters:
                needed[boundary.edge] = [crossings[which][1] for which in boundary.numbers]
        stages = {
            (name, stage, call[1]): self._stage(name, stage, self.shards[call].shards[number])
            for name, stage in role.held_stages
            for call, number in numbers.items()
            if call[0] == name and self.shards[call].used
        }
        outputs = {boundary.edge: boundary.outputs for boundary in self.boundaries}
        return RankBytes(stages, held, needed, outputs, self.assumed.calls)

    def _stage(self, name: str, number: int, shard: SequenceShard) -> StageBytes:
        offload = self.job.config.offload_of(name).activations
        return stage_bytes(self._modules[name], self.job.stages[name][number], shard, offload=offload)

    @cached_property
    def _modules(self) -> dict[str, MeasuredModule]:
        config, frozen, shapes = self.job.config.model, self.job.frozen, self.assumed.shapes
        prefixes = {name: "" if name == TEXT else prefix_of(name, shapes) for name in shapes.modules}
        return {
            name: MeasuredModule(
                name,
                self.assumed.shapes[name],
                layout.tp,
                layout.sp,
                layout.cp,
                self.job.sequence_parallel[name],
                self.job.dtype,
                Recompute.of(config, name),
                frozen=frozenset(n for n in shapes[name].architecture.tensors if prefixes[name] + n in frozen.tensors),
                trains=name == TEXT or frozen.trains(name),
                parts=config.tp_overlap.get(name, 1),
                compiled=config.compile == "layers",
                gpu=self.gpu,
                folds=layout.folds,
            )
            for name, layout in self.assumed.layouts.items()
        }


def _most_in_flight(role: Role, edge: Edge) -> int:
    """The most crossings of an edge in flight on a rank of a role."""
    change = {"start": 1, "finish": -1}
    changes = [change[a.op] for a in role.actions if a.op in change and a.edge == edge]
    return max(accumulate(changes), default=0)


def _by_rank(boundary: BoundaryTraffic, world_size: int) -> np.ndarray:
    """Rows held and needed by each rank, int64 [crossings, 2, ranks]."""
    found = np.zeros((len(boundary.crossings), 2, world_size), np.int64)
    for number, crossing in enumerate(boundary.crossings):
        forward = crossing["forward"]
        found[number, 0, forward.ranks], found[number, 1, forward.ranks] = forward.held, forward.needed
    return found
