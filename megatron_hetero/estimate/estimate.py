"""Estimates the memory, traffic and time of each rank for `--plan`. Pure, except that it reads the model's
`config.json`.

    memory     weights, gradients, optimizer      `parameters`
               activations, workspace             `measured` (one layer), `lifetimes` (one stage, one rank)
               boundary                           `traffic`
               allowance (context, NCCL …)        `allowance`
    traffic    boundaries, experts                `traffic`, `experts`
    time       operations of work                 `durations`, in the simulation of the schedule

`shards` has the batch that all of these modules assume, and the work of each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from megatron_hetero.config.fields import unused, wrong
from megatron_hetero.config.schema import Config
from megatron_hetero.estimate.allowance import ALLOWANCES, allowance_bytes
from megatron_hetero.estimate.durations import module_durations
from megatron_hetero.estimate.experts import ExpertTraffic, expert_traffic
from megatron_hetero.estimate.lifetimes import RankBytes, StageBytes, peak_activations, stage_bytes
from megatron_hetero.estimate.measured import Measured
from megatron_hetero.estimate.parameters import ParameterBytes, module_bytes
from megatron_hetero.estimate.shards import AssumedBatch, ModuleShards, Work, encoder_shards, text_shards
from megatron_hetero.estimate.traffic import BoundaryTraffic
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.communicators import CommunicatorKind, communicators
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.layers.linear import SYMMETRIC
from megatron_hetero.schedule.program import Role
from megatron_hetero.schedule.simulator import DurationKey, Simulation, simulate

KINDS: tuple[str, ...] = ("weights", "gradients", "optimizer", "activations", "boundary", "workspace")
"""Kinds of memory, in the order of the columns of `Estimate.memory`."""
_Call = tuple[str, int]
"""The name of a module, and the number of micro-batches in one of its calls."""
PLANNED_TURNS = 1 << 13
"""Maximum number of stages times micro-batches in a step; larger steps are refused, as simulations would be slow."""
SHARED = (4, 3, 2)
"""Numbers of micro-batches whose items may share an encoder call with `schedule.waves auto`, the best first."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """The memory, traffic and time of a job on `world_size` ranks. `gpu`: whether the ranks are GPUs; on a CPU, layers
    save more.
    """

    job: JobSpec
    assumed: AssumedBatch
    world_size: int
    gpu: bool = True

    @classmethod
    def of(cls, config: Config, world_size: int, *, gpu: bool = True) -> Estimate:
        """Return the estimate of a configuration. Raises `UserError` if it does not fit the model or the world."""
        job = JobSpec.of(with_waves(config, world_size), world_size)
        job.require_turns(PLANNED_TURNS)
        return cls(job, AssumedBatch.of(job), world_size, gpu)

    # ------------------------------------------------------------------------------------- shards and traffic

    @cached_property
    def shards(self) -> dict[str, ModuleShards]:
        """The work of the ranks of each module in its largest call."""
        return {name: self._calls[name, self.assumed.sizes_of_calls(name)[0]] for name in self.job.layouts}

    @cached_property
    def _calls(self) -> dict[_Call, ModuleShards]:
        """The work of the ranks of each module, for each size of its calls."""
        calls = [(name, n) for name in self.job.shapes.encoders for n in self.assumed.sizes_of_calls(name)]
        return {(TEXT, 1): text_shards(self.assumed), **{call: encoder_shards(self.assumed, *call) for call in calls}}

    @cached_property
    def boundaries(self) -> tuple[BoundaryTraffic, ...]:
        """The traffic in a step along each edge whose encoder has work."""
        return tuple(BoundaryTraffic.of(self.assumed, edge) for edge in self.job.edges if self.shards[edge.source].used)

    @cached_property
    def experts(self) -> tuple[ExpertTraffic, ...]:
        """The traffic of the text module's experts, for each pipeline coordinate that has such traffic."""
        traffic = (expert_traffic(self.assumed, coordinate) for coordinate in range(self.job.layouts[TEXT].pp))
        return tuple(each for each in traffic if each is not None)

    @cached_property
    def communicators(self) -> tuple[CommunicatorKind, ...]:
        """The communicators that a run creates after the world communicator, in the order of their creation."""
        job = self.job
        return communicators(job.layouts, edges=job.edges, needs=job.needs)

    # --------------------------------------------------------------------------------------------------- time

    @cached_property
    def work(self) -> dict[DurationKey, float]:
        """The operations of a rank in a micro-batch, by module, kind and stage."""
        durations = dict[DurationKey, float]()
        for name, module in self.job.modules.items():
            several_calls = any(len(work) > 1 for work in self.shards[name].shards)
            host_bytes = [self._host_bytes(name, number) for number in range(len(module.stages))]
            durations |= module_durations(self.assumed, module, host_bytes, several_calls=several_calls)
        return durations

    def _host_bytes(self, name: str, stage: int) -> int:
        """Return the bytes that a rank copies to the host, and back, for one micro-batch of a stage."""
        if not self.job.modules[name].settings.offload.activations:
            return 0
        in_call = max((self._stage(name, stage, work).host for work in self.shards[name].shards), default=0)
        return in_call // self.assumed.sizes_of_calls(name)[0]

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated schedule, whose times are in operations instead of seconds."""
        return simulate(self.job.schedule, self.work)

    # ------------------------------------------------------------------------------------------------- memory

    @cached_property
    def parameters(self) -> dict[tuple[str, int], ParameterBytes]:
        """The memory of a rank's parameters, by module and pipeline coordinate."""
        return {
            (name, coordinate): module_bytes(self.job, module, coordinate, self.assumed.calls[name])
            for name, module in self.job.modules.items()
            for coordinate in range(module.layout.pp)
        }

    @cached_property
    def memory(self) -> np.ndarray:
        """Device memory of each rank in bytes, without allowance: int64 [ranks, kinds], with the columns `KINDS`."""
        weights, gradients, optimizer, stays, running, updates = np.zeros((6, self.world_size), np.int64)
        for (name, coordinate), sizes in self.parameters.items():
            ranks = self._stage_ranks(name, coordinate)
            weights[ranks] += sizes.weights
            gradients[ranks] += sizes.gradients
            optimizer[ranks] += sizes.optimizer
            stays[ranks] += sizes.stays
            # Modules run one at a time, and are updated one at a time.
            running[ranks] = np.maximum(running[ranks], sizes.running)
            updates[ranks] = np.maximum(updates[ranks], sizes.update)
        activations, workspace, _ = self._activations.T
        for name, module in self.job.modules.items():
            stays[list(self.job.layouts[name].ranks)] += SYMMETRIC * (self.gpu and module.settings.tp_overlap)
        workspace = workspace + stays + running
        if self.gpu:  # Updates run when no activations are live, and can use their memory.
            workspace = np.maximum(workspace, updates - activations)
        return np.stack([weights, gradients, optimizer, activations, self._staging(), workspace], axis=1)

    @cached_property
    def allowance(self) -> np.ndarray:
        """Device memory besides tensors in bytes: int64 [ranks, allowances], columns `ALLOWANCES`; zero on a CPU."""
        if not self.gpu:
            return np.zeros((self.world_size, len(ALLOWANCES)), np.int64)
        return allowance_bytes(self.communicators, self.memory.sum(axis=1))

    @cached_property
    def totals(self) -> np.ndarray:
        """Device memory of each rank in bytes, allowance included: int64 [ranks]."""
        return self.memory.sum(axis=1) + self.allowance.sum(axis=1)

    @cached_property
    def host_states(self) -> np.ndarray:
        """Optimizer states of each rank in host memory, in bytes: int64 [ranks]."""
        states = np.zeros(self.world_size, np.int64)
        for (name, coordinate), sizes in self.parameters.items():
            states[self._stage_ranks(name, coordinate)] += sizes.host
        return states

    @property
    def host_activations(self) -> np.ndarray:
        """Peak of each rank's activations in host memory, in bytes: int64 [ranks]."""
        return self._activations[:, 2]

    @property
    def host_memory(self) -> np.ndarray:
        """Optimizer states and activations of each rank in host memory, in bytes: int64 [ranks]."""
        return self.host_states + self.host_activations

    def _stage_ranks(self, name: str, coordinate: int) -> np.ndarray:
        return np.array(self.job.layouts[name].stage(coordinate).ranks)

    def _staging(self) -> np.ndarray:
        """Return the bytes of staging buffers of each rank: the largest crossing times the crossings in flight."""
        total, schedule = np.zeros(self.world_size, np.int64), self.job.schedule
        rounded = self.job.transport != self.job.dtype
        for boundary in self.boundaries:
            traffic = [crossing[direction] for direction in boundary.directions for crossing in boundary.crossings]
            largest = np.max([each.staging(boundary.row_bytes, rounded) for each in traffic], axis=0)
            by_role = [_max_in_flight(role, boundary.edge) for role in schedule.roles]
            in_flight = [by_role[schedule.role_index[rank]] for rank in boundary.ranks.tolist()]
            total[boundary.ranks] += largest * in_flight
        return total

    @cached_property
    def _activations(self) -> np.ndarray:
        """Peak bytes of activations, of workspace above this peak, and of activations on the host: int64 [ranks, 3].
        Ranks of a role with equal shards and rows share one computation.
        """
        peaks, schedule = np.zeros((self.world_size, 3), np.int64), self.job.schedule
        rows = {boundary.edge: self._rows(boundary) for boundary in self.boundaries}
        shard_numbers = {call: np.zeros(self.world_size, np.int64) for call in self._calls}
        for call, shards in self._calls.items():
            shard_numbers[call][np.array(self.job.layouts[call[0]].ranks)] = shards.of_rank
        keys = np.vstack([*shard_numbers.values(), *(side for sides in rows.values() for side in sides)])
        for role in schedule.roles:
            ranks = np.array(role.ranks)
            _, first, key_of_rank = np.unique(keys[:, ranks], axis=1, return_index=True, return_inverse=True)
            distinct = [self._rank_bytes(role, rank, shard_numbers, rows) for rank in ranks[first].tolist()]
            distinct_peaks = np.array([peak_activations(schedule, role, sizes) for sizes in distinct])
            peaks[ranks] = distinct_peaks[key_of_rank.ravel()]
        return peaks

    def _rows(self, boundary: BoundaryTraffic) -> np.ndarray:
        """Return how many rows each rank holds and needs in each crossing: int64 [2, crossings, ranks]."""
        rows = np.zeros((2, len(boundary.crossings), self.world_size), np.int64)
        for number, crossing in enumerate(boundary.crossings):
            forward = crossing["forward"]
            rows[:, number, forward.ranks] = forward.held, forward.needed
        return rows

    def _rank_bytes(
        self, role: Role, rank: int, shard_numbers: Mapping[_Call, np.ndarray], rows: Mapping[Edge, np.ndarray]
    ) -> RankBytes:
        """Return the bytes of stages and rows on a rank. `shard_numbers`: the index of each rank's work in a call."""
        row_bytes, held, needed = self.job.shapes.text.hidden * self.job.dtype.itemsize, {}, {}
        for boundary in self.boundaries:
            sizes = rows[boundary.edge][:, list(boundary.numbers), rank] * (row_bytes * boundary.outputs)
            leaves, enters = self.job.schedule.crosses(role, boundary.edge)
            if leaves:
                held[boundary.edge] = sizes[0].tolist()
            if enters:
                needed[boundary.edge] = sizes[1].tolist()
        stages = {
            (name, stage, size): self._stage(name, stage, shards.shards[shard_numbers[name, size][rank]])
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


def with_waves(config: Config, world_size: int) -> Config:
    """Return a configuration whose `schedule.waves` is a number, or None for the default, in place of `auto`: the most
    micro-batches of `SHARED` whose plan fits into `plan.memory_gb`, else 1. With text stages it is the default, with
    which micro-batches share calls already. Equal configurations have equal results on all ranks and on any device.

    Raises:
        UserError: the memory is unknown, no encoder runs in waves, or the configuration does not fit the world.
    """
    if config.schedule.waves != "auto":
        return config
    default, limit = _in_waves_of(None, config), config.plan.memory_bytes
    job = JobSpec.of(default, world_size)
    if all(encoder.style != "waves" for encoder in job.schedule.encoders):
        raise unused("schedule.waves", "auto", "no encoder runs in waves", "remove it")
    if job.layouts[TEXT].pp > 1:
        return default
    if limit is None:
        because, fix = "waves are as large as the memory of a GPU allows", "set plan.memory_gb, or give a number"
        raise wrong("schedule.waves", "auto without plan.memory_gb", "both", because, fix)
    micro_batches = job.batch.micro_batches
    # As many calls as with waves of `most`, but equally large ones.
    sizes = (-(-micro_batches // -(-micro_batches // most)) for most in SHARED)
    for waves in dict.fromkeys(size for size in sizes if size > 1):
        chosen = _in_waves_of(waves, config)
        if Estimate.of(chosen, world_size).totals.max() <= limit:
            return chosen
    return _in_waves_of(1, config)


def _in_waves_of(waves: int | None, config: Config) -> Config:
    return replace(config, schedule=replace(config.schedule, waves=waves))


def _max_in_flight(role: Role, edge: Edge) -> int:
    """Return the maximum number of crossings of `edge` that are in flight at a time on a rank of a role."""
    change = {"start": 1, "finish": -1}
    changes = [change[action.op] for action in role.actions if action.op in change and action.edge == edge]
    return max(accumulate(changes), default=0)
