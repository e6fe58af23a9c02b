"""That one run alone writes into a folder, and that all of its ranks see the same one."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import uuid
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch.distributed as dist

from megatron_hetero.checkpoint.collective import FIRST, Working, on_every, on_first
from megatron_hetero.checkpoint.folder import unwritable, wait_for
from megatron_hetero.errors import UserError

LOCK = ".lock"
_FREE_S = 15.0
"""Seconds that a run which has just died may hold its lock."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Claim:
    """What a folder is claimed for: the setting that names it, the file that is locked in it, what two runs would do
    there, and the error that says why it cannot be written.
    """

    setting: str
    lock: str
    mixed: str
    unwritable: Callable[[Path, OSError], UserError]


CHECKPOINTS = Claim("checkpoint.dir", LOCK, "their checkpoints would be mixed", unwritable)


class FolderLock:
    """The right to write into a folder, until the process ends, it is released, or nothing refers to it any more."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @classmethod
    def take(cls, folder: Path, claim: Claim = CHECKPOINTS) -> tuple[FolderLock, tuple[str, ...]]:
        """Take it, and make the folder if need be. Returns what there is to say besides. Raises `UserError` where
        another run has it.
        """
        path, notes = folder / claim.lock, ()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (it is held)
            if not wait_for(lambda: _locked(file), _FREE_S):
                file.close()
                raise _taken(folder, path, claim)
            _sign(file)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise claim.unwritable(folder, error) from None
            notes = (f"the file system of {folder} has no locks: see to it that no other run writes there",)
        return cls(file), notes

    def release(self) -> None:
        """Let others write there."""
        with suppress(OSError):
            self._file.close()


def _sign(file: IO[str]) -> None:
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def _locked(file: IO[str]) -> bool:
    try:
        # A lock of the process, not of the file: it is let go when the process ends in whatever way.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _taken(folder: Path, path: Path, claim: Claim) -> UserError:
    holder = path.read_text(encoding="utf-8", errors="replace").strip()
    return UserError.at(
        f"{claim.setting}: {folder}",
        found=f"another run that writes there ({holder or 'no more is known'})",
        expected="none",
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
    try:
        (folder / name).touch()
    except OSError as error:
        raise unwritable(folder, error) from None
    return name


def _find(mark: Path) -> None:
    if not wait_for(mark.exists):
        raise UserError.at(
            f"checkpoint.dir: {mark.parent}",
            found=f"another folder on host {socket.gethostname()} than the first rank's",
            expected="one folder",
            because="a checkpoint has the files of all ranks",
            fix="choose a checkpoint.dir on storage that all nodes share",
        )
