"""A training run: built from a configuration, trained step by step, exported."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_hetero.checkpoint.collective import on_first
from megatron_hetero.checkpoint.resume import resume, shared_record
from megatron_hetero.checkpoint.saver import Saver
from megatron_hetero.checkpoint.state import Resumed, TrainState
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.two_folders import export_changes
from megatron_hetero.errors import UserError
from megatron_hetero.megatron_adapter import prepare_globals
from megatron_hetero.models.backend import spec_provider
from megatron_hetero.models.balance import idle_share
from megatron_hetero.models.hf_folder import StoredWeights, require_writable
from megatron_hetero.models.qwen2_5_vl.fresh import open_encoders, open_modules
from megatron_hetero.models.qwen2_5_vl.shapes import Qwen25VLShapes
from megatron_hetero.models.qwen2_5_vl.weights import stored_shapes
from megatron_hetero.module_names import TEXT, VISION
from megatron_hetero.platform import Platform
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.runtime import Interpreter, ModuleOnRank
from megatron_hetero.schedule.watch import Stopwatch
from megatron_hetero.topology import Topology
from megatron_hetero.training.config import Config, to_yaml
from megatron_hetero.training.export import export_model
from megatron_hetero.training.gradients import GradientSummary, clip_factor, reduce_gradients, scale_gradients
from megatron_hetero.training.metrics import MetricsWriter, NullWriter, StepMetrics, evaluations_since
from megatron_hetero.training.modules import TrainedModule, build_module
from megatron_hetero.training.optimizer import build_optimizer, rate_of, set_learning_rates, update
from megatron_hetero.training.profile import StepProfiler
from megatron_hetero.training.resolved import (
    checked,
    checked_schedule,
    communication,
    dtype_of,
    folders_of,
    shards_activations,
    stages_per_rank,
    transport_of,
)
from megatron_hetero.training.sources import open_held_out, open_mixture, open_processor
from megatron_hetero.training.step_flops import utilisation
from megatron_hetero.training.step_loader import StepBatch, StepLoader
from megatron_hetero.training.step_plan import StepPlanner, image_encoder
from megatron_hetero.training.to_device import to_device

REPORTER = 0
"""The rank that prints and writes metrics."""


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that lives as long as a run, on one rank. `modules` are those that this rank has a part of, encoders
    first; `optimizers` are in the same order. `held_out` are the data sets of `eval.datasets`.
    """

    config: Config
    shapes: Qwen25VLShapes
    topology: Topology
    modules: tuple[TrainedModule, ...]
    optimizers: tuple[Any, ...]
    schedule: Schedule
    interpreter: Interpreter
    loader: StepLoader
    held_out: Mapping[str, Mixture]
    writer: MetricsWriter | NullWriter
    watch: Stopwatch
    profiler: StepProfiler
    resumed: Resumed
    saver: Saver

    @classmethod
    def build(cls, config: Config, platform: Platform) -> Run:
        """Check the configuration against the model and the world, then make groups, modules, optimizers and the
        loader.

        Raises `UserError` for anything that the user can mend; nothing has been written by then.
        """
        shapes, layouts, batch = checked(config, dist.get_world_size())
        weights = _open_weights(config, shapes)
        # Held-out data sets too: what is wrong with them is said now, not after training.
        processor, mixture, held_out = open_processor(config), open_mixture(config), open_held_out(config)
        if dist.get_rank() == REPORTER and config.export.hf_dir is not None:
            require_writable(config.export.hf_dir)
        torch.manual_seed(config.train.seed)
        platform.prepare_megatron()
        prepare_globals(config.train.seed)
        schedule = checked_schedule(config, layouts, batch)
        encoders = config.model.encoder_names
        topology = Topology.build(layouts, platform, decoding=encoders, **communication(config, shapes))
        modules = _build_modules(config, shapes, topology, weights)
        planner = StepPlanner(
            {name: image_encoder(shape) for name, shape in shapes.encoders.items()},
            layouts,
            {name: shards_activations(config, name, layout) for name, layout in layouts.items()},
            topology.rank,
            shapes.text.hidden * transport_of(config).itemsize,
            config.data.balance,
        )
        watch = Stopwatch(platform)
        optimizers = tuple(build_optimizer(m, config.optimizer, dtype_of(config), platform) for m in modules)
        state = TrainState(modules, optimizers, topology, stored_shapes(shapes))
        record = shared_record(config, topology, mixture)
        resumed = _with_evaluations(resume(config, state, record), config, topology)
        return cls(
            config=config,
            shapes=shapes,
            topology=topology,
            modules=modules,
            optimizers=optimizers,
            schedule=schedule,
            interpreter=_interpreter(config, shapes, topology, modules, watch),
            loader=StepLoader(
                mixture, processor, topology, planner, batch, config.data.max_seq_length, config.data.too_long
            ),
            held_out=held_out,
            writer=_writer(config, topology.rank, resumed),
            watch=watch,
            profiler=StepProfiler(
                config.train.profile.start, config.train.profile.steps, config.log.dir, topology.rank, platform
            ),
            resumed=resumed,
            saver=Saver(config, state, record),
        )

    @property
    def platform(self) -> Platform:
        """Where this rank computes."""
        return self.topology.platform

    def batches(self) -> Iterator[tuple[int, StepBatch, float]]:
        """(step, batch, seconds waited for it) of all steps that are still to be trained. None is loaded ahead over an
        evaluation.
        """
        for first, last in stretches(self.resumed.step + 1, self.config.train.iters, self.config.eval.interval):
            batches = iter(self.loader.steps(first, last, self.config.data.workers))
            for step in range(first, last + 1):
                start = time.perf_counter()
                with self._watched(f"the data of step {step}"):
                    batch = next(batches)
                yield step, batch, time.perf_counter() - start

    def train_step(self, step: int, batch: StepBatch, waited: float = 0.0, stop: object = False) -> StepMetrics:
        """Forward, backward, and update; `waited`: seconds that the batch was waited for; `stop`: true, at the end of
        the step, where this rank was asked to stop.

        Raises `UserError` before the update where the loss or a gradient is NaN or infinite.
        """
        start = time.perf_counter()
        if batch.supervised == 0:
            raise UserError(
                f"step {step}: found no supervised token in the global batch, expected some, because the loss "
                f"divides by their number; raise data.max_seq_length or the batch size, or mend the data"
            )
        with self.profiler.step(step):
            summary = self.gradients(batch)
            self._refuse_faults(step, summary)
            norm = summary.norm / batch.supervised
            factor = clip_factor(norm, self.config.optimizer.clip_grad) / batch.supervised
            scale_gradients(self.modules, factor)
            with self._watched(f"the update of step {step}"):
                rate = self._update(step)
                self.platform.synchronize()
        metrics = self._metrics(step, batch, summary.loss_sum / batch.supervised, norm, rate, start - waited, waited)
        told = self.over_ranks([self.platform.peak_memory_bytes(), float(bool(stop))])
        memory, stopping = told.max(dim=0).values.tolist()
        return replace(metrics, peak_memory_bytes=int(memory), stopping=bool(stopping))

    def gradients(self, batch: StepBatch) -> GradientSummary:
        """Forward and backward of all micro-batches, then the sums over ranks; gradients are not scaled by 1/N yet."""
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            if module.ddp is not None:
                module.ddp.zero_grad_buffer()
                optimizer.zero_grad()  # Megatron's fp32 optimizer leaves the last step's gradients on the parameters
        dtype = dtype_of(self.config)
        loss_sum = self.interpreter.run(
            self.schedule, lambda m: to_device(batch.micro_batches[m], self.platform, dtype)
        )
        with self._watched("the sums of gradients over ranks"):
            return reduce_gradients(self.modules, loss_sum, self.counts_loss, self.optimizers, self.topology)

    def _watched(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what waits for other ranks between the actions of the schedule."""
        return self.interpreter.watchdog.doing(lambda: f"{what}, with all other ranks,")

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is one of those that add up to the whole: once for each tp group that has one."""
        layout, rank = self.topology.layouts[TEXT], self.topology.rank
        if rank not in layout:
            return False
        at = layout.coordinate(rank)
        return at.tp == 0 and at.pp == layout.pp - 1

    def _update(self, step: int) -> float:
        """Step all optimizers. Returns the learning rate of `optimizer.lr` (parts may have rates of their own)."""
        config, total = self.config.optimizer, self.config.train.iters
        with self.platform.megatron_scope():
            for optimizer in self.optimizers:
                if optimizer is not None:
                    set_learning_rates(optimizer, step, config, total)
                    update(optimizer)
        return rate_of(config.lr, config.min_lr, step, config, total)

    def _refuse_faults(self, step: int, summary: GradientSummary) -> None:
        if not summary.faults:
            return
        what, rank = summary.faults[0]
        others = f" (and {len(summary.faults) - 1} more)" if len(summary.faults) > 1 else ""
        kind = "loss" if what == "loss" else f"gradient of module {what}"
        raise UserError(
            f"step {step}: found a {kind} that is NaN or infinite on rank {rank}{others}, expected finite "
            f"numbers; the weights "
            "have not been updated. Lower optimizer.lr, add warm-up, or look for broken samples in this step"
        )

    def _metrics(
        self, step: int, batch: StepBatch, loss: float, norm: float, rate: float, start: float, waited: float
    ) -> StepMetrics:
        seconds = time.perf_counter() - start
        laps = self.watch.read()
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens=batch.tokens,
            images=sum(map(len, batch.grids.values())),
            step_time_s=seconds,
            peak_memory_bytes=self.platform.peak_memory_bytes(),
            data_time_s=waited,
            boundary_time_s=sum(laps.get("boundary", [])),
            mfu=utilisation(self.shapes, self.config.model.freeze, batch, seconds, self.topology),
            extra={
                "patches": sum(prod(grid) for grids in batch.grids.values() for grid in grids),
                "supervised_tokens": batch.supervised,
                "encoder_idle_share": self._idle_share(laps),
                "encoder_idle_share_predicted": idle_share(*batch.encoder_loads),
            },
        )

    def on_any_rank(self, flag: object) -> bool:
        """Whether `flag` is true on at least one rank, the same on each."""
        return bool(self.over_ranks([float(bool(flag))]).max())

    def over_ranks(self, numbers: Sequence[float]) -> torch.Tensor:
        """All ranks' numbers, fp64 [ranks, numbers] on the host; as many on each rank."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.platform.device)
        everyone = mine.new_empty(self.topology.world_size * len(mine))
        dist.all_gather_into_tensor(everyone, mine, group=self.topology.world)
        return everyone.view(self.topology.world_size, -1).cpu()

    def added_over_ranks(self, counts: np.ndarray) -> np.ndarray:
        """The sum of all ranks' `counts`, int64 of any shape, the same on each rank."""
        total = torch.from_numpy(counts).to(self.platform.device, copy=True)
        dist.all_reduce(total, group=self.topology.world)
        return total.cpu().numpy()

    def _idle_share(self, laps: Mapping[str, Sequence[float]]) -> float:
        """The share of the encoder ranks' time in which they wait for the slowest of their encoder, in each forward and
        backward of each micro-batch. `laps`: this rank's seconds by module.
        """
        rounds = []
        for name in self.shapes.encoders:
            ranks = self.topology.layouts[name].ranks
            role = self.schedule.roles[self.schedule.role_index[ranks[0]]]
            runs, mine = sum(a.op == "run" and a.module == name for a in role.actions), laps.get(name, [])
            rounds += self.over_ranks([*mine, *[0.0] * (runs - len(mine))])[list(ranks)].T.tolist()
        return idle_share(*rounds)

    def shards_activations(self, name: str) -> bool:
        """Whether a module's activations are split along the sequence over its tp ranks."""
        return shards_activations(self.config, name, self.topology.layouts[name])

    def export(self, target: Path) -> None:
        """Write the model to `target` in `transformers` format."""
        folders = {VISION: self.config.model.hf_path, **{n: e.hf_path for n, e in self.config.model.encoders.items()}}
        changes = export_changes(folders_of(self.config))
        export_model(self.modules, self.shapes, self.topology, target, folders, dtype_of(self.config), changes)


def stretches(first: int, last: int, interval: int) -> Iterator[tuple[int, int]]:
    """The steps from `first` to `last` in stretches that end with multiples of `interval`; in one where that is 0.

    What is evaluated after such a step reads through the same groups of hosts as the steps do, so that none of these
    may be loading meanwhile.
    """
    while first <= last:
        end = last if interval == 0 else min(last, -(-first // interval) * interval)
        yield first, end
        first = end + 1


def _with_evaluations(resumed: Resumed, config: Config, topology: Topology) -> Resumed:
    """Its history with the evaluations that were made after the checkpoint was written, so that none is made twice."""
    if resumed.step == 0:
        return resumed
    more = on_first(topology.files, lambda: evaluations_since(resumed.history, resumed.step, config.log.dir))
    return replace(resumed, history=resumed.history + more)


def _open_weights(config: Config, shapes: Qwen25VLShapes) -> dict[str, StoredWeights]:
    """The stored weights of each module, opened and checked. Raises `UserError`."""
    further = {name: encoder.hf_path for name, encoder in config.model.encoders.items()}
    return open_modules(folders_of(config), shapes, config.train.seed) | open_encoders(further, shapes)


def _build_modules(
    config: Config, shapes: Qwen25VLShapes, topology: Topology, weights: Mapping[str, StoredWeights]
) -> tuple[TrainedModule, ...]:
    provider = spec_provider(config.model.backend, topology.platform)
    return tuple(
        build_module(
            name,
            shapes,
            topology,
            provider,
            dtype=dtype_of(config),
            sequence_parallel=config.model.sequence_parallel.get(name, True),
            recompute=config.model.recompute.get(name, "none"),
            freeze=config.model.freeze,
            distributed_optimizer=config.optimizer.name == "adamw",
            weights=weights[name],
            split=config.parallel_layers.get(name),
            stages_per_rank=stages_per_rank(config, name),
        )
        for name, layout in topology.layouts.items()
        if topology.rank in layout
    )


def _interpreter(
    config: Config, shapes: Qwen25VLShapes, topology: Topology, modules: Sequence[TrainedModule], watch: Stopwatch
) -> Interpreter:
    on_rank = {}
    for module in modules:
        layout, first = topology.layouts[module.name], topology.layouts[module.name].coordinate(topology.rank).pp
        stages = {first + i * layout.pp: chunk for i, chunk in enumerate(module.chunks)}
        on_rank[module.name] = ModuleOnRank(stages, embeds=module.name == TEXT and 0 in stages)
    return Interpreter.build(
        topology,
        on_rank,
        width=shapes.text.hidden,
        dtype=dtype_of(config),
        transport=transport_of(config),
        timeout_s=config.schedule.timeout_s,
        watch=watch,
    )


def _writer(config: Config, rank: int, resumed: Resumed) -> MetricsWriter | NullWriter:
    if rank != REPORTER:
        return NullWriter()
    writer = MetricsWriter(
        config.log.dir,
        config.train.iters,
        done=resumed.step,
        history=resumed.history,
        tensorboard=config.log.tensorboard,
    )
    (config.log.dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return writer
