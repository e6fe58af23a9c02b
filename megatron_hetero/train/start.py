"""The start of a run: inputs are opened, groups, modules and optimizers built, the state is resumed, the log opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from megatron_hetero.base.environment import prepare_traces
from megatron_hetero.base.errors import SharedError, UserError, listed, os_errors_as
from megatron_hetero.checkpoint.resume import Resumed, TrainState, resume, shared_record
from megatron_hetero.checkpoint.saver import Saver
from megatron_hetero.config.schema import Config, to_yaml
from megatron_hetero.data.loader import StepLoader
from megatron_hetero.data.partition import StepPartitioner
from megatron_hetero.groups import megatron
from megatron_hetero.groups.collective import FIRST, all_or_none, on_first
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.topology import Topology, build
from megatron_hetero.groups.watchdog import Stopwatch, Watchdog
from megatron_hetero.hf.weight_map import WeightSource
from megatron_hetero.job.job import JobSpec
from megatron_hetero.job.module import ModuleJob
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.layers.backend import backend_notices
from megatron_hetero.models.layers.compiled import require_compiler
from megatron_hetero.models.weights import own_projectors
from megatron_hetero.schedule.contract import ModuleOnRank
from megatron_hetero.step.algorithms import SGD, AdamW, Algorithm
from megatron_hetero.step.family_module import build_module
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.module import ModuleOptimizer, TrainedModule
from megatron_hetero.step.optimizer import build_shard_optimizer
from megatron_hetero.step.runner import Runner
from megatron_hetero.train.inputs import Inputs, open_inputs
from megatron_hetero.train.log import MetricsWriter, Writer, unwritable
from megatron_hetero.train.measures import StepProfiler
from megatron_hetero.train.step_trainer import StepTrainer
from megatron_hetero.train.trainer import Trainer


def build_trainer(config: Config, platform: Platform, watchdog: Watchdog | None = None) -> Trainer:
    """Check the configuration against the model and the world, and all ranks against each other; then create process
    groups, modules, optimizers and the loader, and resume. `watchdog`: the rank's, if it already has one.

    Raises `UserError` for anything that the user can fix, before anything is written.
    """
    watchdog = watchdog or Watchdog.of_world(config.schedule.timeout_s, platform, "schedule.timeout_s")
    if platform.is_cuda:  # Before the first collective.
        with os_errors_as(partial(unwritable, config.log.dir)):
            prepare_traces(config.log.dir / "nccl")
    job, inputs = open_inputs(config, platform, watchdog)
    steps = build_step_trainer(job, platform, inputs.weights, watchdog=watchdog)
    topology = steps.topology
    if topology.rank == FIRST:
        notices = [*backend_notices(config.layer_backend, platform), *_unread(inputs), inputs.processor.advice]
        notices += [inputs.source.notice] if inputs.source else []
        for notice in filter(None, notices):
            print(notice, flush=True)
    state = TrainState(steps.optimizer, topology, steps.shapes, working=watchdog.working)
    with watchdog.waiting(lambda: "the state to resume from, with all other ranks,"):
        record = shared_record(config, state, inputs.mixture, inputs.transposed)
        resumed = resume(config, state, record)
        _require_trained_projector(job, resumed)
        writer = _open_writer(config, topology, resumed)
    # Ranks that still read their weights take longer than any step may.
    steps.wait_for_all("the start of all other ranks")
    return Trainer(
        **{field.name: getattr(steps, field.name) for field in fields(steps)},
        inputs=replace(inputs, weights={}),  # whose files would stay mapped
        loader=StepLoader.of(job, inputs.mixture, inputs.processor, topology, steps.partitioner),
        writer=writer,
        resumed=resumed,
        saver=Saver(config, state, record, resumed.step, watchdog.waiting, writer.history),
    )


def _unread(inputs: Inputs) -> list[str]:
    """Return lines about keys of records that are not read; none if a file cannot be read, which all ranks will see."""
    with suppress(UserError, OSError):
        return sorted({data.unread for each in (inputs.mixture, *inputs.held_out.values()) for data, _ in each.parts})
    return []


def _require_trained_projector(job: JobSpec, resumed: Resumed) -> None:
    """Check that all of a fresh projector is trained, in this run or before. Raises `UserError`."""
    frozen = [name for name in own_projectors(job.shapes) if name in job.frozen.tensors]
    if resumed.step == 0 and job.folders.fresh_projector and frozen:
        part = job.shapes.parts_of(job.shapes.own[0])[-1]
        which = part if not job.frozen.trains(part) else f"{part} ({listed(frozen)})"
        where = "model.train" if job.config.model.train else "model.freeze"
        problem = f"{which} is frozen, but starts with random weights"
        because = "model.fresh_projector is set, or the folder's projector does not match the language model"
        fix = "train it first, or take folders that match"
        raise SharedError.at(f"{where} (--{where})", problem=problem, because=because, fix=fix)


def _open_writer(config: Config, topology: Topology, resumed: Resumed) -> Writer:
    """Return the writer of this rank. Raises `SharedError` if the folder cannot be written, or is in use by another
    run.
    """
    opened: list[MetricsWriter] = []

    def open_folder() -> None:
        writer = MetricsWriter(
            config.log.dir,
            config.train.iters,
            config=to_yaml(config),
            done=resumed.step,
            history=resumed.history,
            tensorboard=config.log.tensorboard,
            wandb=config.log.wandb,
        )
        opened.append(writer)

    on_first(topology.files, open_folder)
    return opened[0] if opened else Writer()


def build_step_trainer(
    job: JobSpec,
    platform: Platform,
    weights: Mapping[str, WeightSource],
    *,
    watchdog: Watchdog | None = None,
    check: bool = True,
) -> StepTrainer:
    """Build groups, modules and optimizers of this process's rank.

    Args:
        job: the resolved configuration.
        platform: device and backend.
        weights: sources of the weights of each module.
        watchdog: the rank's, if it already has one.
        check: whether groups are checked, see `Topology.build`.

    Raises:
        UserError: the configuration does not fit the model or the world.
    """
    config = job.config
    job.schedule  # noqa: B018 (one that does not fit is refused before groups are created)
    torch.manual_seed(config.train.seed)
    megatron.prepare(platform)
    megatron.prepare_globals(config.train.seed)
    watchdog = watchdog or Watchdog.of_world(config.schedule.timeout_s, platform, "schedule.timeout_s")
    topology = _build_topology(job, platform, watchdog, check)
    parts = partial(_build_parts, job, topology, weights)
    with watchdog.waiting(lambda: "the weights of all other ranks"):
        # A rank may be the only one to find what is wrong: all of them leave, and one says why.
        optimizer = all_or_none(topology.files, parts, watchdog.working) if check else parts()
    watch, profiled = Stopwatch(platform), config.train.profile
    return StepTrainer(
        job=job,
        topology=topology,
        optimizer=optimizer,
        runner=Runner(
            topology,
            _on_rank(job, optimizer.modules),
            optimizer=optimizer,
            watch=watch,
            check=False,  # Stages of our own.
        ),
        partitioner=StepPartitioner(
            job.shapes.encoders,
            job.layouts,
            job.sequence_parallel,
            topology.rank,
            job.row_bytes,
            job.edges,
            config.data.balance,
            job.encoder_calls,
            job.patch_limits,
        ),
        watch=watch,
        profiler=StepProfiler(
            *(profiled.start, profiled.steps, config.log.dir, topology.rank, platform), optimizer.wait_for_weights
        ),
    )


def _build_topology(job: JobSpec, platform: Platform, watchdog: Watchdog, check: bool) -> Topology:
    with watchdog.waiting(lambda: "the creation of process groups, with all other ranks,"):
        topology = build(
            job.graph,
            job.layouts,
            platform=platform,
            tied=job.tied,
            interleaved=job.interleaved,
            decoding=tuple(job.shapes.encoders),
            megatron=(),  # The schedule, the norm and the embedding's gradients are ours.
            planned=False,  # The loader plans them, on each rank alike.
            check=check,
            watchdog=watchdog,
        )
    if check:
        with watchdog.waiting(lambda: "the first kernels that all other ranks compile"):
            platform.agree_to_compile(topology.files)
    platform.leave_headroom()
    return topology


def _build_parts(job: JobSpec, topology: Topology, weights: Mapping[str, WeightSource]) -> JointOptimizer:
    """Build this rank's parts of modules, and their optimizers."""
    if job.config.model.compile == "layers":
        require_compiler(topology.platform.device)
    here = [module for name, module in job.modules.items() if topology.has(name)]
    modules = tuple(view for module in here for view in build_module(module, topology, weights[module.name]))
    streamed = any(module.settings.offload.states for module in here)
    streams = topology.platform.side_streams(2) if streamed else ()
    optimizers: dict[str, ModuleOptimizer] = {
        module.key: build_shard_optimizer(module, _algorithm(job, job.modules[module.name]), streams)
        for module in modules
        if module.trained
    }
    return JointOptimizer(topology, modules, optimizers, job.config.optimizer.clip_grad)


def _algorithm(job: JobSpec, module: ModuleJob) -> Algorithm:
    """Return the optimizer of a module, with its learning rates and number formats."""
    chosen, settings, architecture = job.config.optimizer, module.settings, module.shape.architecture

    def lr(parameter: str) -> float:
        peak = chosen.lr_projector if architecture.in_projector(parameter) else settings.lr
        return chosen.lr if peak is None else peak

    common: dict[str, Any] = {
        "lr": lr,
        "master": settings.precision.master,
        "gradients": settings.precision.gradients,
        "offload": settings.offload.states,
        "seed": job.config.train.seed,
    }
    if chosen.name == "sgd":
        return SGD(**common)
    decay, moments = chosen.weight_decay, settings.precision.moments
    return AdamW(betas=chosen.betas, eps=chosen.eps, weight_decay=decay, moments=moments, **common)


def _on_rank(job: JobSpec, modules: Sequence[TrainedModule]) -> dict[str, ModuleOnRank]:
    found = {}
    for module in modules:
        stages, row = dict(zip(module.stages, module.chunks, strict=True)), job.modules[module.name]
        found[module.name] = ModuleOnRank(stages, row.role == TEXT and 0 in stages, row.passes_gradients)
    return found
