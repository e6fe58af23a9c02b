"""The files of `log.dir`: only one run writes there, files of earlier runs are kept, and no line is lost.

runs/
  metrics.jsonl  config.yaml  evaluation.json  events.out.tfevents.*  trace-rank0.json ...      of the last run
  earlier-1/     earlier-2/                                           of earlier runs
  .metrics.lock  held by the run that writes here
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_hetero.checkpoint.shared_folder import lock_folder
from megatron_hetero.checkpoint.state import History
from megatron_hetero.errors import UserError
from megatron_hetero.files.paths import in_the_way
from megatron_hetero.outputs.logs import CONFIG, LOCK, METRICS, OF_A_RUN


def unwritable(path: Path, error: OSError) -> UserError:
    """The error for something in `log.dir` that cannot be written."""
    return UserError.at(
        f"log.dir: {path}",
        problem=f"cannot be written ({in_the_way(path, error)})",
        fix="free space or grant access, or choose another folder with --log.dir DIR",
    )


class LogFolder:
    """The folder where this run alone writes its configuration and metrics.jsonl, which starts with the lines of
    `history`.

    `notes`: for the user.
    """

    def __init__(self, folder: Path, history: str, config: str) -> None:
        """Raises `UserError` if it cannot be written, or another run writes there."""
        self.folder, self._path, self._waiting = folder, folder / METRICS, b""
        self._lock = lock_folder(folder, "log.dir", LOCK, "their metrics", unwritable)
        try:
            self.notes = (*filter(None, [self._lock.note]), *_set_aside(folder, history.encode(), config.encode()))
            _begin(self._path, history.encode())
            if config:
                (folder / CONFIG).write_text(config, encoding="utf-8")
        except OSError as error:
            self._lock.release()
            raise unwritable(Path(error.filename or self._path), error) from None

    def append(self, line: str) -> None:
        """Append a line to metrics.jsonl, after lines that could not be written before. Raises `OSError`."""
        self._waiting += line.encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab", buffering=0) as file:
            while self._waiting:
                self._waiting = self._waiting[file.write(self._waiting) :]

    def history(self) -> History:
        """All lines so far, also those that could not be written yet; these alone where the file cannot be reached."""
        with contextlib.suppress(OSError):
            return History(self._path, _size(self._path), self._waiting)
        return History(waits=self._waiting)

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()


def _begin(path: Path, history: bytes) -> None:
    """Make `path` a file with `history`. Raises `OSError`."""
    there = _common(path, history)
    if path.is_file():
        os.truncate(path, there)  # Later steps are trained again.
    with open(path, "ab") as file:
        file.write(history[there:])


def _common(path: Path, history: bytes) -> int:
    """How many bytes of `history` the file starts with, if it has nothing else before its end: the last lines of a run
    whose disk was full are only in its checkpoint. Otherwise 0.
    """
    if not path.is_file():
        return 0
    with open(path, "rb") as file:
        found = file.read(len(history))
    return len(found) if history.startswith(found) else 0


def _set_aside(folder: Path, history: bytes, config: bytes) -> Iterator[str]:
    """Move the files of another run, or a different configuration, to a new subfolder. Yields notes for the user.
    Raises `OSError`.
    """
    if _size(folder / METRICS) > 0 and not _common(folder / METRICS, history):
        moved = [path for pattern in OF_A_RUN for path in sorted(folder.glob(pattern))]
    elif _size(folder / CONFIG) > 0 and config and (folder / CONFIG).read_bytes() != config:
        moved = [folder / CONFIG]
    else:
        return
    place = next(p for n in itertools.count(1) if not os.path.lexists(p := folder / f"earlier-{n}"))
    place.mkdir()
    for path in moved:
        path.rename(place / path.name)
    yield f"moved files of an earlier run from {folder} to {place}: {', '.join(path.name for path in moved)}"


def _size(path: Path) -> int:
    """The size of a file; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0
