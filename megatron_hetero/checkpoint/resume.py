"""Resuming a run: the checkpoint is chosen, verified and loaded before anything is written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from megatron_hetero.checkpoint.choice import choose, started_again
from megatron_hetero.checkpoint.model_files import hashes
from megatron_hetero.checkpoint.model_sources import ModelSources
from megatron_hetero.checkpoint.record import RunRecord, dataset_records, plain
from megatron_hetero.checkpoint.shared_folder import FolderLock, require_shared
from megatron_hetero.checkpoint.state import Resumed, TrainState, load
from megatron_hetero.config.schema import Config, to_yaml
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.distributed.collective import on_first
from megatron_hetero.distributed.topology import Topology


def resume(config: Config, state: TrainState, record: RunRecord | None) -> Resumed:
    """Load the checkpoint that `checkpoint.resume` selects into `state`. Collective; `record` is that of
    `shared_record`.

    Raises `UserError` on every rank if that fails, or if `checkpoint.dir` cannot be written.
    """
    if record is None:
        return Resumed()
    group, folder, held = state.topology.files, config.checkpoint.dir, []
    notes = on_first(group, lambda: _take(folder, held), state.working) if folder is not None else ()
    chosen, more = on_first(group, lambda: choose(config.checkpoint, started_again(os.environ)), state.working)
    if folder is not None:
        require_shared(folder, group, state.working)
    resumed = Resumed()
    if chosen is not None:
        resumed = load(state, chosen, record, config.checkpoint.allow_changes)
    if resumed.step == config.train.iters:
        more = (*more, f"all {resumed.step} steps of train.iters are done")
    return replace(resumed, notes=(*notes, *more, *resumed.notes), lock=held[0] if held else None)


def _take(folder: Path, held: list[FolderLock]) -> tuple[str, ...]:
    lock, notes = FolderLock.take(folder)
    held.append(lock)
    return notes


def shared_record(config: Config, state: TrainState, mixture: Mixture) -> RunRecord | None:
    """The record of this run before its first step, on every rank; None if it neither reads nor writes checkpoints.
    Raises `UserError`, as `run_record` does.
    """
    if config.checkpoint.dir is None and config.checkpoint.resume in ("auto", "never"):
        return None
    topology = state.topology
    return on_first(topology.files, lambda: run_record(config, topology, mixture), state.working)


def run_record(config: Config, topology: Topology, mixture: Mixture) -> RunRecord:
    """The record of this run before its first step. Reads all annotations, and the model's files other than weights.
    Raises `UserError` if these cannot be read.
    """
    settings = plain(to_yaml(config))
    return RunRecord(
        step=0,
        world_size=topology.world_size,
        layouts={name: str(layout) for name, layout in topology.layouts.items()},
        datasets=dataset_records(mixture),
        config=settings,
        model_files=hashes(ModelSources.recorded(settings)),
    )
