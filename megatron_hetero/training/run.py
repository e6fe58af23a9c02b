"""A training run: built from a configuration, trained step by step, exported."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.data.mixture import Mixture, RegistryEntry
from megatron_hetero.data.processing import Processor
from megatron_hetero.errors import UserError
from megatron_hetero.layout import Layout, require_supported, resolve
from megatron_hetero.megatron_adapter import prepare_globals
from megatron_hetero.models.backend import spec_provider
from megatron_hetero.models.balance import idle_share
from megatron_hetero.models.hf_folder import StoredWeights, require_writable
from megatron_hetero.models.qwen2_5_vl.shapes import Qwen25VLShapes
from megatron_hetero.models.qwen2_5_vl.weights import TIED_COPIES, canonical_name, stored_shapes
from megatron_hetero.platform import Platform
from megatron_hetero.schedule.colocated import Stopwatch, run_step
from megatron_hetero.topology import Topology
from megatron_hetero.training.config import Config, require_modules, to_yaml
from megatron_hetero.training.export import export_model
from megatron_hetero.training.gradients import GradientSummary, clip_factor, reduce_gradients, scale_gradients
from megatron_hetero.training.metrics import MetricsWriter, NullWriter, StepMetrics
from megatron_hetero.training.modules import MODULES, TrainedModule, build_module
from megatron_hetero.training.optimizer import build_optimizer, rate_of, set_learning_rates
from megatron_hetero.training.step_flops import utilisation
from megatron_hetero.training.step_loader import BatchShape, StepBatch, StepLoader
from megatron_hetero.training.step_plan import StepPlanner
from megatron_hetero.training.to_device import to_device

REPORTER = 0
"""The rank that prints and writes metrics."""


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that lives as long as a run, on one rank. Modules and optimizers are in the same order: vision,
    text.
    """

    config: Config
    shapes: Qwen25VLShapes
    topology: Topology
    modules: tuple[TrainedModule, ...]
    optimizers: tuple[Any, ...]
    communicator: BoundaryCommunicator
    loader: StepLoader
    writer: MetricsWriter | NullWriter
    watch: Stopwatch

    @classmethod
    def build(cls, config: Config, platform: Platform) -> Run:
        """Check the configuration against the model and the world, then make groups, modules, optimizers and the
        loader.

        Raises `UserError` for anything that the user can mend; nothing has been written by then.
        """
        shapes, layouts, batch = checked(config, dist.get_world_size())
        weights = StoredWeights.open(config.model.hf_path, canonical_name)
        weights.require(stored_shapes(shapes), frozenset(TIED_COPIES) if shapes.text.tied else frozenset())
        processor = Processor.from_folder(config.model.hf_path, config.data.min_pixels, config.data.max_pixels)
        registry = {n: RegistryEntry(e.annotations, e.images) for n, e in config.data.registry.items()}
        mixture = Mixture.parse(config.data.datasets, registry, config.data.shuffle, config.train.seed)
        if dist.get_rank() == REPORTER and config.export.hf_dir is not None:
            require_writable(config.export.hf_dir)
        torch.manual_seed(config.train.seed)
        platform.prepare_megatron()
        prepare_globals(config.train.seed)
        topology = Topology.build(layouts, platform, decoding=("vision",))
        modules = _build_modules(config, shapes, topology, weights)
        communicator = _communicator(config, shapes, topology)
        planner = StepPlanner(
            shapes.vision,
            layouts,
            {m.name: m.model.config.sequence_parallel for m in modules},
            topology.rank,
            communicator.row_bytes,
            config.data.balance,
        )
        return cls(
            config=config,
            shapes=shapes,
            topology=topology,
            modules=modules,
            optimizers=tuple(build_optimizer(m, config.optimizer, dtype_of(config), platform) for m in modules),
            communicator=communicator,
            loader=StepLoader(
                mixture, processor, topology, planner, batch, config.data.max_seq_length, config.data.too_long
            ),
            writer=_writer(config, topology.rank),
            watch=Stopwatch(platform),
        )

    @property
    def platform(self) -> Platform:
        """Where this rank computes."""
        return self.topology.platform

    @cached_property
    def _by_name(self) -> Mapping[str, TrainedModule]:
        return {m.name: m for m in self.modules}

    def batches(self) -> Iterator[tuple[int, StepBatch, float]]:
        """(step, batch, seconds waited for it) of all steps."""
        iters, workers = self.config.train.iters, self.config.data.workers
        batches = iter(self.loader.steps(1, iters, workers))
        for step in range(1, iters + 1):
            start = time.perf_counter()
            batch = next(batches)
            yield step, batch, time.perf_counter() - start

    def train_step(self, step: int, batch: StepBatch, waited: float = 0.0) -> StepMetrics:
        """Forward, backward, and update; `waited`: seconds that the batch was waited for.

        Raises `UserError` before the update where the loss or a gradient is NaN or infinite.
        """
        start = time.perf_counter()
        if batch.supervised == 0:
            raise UserError(
                f"step {step}: found no supervised token in the global batch, expected some, because the loss "
                f"divides by their number; raise data.max_seq_length or the batch size, or mend the data"
            )
        summary = self.gradients(batch)
        self._refuse_faults(step, summary)
        norm = summary.norm / batch.supervised
        factor = clip_factor(norm, self.config.optimizer.clip_grad) / batch.supervised
        scale_gradients(self.modules, factor)
        rate = self._update(step)
        self.platform.synchronize()
        return self._metrics(step, batch, summary.loss_sum / batch.supervised, norm, rate, start - waited, waited)

    def gradients(self, batch: StepBatch) -> GradientSummary:
        """Forward and backward of all micro-batches, then the sums over ranks; gradients are not scaled by 1/N yet."""
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            if module.ddp is not None:
                module.ddp.zero_grad_buffer()
                optimizer.zero_grad()  # Megatron's fp32 optimizer leaves the last step's gradients on the parameters
        dtype = dtype_of(self.config)
        micro_batches = (to_device(m, self.platform, dtype) for m in batch.micro_batches)
        vision, text = self._by_name["vision"], self._by_name["text"]
        loss_sum = run_step(vision.model, text.model, self.communicator, micro_batches, self.watch)
        first_of_tp = text.groups.tp.rank() == 0
        return reduce_gradients(self.modules, loss_sum, first_of_tp, self.optimizers, self.topology)

    def _update(self, step: int) -> float:
        """Step all optimizers. Returns the learning rate of `optimizer.lr` (parts may have rates of their own)."""
        config, total = self.config.optimizer, self.config.train.iters
        with self.platform.megatron_scope():
            for optimizer in self.optimizers:
                if optimizer is not None:
                    set_learning_rates(optimizer, step, config, total)
                    optimizer.step()
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
        parts = self.watch.read()
        peak, _ = self._over_ranks(self.platform.peak_memory_bytes())
        slowest, encoding = self._over_ranks(parts.get("vision", 0.0))
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens=batch.tokens,
            images=len(batch.grids),
            step_time_s=seconds,
            peak_memory_bytes=int(peak),
            data_time_s=waited,
            boundary_time_s=parts.get("boundary", 0.0),
            mfu=utilisation(self.shapes, self.config.model.freeze, batch, seconds, self.topology),
            extra={
                "patches": sum(prod(grid) for grid in batch.grids),
                "supervised_tokens": batch.supervised,
                "encoder_idle_share": 1 - encoding / slowest if slowest else 0.0,
                "encoder_idle_share_predicted": idle_share(*batch.encoder_loads),
            },
        )

    def _over_ranks(self, number: float) -> tuple[float, float]:
        """The highest and the mean of all ranks' numbers."""
        numbers = torch.tensor([number], dtype=torch.float64, device=self.platform.device)
        everyone = numbers.new_empty(self.topology.world_size)
        dist.all_gather_into_tensor(everyone, numbers, group=self.topology.world)
        return float(everyone.max()), float(everyone.mean())

    def export(self, target: Path) -> None:
        """Write the model to `target` in `transformers` format."""
        export_model(self.modules, self.shapes, self.topology, target, self.config.model.hf_path, dtype_of(self.config))


def dtype_of(config: Config) -> torch.dtype:
    """`model.dtype` as torch has it."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]


def checked(config: Config, world_size: int) -> tuple[Qwen25VLShapes, dict[str, Layout], BatchShape]:
    """The shapes of the model, the layouts that fit it and the world, and how the batch is shared out. Raises
    `UserError`.
    """
    shapes = Qwen25VLShapes.from_folder(config.model.hf_path)
    require_modules(config, MODULES)
    layouts = resolve(config.parallel, shapes.module_shapes(), world_size)
    require_supported(layouts, world_size)
    return shapes, layouts, _batch_shape(config, layouts["text"])


def _batch_shape(config: Config, text: Layout) -> BatchShape:
    total, micro = config.train.global_batch_size, config.train.micro_batch_size
    if total % (text.dp * micro):
        share = text.dp * micro
        raise UserError(
            f"train.global_batch_size (--train.global_batch_size): found {total}, expected a multiple of "
            f"{share}, because {text.dp} replicas of the text module train micro-batches of {micro}; "
            f"try --train.global_batch_size {-(-total // share) * share}"
        )
    return BatchShape(text.dp, total // (text.dp * micro), micro)


def _build_modules(
    config: Config, shapes: Qwen25VLShapes, topology: Topology, weights: StoredWeights
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
            weights=weights,
        )
        for name in MODULES
    )


def _communicator(config: Config, shapes: Qwen25VLShapes, topology: Topology) -> BoundaryCommunicator:
    return BoundaryCommunicator(
        topology.world,
        topology.platform.device,
        shapes.text.hidden,
        dtype_of(config),
        transport={"exact": None, "bfloat16": torch.bfloat16}[config.boundary.transport],
        # What crosses was counted when the step was planned, and an error then reached every rank.
        check=False,
    )


def _writer(config: Config, rank: int) -> MetricsWriter | NullWriter:
    if rank != REPORTER:
        return NullWriter()
    writer = MetricsWriter(config.log.dir, config.train.iters, tensorboard=config.log.tensorboard)
    (config.log.dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return writer
