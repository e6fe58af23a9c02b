"""Consoles for tables, standard output, progress, and the argument parser of the tools."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn, Self

from megatron_hetero.base.errors import printable

# `rich` is imported only where it is used.
if TYPE_CHECKING:
    from rich.console import Console

FILE_COLUMNS = 300
"""Assumed width of a file or pipe in columns: enough for the tables of a run."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose messages escape control characters."""

    def error(self, message: str) -> NoReturn:
        """Print the message with control characters escaped, and exit."""
        super().error(printable(message))


def console() -> Console:
    """Return a console on standard output, wide enough in a file or pipe that tables are not cropped."""
    from rich.console import Console

    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console()
    return Console(width=FILE_COLUMNS)


def size_text(size: int) -> str:
    """Format a number of bytes in units of powers of 1,000, such as MB."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size} B" if size else "0"


def prepare_outputs() -> None:
    """Redirect standard output and error to /dev/null where they were closed before the start (`>&-`), and have them
    escape characters that their encoding lacks.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it stays open
        if reconfigure := getattr(getattr(sys, name), "reconfigure", None):
            reconfigure(errors="backslashreplace")


class Progress:
    """A progress report of long work on standard error: a bar on a terminal, elsewhere a line from time to time. Short
    work prints nothing. Any thread may call its methods.
    """

    FIRST_S, LINE_S = 3.0, 15.0
    """Seconds before the first report, and between lines."""

    def __init__(self, what: str, total: float) -> None:
        self._what, self._total = what, total
        self._done, self._count, self._lock = 0.0, 0, threading.Lock()
        self._began = time.monotonic()
        self._due = self._began + self.FIRST_S
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def advance(self, done: float, count: int) -> None:
        """Add `done` to the completed amount of the total, and `count` to the number of processed items."""
        with self._lock:
            self._done += done
            self._count += count
            if (now := time.monotonic()) >= self._due:
                self._show(now)

    def _show(self, now: float) -> None:
        terminal, share = sys.stderr.isatty(), self._done / self._total
        self._due, self._shown = now + (0.2 if terminal else self.LINE_S), True
        left = (now - self._began) * (1 / share - 1) if share > 0 else math.inf
        text = f"{self._what}: {share:.0%}, {self._count:,}" + (f", {left:.0f} s left" if left < math.inf else "")
        bar = f"[{'#' * int(20 * share):20}] " if terminal else ""
        with contextlib.suppress(OSError):
            print(
                f"\r{bar}{text}\x1b[K" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True
            )

    def __exit__(self, *_: object) -> None:
        if self._shown and sys.stderr.isatty():
            with contextlib.suppress(OSError):
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
