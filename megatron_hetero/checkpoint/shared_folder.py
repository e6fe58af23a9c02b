"""That one run alone writes into a folder, and that all of its ranks see the same one."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch.distributed as dist

from megatron_hetero.distributed.collective import FIRST, Working, on_every, on_first
from megatron_hetero.errors import UserError
from megatron_hetero.files import lock as file_lock
from megatron_hetero.outputs.checkpoints import unwritable, wait_for

LOCK = ".lock"
_FREE_S = 15.0
"""Seconds that a run which has just died may hold its lock."""


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

    def __init__(self, file: IO[str] | None) -> None:
        """`file`: the locked one; None where there are no locks."""
        self._file = file

    @classmethod
    def take(cls, folder: Path, claim: Claim = CHECKPOINTS) -> tuple[FolderLock, tuple[str, ...]]:
        """Take it, and make the folder if need be. Returns what there is to say besides. Raises `UserError` where
        another run has it.
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
            return cls(None), (f"the file system of {folder} has no locks: see to it that no other run writes there",)
        return cls(held[0]), ()

    def release(self) -> None:
        """Let others write there."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def _taken(folder: Path, path: Path, claim: Claim) -> UserError:
    return UserError.at(
        f"{claim.setting}: {folder}",
        found=f"another run that writes there ({file_lock.holder_of(path)})",
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
