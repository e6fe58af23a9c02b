"""Lock files, each held by one process at a time: the one that writes to the folder they stand for."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from megatron_hetero.errors import UserError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""The errors of a file system without locks."""


def take(path: Path) -> IO[str] | None:
    """The open lock file, held until it is closed or the process ends; its text names the holder. None if another
    process holds it. Raises `OSError`.
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
    """Release a lock, and remove its file."""
    with suppress(OSError):
        path.unlink()  # First: whoever has opened it meanwhile sees that it is gone, and does not become its holder.
    with suppress(OSError):
        file.close()


@contextmanager
def alone(path: Path, target: Path, doing: str) -> Generator[None]:
    """Inside, this process alone writes `target`, guarded by the lock file `path`; `doing`, such as "export", is for
    messages. Raises `OSError`, and `UserError` if another process holds the lock.
    """
    file = None
    try:
        file = take(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        note = f"warning: the file system of {target} has no locks; make sure that no other {doing} writes there"
        print(note, file=sys.stderr, flush=True)
    else:
        if file is None:
            # Not awaited: this process would only replace what that one writes.
            raise UserError.at(
                target,
                found=f"another {doing} that writes there ({holder_of(path)})",
                expected="none",
                because="two models would mix",
                fix=f"choose another folder{' (of a run export.hf_dir)' if doing == 'export' else ''}, or wait for it",
            )
    try:
        yield
    finally:
        if file is not None:
            give_back(path, file)


def holder_of(path: Path) -> str:
    """Who holds the lock, for a message."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "unknown process"
    except OSError:
        return "unknown process"


def _locked(file: IO[str]) -> bool:
    try:
        # A lock of the process, not of the file: the system releases it however the process ends.
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
