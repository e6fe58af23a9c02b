"""Lock files, through which one process at a time writes to a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import open_own, read_own

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of file systems without locks."""
_OWNER = re.compile(r"(process \d+ on \S+\n?)?")
"""Pattern of the content of a lock file, which may be empty after a process was killed."""
_MAX_OWNER = 400
"""Maximum bytes of a lock file; a host name has at most 253."""


@dataclass(frozen=True, eq=False)
class Lock:
    """The exclusive right to write to a folder, until it is released or garbage-collected or the process ends."""

    path: Path
    file: IO[bytes] | None
    """The lock file, whose text names the owner; None if the file system has no locks."""
    left: bool = False
    """Whether the previous owner ended without releasing the lock."""
    note: str = ""
    """A warning for the user if the file system has no locks, else empty."""

    @classmethod
    def take(cls, path: Path, where: object, doing: str, *, mixed: str, fix: str, wait_s: float = 0.0) -> Lock:
        """Lock the file `path`. Texts for messages: `where`, the locked place; `doing`, such as "export"; `mixed`, the
        outputs that two writers would mix; `fix`.

        Raises:
            UserError: another process still has the lock after `wait_s` seconds.
            OSError: the file cannot be opened or locked, or is not a lock file.
        """
        until = time.monotonic() + wait_s
        try:
            while (locked := _locked(path)) is None:
                if time.monotonic() >= until:
                    problem = f"in use by another {doing} ({_owner(path)})"
                    raise UserError.at(where, problem=problem, because=f"{mixed} would mix", fix=fix)
                time.sleep(0.1)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            note = f"the file system of {path.parent} has no locks; make sure that no other {doing} writes there"
            return cls(path, None, note=note)
        return cls(path, *locked)

    def release(self, *, remove: bool = False) -> None:
        """Release the lock. `remove`: whether to remove the lock file."""
        if self.file is not None:
            with suppress(OSError):
                if remove and os.path.samestat(self.path.lstat(), os.fstat(self.file.fileno())):
                    self.path.unlink()  # Unlink before closing, so that a process waiting on this file notices.
            with suppress(OSError):
                self.file.close()


@contextmanager
def alone(path: Path, target: Path, doing: str) -> Generator[None]:
    """Hold the lock file `path` while this process writes `target`. `doing`, such as "export", is for messages.

    Raises:
        UserError: another process has the lock. This one does not wait, since it would only replace the other's output.
        OSError: the file cannot be opened or locked, or is not a lock file.
    """
    fix = f"choose another folder{' (of a run export.hf_dir)' if doing == 'export' else ''}, or wait for it"
    lock = Lock.take(path, target, doing, mixed="two models", fix=fix)
    if lock.note:
        print(f"warning: {lock.note}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        lock.release(remove=True)


def _owner(path: Path) -> str:
    try:
        return read_own(path, _MAX_OWNER).decode("utf-8", "replace").strip() or "unknown process"
    except OSError:
        return "unknown process"


def _locked(path: Path) -> tuple[IO[bytes], bool] | None:
    """Lock a file. Returns the file and whether it named an owner; None if another process has it. Raises `OSError`."""
    file = open_own(path, "a+b", 0)
    try:
        # This lock belongs to the process, not to the open file: the system releases it however the process ends.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(path.lstat(), os.fstat(file.fileno())):  # Else the owner has removed it.
            file.seek(0)
            text = file.read(_MAX_OWNER + 1)
            if len(text) > _MAX_OWNER or not _OWNER.fullmatch(text.decode("utf-8", "replace")):
                raise OSError(errno.EEXIST, f"{path.name} is not a lock file of this program", str(path))
            file.truncate(0)
            owner = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
            if file.write(owner) < len(owner):  # The disk is full.
                file.truncate(0)
            return file, bool(text)
    except (BlockingIOError, PermissionError, FileNotFoundError):
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None
