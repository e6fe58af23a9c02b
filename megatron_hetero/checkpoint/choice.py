"""Which checkpoint a run goes on from, and whether it can write its own: for the first rank alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_hetero.config.schema import CheckpointConfig
from megatron_hetero.errors import UserError
from megatron_hetero.outputs.checkpoints import (
    MANIFEST,
    chosen_in,
    read_manifest,
    set_aside,
    unfinished,
    unwritable,
    verify,
    whole,
    without_manifest,
)


def choose(config: CheckpointConfig, again: bool = False) -> tuple[Path | None, tuple[str, ...]]:
    """The checkpoint that `checkpoint.resume` means, None for a fresh start, and what there is to say about it.

    `again`: whether this run has been started before, by a command that is repeated by itself: it then goes on from its
    own newest checkpoint, wherever it began. Raises `UserError` where no checkpoint is meant that exists, or where this
    run would come upon checkpoints of another.
    """
    folder, resume = config.dir, config.resume
    notes: list[str] = []
    if again and resume != "auto" and folder is not None and whole(folder):
        notes.append(f"started again: the run goes on from its own newest checkpoint (--checkpoint.resume {resume})")
        resume = "auto"
    chosen: Path | None = None
    if resume not in ("auto", "never"):
        chosen = Path(resume).expanduser().absolute()
        _require_folder(chosen)
    elif resume == "auto" and folder is not None:
        notes += [f"{path} was never finished, and is not used" for path in unfinished(folder)]
        notes += [f"{path} has no manifest, and is not used" for path in without_manifest(folder)]
        chosen = next(reversed(whole(folder).values()), None)
    if folder is not None:
        notes += _make_room(folder, chosen)
        _require_writable(folder)
        if chosen is None:
            notes.append(f"no checkpoint in {folder}: training begins with step 1")
    return chosen, tuple(notes)


def started_again(environment: Mapping[str, str]) -> bool:
    """Whether torchrun has started the ranks again, or Slurm the job."""
    counts = (environment.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts)


def _require_folder(checkpoint: Path) -> None:
    if checkpoint.is_dir():
        return _require_one(checkpoint)
    others = list(whole(checkpoint.parent).values())
    raise UserError.at(
        "checkpoint.resume (--checkpoint.resume)",
        found=f"{checkpoint}, which is no folder",
        expected="auto, never or the folder of a checkpoint",
        because="a run never starts from scratch where a checkpoint was named",
        fix=f"try `--checkpoint.resume {others[-1]}`" if others else "correct the path",
    )


def _require_one(folder: Path) -> None:
    """Check that this is no folder of checkpoints."""
    newest = chosen_in(folder)
    if newest != folder:
        raise UserError.at(
            "checkpoint.resume (--checkpoint.resume)",
            found=f"{folder}, which holds {len(whole(folder))} checkpoints",
            expected="the folder of one",
            because="only a path that names one says which is meant",
            fix=f"try `--checkpoint.resume {newest}`",
        )


def _make_room(folder: Path, chosen: Path | None) -> list[str]:
    """See to it that this run will not write steps that another has written, or into a checkpoint. Returns what there
    is to say of what was set aside: later checkpoints that are damaged.
    """
    if (folder / MANIFEST).is_file():
        raise UserError.at(
            "checkpoint.dir (--checkpoint.dir)",
            found=f"{folder}, which is a checkpoint itself",
            expected="a folder for checkpoints",
            because="a run does not go on from what its folder is, but from what lies in it",
            fix=f"choose another checkpoint.dir, and go on from this one with --checkpoint.resume {folder}",
        )
    steps = whole(folder)
    own = chosen is not None and chosen.resolve().parent == folder.resolve()
    last = max((step for step, path in steps.items() if own and chosen and path.name == chosen.name), default=0)
    notes = []
    for path in reversed([path for step, path in steps.items() if step > last or chosen is None]):
        if not own or not _damaged(path):
            raise UserError.at(
                "checkpoint.dir (--checkpoint.dir)",
                found=f"{path.name} in {folder}",
                expected="no later checkpoint than the one to go on from" if chosen else "no checkpoint",
                because="those of two runs would be mixed",
                fix="choose another checkpoint.dir, or go on from it with --checkpoint.resume auto",
            )
        notes.append(f"{path} is damaged, and now called {_aside(path).name}")
    return notes


def _damaged(checkpoint: Path) -> bool:
    try:
        manifest = read_manifest(checkpoint)
    except UserError:
        return True
    return bool(verify(checkpoint, manifest, manifest))


def _aside(path: Path) -> Path:
    try:
        return set_aside(path)
    except OSError as error:
        raise unwritable(path, error) from None


def _require_writable(folder: Path) -> None:
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise unwritable(folder, error) from None
