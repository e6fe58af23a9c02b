"""Files that one process at a time has locked, by which others know that it writes beside them."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from megatron_hetero.errors import UserError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What says that a file system has no locks."""


def take(path: Path) -> IO[str] | None:
    """The open file, locked until it is closed or the process ends; it says who has it. None where another process has
    it. Raises `OSError`.
    """
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (it is held)
    try:
        if _locked(file) and _is_at(path, file):
            _sign(file)
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def give_back(path: Path, file: IO[str]) -> None:
    """Unlock a file, and remove it."""
    with suppress(OSError):
        path.unlink()  # First: who has opened it meanwhile sees that it is gone, and does not count as its holder.
    with suppress(OSError):
        file.close()


@contextmanager
def alone(path: Path, target: Path, doing: str) -> Iterator[None]:
    """Inside, this process alone writes `target`, which the lock `path` says; `doing`, such as "export", is for
    messages. Raises `OSError`, and `UserError` where another process does.
    """
    file = None
    try:
        file = take(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        note = f"warning: the file system of {target} has no locks: make sure that no other {doing} writes there"
        print(note, file=sys.stderr, flush=True)
    else:
        if file is None:
            # Not waited for: what it writes would only be replaced.
            raise UserError.at(
                target,
                found=f"another {doing} that writes there ({holder_of(path)})",
                expected="none",
                because="two models would be mixed",
                fix=f"choose another folder{' (of a run export.hf_dir)' if doing == 'export' else ''}, or wait for it",
            )
    try:
        yield
    finally:
        if file is not None:
            give_back(path, file)


def holder_of(path: Path) -> str:
    """Who has the lock, for a message."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "no more is known"
    except OSError:
        return "no more is known"


def _locked(file: IO[str]) -> bool:
    try:
        # A lock of the process, not of the file: it is let go when the process ends in whatever way.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether nobody has removed the file since it was opened."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _sign(file: IO[str]) -> None:
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
