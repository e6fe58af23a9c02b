"""Makes sure that only one run writes to a folder, and that all of its ranks see the same one."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch.distributed as dist

from megatron_hetero.distributed.collective import FIRST, Working, on_every, on_first
from megatron_hetero.errors import UserError, os_errors_as
from megatron_hetero.files import lock as file_lock
from megatron_hetero.outputs.checkpoints import unwritable, wait_for

LOCK = ".lock"
_FREE_S = 15.0
"""Seconds for which a run that has just died may still hold its lock."""


@dataclass(frozen=True)
class Claim:
    """The purpose of a locked folder: the setting that names it, its lock file, the consequence of two runs writing
    there, and the error for a folder that cannot be written.
    """

    setting: str
    lock: str
    mixed: str
    unwritable: Callable[[Path, OSError], UserError]


CHECKPOINTS = Claim("checkpoint.dir", LOCK, "their checkpoints would mix", unwritable)


class FolderLock:
    """The right to write to a folder, until it is released or garbage-collected, or the process ends."""

    def __init__(self, file: IO[str] | None) -> None:
        """`file`: the lock file; None if the file system has no locks."""
        self._file = file

    @classmethod
    def take(cls, folder: Path, claim: Claim = CHECKPOINTS) -> tuple[FolderLock, tuple[str, ...]]:
        """Lock the folder, which is created if necessary. Returns notes for the user too. Raises `UserError` if another
        run holds the lock.
        """
        path, held = folder / claim.lock, list[IO[str]]()

        def is_taken() -> bool:
            held.extend(filter(None, [file_lock.take(path)]))
            return bool(held)

        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not wait_for(is_taken, _FREE_S):
                raise _taken(folder, path, claim)
        except OSError as error:
            if error.errno not in file_lock.NO_LOCKS:
                raise claim.unwritable(folder, error) from None
            return cls(None), (f"the file system of {folder} has no locks; make sure that no other run writes there",)
        return cls(held[0]), ()

    def release(self) -> None:
        """Let others write there."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def _taken(folder: Path, path: Path, claim: Claim) -> UserError:
    return UserError.at(
        f"{claim.setting}: {folder}",
        problem=f"in use by another run ({file_lock.holder_of(path)})",
        because=claim.mixed,
        fix=f"choose another {claim.setting}, or end the other run first",
    )


def require_shared(folder: Path, group: dist.ProcessGroup, working: Working = nullcontext) -> None:
    """Check that all ranks of `group` see the same folder. Raises `UserError` on every rank."""
    mark = folder / on_first(group, lambda: _leave_mark(folder), working)
    try:
        on_every(group, lambda: _find(mark), working)
    finally:
        if dist.get_rank(group) == FIRST:
            mark.unlink(missing_ok=True)


def _leave_mark(folder: Path) -> str:
    name = f".seen-{uuid.uuid4().hex}"
    with os_errors_as(partial(unwritable, folder)):
        (folder / name).touch()
    return name


def _find(mark: Path) -> None:
    if not wait_for(mark.exists):
        raise UserError.at(
            f"checkpoint.dir: {mark.parent}",
            problem=f"host {socket.gethostname()} sees another folder than the first rank",
            because="all ranks write to one checkpoint",
            fix="choose a checkpoint.dir on storage that all nodes share",
        )
