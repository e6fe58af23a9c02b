"""Saving and loading the state of a run: every rank calls these together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_hetero.checkpoint.contents import random_entries, read, renew_masters, written
from megatron_hetero.checkpoint.format.keys import Entry
from megatron_hetero.checkpoint.format.storage import INDEX, index_shapes, open_index, read_entries, write_entries
from megatron_hetero.checkpoint.record import FILE_NAME as RECORD
from megatron_hetero.checkpoint.record import RunRecord
from megatron_hetero.distributed.collective import FIRST, Working, on_every, on_first
from megatron_hetero.distributed.megatron import random_states, set_random_states
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.engine.module import TrainedModule
from megatron_hetero.errors import UserError
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

HISTORY = "metrics.jsonl"
"""The metrics of all steps up to the checkpoint's."""


@dataclass(frozen=True, eq=False)
class TrainState:
    """What changes from step to step, on one rank. `shapes`: of all stored tensors of the model. `working`: around what
    the rank reads and writes while others wait for it.
    """

    modules: Sequence[TrainedModule]
    optimizers: Sequence[Any]
    topology: Topology
    shapes: Mapping[str, tuple[int, ...]]
    working: Working = nullcontext

    def entries(self) -> list[Entry]:
        """What this rank writes, in place: views of what training changes."""
        states = random_states(self.topology.platform)
        return [
            *written(self.modules, self.optimizers, self.shapes),
            *random_entries(self.topology.rank, states),
        ]


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run goes on from, if any: the last trained step, the metrics up to it (the text of
    metrics.jsonl), what there is to say about it, and its folder. `lock`: on the first rank the right to write into
    `checkpoint.dir`, if any.
    """

    step: int = 0
    history: str = ""
    notes: tuple[str, ...] = ()
    lock: object = None
    path: Path | None = None


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole: its folder, and the bytes of its files."""

    path: Path
    size: int


@dataclass(frozen=True)
class History:
    """The metrics of the steps so far: the first `size` bytes of a file that may grow. There need not be one."""

    path: Path
    size: int

    @classmethod
    def now(cls, path: Path) -> History:
        """What the file holds at this moment."""
        try:
            return cls(path, path.stat().st_size)
        except OSError:
            return cls(path, 0)

    def text(self) -> str:
        """Those bytes, as text. Raises `OSError`."""
        if self.size == 0:
            return ""
        with open(self.path, "rb") as file:
            return file.read(self.size).decode("utf-8", errors="replace")


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
    """Write the checkpoint after step `record.step` into `folder`: beside its place, checked, then moved there; then
    older ones are removed. Every rank of `group` calls it; the record and the history are taken from the first. One
    that is not `sound` gets a name by which no run goes on from it unasked, and replaces an earlier one of that name.

    Raises `UserError` on every rank where it cannot be written; older checkpoints are then as they were.
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
                partial, lambda: tensors | (_write_beside(partial, record, history) if rank == FIRST else {})
            ),
            working,
        )
        records = {name: found for of_rank in own for name, found in of_rank.items()}
        return on_first(group, lambda: _writing(folder, lambda: _finish(partial, records, keep_last)), working)
    except UserError:
        # All ranks have stopped writing, and what there is takes the room that the next one needs.
        if rank == FIRST:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load(state: TrainState, checkpoint: Path, new: RunRecord, allowed: Sequence[str]) -> Resumed:
    """Check a checkpoint, file by file and tensor by tensor, and read it into `state`. `new`: the record of this run,
    used on the first rank; `allowed`: changes that it may make.

    Raises `UserError` on every rank, before anything is read, where the checkpoint is damaged or another model's.
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
    # What was imported takes the place of the model's folder: the optimizers begin with it as they would with that.
    imported = record.imported_from is not None
    optimizers = [None] * len(state.modules) if imported else state.optimizers
    entries = list(read(state.modules, optimizers, state.shapes, found))
    states = random_states(state.topology.platform)
    own_random = list(random_entries(rank, states))
    # Those of another kind of device are other ones.
    fit = record.world_size == ranks and all(stored.get(entry.key) == entry.size for entry in own_random)
    read_entries(checkpoint, index, [*entries, *(own_random if fit else ())], group, working)
    if imported:
        renew_masters(state.modules, state.optimizers)
    if fit:
        set_random_states(states, state.topology.platform)
    notes = (f"resumed from {checkpoint}, after step {record.step}", *_changes(record, new))
    return Resumed(record.step, _history(checkpoint), notes, path=checkpoint)


def _require_steps(record: RunRecord, new: RunRecord, checkpoint: Path) -> None:
    """Check that the run is not meant to be shorter than it is already."""
    iters = new.config["train"]["iters"]
    if record.step > iters:
        raise UserError.at(
            "train.iters (--train.iters)",
            found=str(iters),
            expected=f"{record.step} or more, the steps that {checkpoint} has trained",
            because="what has been trained is not taken back",
            fix="raise it, or go on from an earlier one with --checkpoint.resume PATH and another checkpoint.dir",
        )


def _changes(old: RunRecord, new: RunRecord) -> list[str]:
    """What a user should know of the difference between two runs."""
    if old.imported_from is not None:
        return [f"its weights were imported from {old.imported_from}: the optimizer begins with moments of zero"]
    notes = []
    if (old.world_size, old.layouts) != (new.world_size, new.layouts):
        before, now = (", ".join(f"{n} {v}" for n, v in record.layouts.items()) for record in (old, new))
        notes.append(f"layouts were {before} on {old.world_size} ranks, and are {now} on {new.world_size}")
    if thawed := [part for part in old.freeze if part not in new.freeze]:
        notes.append(f"{', '.join(thawed)} was frozen: the optimizer begins there with moments of zero")
    if frozen := [part for part in new.freeze if part not in old.freeze]:
        notes.append(f"{', '.join(frozen)} is frozen now: its optimizer state is left out, and not saved again")
    return notes


def _verify(checkpoint: Path, group: dist.ProcessGroup, working: Working) -> Mapping[str, FileRecord]:
    """Check sizes and hashes, and return them; ranks share the files. Raises `UserError` on every rank, naming all that
    is wrong.
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


def _write_beside(partial: Path, record: RunRecord, history: History) -> dict[str, FileRecord]:
    """Write what a checkpoint holds besides tensors."""
    texts = {RECORD: record.to_json(), HISTORY: history.text()}
    return {name: write_synced(partial / name, text) for name, text in texts.items()}


def _finish(partial: Path, records: Mapping[str, FileRecord], keep_last: int | None) -> Saved:
    for name, record in records.items():
        if not wait_for(lambda: _size(partial / name) == record.size):  # noqa: B023 (called in this turn)
            raise UserError.at(
                partial / name,
                found="it missing, or of another size, on the first rank",
                expected=f"{record.size} bytes that a rank has written",
                because="a checkpoint is one folder",
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


def _writing(where: Path, work: Callable[[], Any]) -> Any:
    """`work`, where a full disk and the like are errors that name the place. Raises `UserError`."""
    try:
        return work()
    except OSError as error:
        raise unwritable(where, error) from None
