"""Builds what a rank trains steps with: process groups, its parts of modules, their optimizers, and the interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_hetero.base.errors import TEXT, UserError, parts_of
from megatron_hetero.config.schema import Config
from megatron_hetero.data.step_plan import StepPlanner
from megatron_hetero.groups.collective import all_or_none
from megatron_hetero.groups.megatron import prepare_globals
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import Stopwatch, Watchdog
from megatron_hetero.hf.weight_map import WeightSource
from megatron_hetero.job import JobSpec
from megatron_hetero.models.layers.backend import spec_provider
from megatron_hetero.models.layers.compiled import require_compiler
from megatron_hetero.models.layers.offload import ActivationOffload
from megatron_hetero.models.layers.overlapped import overlap_exchanges
from megatron_hetero.models.layers.recompute import Recompute
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import group_of
from megatron_hetero.schedule.contract import ModuleOnRank
from megatron_hetero.step.family_module import build_module
from megatron_hetero.step.joint import JointOptimizer, ModuleOptimizer
from megatron_hetero.step.module import TrainedModule, gathered_stages
from megatron_hetero.step.optimizer import SGD, AdamW, Algorithm, build_shard_optimizer
from megatron_hetero.step.runner import Runner, build
from megatron_hetero.train.measures import StepProfiler
from megatron_hetero.train.step_trainer import StepTrainer


def build_step_trainer(
    job: JobSpec,
    platform: Platform,
    weights: Mapping[str, WeightSource],
    *,
    watchdog: Watchdog | None = None,
    check: bool = True,
) -> StepTrainer:
    """Make groups, modules and optimizers of this process's rank.

    `weights`: where those of each module come from. `watchdog`: the rank's, if it already has one. `check`: whether
    groups are checked, see `Topology.build`.

    Raises `UserError` where the configuration does not fit the model or the world.
    """
    config, schedule = job.config, job.schedule  # A schedule that does not fit is said before groups are made.
    torch.manual_seed(config.train.seed)
    platform.prepare_megatron()
    prepare_globals(config.train.seed)
    watchdog = watchdog or Watchdog.of_world(config.schedule.timeout_s, platform, "schedule.timeout_s")
    with watchdog.waiting(lambda: "the making of process groups, with all other ranks,"):
        topology = build(
            job.graph,
            job.layouts,
            platform=platform,
            tied=job.tied,
            interleaved=job.interleaved,
            decoding=config.model.encoder_names,
            megatron=(),  # The schedule, the norm and the embedding's gradients are ours.
            planned=False,  # The loader plans them, on each rank alike.
            check=check,
        )
    if check:
        with watchdog.waiting(lambda: "the first kernels that all other ranks compile"):
            platform.agree_to_compile(topology.files)
    platform.leave_headroom()
    parts = partial(_build_parts, job, topology, weights)
    with watchdog.waiting(lambda: "the weights of all other ranks"):
        # A rank may be the only one to find what is wrong: all of them leave, and one says why.
        optimizer = all_or_none(topology.files, parts, watchdog.working) if check else parts()
    planner = StepPlanner(
        job.shapes.encoders,
        job.layouts,
        job.sequence_parallel,
        topology.rank,
        job.row_bytes,
        config.data.balance,
        job.edges,
        job.together,
    )
    watch, profiled = Stopwatch(platform), config.train.profile
    return StepTrainer(
        job=job,
        schedule=schedule,
        topology=topology,
        optimizer=optimizer,
        runner=Runner(
            topology,
            _on_rank(job, optimizer.modules),
            optimizer=optimizer,
            watch=watch,
            watchdog=watchdog,
            check=False,  # Stages of our own.
        ),
        planner=planner,
        watch=watch,
        profiler=StepProfiler(
            *(profiled.start, profiled.steps, config.log.dir, topology.rank, platform), optimizer.wait_for_weights
        ),
    )


def _build_parts(job: JobSpec, topology: Topology, weights: Mapping[str, WeightSource]) -> JointOptimizer:
    """This rank's parts of modules, and their optimizers."""
    modules, platform = _build_modules(job, topology, weights), topology.platform
    streamed = any(job.config.offload_of(module.name).states for module in modules)
    streams = platform.side_streams(2) if streamed else ()
    optimizers: dict[str, ModuleOptimizer] = {
        module.key: build_shard_optimizer(module, _algorithm(job.config, job.shapes, module), streams)
        for module in modules
        if module.trained
    }
    return JointOptimizer(topology, modules, optimizers, job.config.optimizer.clip_grad)


def _algorithm(config: Config, shapes: ModelShapes, module: TrainedModule) -> Algorithm:
    """The optimizer of a module with its own rates and numbers."""
    chosen, precision, name = config.optimizer, config.precision_of(module.name), module.name
    encoder, *projector = parts_of(name)
    peaks = dict.fromkeys(projector, chosen.lr_projector)
    peaks |= {} if name == TEXT else {encoder: chosen.lr_vision}

    def lr(parameter: str) -> float:
        peak = peaks.get(group_of(name, shapes, parameter))
        return chosen.lr if peak is None else peak

    numbers: dict[str, Any] = {"master": precision.master, "gradients": precision.gradients}
    offload, seed = config.offload_of(name).states, config.train.seed
    if chosen.name == "sgd":
        return SGD(lr=lr, offload=offload, seed=seed, **numbers)
    decay, numbers = chosen.weight_decay, numbers | {"moments": precision.moments}
    return AdamW(lr=lr, betas=chosen.betas, eps=chosen.eps, weight_decay=decay, offload=offload, seed=seed, **numbers)


def _build_modules(job: JobSpec, topology: Topology, weights: Mapping[str, WeightSource]) -> tuple[TrainedModule, ...]:
    config = job.config
    if compile_layers := config.model.compile == "layers":
        require_compiler(topology.platform.device)
    backend = spec_provider(config.model.layer_backend, topology.platform)
    modules = tuple(
        of_view
        for name, layout in topology.layouts.items()
        if topology.rank in layout
        for of_view in build_module(
            name,
            job.shapes,
            job.stages[name],
            topology,
            backend,
            dtype=job.dtype,
            sequence_parallel=job.sequence_parallel[name],
            recompute=Recompute.of(config.model, name),
            frozen=job.frozen.tensors,
            sharded=job.optimizer.sharded,
            zero=config.zero_of(name),
            gradients=getattr(torch, config.precision_of(name).gradients),
            weights=weights[name],
            offload=ActivationOffload(topology.platform) if config.offload_of(name).activations else None,
            compile_layers=compile_layers,
        )
    )
    for module in {module.name: module for module in modules}.values():
        _overlap_exchanges(module, config.model.tp_overlap.get(module.name, 1))
    return modules


def _overlap_exchanges(module: TrainedModule, parts: int) -> None:
    """Raises `UserError` for layers that exchange by themselves."""
    if parts == 1:
        return
    try:
        for chunk in module.chunks:
            overlap_exchanges(chunk, parts)
    except TypeError as error:
        where = f"model.tp_overlap.{module.name} (--model.tp_overlap.{module.name})"
        raise UserError.at(where, problem=str(error), fix="use --model.backend torch, or remove it") from None


def _on_rank(job: JobSpec, modules: Sequence[TrainedModule]) -> dict[str, ModuleOnRank]:
    found = {}
    for module in modules:
        stages = dict(zip(module.stages, module.chunks, strict=True))
        trains = module.name == TEXT or job.frozen.trains(module.name)
        gathered = gathered_stages(each for each in modules if each.name == module.name)
        found[module.name] = ModuleOnRank(stages, module.name == TEXT and 0 in stages, trains, gathered)
    return found
