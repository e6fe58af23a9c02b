"""Saves and loads the state of a run; collective over all ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megatron_hetero.checkpoint.contents import random_entries, read, renew_masters, written
from megatron_hetero.checkpoint.format.index import INDEX, index_shapes, open_index
from megatron_hetero.checkpoint.format.keys import Entry
from megatron_hetero.checkpoint.format.storage import read_entries, write_entries
from megatron_hetero.checkpoint.record import FILE_NAME as RECORD
from megatron_hetero.checkpoint.record import RunRecord
from megatron_hetero.distributed.collective import FIRST, Working, on_every, on_first
from megatron_hetero.distributed.megatron import random_states, set_random_states
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.engine.module import TrainedModule
from megatron_hetero.engine.optimizer import ModuleOptimizer
from megatron_hetero.errors import UserError, os_errors_as
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.names import parts_of
from megatron_hetero.outputs.checkpoints import (
    FileRecord,
    clean,
    damaged,
    name_of,
    partial_of,
    prune,
    publish,
    read_manifest,
    remove,
    unsound_name_of,
    unwritable,
    verify,
    wait_for,
    write_synced,
)

T = TypeVar("T")
HISTORY = "metrics.jsonl"
"""The metrics of all steps up to the checkpoint's."""


@dataclass(frozen=True, eq=False)
class TrainState:
    """The state that training changes, on one rank. `shapes`: of the model. `working`: around
    reads and writes that other ranks wait for.
    """

    modules: Sequence[TrainedModule]
    optimizers: Sequence[ModuleOptimizer | None]
    topology: Topology
    shapes: ModelShapes
    working: Working = nullcontext

    def entries(self) -> list[Entry]:
        """What this rank writes: views of the live state."""
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


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its folder, and its size in bytes."""

    path: Path
    size: int


@dataclass(frozen=True)
class History:
    """The metrics so far: the first `size` bytes of a growing file, and what `waits` to be written to it."""

    path: Path = Path()
    size: int = 0
    waits: bytes = b""

    def text(self) -> str:
        """Return the metrics. Raises `OSError`."""
        written = b""
        if self.size:
            with open(self.path, "rb") as file:
                written = file.read(self.size)
        return (written + self.waits).decode("utf-8", errors="replace")


def save(
    entries: Sequence[Entry],
    folder: Path,
    record: RunRecord,
    history: History,
    keep_last: int | None,
    group: dist.ProcessGroup,
    working: Working = nullcontext,
    sound: bool = True,
) -> Saved:
    """Write the checkpoint after step `record.step` into `folder`: under a temporary name, checked, renamed; then
    remove older ones. Collective over `group`; record and history are the first rank's. A checkpoint that is not
    `sound` gets a name that is never resumed from automatically, and replaces an earlier one of that name.

    Raises `UserError` on every rank if it cannot be written; older checkpoints are then intact.
    """
    target, rank = folder / (name_of if sound else unsound_name_of)(record.step), dist.get_rank(group)
    partial = partial_of(target)
    try:
        if not sound:
            on_first(group, lambda: _writing(target, lambda: remove(target)), working)
        on_first(group, lambda: _writing(partial, lambda: _make(partial)), working)
        tensors = write_entries(partial, entries, group, working=working)
        own = on_every(
            group,
            lambda: _writing(
                partial, lambda: tensors | (_write_texts(partial, record, history) if rank == FIRST else {})
            ),
            working,
        )
        records = {name: found for of_rank in own for name, found in of_rank.items()}
        return on_first(group, lambda: _writing(folder, lambda: _finish(partial, records, keep_last)), working)
    except UserError:
        # All ranks have stopped writing; the next checkpoint needs the space.
        if rank == FIRST:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load(state: TrainState, checkpoint: Path, new: RunRecord, allowed: Sequence[str]) -> Resumed:
    """Verify a checkpoint, file by file and tensor by tensor, and load it into `state`. `new`: the record of this run,
    used on the first rank; `allowed`: the changes that it may make.

    Raises `UserError` on every rank, before anything is loaded, if the checkpoint is damaged or another model's.
    """
    group, working = state.topology.files, state.working
    manifest = _verify(checkpoint, group, working)
    rank, ranks = state.topology.rank, state.topology.world_size
    record = on_every(group, lambda: RunRecord.read(checkpoint))[rank]
    on_first(group, lambda: record.require_own_name(checkpoint))
    on_first(group, lambda: record.require_resumable(new, allowed, checkpoint))
    on_first(group, lambda: _require_steps(record, new, checkpoint))
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
        renew_masters(state.optimizers)
    else:
        for optimizer in state.optimizers:
            if optimizer is not None:
                optimizer.renew_weights()
    if fit:
        set_random_states(states, state.topology.platform)
    notes = (f"resumed from {checkpoint}, after step {record.step}", *_changes(record, new))
    return Resumed(record.step, _history(checkpoint), notes, path=checkpoint)


def _require_steps(record: RunRecord, new: RunRecord, checkpoint: Path) -> None:
    """Check that the checkpoint is not past the end of the run."""
    iters = new.config["train"]["iters"]
    if record.step > iters:
        raise UserError.at(
            "train.iters (--train.iters)",
            found=str(iters),
            expected=f"≥ {record.step}, the step of {checkpoint}",
            fix="raise it, or resume an earlier checkpoint with --checkpoint.resume PATH and another checkpoint.dir",
        )


def _changes(old: RunRecord, new: RunRecord) -> list[str]:
    """Notes for the user on the differences between two runs."""
    if old.imported_from is not None:
        return [f"weights imported from {old.imported_from}: optimizer moments start at zero"]
    notes = []
    if (old.world_size, old.layouts) != (new.world_size, new.layouts):
        before, now = (", ".join(f"{n} {v}" for n, v in record.layouts.items()) for record in (old, new))
        notes.append(f"layouts changed from {before} on {old.world_size} ranks to {now} on {new.world_size}")
    if thawed := [part for part in old.freeze if part not in new.freeze]:
        notes.append(f"{', '.join(thawed)} no longer frozen: its optimizer moments start at zero")
    if frozen := [part for part in new.freeze if part not in old.freeze]:
        notes.append(f"{', '.join(frozen)} now frozen: its optimizer state is dropped")
    return [*notes, *_roundings(old, new)]


def _roundings(old: RunRecord, new: RunRecord) -> Iterator[str]:
    """Notes on what is kept in fewer bits than before."""
    bits = {"master": {"none": 16}, "moments": {"bfloat16": 16, "8bit": 8}}
    for module in new.layouts:
        if set(old.freeze).issuperset(parts_of(module)):
            continue  # Its moments start at zero.
        for field, of_values in bits.items():
            before, now = (record.precision(module, field) for record in (old, new))
            if of_values.get(now, 32) < of_values.get(before, 32):
                what = "master weights" if field == "master" else field
                yield f"{what} of {module} rounded to {of_values[now]} bits (precision.{module}.{field} {now})"


def _verify(checkpoint: Path, group: dist.ProcessGroup, working: Working) -> Mapping[str, FileRecord]:
    """Verify sizes and hashes, and return them; the ranks divide the files among them. Raises `UserError` on every
    rank, naming all faults.
    """
    manifest = on_first(group, lambda: read_manifest(checkpoint, (INDEX, RECORD)))
    mine = sorted(manifest)[dist.get_rank(group) :: dist.get_world_size(group)]
    faults = on_every(group, lambda: verify(checkpoint, manifest, mine), working)
    if any(faults):
        raise damaged(checkpoint, sorted(fault for of_rank in faults for fault in of_rank))
    return manifest


def _make(partial: Path) -> None:
    clean(partial.parent)
    partial.mkdir()


def _write_texts(partial: Path, record: RunRecord, history: History) -> dict[str, FileRecord]:
    """Write the files of a checkpoint other than tensors."""
    texts = {RECORD: record.to_json(), HISTORY: history.text()}
    return {name: write_synced(partial / name, text) for name, text in texts.items()}


def _finish(partial: Path, records: Mapping[str, FileRecord], keep_last: int | None) -> Saved:
    for name, record in records.items():
        if not wait_for(lambda: _size(partial / name) == record.size):  # noqa: B023 (called in this turn)
            raise UserError.at(
                partial / name,
                problem=f"missing or truncated on the first rank ({record.size} bytes written by another)",
                fix="choose a checkpoint.dir on storage that all nodes share",
            )
    target = publish(partial, records)
    prune(target.parent, keep_last)
    return Saved(target, sum(record.size for record in records.values()))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _history(checkpoint: Path) -> str:
    path = checkpoint / HISTORY
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _writing(where: Path, work: Callable[[], T]) -> T:
    """The result of `work`. Raises `UserError` for a full disk and the like."""
    with os_errors_as(partial(unwritable, where)):
        return work()
