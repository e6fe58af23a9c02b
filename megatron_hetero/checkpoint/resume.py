"""How a run goes on: chosen, checked and loaded before anything is written; and how it saves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megatron_hetero.checkpoint.choice import choose
from megatron_hetero.checkpoint.collective import on_first
from megatron_hetero.checkpoint.optimizer_state import require_known
from megatron_hetero.checkpoint.record import RunRecord, dataset_records, plain
from megatron_hetero.checkpoint.state import HISTORY, Resumed, TrainState, load, save
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.topology import Topology
from megatron_hetero.training.config import Config, to_yaml


def resume(config: Config, state: TrainState, mixture: Mixture) -> Resumed:
    """Load what `checkpoint.resume` asks for into `state`. Every rank calls it.

    Raises `UserError` on every rank where that cannot be done, or where `checkpoint.dir` cannot be written.
    """
    if config.checkpoint.dir is None and config.checkpoint.resume in ("auto", "never"):
        return Resumed()
    for optimizer in state.optimizers:
        if optimizer is not None:
            require_known(optimizer)
    chosen, notes = on_first(state.topology.files, lambda: choose(config.checkpoint))
    if chosen is None:
        return Resumed(notes=notes)
    new = on_first(state.topology.files, lambda: run_record(config, state.topology, mixture))
    resumed = load(state, chosen, new, config.checkpoint.allow_changes)
    return replace(resumed, notes=(*notes, *resumed.notes))


def run_record(config: Config, topology: Topology, mixture: Mixture) -> RunRecord:
    """What a checkpoint of this run says of it, before the first step. Reads all annotations."""
    return RunRecord(
        step=0,
        world_size=topology.world_size,
        layouts={name: str(layout) for name, layout in topology.layouts.items()},
        datasets=dataset_records(mixture),
        config=plain(to_yaml(config)),
    )


@dataclass(frozen=True, eq=False)
class Saver:
    """Saves a run after every `interval` steps, after the last one, and where it is stopped."""

    config: Config
    state: TrainState
    mixture: Mixture

    def after(self, step: int, stopping: bool = False) -> None:
        """Save where it is time to. Every rank calls it after each step. Raises `UserError` as `save` does."""
        chosen = self.config.checkpoint
        if chosen.dir is None or not (stopping or step % chosen.interval == 0 or step == self.config.train.iters):
            return
        record, group = replace(self._record, step=step), self.state.topology.files
        history = self.config.log.dir / HISTORY
        save(self.state.entries(), chosen.dir, record, history, chosen.keep_last, group)

    @cached_property
    def _record(self) -> RunRecord:
        return on_first(self.state.topology.files, lambda: run_record(self.config, self.state.topology, self.mixture))
