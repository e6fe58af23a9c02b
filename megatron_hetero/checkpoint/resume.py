"""How a run goes on: chosen, checked and loaded before anything is written."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.checkpoint.choice import choose
from megatron_hetero.checkpoint.collective import on_first
from megatron_hetero.checkpoint.model_files import hashes
from megatron_hetero.checkpoint.model_sources import ModelSources
from megatron_hetero.checkpoint.record import RunRecord, dataset_records, plain
from megatron_hetero.checkpoint.state import Resumed, TrainState, load
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.topology import Topology
from megatron_hetero.training.config import Config, to_yaml


def resume(config: Config, state: TrainState, mixture: Mixture) -> Resumed:
    """Load what `checkpoint.resume` asks for into `state`. Every rank calls it.

    Raises `UserError` on every rank where that cannot be done, or where `checkpoint.dir` cannot be written.
    """
    if config.checkpoint.dir is None and config.checkpoint.resume in ("auto", "never"):
        return Resumed()
    chosen, notes = on_first(state.topology.files, lambda: choose(config.checkpoint))
    if chosen is None:
        return Resumed(notes=notes)
    new = on_first(state.topology.files, lambda: run_record(config, state.topology, mixture))
    resumed = load(state, chosen, new, config.checkpoint.allow_changes)
    return replace(resumed, notes=(*notes, *resumed.notes))


def run_record(config: Config, topology: Topology, mixture: Mixture) -> RunRecord:
    """What a checkpoint of this run says of it, before the first step. Reads all annotations, and the model's files
    besides weights. Raises `UserError` where these cannot be read.
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
