"""Which checkpoint a run goes on from, and whether it can write its own: for the first rank alone."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_hetero.checkpoint.folder import MANIFEST, chosen_in, name_of, unfinished, whole
from megatron_hetero.checkpoint.state import unwritable
from megatron_hetero.errors import UserError
from megatron_hetero.training.config import CheckpointConfig


def choose(config: CheckpointConfig) -> tuple[Path | None, tuple[str, ...]]:
    """The checkpoint that `checkpoint.resume` means, None for a fresh start, and what there is to say about it.

    Raises `UserError` where none is meant that exists, or where this run would come upon checkpoints of another.
    """
    folder = config.dir
    chosen: Path | None = None
    notes: list[str] = []
    if config.resume not in ("auto", "never"):
        chosen = Path(config.resume).expanduser().absolute()
        _require_folder(chosen)
    elif config.resume == "auto" and folder is not None:
        notes += [f"{path} was never finished, and is not used" for path in unfinished(folder)]
        chosen = next(reversed(whole(folder).values()), None)
    if folder is not None:
        _require_room(folder, chosen)
        _require_writable(folder)
    return chosen, tuple(notes)


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


def _require_room(folder: Path, chosen: Path | None) -> None:
    """Check that this run will not write steps that another has written, or into a checkpoint."""
    if (folder / MANIFEST).is_file():
        raise UserError.at(
            "checkpoint.dir (--checkpoint.dir)",
            found=f"{folder}, which is a checkpoint itself",
            expected="a folder for checkpoints",
            because="a run does not go on from what its folder is, but from what lies in it",
            fix=f"choose another checkpoint.dir, and go on from this one with --checkpoint.resume {folder}",
        )
    steps = whole(folder)
    ahead = [path for path in steps.values() if chosen is None or path.name > _as_in(folder, chosen, steps)]
    if ahead:
        raise UserError.at(
            "checkpoint.dir (--checkpoint.dir)",
            found=f"{ahead[-1].name} in {folder}",
            expected="no later checkpoint than the one to go on from" if chosen else "no checkpoint",
            because="those of two runs would be mixed",
            fix="choose another checkpoint.dir, or go on from it with --checkpoint.resume auto",
        )


def _as_in(folder: Path, chosen: Path, steps: dict[int, Path]) -> str:
    """The name up to which checkpoints in `folder` may be there: the chosen one's, if it is one of them."""
    return chosen.name if chosen.resolve().parent == folder.resolve() and steps else name_of(0)


def _require_writable(folder: Path) -> None:
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise unwritable(folder, error) from None
