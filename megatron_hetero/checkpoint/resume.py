"""Resumes a run: its folder is locked, and the checkpoint chosen, verified and loaded, before anything is written."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_hetero.base.errors import UserError, os_errors_as
from megatron_hetero.base.files import try_to_write
from megatron_hetero.base.lock import Lock
from megatron_hetero.base.outputs import (
    LOCK,
    MANIFEST,
    chosen_in,
    unfinished,
    unwritable,
    wait_for,
    whole,
    without_manifest,
)
from megatron_hetero.checkpoint.record import RunRecord, dataset_records, plain
from megatron_hetero.checkpoint.sources import ModelSources, hashes
from megatron_hetero.checkpoint.state import Resumed, TrainState, load
from megatron_hetero.config.schema import Config, to_yaml
from megatron_hetero.config.sections import CheckpointConfig
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.groups.collective import FIRST, Working, on_every, on_first

_FREE_S = 15.0
"""Seconds for which a run that has just died may still hold its lock."""


def lock_folder(
    folder: Path, setting: str, lock: str, mixed: str, unwritable: Callable[[Path, OSError], UserError]
) -> Lock:
    """Lock the folder of a run, which is created if necessary, by the file `lock` in it. For messages: the `setting` of
    the folder; what would be `mixed`. Raises `UserError`, from `unwritable` for a folder that cannot be written.
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
            raise UserError.at(
                f"checkpoint.dir: {folder}",
                problem=f"host {socket.gethostname()} sees another folder than the first rank",
                because="all ranks write to one checkpoint",
                fix="choose a checkpoint.dir on storage that all nodes share",
            )

    mark = folder / on_first(group, leave_mark, working).name
    try:
        on_every(group, require_mark, working)
    finally:
        if dist.get_rank(group) == FIRST:
            mark.unlink(missing_ok=True)


def choose(config: CheckpointConfig, again: bool = False) -> tuple[Path | None, tuple[str, ...]]:
    """Return the checkpoint that `checkpoint.resume` selects, None for a fresh start, and notes for the user.

    `again`: whether a launcher or scheduler has restarted this run, which then resumes from its own newest checkpoint,
    wherever it first started. Raises `UserError` if the selected checkpoint does not exist, or if this run would mix
    its checkpoints with another run's.
    """
    folder, resume = config.dir, config.resume
    notes: list[str] = []
    if again and resume != "auto" and folder is not None and whole(folder):
        notes.append(f"restarted: resuming from this run's newest checkpoint (--checkpoint.resume {resume})")
        resume = "auto"
    chosen: Path | None = None
    if resume not in ("auto", "never"):
        chosen = Path(resume).expanduser().absolute()
        _require_checkpoint(chosen)
    elif resume == "auto" and folder is not None:
        notes += [f"{path} is unfinished, ignored" for path in unfinished(folder)]
        notes += [f"{path} has no manifest, ignored" for path in without_manifest(folder)]
        chosen = next(reversed(whole(folder).values()), None)
    if folder is not None:
        _require_room(folder, chosen)
        with os_errors_as(partial(unwritable, folder)):
            try_to_write(folder)
        if chosen is None:
            notes.append(f"no checkpoint in {folder}: training starts at step 1")
    return chosen, tuple(notes)


def started_again(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun has restarted the ranks, or Slurm the job."""
    counts = (environment.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts)


def _require_checkpoint(path: Path) -> None:
    """Check that this is a folder, and not one of checkpoints. Raises `UserError`."""
    if not path.is_dir():
        problem, others = "is not a folder", list(whole(path.parent).values())
    elif (newest := chosen_in(path)) != path:
        problem, others = "is a folder of checkpoints, not a checkpoint", [newest]
    else:
        return
    raise UserError.at(
        "checkpoint.resume (--checkpoint.resume)",
        problem=f"{path} {problem}",
        fix=f"try `--checkpoint.resume {others[-1]}`" if others else "correct the path",
    )


def _require_room(folder: Path, chosen: Path | None) -> None:
    """Check that this run will not overwrite another run's steps, or write into a checkpoint. Raises `UserError`."""
    if (folder / MANIFEST).is_file():
        raise UserError.at(
            "checkpoint.dir (--checkpoint.dir)",
            problem=f"{folder} is itself a checkpoint",
            fix=f"choose another checkpoint.dir, and resume from this one with --checkpoint.resume {folder}",
        )
    steps = whole(folder)
    own = chosen is not None and chosen.resolve().parent == folder.resolve()
    last = max((step for step, path in steps.items() if own and chosen and path.name == chosen.name), default=-1)
    if later := [path for step, path in steps.items() if step > last]:
        raise UserError.at(
            "checkpoint.dir (--checkpoint.dir)",
            found=f"{later[-1].name} in {folder}",
            expected="no checkpoint after the one to resume from" if chosen else "no checkpoint",
            because="the checkpoints of two runs would mix",
            fix="choose another checkpoint.dir, resume from it with --checkpoint.resume auto, or move it away if it is "
            "damaged",
        )


def resume(config: Config, state: TrainState, record: RunRecord | None) -> Resumed:
    """Load the checkpoint that `checkpoint.resume` selects into `state`. Collective; `record` is that of
    `shared_record`.

    Raises `UserError` on every rank if that fails, or if `checkpoint.dir` cannot be written.
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
    of_locks = [lock.note for lock in locks if lock.note]
    return replace(resumed, notes=(*of_locks, *notes, *resumed.notes), lock=locks[0] if locks else None)


def shared_record(config: Config, state: TrainState, mixture: Mixture) -> RunRecord | None:
    """Return the record of this run before its first step, on every rank; None if it neither reads nor writes
    checkpoints. Raises `UserError` if annotations, or the model's files other than weights, cannot be read.
    """
    if config.checkpoint.dir is None and config.checkpoint.resume in ("auto", "never"):
        return None
    topology = state.topology

    def record() -> RunRecord:
        settings = plain(to_yaml(config))
        return RunRecord(
            step=0,
            world_size=topology.world_size,
            layouts={name: str(layout) for name, layout in topology.layouts.items()},
            datasets=dataset_records(mixture),
            config=settings,
            model_files=hashes(ModelSources.recorded(settings)),
        )

    return on_first(topology.files, record, state.working)
