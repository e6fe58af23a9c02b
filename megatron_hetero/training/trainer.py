"""A training run: built from a configuration, trained step by step, exported."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_hetero.batch.sources import open_held_out, open_mixture, open_processor
from megatron_hetero.batch.step_loader import StepBatch, StepLoader
from megatron_hetero.checkpoint.resume import resume, shared_record
from megatron_hetero.checkpoint.saver import Saver
from megatron_hetero.checkpoint.state import Resumed, TrainState
from megatron_hetero.config.schema import Config, to_yaml
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.distributed.agreement import Statement, require_agreement
from megatron_hetero.distributed.collective import on_first
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.environment.cuda import prepare_traces
from megatron_hetero.errors import SharedError, UserError, os_errors_as
from megatron_hetero.execution.watch import Watchdog
from megatron_hetero.hf.folder_writer import Companions, require_writable
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.job import JobSpec
from megatron_hetero.models.common.backend import backend_notices
from megatron_hetero.models.opening import open_encoders, open_modules
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.models.writer import companions_of
from megatron_hetero.names import VISION, parts_of
from megatron_hetero.processor.processor import Processor
from megatron_hetero.processor.two_folders import export_changes
from megatron_hetero.training.export import export_model
from megatron_hetero.training.log_folder import unwritable
from megatron_hetero.training.metrics import MetricsWriter, NullWriter
from megatron_hetero.training.metrics_history import evaluations_since
from megatron_hetero.training.share import Share
from megatron_hetero.training.started_with import data_sets, files_of_model, settings_and_versions

REPORTER = 0
"""The rank that prints, writes metrics and exports."""


@dataclass(frozen=True)
class MustStop:
    """True if this rank stops the run after the current step: because it was asked to, or because it can no longer
    report metrics. The latter only if stopping saves what was trained.
    """

    run: Trainer
    asked: object

    def __bool__(self) -> bool:
        saves = self.run.config.checkpoint.dir is not None
        return bool(self.asked) or (saves and self.run.writer.is_broken)


@dataclass(frozen=True, eq=False, kw_only=True)
class Trainer(Share):
    """Everything that lives as long as a run, on one rank. `held_out`: the data sets of `eval.datasets`; `companions`:
    on the rank that exports, the files exported with the model, read at the start since the model's folders may be gone
    at the end.
    """

    loader: StepLoader
    held_out: Mapping[str, Mixture]
    writer: MetricsWriter | NullWriter
    resumed: Resumed
    saver: Saver
    companions: Mapping[str, Companions]

    @classmethod
    def build(cls, config: Config, platform: Platform, watchdog: Watchdog | None = None) -> Trainer:
        """Check the configuration against the model and the world, and all ranks against each other; then create
        process groups, modules, optimizers and the loader. `watchdog`: the rank's, if it already has one.

        Raises `UserError` for anything that the user can fix, before anything is written.
        """
        watchdog = watchdog or Watchdog.of_world(config.schedule.timeout_s, platform)
        job, sources = _open_together(config, platform, watchdog)
        if platform.is_cuda:  # Before the first collective.
            _prepare_traces(config.log.dir / "nccl")
        share = Share.of(job, platform, sources.weights, watchdog=watchdog)
        topology, data = share.topology, config.data
        for notice in backend_notices(config.model.backend, platform) if topology.rank == REPORTER else ():
            print(notice, flush=True)
        state = TrainState(
            share.modules, share.optimizers, topology, stored_shapes(share.shapes), working=watchdog.working
        )
        with watchdog.waiting(lambda: "the state to resume from, with all other ranks,"):
            record = shared_record(config, state, sources.mixture)
            resumed = _with_evaluations(resume(config, state, record), config, topology)
            _require_trained_projector(job, resumed)
            writer = _writer(config, topology, resumed)
        # Ranks that still read their weights take longer than any step may.
        share.wait_for_all("the start of all other ranks")
        return cls(
            **{field.name: getattr(share, field.name) for field in fields(share)},
            loader=StepLoader(
                sources.mixture,
                sources.processor,
                topology,
                share.planner,
                share.batch,
                data.max_seq_length,
                data.too_long,
            ),
            held_out=sources.held_out,
            writer=writer,
            resumed=resumed,
            saver=Saver(config, state, record, resumed.step, watchdog.waiting),
            companions=sources.companions,
        )

    def batches(self) -> Iterator[tuple[int, StepBatch, float]]:
        """(step, batch, seconds waited for it) of all remaining steps. Nothing is prefetched across an evaluation.

        Raises `UserError`, on every rank, for unusable data, and if all samples are too long.
        """
        in_a_row = 0
        for first, last in stretches(self.resumed.step + 1, self.config.train.iters, self.config.eval.interval):
            batches = iter(self.loader.steps(first, last, self.config.data.workers))
            for step in range(first, last + 1):
                start = time.perf_counter()
                with self.watched(f"the data of step {step}"):
                    batch = next(batches)
                in_a_row = 0 if batch.sample_lengths else in_a_row + batch.skipped
                self._require_samples(step, in_a_row)
                yield step, batch, time.perf_counter() - start

    def _require_samples(self, step: int, skipped: int) -> None:
        """Check that the samples `skipped` in a row up to `step` are not the whole mixture, or the whole run."""
        longest, everything = self.loader.max_seq_length, self.config.train.iters * self.loader.batch.step_samples
        if skipped >= min(len(self.loader.mixture), everything):
            raise SharedError.at(
                f"data.max_seq_length (--data.max_seq_length), step {step}",
                problem=f"all of {skipped} samples in a row are longer than {longest} tokens and were skipped",
                fix="raise it, or lower data.max_pixels",
            )

    def export(self, target: Path) -> None:
        """Write the model to `target` in `transformers` format. Raises `SharedError`, as `export_model` does."""
        watchdog = self.interpreter.watchdog
        with watchdog.waiting(lambda: "the export of the model, with all other ranks,"):
            export_model(
                *(self.modules, self.shapes, self.topology, target, self.companions, self.job.dtype),
                working=watchdog.working,
            )

    @property
    def faults(self) -> tuple[str, ...]:
        """What went wrong on this rank outside of training."""
        return (*self.writer.faults.values(), *filter(None, [self.profiler.fault]))


@dataclass(frozen=True, eq=False)
class _Sources:
    """The inputs of a rank: weights by module, data, and on the rank that exports the files exported with the model.
    Held-out data sets too, so that their errors are reported before training.
    """

    weights: Mapping[str, StoredWeights]
    processor: Processor
    mixture: Mixture
    held_out: Mapping[str, Mixture]
    companions: Mapping[str, Companions]


def _open_together(config: Config, platform: Platform, watchdog: Watchdog) -> tuple[JobSpec, _Sources]:
    """The job and this rank's inputs, once all ranks have opened the same ones. Raises `UserError` on every rank."""
    with watchdog.working():
        facts, job, sources, problem = settings_and_versions(config, platform), None, None, None
        try:
            job = JobSpec.of(config, dist.get_world_size())
            sources = _open(job)
            facts |= files_of_model(config, sources.weights.values())
            facts |= data_sets([sources.mixture, *sources.held_out.values()])
        except UserError as error:
            problem = str(error)
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    require_agreement(Statement(facts, problem), store, rank, ranks, watchdog.waiting)
    assert job is not None and sources is not None, "ranks agree only where none has a problem"
    return job, sources


def _open(job: JobSpec) -> _Sources:
    """This rank's inputs, checked. Raises `UserError`."""
    config = job.config
    return _Sources(
        _open_weights(job),
        open_processor(config),
        open_mixture(config),
        open_held_out(config),
        _ready_to_export(job) if dist.get_rank() == REPORTER else {},
    )


def stretches(first: int, last: int, interval: int) -> Iterator[tuple[int, int]]:
    """The steps from `first` to `last` in stretches that end at multiples of `interval`; one stretch if that is 0.

    An evaluation after a stretch reads through the same process groups as the steps, none of which may be loading
    meanwhile.
    """
    while first <= last:
        end = last if interval == 0 else min(last, -(-first // interval) * interval)
        yield first, end
        first = end + 1


def _require_trained_projector(job: JobSpec, resumed: Resumed) -> None:
    """Check that a fresh projector is trained, in this run or before. Raises `UserError`."""
    frozen = parts_of(VISION)[-1]
    if resumed.step == 0 and frozen in job.config.model.freeze and job.folders.fresh_projector:
        raise SharedError.at(
            "model.freeze (--model.freeze)",
            problem=f"{frozen} is frozen, but starts with random weights",
            because="model.fresh_projector is set, or the folder's projector does not match the language model",
            fix="train it first, or take folders that match",
        )


def _with_evaluations(resumed: Resumed, config: Config, topology: Topology) -> Resumed:
    """Its history with the evaluations made after the checkpoint was written, so that none is repeated."""
    if resumed.step == 0:
        return resumed
    more = on_first(topology.files, lambda: evaluations_since(resumed.history, resumed.step, config.log.dir))
    return replace(resumed, history=resumed.history + more)


def _open_weights(job: JobSpec) -> dict[str, StoredWeights]:
    """The stored weights of each module, opened and checked. Raises `UserError`."""
    further = job.config.model.encoder_folders
    return open_modules(job.folders, job.shapes, job.config.train.seed) | open_encoders(further, job.shapes)


def _writer(config: Config, topology: Topology, resumed: Resumed) -> MetricsWriter | NullWriter:
    """The writer of this rank. Raises `SharedError` if the folder cannot be written, or is in use by another run."""
    opened: list[MetricsWriter] = []

    def open_folder() -> None:
        opened.append(
            MetricsWriter(
                config.log.dir,
                config.train.iters,
                config=to_yaml(config),
                done=resumed.step,
                history=resumed.history,
                tensorboard=config.log.tensorboard,
                wandb=config.log.wandb,
            )
        )

    on_first(topology.files, open_folder)
    return opened[0] if opened else NullWriter()


def _ready_to_export(job: JobSpec) -> dict[str, Companions]:
    """The files exported with the model, after checking that the export's folder can be written. Raises `UserError`."""
    config = job.config
    if config.export.hf_dir is not None:
        require_writable(config.export.hf_dir)
    return companions_of({VISION: config.model.hf_path, **config.model.encoder_folders}, export_changes(job.folders))


def _prepare_traces(folder: Path) -> None:
    with os_errors_as(partial(unwritable, folder)):
        prepare_traces(folder)
