"""Lock files, each held by one process at a time: the one that writes to the folder they stand for."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_hetero.base.errors import UserError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""The errors of a file system without locks."""


@dataclass(frozen=True, eq=False)
class Lock:
    """The right to write somewhere, until it is released or garbage-collected, or the process ends. `file`: the lock
    file, whose text names the holder; None where the file system has no locks, which the `note` tells the user.
    """

    path: Path
    file: IO[str] | None
    note: str = ""

    @classmethod
    def take(cls, path: Path, where: object, doing: str, *, mixed: str, fix: str, wait_s: float = 0.0) -> Lock:
        """The lock of the file `path`. Raises `OSError`, and a `UserError` about `where` if another process still holds
        it after `wait_s` seconds. For messages: `doing`, such as "export"; what `mixed` would be; the `fix`.
        """
        until = time.monotonic() + wait_s
        try:
            while (file := _opened(path)) is None:
                if time.monotonic() >= until:
                    problem = f"in use by another {doing} ({_holder_of(path)})"
                    raise UserError.at(where, problem=problem, because=f"{mixed} would mix", fix=fix)
                time.sleep(0.1)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            note = f"the file system of {path.parent} has no locks; make sure that no other {doing} writes there"
            return cls(path, None, note)
        return cls(path, file)

    def release(self, *, remove: bool = False) -> None:
        """Let others write there. `remove`: whether the file goes."""
        if self.file is not None:
            with suppress(OSError):
                if remove:
                    self.path.unlink()  # First: whoever has opened it meanwhile sees that it is gone.
            with suppress(OSError):
                self.file.close()


@contextmanager
def alone(path: Path, target: Path, doing: str) -> Generator[None]:
    """Inside, this process alone writes `target`, guarded by the lock file `path`; `doing`, such as "export", is for
    messages. Raises `OSError`, and `UserError` if another process holds the lock.
    """
    # Not awaited: this process would only replace what that one writes.
    fix = f"choose another folder{' (of a run export.hf_dir)' if doing == 'export' else ''}, or wait for it"
    lock = Lock.take(path, target, doing, mixed="two models", fix=fix)
    if lock.note:
        print(f"warning: {lock.note}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        lock.release(remove=True)


def _opened(path: Path) -> IO[str] | None:
    """The open lock file, locked and signed; None if another process holds it. Raises `OSError`."""
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (it is held)
    try:
        if _locked(file) and _is_at(path, file):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def _holder_of(path: Path) -> str:
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
