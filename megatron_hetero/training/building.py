"""Builds what a rank trains steps with: process groups, its parts of modules, their optimizers, and the interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from megatron_hetero.data.step_plan import StepPlanner
from megatron_hetero.distributed.collective import together
from megatron_hetero.distributed.megatron import prepare_globals
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.engine.module import TrainedModule, build_module
from megatron_hetero.engine.optimizer import ModuleOptimizer, build_optimizer
from megatron_hetero.errors import UserError
from megatron_hetero.execution.runtime import Interpreter, ModuleOnRank
from megatron_hetero.hf.weight_map import WeightSource
from megatron_hetero.job import JobSpec
from megatron_hetero.models.common.backend import spec_provider
from megatron_hetero.models.common.layers.compiled import require_compiler
from megatron_hetero.models.common.layers.overlapped import overlap_exchanges
from megatron_hetero.models.common.offload.activations import ActivationOffload
from megatron_hetero.models.common.recompute.policy import Recompute
from megatron_hetero.names import TEXT
from megatron_hetero.training.profile import StepProfiler
from megatron_hetero.training.step_trainer import StepTrainer
from megatron_hetero.watch.stopwatch import Stopwatch
from megatron_hetero.watch.watchdog import Watchdog


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
        topology = Topology.build(
            job.layouts,
            platform,
            decoding=config.model.encoder_names,
            megatron=(),  # The schedule, the norm and the embedding's gradients are ours.
            check=check,
            **job.communication,
        )
    if check:
        with watchdog.waiting(lambda: "the first kernels that all other ranks compile"):
            platform.agree_to_compile(topology.files)
    platform.leave_headroom()
    build = partial(_build_parts, job, topology, weights)
    with watchdog.waiting(lambda: "the weights of all other ranks"):
        # A rank may be the only one to find what is wrong: all of them leave, and one says why.
        modules, optimizers = together(topology.files, build, watchdog.working) if check else build()
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

    def settle() -> None:
        for module in modules:
            module.data_parallel.wait_for_weights()

    return StepTrainer(
        job=job,
        schedule=schedule,
        topology=topology,
        modules=modules,
        optimizers=optimizers,
        interpreter=_interpreter(job, topology, modules, watch, watchdog),
        planner=planner,
        watch=watch,
        profiler=StepProfiler(profiled.start, profiled.steps, config.log.dir, topology.rank, platform, settle),
    )


def _build_parts(
    job: JobSpec, topology: Topology, weights: Mapping[str, WeightSource]
) -> tuple[tuple[TrainedModule, ...], tuple[ModuleOptimizer | None, ...]]:
    """This rank's parts of modules, and their optimizers."""
    modules, platform = _build_modules(job, topology, weights), topology.platform
    streamed = any(job.config.offload_of(module.name).states for module in modules)
    streams = platform.side_streams(2) if streamed else ()
    return modules, tuple(_build_optimizer(job, module, platform, streams) for module in modules)


def _build_modules(job: JobSpec, topology: Topology, weights: Mapping[str, WeightSource]) -> tuple[TrainedModule, ...]:
    config = job.config
    if compile_layers := config.model.compile == "layers":
        require_compiler(topology.platform.device)
    provider = spec_provider(config.model.layer_backend, topology.platform)
    modules = tuple(
        build_module(
            name,
            job.shapes,
            job.stages[name],
            topology,
            provider,
            dtype=job.dtype,
            sequence_parallel=job.sequence_parallel[name],
            recompute=Recompute.of(config.model, name),
            freeze=config.model.freeze,
            sharded=job.optimizer.sharded,
            zero=config.zero_of(name),
            gradients=getattr(torch, config.precision_of(name).gradients),
            weights=weights[name],
            offload=ActivationOffload(topology.platform) if config.offload_of(name).activations else None,
            compile_layers=compile_layers,
        )
        for name, layout in topology.layouts.items()
        if topology.rank in layout
    )
    for module in modules:
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


def _build_optimizer(
    job: JobSpec, module: TrainedModule, platform: Platform, streams: Sequence[torch.cuda.Stream]
) -> ModuleOptimizer | None:
    config, name = job.config, module.name
    return build_optimizer(
        module,
        config.optimizer,
        platform,
        config.precision_of(name),
        on_host=config.offload_of(name).states,
        streams=streams,
        seed=config.train.seed,
    )


def _interpreter(
    job: JobSpec,
    topology: Topology,
    modules: Sequence[TrainedModule],
    watch: Stopwatch,
    watchdog: Watchdog,
) -> Interpreter:
    on_rank = {}
    for module in modules:
        layout, first = topology.layouts[module.name], topology.layouts[module.name].coordinate(topology.rank).pp
        stages = {first + i * layout.pp: chunk for i, chunk in enumerate(module.chunks)}
        trains = module.name == TEXT or module.name not in job.config.model.freeze
        gathered = {first + i * layout.pp: each for i, each in enumerate(module.data_parallel.gathered)}
        on_rank[module.name] = ModuleOnRank(stages, module.name == TEXT and 0 in stages, trains, gathered)
    return Interpreter.build(
        topology,
        on_rank,
        width=job.shapes.text.hidden,
        dtype=job.dtype,
        outputs=job.edges,
        transport=job.transport,
        watch=watch,
        watchdog=watchdog,
        check=False,  # Stages of our own.
    )
