"""What a process may not do while it reads bad input, by Python's audit events."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PRIVATE = "/etc/passwd"
FREE = (os.devnull, "/dev/tty")


class Guards:
    """Notes what is done inside `watching` that must not be: processes, connections, files outside of a folder.

    An audit hook stays for as long as the process; there is one `Guards` in it.
    """

    def __init__(self, folder: Path):
        self.folder, self.seen, self._on = os.path.realpath(folder), [], False
        sys.addaudithook(self._hear)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Clears `seen`, and notes there what is done inside."""
        self.seen: list[str] = []
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event in PROCESSES:
            self.seen.append(f"a process: {event}{args!r:.300}")
        elif event == "socket.connect":
            self.seen.append(f"a connection: {args[1]!r:.300}")
        elif event == "open":
            if args[0] == PRIVATE:
                self.seen.append(f"a file outside: {PRIVATE}")
            if isinstance(args[2], int) and args[2] & WRITES:
                self._written(event, args[0])
        elif event in CHANGES:
            for path in args[: 2 if event in ("os.rename", "os.link") else 1]:
                self._written(event, path)

    def _written(self, event: str, path: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):  # A descriptor: heard when it was opened.
            return
        name = os.fsdecode(path)
        try:
            # Where the folder is, not where the link leads that is removed or renamed.
            above, last = os.path.split(os.path.abspath(name))
            place = os.path.join(os.path.realpath(above), last)
        except (OSError, ValueError):  # No such place can be written to.
            return
        if event == "os.mkdir" and os.path.lexists(place):  # It fails, and changes nothing.
            return
        if place not in FREE and os.path.commonpath([place, self.folder]) != self.folder:
            self.seen.append(f"a file outside: {event} {name!r:.300}")
