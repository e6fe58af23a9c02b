"""Saves and loads the state of a run; collective over all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megatron_hetero.base.errors import listed
from megatron_hetero.base.outputs import require_own_name
from megatron_hetero.checkpoint.contents import random_entries, read, written
from megatron_hetero.checkpoint.index import INDEX, Entry, index_shapes, open_index
from megatron_hetero.checkpoint.record import FILE_NAME as RECORD
from megatron_hetero.checkpoint.record import RunRecord
from megatron_hetero.checkpoint.storage import read_entries, verified
from megatron_hetero.groups.collective import Working, on_every, on_first
from megatron_hetero.groups.topology import Topology
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes, tensors_of_parts
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.optimizer import ShardOptimizer

HISTORY = "metrics.jsonl"
"""The metrics of all steps up to the checkpoint's."""


@dataclass(frozen=True, eq=False)
class TrainState:
    """The state that training changes, on one rank. `shapes`: of the model. `working`: a context for reads and writes
    that other ranks wait for.
    """

    optimizer: JointOptimizer
    topology: Topology
    shapes: ModelShapes
    working: Working = nullcontext

    @property
    def modules(self) -> Sequence[TrainedModule]:
        """This rank's parts of modules."""
        return self.optimizer.modules

    @property
    def optimizers(self) -> Sequence[ShardOptimizer | None]:
        """Optimizers of the modules, None where nothing trains."""
        return [self.optimizer.sharded.get(module.key) for module in self.modules]

    def entries(self) -> list[Entry]:
        """Return the entries that this rank writes: views of the live state."""
        from megatron_hetero.groups.megatron import random_states  # imports Megatron-Core

        states = random_states(self.topology.platform)
        return [
            *written(self.modules, self.optimizers, stored_shapes(self.shapes)),
            *random_entries(self.topology.rank, states),
        ]


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from, if any: the last trained step, the metrics up to it (the text of
    metrics.jsonl), notes for the user, and its folder. `lock`: on the first rank the right to write to
    `checkpoint.dir`, if any.
    """

    step: int = 0
    history: str = ""
    notes: tuple[str, ...] = ()
    lock: object = None
    path: Path | None = None


def load(state: TrainState, checkpoint: Path, new: RunRecord, allowed: Sequence[str]) -> Resumed:
    """Verify a checkpoint, file by file and tensor by tensor, and load it into `state`. `new`: the record of this run,
    used on the first rank; `allowed`: the changes that it may make.

    Raises `UserError` on every rank, before anything is loaded, if the checkpoint is damaged or another model's.
    """
    from megatron_hetero.groups.megatron import random_states, set_random_states  # imports Megatron-Core

    group, working = state.topology.files, state.working
    manifest = verified(checkpoint, (INDEX, RECORD), group, working)
    rank, ranks = state.topology.rank, state.topology.world_size
    record = on_every(group, lambda: RunRecord.read(checkpoint))[rank]
    on_first(group, lambda: require_own_name(checkpoint, record.step, RECORD))
    on_first(group, lambda: record.require_resumable(new, allowed, checkpoint))
    on_first(group, lambda: record.require_steps(new, checkpoint))
    index = on_first(group, lambda: open_index(checkpoint, manifest), working)
    stored = index_shapes(index)
    found = on_first(group, lambda: record.require_complete(stored, state.shapes, checkpoint))
    on_first(group, lambda: record.require_same_model(new, allowed, checkpoint))
    # Imported weights take the place of the model's folder: the optimizers start from them as they would from that.
    imported = record.imported_from is not None
    optimizers = [None] * len(state.modules) if imported else state.optimizers
    entries = read(state.modules, optimizers, stored_shapes(state.shapes), found, imported=imported)
    states = random_states(state.topology.platform)
    own_random = list(random_entries(rank, states))
    # Random states of another kind of device do not fit.
    fit = record.world_size == ranks and all(stored.get(entry.key) == entry.size for entry in own_random)
    read_entries(checkpoint, index, chain(entries, own_random if fit else ()), group, working)
    if imported:
        state.optimizer.reload_model_params()
    else:
        for optimizer in state.optimizers:
            if optimizer is not None:
                optimizer.renew_weights()
    if fit:
        set_random_states(states, state.topology.platform)
    notes = (f"resumed from {checkpoint}, after step {record.step}", *_changes(record, new, state.shapes))
    metrics = checkpoint / HISTORY
    history = metrics.read_text(encoding="utf-8", errors="replace") if metrics.is_file() else ""
    return Resumed(record.step, history, notes, path=checkpoint)


def _changes(old: RunRecord, new: RunRecord, shapes: ModelShapes) -> list[str]:
    """Return notes for the user on the differences between two runs of a model."""
    if old.imported_from is not None:
        return [f"weights imported from {old.imported_from}: optimizer moments start at zero"]
    notes = []
    if (old.world_size, old.layouts) != (new.world_size, new.layouts):
        before, now = (", ".join(f"{n} {v}" for n, v in record.layouts.items()) for record in (old, new))
        notes.append(f"layouts changed from {before} on {old.world_size} ranks to {now} on {new.world_size}")
    frozen_before, frozen_now = old.frozen(shapes), new.frozen(shapes)
    if thawed := frozen_before - frozen_now:
        notes.append(f"{_named(thawed, shapes)} no longer frozen: its optimizer moments start at zero")
    if frozen := frozen_now - frozen_before:
        notes.append(f"{_named(frozen, shapes)} now frozen: its optimizer state is dropped")
    for module in new.layouts:
        for field in ("master", "moments"):
            before, now = (record.precision(module, field) for record in (old, new))
            if before != now:
                notes.append(f"precision.{module}.{field} changed from {before} to {now}: values are converted")
    return notes


def _named(tensors: Collection[str], shapes: ModelShapes) -> str:
    """Return the names of the parts that the tensors make up, and of further tensors."""
    whole = {part: names for part, names in tensors_of_parts(shapes).items() if {*names} <= {*tensors}}
    others = {*tensors}.difference(*whole.values())
    return ", ".join([*whole, *([listed(others)] if others else [])])
