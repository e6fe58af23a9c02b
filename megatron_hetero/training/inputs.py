"""The inputs of a run, opened and checked on every rank before the first process group is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from megatron_hetero.batch.sources import open_held_out, open_mixture, open_processor
from megatron_hetero.config.schema import Config
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.distributed.agreement import Statement, require_agreement
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.errors import UserError
from megatron_hetero.hf.folder_writer import Companions, require_writable
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.job import JobSpec
from megatron_hetero.models.opening import open_encoders, open_modules
from megatron_hetero.models.writer import companions_of
from megatron_hetero.names import VISION
from megatron_hetero.processor.processor import Processor
from megatron_hetero.processor.two_folders import export_changes
from megatron_hetero.training.started_with import data_sets, files_of_model, settings_and_versions
from megatron_hetero.watch.watchdog import Watchdog

REPORTER = 0
"""The rank that prints, writes metrics and exports."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a rank: weights by module, data, and on the rank that exports the files exported with the model.
    Held-out data sets too, so that their errors are reported before training.
    """

    weights: Mapping[str, StoredWeights]
    processor: Processor
    mixture: Mixture
    held_out: Mapping[str, Mixture]
    companions: Mapping[str, Companions]


def open_together(config: Config, platform: Platform, watchdog: Watchdog) -> tuple[JobSpec, Inputs]:
    """The job and this rank's inputs, once all ranks have opened the same ones. Raises `UserError` on every rank."""
    with watchdog.working():
        facts, job, inputs, problem = settings_and_versions(config, platform), None, None, None
        try:
            job = JobSpec.of(config, dist.get_world_size())
            inputs = _open(job)
            facts |= files_of_model(config, inputs.weights.values())
            facts |= data_sets([inputs.mixture, *inputs.held_out.values()])
        except UserError as error:
            problem = str(error)
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    require_agreement(Statement(facts, problem), store, rank, ranks, watchdog.waiting)
    assert job is not None and inputs is not None, "ranks agree only where none has a problem"
    return job, inputs


def _open(job: JobSpec) -> Inputs:
    """This rank's inputs, checked. Raises `UserError`."""
    config = job.config
    return Inputs(
        _open_weights(job),
        open_processor(config),
        open_mixture(config),
        open_held_out(config),
        _ready_to_export(job) if dist.get_rank() == REPORTER else {},
    )


def _open_weights(job: JobSpec) -> dict[str, StoredWeights]:
    """The stored weights of each module, opened and checked. Raises `UserError`."""
    further = job.config.model.encoder_folders
    return open_modules(job.folders, job.shapes, job.config.train.seed) | open_encoders(further, job.shapes)


def _ready_to_export(job: JobSpec) -> dict[str, Companions]:
    """The files exported with the model, after checking that the export's folder can be written. Raises `UserError`."""
    config = job.config
    if config.export.hf_dir is not None:
        require_writable(config.export.hf_dir)
    return companions_of({VISION: config.model.hf_path, **config.model.encoder_folders}, export_changes(job.folders))
