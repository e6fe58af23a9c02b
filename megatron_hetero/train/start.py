"""The start of a run: builds modules and optimizers, resumes the state, and opens the log."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.base.errors import SharedError, UserError, listed
from megatron_hetero.checkpoint.resume import Resumed, TrainState, resume, shared_record
from megatron_hetero.checkpoint.saver import Saver
from megatron_hetero.config.schema import Config, to_yaml
from megatron_hetero.groups import megatron
from megatron_hetero.groups.collective import FIRST, all_or_none, on_first, require_same
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import WeightSource
from megatron_hetero.job.job import JobSpec
from megatron_hetero.job.module import ModuleJob
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.adapters import adapters_text
from megatron_hetero.models.layers.backend import backend_notices
from megatron_hetero.models.layers.compiled import require_compiler
from megatron_hetero.models.layers.kernels import cudnn_support
from megatron_hetero.models.layers.linear import reserve_symmetric_memory
from megatron_hetero.models.weights import own_projectors, tensors_by_subset
from megatron_hetero.schedule.contract import ModuleOnRank
from megatron_hetero.step.algorithms import SGD, AdamW, Algorithm
from megatron_hetero.step.family_module import build_module
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.library_optimizers import join_optimizers
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.train.inputs import Inputs
from megatron_hetero.train.log import MetricsWriter, Writer
from megatron_hetero.train.trainer import Trainer


def prepare(job: JobSpec, platform: Platform) -> None:
    """Prepare this process for the modules of a job, before groups are created. Raises `UserError`."""
    job.schedule  # noqa: B018 (building the schedule validates it before groups are created)
    torch.manual_seed(job.config.train.seed)
    megatron.prepare(platform)
    megatron.prepare_globals(job.config.train.seed)


def build_modules(
    job: JobSpec, topology: Topology, weights: Mapping[str, WeightSource], *, check: bool = True
) -> tuple[TrainedModule, ...]:
    """Build this rank's stages of all modules from `weights` by module. `check`: whether to check that ranks agree on
    compilation. Raises `UserError`.
    """
    if check:
        with topology.watchdog.waiting(lambda: "the first kernels that all other ranks compile"):
            topology.platform.agree_to_compile(topology.files)

    def build() -> tuple[TrainedModule, ...]:
        here = [module for name, module in job.modules.items() if topology.has(name)]
        for module in here:
            if module.settings.tp_overlap and topology.platform.is_cuda:
                share_memory(module.name, topology.group(module.name, "tp"))
        topology.platform.leave_headroom()
        if job.config.model.compile == "layers":
            require_compiler(topology.platform.device)
        return tuple(view for module in here for view in build_module(module, topology, weights[module.name]))

    # If building fails on any rank, all ranks raise its error.
    with topology.watchdog.waiting(lambda: "the weights of all other ranks"):
        return all_or_none(topology.files, build, topology.watchdog.working)


def share_memory(module: str, group: dist.ProcessGroup) -> None:
    """Reserve symmetric memory for a module's tp `group`. Raises `UserError` if its ranks are on several hosts, or
    cannot read each other's memory.
    """
    where, fix = f"modules.{module}.tp_overlap (--{module}-tp_overlap)", "keep tp inside a host, or remove it"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")[:8]
    # PyTorch connects to processes by their numbers, which are those of others on another host.
    require_same(group, where, {"host": f"{socket.gethostname()} (boot {boot})"}, fix, "tp ranks share memory")
    try:
        reserve_symmetric_memory(group)
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except RuntimeError as error:
        problem, fix = f"tp ranks cannot share memory: {error}", "connect their GPUs by NVLink, or remove it"
        raise UserError.at(where, problem=problem, fix=fix) from error


def build_optimizer(job: JobSpec, topology: Topology, modules: Sequence[TrainedModule]) -> JointOptimizer:
    """Build the joint optimizer of this rank's modules from their settings. Collective. Raises `UserError`."""
    algorithms = {name: _algorithm(job, module) for name, module in job.modules.items()}
    with topology.watchdog.waiting(lambda: "the optimizers of all other ranks"):
        return join_optimizers(
            topology,
            modules,
            algorithms,
            job.config.optimizer.clip_grad,
            group=topology.files,
            working=topology.watchdog.working,
        )


def _algorithm(job: JobSpec, module: ModuleJob) -> Algorithm:
    """Return the optimization algorithm of a module, with its learning rates and number formats."""
    chosen, settings = job.config.optimizer, module.settings
    common: dict[str, Any] = {
        "lr": partial(module.peak_lr, chosen),
        "master": settings.precision.master,
        "gradients": settings.precision.gradients,
        "offload": settings.offload.states,
        "seed": job.config.train.seed,
    }
    if chosen.name == "sgd":
        return SGD(**common)
    decay, moments = chosen.weight_decay, settings.precision.moments
    return AdamW(betas=chosen.betas, eps=chosen.eps, weight_decay=decay, moments=moments, **common)


def on_rank(job: JobSpec, modules: Sequence[TrainedModule]) -> dict[str, ModuleOnRank]:
    """Return this rank's modules with their stages, by name, as arguments for a `Runner`."""
    stages_by_module = dict[str, ModuleOnRank]()
    for module in modules:
        stages = dict(zip(module.stages, module.chunks, strict=True))
        row = job.modules[module.name]
        embeds = row.role == TEXT and 0 in stages
        stages_by_module[module.name] = ModuleOnRank(stages, embeds, row.passes_gradients)
    return stages_by_module


def resume_run(trainer: Trainer, inputs: Inputs) -> tuple[Resumed, Writer, Saver]:
    """Resume from a checkpoint if there is one, and open the log. Collective; returns after all ranks are ready for the
    first step. Raises `UserError` before anything is written.
    """
    config, topology, watchdog = trainer.job.config, trainer.topology, trainer.topology.watchdog
    if topology.rank == FIRST:
        notices = backend_notices(config.layer_backend, topology.platform)
        notices += [cudnn_support(topology.platform.device)[1]] if config.may_use_cudnn else []
        notices += [trainer.job.folders.notice, inputs.source.notice if inputs.source else ""]
        notices += adapters_text(trainer.job.shapes)
        for notice in filter(None, [*notices, *_unread(inputs), inputs.processor.advice]):
            print(notice, flush=True)
    state = TrainState(trainer.optimizer, topology, trainer.job.shapes, working=watchdog.working)
    with watchdog.waiting(lambda: "the state to resume from, with all other ranks,"):
        record = shared_record(config, state, inputs.mixture, inputs.transposed)
        resumed = resume(config, state, record)
        _require_trained_projector(trainer.job, resumed)
        writer = _open_writer(config, topology, resumed)
    # Other ranks may still be reading weights, which can exceed the time limit of a step.
    trainer.wait_for_all("the start of all other ranks")
    return resumed, writer, Saver(config, state, record, resumed.step, watchdog.waiting, writer.history)


def _unread(inputs: Inputs) -> list[str]:
    """Return lines about keys of records that are not read; none if a file is unreadable, which is reported later."""
    with suppress(UserError, OSError):
        return sorted({data.unread for each in (inputs.mixture, *inputs.held_out.values()) for data, _ in each.sampled})
    return []


def _require_trained_projector(job: JobSpec, resumed: Resumed) -> None:
    """Check that this run or an earlier one trains all tensors of a fresh projector. Raises `UserError`."""
    frozen = [name for name in own_projectors(job.shapes) if name in job.frozen.tensors]
    if resumed.step == 0 and job.folders.fresh_projector and frozen:
        subset = next(subset for subset, names in tensors_by_subset(job.shapes).items() if frozen[0] in names)
        which = subset if not job.frozen.trains(subset) else f"{subset} ({listed(frozen)})"
        where = "model.train" if job.config.model.train else "model.freeze"
        problem = f"{which} is frozen, but starts with random weights"
        because = "model.fresh_projector is set, or the folder's projector does not match the language model"
        fix = "train it first, or take folders that match"
        raise SharedError.at(f"{where} (--{where})", problem=problem, because=because, fix=fix)


def _open_writer(config: Config, topology: Topology, resumed: Resumed) -> Writer:
    """Return this rank's writer. Raises `SharedError` if `log.dir` cannot be written or another run writes there."""
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
