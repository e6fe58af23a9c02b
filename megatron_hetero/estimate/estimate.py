"""The estimate of `--plan`: memory, traffic and time of each rank under a configuration. Pure but for reading the
model's `config.json`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np

from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.config.schema import Config
from megatron_hetero.estimate.communicator_memory import ALLOWANCES, allowance_bytes
from megatron_hetero.estimate.experts import ExpertTraffic, expert_traffic, operations_above_mean, tokens_of
from megatron_hetero.estimate.lifetimes import RankBytes, StageBytes, peak_activations, stage_bytes
from megatron_hetero.estimate.measured import Measured
from megatron_hetero.estimate.parameters import (
    Parameter,
    ParameterBytes,
    gathered_bytes,
    gradient_itemsize,
    parameter_bytes,
    parameters_of,
)
from megatron_hetero.estimate.shards import AssumedBatch, ModuleShards, Work, encoder_shards, text_shards
from megatron_hetero.estimate.traffic import DirectionTraffic, traffic_of
from megatron_hetero.job.job import JobSpec
from megatron_hetero.job.module import ModuleJob
from megatron_hetero.layout.communicators import CommunicatorKind, communicators
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.names import TEXT
from megatron_hetero.layout.pipeline import stages_of_rank
from megatron_hetero.models.layers.parts import FORWARD, Tokens
from megatron_hetero.schedule.gathering import shares_weights, span_of
from megatron_hetero.schedule.program import Role
from megatron_hetero.schedule.simulator import DurationKey, Simulation, simulate

COPIED = 8000
"""Operations per byte copied to or from the host: some 400 TFLOP/s and 50 GB/s on H100, half of both on A100."""
KINDS: tuple[str, ...] = ("weights", "gradients", "optimizer", "activations", "boundary", "workspace")
"""Kinds of memory, in the order of the columns of `Estimate.memory`."""
_Call = tuple[str, int]
"""A module and the number of micro-batches in a call of it."""
PLANNED_TURNS = 1 << 13
"""The most turns of all stages that are simulated, some seconds' work; larger batches are refused."""


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
    """Memory, traffic and time of a job on `world_size` ranks. `gpu`: whether the ranks are GPUs; on a CPU, layers
    save more.
    """

    job: JobSpec
    assumed: AssumedBatch
    world_size: int
    gpu: bool = True

    @classmethod
    def of(cls, config: Config, world_size: int, *, gpu: bool = True) -> Estimate:
        """Estimate a configuration. Raises `UserError` where it does not fit the model or the world."""
        job = JobSpec.of(config, world_size)
        job.require_turns(PLANNED_TURNS)
        return cls(job, AssumedBatch.of(job), world_size, gpu)

    @cached_property
    def parameters(self) -> dict[tuple[str, int], ParameterBytes]:
        """Memory of the parameters of a rank, by module and pipeline coordinate."""
        places = [(module, at) for module in self.job.modules.values() for at in range(module.layout.pp)]
        return {(module.name, at): _parameter_bytes(self.assumed, module, at) for module, at in places}

    @cached_property
    def shards(self) -> dict[str, ModuleShards]:
        """Shards by module, of the largest call."""
        return {name: self._calls[name, self.assumed.sizes_of_calls(name)[0]] for name in self.job.layouts}

    @cached_property
    def _calls(self) -> dict[_Call, ModuleShards]:
        """Shards of each module in calls of each size that occurs."""
        calls = [(name, n) for name in self.job.shapes.encoders for n in self.assumed.sizes_of_calls(name)]
        return {(TEXT, 1): text_shards(self.assumed), **{call: encoder_shards(self.assumed, *call) for call in calls}}

    @cached_property
    def boundaries(self) -> tuple[BoundaryTraffic, ...]:
        """Traffic along each edge."""
        return tuple(_boundary(self.assumed, edge) for edge in self.job.edges if self.shards[edge.source].used)

    @cached_property
    def experts(self) -> tuple[ExpertTraffic, ...]:
        """Traffic of experts of the text module, by pipeline coordinate, where there is any."""
        found = (expert_traffic(self.assumed, at) for at in range(self.job.layouts[TEXT].pp))
        return tuple(traffic for traffic in found if traffic is not None)

    @cached_property
    def work(self) -> dict[DurationKey, float]:
        """Operations of a rank in a micro-batch by module, kind and stage, or those that fit in the time of its
        copies.
        """
        copied = {}
        for name, stages in self.job.stages.items():
            if self.job.modules[name].settings.offload.activations:
                size = self.assumed.sizes_of_calls(name)[0]
                for number in range(len(stages)):
                    on_host = (self._stage(name, number, work).host for work in self.shards[name].shards)
                    copied[name, number] = max(on_host, default=0) // size
        in_parts = {name for name, shards in self.shards.items() if any(len(work) > 1 for work in shards.shards)}
        return _durations(self.assumed, copied, in_parts)

    @cached_property
    def simulation(self) -> Simulation:
        """The schedule, timed in operations."""
        return simulate(self.job.schedule, self.work)

    @cached_property
    def communicators(self) -> tuple[CommunicatorKind, ...]:
        """The communicators that a run creates after the world's, in order."""
        job = self.job
        return communicators(job.layouts, edges=job.edges, needs=job.needs)

    @cached_property
    def memory(self) -> np.ndarray:
        """Bytes of device memory, int64 [ranks, kinds], see `KINDS`."""
        table = np.zeros((self.world_size, len(KINDS)), np.int64)
        stays, running, updates = np.zeros((3, self.world_size), np.int64)
        for (name, at), held in self.parameters.items():
            ranks = np.array(self.job.layouts[name].stage(at).ranks)
            table[ranks, :3] += held.weights, held.gradients, held.optimizer
            stays[ranks] += held.stays
            # Modules run, and are updated, one at a time.
            running[ranks] = np.maximum(running[ranks], held.running)
            updates[ranks] = np.maximum(updates[ranks], held.update)
        table[:, 3], workspace, _ = self._activations.T
        table[:, 4] = self._staging()
        table[:, 5] = workspace + stays + running
        if self.gpu:  # Updates run when there are no activations.
            table[:, 5] = np.maximum(table[:, 5], updates - table[:, 3])
        return table

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
            found[np.array(self.job.layouts[name].stage(at).ranks)] += sizes.host
        return found

    @property
    def host_activations(self) -> np.ndarray:
        """Bytes of activations in host memory, int64 [ranks]."""
        return self._activations[:, 2]

    @property
    def host_memory(self) -> np.ndarray:
        """Bytes in host memory, int64 [ranks]."""
        return self.host_states + self.host_activations

    @cached_property
    def kinds_of_ranks(self) -> tuple[tuple[Role, np.ndarray, np.ndarray], ...]:
        """Ranks with equal memory: role, ascending ranks, and bytes by kind and allowance."""
        found, table = [], np.hstack([self.memory, self.allowance])
        for role in self.job.schedule.roles:
            ranks = np.array(role.ranks)
            rows, which = np.unique(table[ranks], axis=0, return_inverse=True)
            found += [(role, ranks[which.ravel() == i], row) for i, row in enumerate(rows)]
        return tuple(sorted(found, key=lambda kind: int(kind[1][0])))

    def _staging(self) -> np.ndarray:
        """Bytes of communicators' buffers on each rank: the largest crossing times the crossings in flight."""
        found, schedule = np.zeros(self.world_size, np.int64), self.job.schedule
        for boundary in self.boundaries:
            rounded = self.job.transport != self.job.dtype
            traffic = [crossing[d] for d in boundary.directions for crossing in boundary.crossings]
            most = np.max([each.staging(boundary.row_bytes, rounded) for each in traffic], axis=0)
            flying = [_most_in_flight(role, boundary.edge) for role in schedule.roles]
            found[boundary.ranks] += most * [flying[schedule.role_index[rank]] for rank in boundary.ranks.tolist()]
        return found

    @cached_property
    def _activations(self) -> np.ndarray:
        """Peak bytes of activations, of workspace above it, and of activations on the host, int64 [ranks, 3]. They are
        computed once for all ranks of a role with equal shards and rows.
        """
        found, schedule = np.zeros((self.world_size, 3), np.int64), self.job.schedule
        rows = {boundary.edge: self._rows(boundary) for boundary in self.boundaries}
        numbers = {call: np.zeros(self.world_size, np.int64) for call in self._calls}
        for (name, size), shards in self._calls.items():
            numbers[name, size][np.array(self.job.layouts[name].ranks)] = shards.of_rank
        columns = np.vstack([*numbers.values(), *(side for of_edge in rows.values() for side in of_edge)])
        for role in schedule.roles:
            ranks = np.array(role.ranks)
            _, first, which = np.unique(columns[:, ranks], axis=1, return_index=True, return_inverse=True)
            sizes = [self._rank_bytes(role, rank, numbers, rows) for rank in ranks[first].tolist()]
            found[ranks] = np.array([peak_activations(schedule, role, each) for each in sizes])[which.ravel()]
        return found

    def _rows(self, boundary: BoundaryTraffic) -> np.ndarray:
        """Rows held by each rank in each crossing, and rows needed, int64 [2, crossings, ranks]."""
        found = np.zeros((2, len(boundary.crossings), self.world_size), np.int64)
        for number, crossing in enumerate(boundary.crossings):
            forward = crossing["forward"]
            found[:, number, forward.ranks] = forward.held, forward.needed
        return found

    def _rank_bytes(
        self, role: Role, rank: int, numbers: Mapping[_Call, np.ndarray], rows: Mapping[Edge, np.ndarray]
    ) -> RankBytes:
        """Sizes on a rank of a role. `numbers`: of the ranks' shards; `rows`: see `_rows`."""
        width, held, needed = self.job.shapes.text.hidden * self.job.dtype.itemsize, {}, {}
        for boundary in self.boundaries:
            of_rank = rows[boundary.edge][:, list(boundary.numbers), rank] * (width * boundary.outputs)
            leaves, enters = self.job.schedule.crosses(role, boundary.edge)
            if leaves:
                held[boundary.edge] = of_rank[0].tolist()
            if enters:
                needed[boundary.edge] = of_rank[1].tolist()
        stages = {
            (name, stage, size): self._stage(name, stage, shards.shards[numbers[name, size][rank]])
            for name, stage in role.held_stages
            for (module, size), shards in self._calls.items()
            if module == name and shards.used
        }
        outputs = {boundary.edge: boundary.outputs for boundary in self.boundaries}
        return RankBytes(stages, held, needed, outputs, self.assumed.calls)

    def _stage(self, name: str, number: int, work: Work) -> StageBytes:
        module = self.job.modules[name]
        offload = module.settings.offload.activations
        return stage_bytes(self._measured[name], module.stages[number], work, offload=offload)

    @cached_property
    def _measured(self) -> dict[str, Measured]:
        imbalance = self.job.config.plan.expert_imbalance
        modules = self.job.modules.items()
        return {name: Measured.of(module, gpu=self.gpu, imbalance=imbalance) for name, module in modules}


def _parameter_bytes(assumed: AssumedBatch, module: ModuleJob, at: int) -> ParameterBytes:
    """Memory of the parameters of all views on the ranks of a stage of a module."""
    job, name, layout, itemsize = assumed.job, module.name, module.layout, module.dtype.itemsize
    precision, zero = module.settings.precision, module.settings.zero
    stages = stages_of_rank(module.stages, at, layout.pp)
    every, found = list[Parameter](), list[ParameterBytes]()
    for view in layout.every_view:
        holders, ranks = layout.ways("weights", "experts", view=view), layout.ways("tokens", "samples", view=view)
        own = parameters_of(module, holders, stages, view.name)
        on_host = module.settings.offload.states
        found.append(parameter_bytes(own, ranks, itemsize, module.optimizer, precision, on_host=on_host, zero=zero))
        every += own
    total = reduce(add, found)
    ranks = max(layout.ways("tokens", "samples", view=view) for view in layout.every_view)
    if not shares_weights(zero, ranks, total.trained > 0):
        return total
    is_head = module.role == TEXT and module.shape.tied and layout.pp == 1
    exchanged = gradient_itemsize(itemsize, precision)
    # Gradients of chunks are summed in the dtype of the sum.
    whole = exchanged if module.settings.chunk else itemsize
    span, turns = span_of(job.schedule.module[name], zero), (*job.schedule.waves, *job.schedule.returned)
    if all(any(call[0] <= turn[0] and turn[-1] <= call[-1] for call in assumed.calls[name]) for turn in turns if turn):
        # With one call per turn, weights need not stay for a next one.
        span = "run" if span == "wave" else span
    stays, running = gathered_bytes(every, itemsize, whole + exchanged, span, is_head=is_head)
    return replace(total, stays=stays, running=running)


def _boundary(assumed: AssumedBatch, edge: Edge) -> BoundaryTraffic:
    job = assumed.job
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


def _most_in_flight(role: Role, edge: Edge) -> int:
    """The most crossings of an edge in flight on a rank of a role."""
    change = {"start": 1, "finish": -1}
    changes = [change[a.op] for a in role.actions if a.op in change and a.edge == edge]
    return max(accumulate(changes), default=0)


# ---------------------------------------------------------------------------------------------- time


def _durations(
    assumed: AssumedBatch, copied: Mapping[tuple[str, int], int], in_parts: Collection[str]
) -> dict[DurationKey, float]:
    """Operations of one rank by module, kind of work and stage, or those that fit in the time of the copies beside
    them where that is longer. `copied`: bytes copied to the host, and back, by module and stage. `in_parts`: encoders
    that take several calls for a micro-batch.

    A backward pass costs what the gradients of inputs and of weights do, where they are computed, and the forward pass
    of fully recomputed layers and of encoders in parts. Selective recomputation repeats no matrix product and costs
    nothing; chunked MLPs recompute their first product. Experts cost what they do on the rank whose experts get most.
    """
    job, found = assumed.job, dict[DurationKey, float]()
    for name, module in job.modules.items():
        architecture, layout, ways = module.shape.architecture, module.layout, module.layout.ways
        tokens, times = _of_replica(assumed, name)
        on_rank, of_rank = times * tokens.total / ways("tokens"), times / ways("weights", "tokens")
        passes, recompute = job.frozen.passes(name, inputs=module.passes_gradients), module.recompute
        for number, stage in enumerate(module.stages):
            layers = architecture.layers[stage.first : stage.last]
            more = tokens.total * operations_above_mean(layers, layout, job.config.plan.expert_imbalance)
            forward = of_rank * (architecture.operations(tokens, stage, FORWARD) + more)
            step = of_rank * (job.frozen.operations(name, job.shapes, tokens, stage) + more * passes.linear)
            again = forward * recompute.whole_layers(len(stage.layers)) / len(stage.layers)
            if passes.linear > 1:
                mlps = (layer.mlp for layer in layers)
                chunked = (mlp for mlp in mlps if recompute.chunks(math.ceil(tokens_of(mlp, on_rank, layout))))
                again += on_rank * sum(mlp.first_product for mlp in chunked) / ways("weights")
            again += forward * (name in in_parts)
            copies = COPIED * copied.get((name, number), 0)
            saves = not job.schedule.module[name].recomputes  # else F saves nothing yet
            found[name, "F", number] = max(forward, copies * saves)
            # The last stage in parts runs again in the backward pass alone.
            found[name, "R", number] = (
                0.0 if name in in_parts and number == len(module.stages) - 1 else max(forward, copies)
            )
            found[name, "B", number] = max(step - forward + again, copies)
    return found


def _of_replica(assumed: AssumedBatch, module: str) -> tuple[Tokens, float]:
    """Tokens of a replica's micro-batch: those of the text module, or those of one image, and how many images the
    replica with the most has in a micro-batch, averaged over the calls of a step.
    """
    if module == TEXT:
        return Tokens(assumed.lengths, supervised=assumed.sample.supervised * len(assumed.lengths)), 1
    calls = assumed.calls[module]
    most = {n: max(map(len, assumed.encoder_shards(module, n).assigned)) for n in assumed.sizes_of_calls(module)}
    images = sum(most[len(call)] for call in calls) / sum(map(len, calls))
    return assumed.job.shapes.encoders[module].tokens(assumed.sample.sizes[module][:1]), images
