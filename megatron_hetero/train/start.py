"""The start of a run: inputs opened, modules built, the state resumed, the log opened."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

from megatron_hetero.base.environment import prepare_traces
from megatron_hetero.base.errors import VISION, SharedError, listed, os_errors_as, parts_of
from megatron_hetero.checkpoint.resume import resume, shared_record
from megatron_hetero.checkpoint.saver import Saver
from megatron_hetero.checkpoint.state import Resumed, TrainState
from megatron_hetero.config.schema import Config, to_yaml
from megatron_hetero.data.loader import StepLoader
from megatron_hetero.groups.collective import FIRST, on_first
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.job import JobSpec
from megatron_hetero.models.layers.backend import backend_notices
from megatron_hetero.models.weights import projector_shapes
from megatron_hetero.train.build import build_step_trainer
from megatron_hetero.train.inputs import open_inputs
from megatron_hetero.train.log import MetricsWriter, Writer, unwritable
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
    for notice in backend_notices(config.model.layer_backend, platform) if topology.rank == FIRST else ():
        print(notice, flush=True)
    state = TrainState(steps.optimizer, topology, steps.shapes, working=watchdog.working)
    with watchdog.waiting(lambda: "the state to resume from, with all other ranks,"):
        record = shared_record(config, state, inputs.mixture)
        resumed = resume(config, state, record)
        _require_trained_projector(job, resumed)
        writer = _open_writer(config, topology, resumed)
    # Ranks that still read their weights take longer than any step may.
    steps.wait_for_all("the start of all other ranks")
    return Trainer(
        **{field.name: getattr(steps, field.name) for field in fields(steps)},
        loader=StepLoader.of(job, inputs.mixture, inputs.processor, topology, steps.partitioner),
        held_out=inputs.held_out,
        writer=writer,
        resumed=resumed,
        saver=Saver(config, state, record, resumed.step, watchdog.waiting, writer.history),
        companions=inputs.companions,
    )


def _require_trained_projector(job: JobSpec, resumed: Resumed) -> None:
    """Check that all of a fresh projector is trained, in this run or before. Raises `UserError`."""
    frozen = [name for name in projector_shapes(VISION, job.shapes) if name in job.frozen.tensors]
    if resumed.step == 0 and job.folders.fresh_projector and frozen:
        part = parts_of(VISION)[-1]
        which = part if not job.frozen.trains(part) else f"{part} ({listed(frozen)})"
        raise SharedError.at(
            "model.freeze (--model.freeze)" if not job.config.model.train else "model.train (--model.train)",
            problem=f"{which} is frozen, but starts with random weights",
            because="model.fresh_projector is set, or the folder's projector does not match the language model",
            fix="train it first, or take folders that match",
        )


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
