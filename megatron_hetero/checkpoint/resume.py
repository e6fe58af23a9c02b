"""Resumption of a run: locks its folder, then selects, verifies and loads a checkpoint on every rank, before anything
is written.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch.distributed as dist
import yaml

from megatron_hetero.base.errors import UserError, listed, os_errors_as
from megatron_hetero.base.lock import Lock
from megatron_hetero.base.outputs import (
    LOCK,
    MANIFEST,
    chosen_in,
    read_manifest,
    step_of,
    unfinished,
    unwritable,
    wait_for,
    whole,
    without_manifest,
)
from megatron_hetero.checkpoint.contents import random_entries, read, written
from megatron_hetero.checkpoint.index import WEIGHTS, Entry, index_shapes
from megatron_hetero.checkpoint.record import FILE_NAME as RECORD
from megatron_hetero.checkpoint.record import DatasetRecord, ModelSources, RunRecord, hashes
from megatron_hetero.checkpoint.recorded_adapters import adapters_of, fingerprints, replaced
from megatron_hetero.checkpoint.storage import open_checkpoint, read_entries
from megatron_hetero.config.schema import Config, to_yaml
from megatron_hetero.config.sections import CheckpointConfig
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.groups.collective import FIRST, Working, on_every, on_first
from megatron_hetero.groups.topology import Topology
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes, tensors_by_subset
from megatron_hetero.step.joint import JointOptimizer

HISTORY = "metrics.jsonl"
"""Name of the file in a checkpoint with the metrics of all steps up to the checkpoint's step."""
_FREE_S = 15.0
"""Seconds to wait for a lock, since a run that has just died may still hold it."""


@dataclass(frozen=True, eq=False)
class TrainState:
    """The state of training on one rank, which checkpoints save and restore.

    Attributes:
        optimizer: joint optimizer of this rank's modules, with these modules.
        topology: topology of all modules.
        shapes: shapes of the model.
        working: context for reads and writes for which other ranks wait.
    """

    optimizer: JointOptimizer
    topology: Topology
    shapes: ModelShapes
    working: Working = nullcontext

    def entries(self) -> list[Entry]:
        """Return the entries that this rank writes to a checkpoint, as views of the live state."""
        from megatron_hetero.groups.megatron import random_states  # This import loads Megatron-Core.

        states = random_entries(self.topology.rank, random_states(self.topology.platform))
        adapters = adapters_of(self.shapes)
        frozen = replaced(adapters, self.shapes) if adapters else None
        return [*written(self.optimizer, stored_shapes(self.shapes), frozen), *states]


@dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run resumes, or the defaults for a fresh start.

    Attributes:
        step: the last trained step.
        history: the text of metrics.jsonl up to that step.
        notes: notes for the user.
        lock: the lock on `checkpoint.dir`, on the first rank of a run that writes checkpoints.
        path: folder of the checkpoint.
    """

    step: int = 0
    history: str = ""
    notes: tuple[str, ...] = ()
    lock: object = None
    path: Path | None = None


def lock_folder(
    folder: Path, setting: str, lock: str, mixed: str, unwritable: Callable[[Path, OSError], UserError]
) -> Lock:
    """Create the folder of a run if it is missing, and lock it by the file `lock` in it. `setting` and `mixed`, for
    messages: the setting of the folder, and the outputs that two runs would mix. `unwritable`: function that returns
    the error for a folder that cannot be written. Raises `UserError`.
    """
    fix = f"choose another {setting}, or end the other run first"
    with os_errors_as(partial(unwritable, folder)):
        folder.mkdir(parents=True, exist_ok=True)
        return Lock.take(folder / lock, f"{setting}: {folder}", "run", mixed=mixed, fix=fix, wait_s=_FREE_S)


def require_shared(folder: Path, group: dist.ProcessGroup, working: Working = nullcontext) -> None:
    """Check that all ranks of `group` see the same folder. Raises `UserError` on every rank."""

    def leave_mark() -> Path:
        mark = folder / f".seen-{uuid.uuid4().hex}"
        with os_errors_as(partial(unwritable, folder)):
            mark.touch()
        return mark

    def require_mark() -> None:
        if not wait_for(mark.exists):
            problem = f"host {socket.gethostname()} sees another folder than the first rank"
            why, fix = "all ranks write to one checkpoint", "choose a checkpoint.dir on storage that all nodes share"
            raise UserError.at(f"checkpoint.dir: {folder}", problem=problem, because=why, fix=fix)

    mark = folder / on_first(group, leave_mark, working).name
    try:
        on_every(group, require_mark, working)
    finally:
        if dist.get_rank(group) == FIRST:
            mark.unlink(missing_ok=True)


def choose(config: CheckpointConfig, again: bool = False) -> tuple[Path | None, tuple[str, ...]]:
    """Return the checkpoint that `checkpoint.resume` selects, None for a fresh start, and notes for the user.

    `again`: whether a launcher or scheduler has restarted this run; it then resumes from the newest checkpoint that it
    wrote, if any. Raises `UserError` if the selected checkpoint does not exist, or if this run would mix its
    checkpoints with another run's.
    """
    folder, resume = config.dir, config.resume
    notes: list[str] = []
    if again and resume != "auto" and folder is not None and whole(folder):
        notes.append(f"restarted: resuming from this run's newest checkpoint (--checkpoint.resume {resume})")
        resume = "auto"
    chosen: Path | None = None
    if resume not in ("auto", "never"):
        chosen = chosen_in(Path(resume).expanduser().absolute())
        read_manifest(chosen)
    elif resume == "auto" and folder is not None:
        notes += [f"{path} is unfinished, ignored" for path in unfinished(folder)]
        notes += [f"{path} has no manifest, ignored" for path in without_manifest(folder)]
        chosen = next(reversed(whole(folder).values()), None)
    if folder is not None:
        _require_room(folder, chosen)
        if chosen is None:
            notes.append(f"no checkpoint in {folder}: training starts at step 1")
    return chosen, tuple(notes)


def started_again(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun has restarted the ranks, or Slurm has requeued the job."""
    counts = (environment.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts)


def _require_room(folder: Path, chosen: Path | None) -> None:
    """Check that this run will not overwrite another run's checkpoints or write into one. Raises `UserError`."""
    where, fix = "checkpoint.dir (--checkpoint.dir)", "choose another checkpoint.dir"
    if (folder / MANIFEST).is_file():
        fix = f"{fix}, and resume from this one with --checkpoint.resume {folder}"
        raise UserError.at(where, problem=f"{folder} is itself a checkpoint", fix=fix)
    last = None
    if chosen is not None and chosen.resolve().parent == folder.resolve():
        last = step_of(chosen)
    if later := [path for step, path in whole(folder).items() if last is None or step > last]:
        expected = "no checkpoint after the one to resume from" if chosen else "no checkpoint"
        found, because = f"{later[-1].name} in {folder}", "the checkpoints of two runs would mix"
        fix = f"{fix}, resume from it with --checkpoint.resume auto, or move it away if it is damaged"
        raise UserError.at(where, found=found, expected=expected, because=because, fix=fix)


def resume(config: Config, state: TrainState, record: RunRecord | None) -> Resumed:
    """Load the checkpoint that `checkpoint.resume` selects into `state`. Collective. `record`: the result of
    `shared_record`.

    Raises `UserError` on every rank if loading fails, or if `checkpoint.dir` cannot be written.
    """
    if record is None:
        return Resumed()
    group, folder, locks = state.topology.files, config.checkpoint.dir, list[Lock]()
    if folder is not None:
        take = partial(lock_folder, folder, "checkpoint.dir", LOCK, "their checkpoints", unwritable)
        on_first(group, lambda: locks.append(take()), state.working)
    chosen, notes = on_first(group, lambda: choose(config.checkpoint, started_again(os.environ)), state.working)
    if folder is not None:
        require_shared(folder, group, state.working)
    resumed = Resumed()
    if chosen is not None:
        resumed = load(state, chosen, record, config.checkpoint.allow_changes)
    if resumed.step == config.train.iters:
        notes = (*notes, f"all {resumed.step} steps of train.iters are done")
    lock_notes = [lock.note for lock in locks if lock.note]
    return replace(resumed, notes=(*lock_notes, *notes, *resumed.notes), lock=locks[0] if locks else None)


def shared_record(config: Config, state: TrainState, mixture: Mixture, transposed: bool) -> RunRecord | None:
    """Return the record of this run before its first step, on every rank; None if the run neither reads nor writes
    checkpoints. `transposed`: whether expert weights are transposed in the model's folder. Raises `UserError` if
    annotations, or the model's files other than weights, cannot be read.
    """
    if config.checkpoint.dir is None and config.checkpoint.resume in ("auto", "never"):
        return None
    topology = state.topology

    def record() -> RunRecord:
        settings, adapters = yaml.safe_load(to_yaml(config)), adapters_of(state.shapes)
        sources = ModelSources.recorded(settings)
        return RunRecord(
            step=0,
            world_size=topology.world_size,
            layouts={name: str(layout) for name, layout in topology.layouts.items()},
            datasets=tuple(DatasetRecord(str(each), len(data), data.digest, by) for data, each, by in mixture.hashed()),
            config=settings,
            model_files=hashes(sources),
            experts_transposed=transposed,
            adapters=adapters,
            bases=fingerprints(sources.folders) if adapters else {},
        )

    return on_first(topology.files, record, state.working)


def load(state: TrainState, checkpoint: Path, new: RunRecord, allowed: Sequence[str]) -> Resumed:
    """Verify the files and tensors of a checkpoint, and load it into `state`. `new`: the record of this run, used on
    the first rank. `allowed`: the settings that may differ from the checkpoint's.

    Raises `UserError` on every rank, before anything is loaded, if the checkpoint is damaged or has another model.
    """
    from megatron_hetero.groups.megatron import random_states, set_random_states  # This import loads Megatron-Core.

    group, working = state.topology.files, state.working
    record, index, files = open_checkpoint(checkpoint, RECORD, RunRecord.read, group, working)
    stored = index_shapes(index)

    def require() -> None:
        record.require_resumable(new, allowed, checkpoint)
        record.require_same_adapters(new, state.shapes, allowed, checkpoint)
        record.require_complete(stored, state.shapes, checkpoint)
        record.require_same_model(new, allowed, checkpoint)

    on_first(group, require, working)
    imported = record.imported_from is not None
    # Do not load imported weights for tensors whose values come from a PEFT folder.
    from_folder = replaced(adapters_of(state.shapes), state.shapes) if imported else ()
    available = stored.keys() - {f"{WEIGHTS}/{name}" for name in from_folder}
    entries = read(state.optimizer, stored_shapes(state.shapes), available, imported=imported)
    states = random_states(state.topology.platform)
    local_states = list(random_entries(state.topology.rank, states))
    # Restore random states only if the number of ranks and the kind of device are unchanged.
    fit = record.world_size == new.world_size and all(stored.get(entry.key) == entry.size for entry in local_states)
    read_entries(checkpoint, index, chain(entries, local_states if fit else ()), group, working)
    if imported:
        state.optimizer.reload_model_params()
    else:
        for optimizer in state.optimizer.sharded.values():
            optimizer.renew_weights()
    if fit:
        set_random_states(states, state.topology.platform)
    notes = (f"resumed from {checkpoint}, after step {record.step}", *_changes(record, new, state.shapes))
    history = (checkpoint / HISTORY).read_text(encoding="utf-8", errors="replace") if HISTORY in files else ""
    return Resumed(record.step, history, notes, path=checkpoint)


def _changes(old: RunRecord, new: RunRecord, shapes: ModelShapes) -> list[str]:
    """Return notes for the user on what changes between the checkpoint's run `old` and this run `new`."""
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
                notes.append(f"modules.{module}.precision.{field} changed from {before} to {now}: values are converted")
    return notes


def _named(tensors: Collection[str], shapes: ModelShapes) -> str:
    """Return a list of `tensors` for messages, in which complete subsets of the model are replaced by their names."""
    whole = {subset: names for subset, names in tensors_by_subset(shapes).items() if {*names} <= {*tensors}}
    others = {*tensors}.difference(*whole.values())
    return ", ".join([*whole, *([listed(others)] if others else [])])
