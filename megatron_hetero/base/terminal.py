"""Standard output that may go, consoles for tables, and the tools' argument parser."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from megatron_hetero.base.errors import printable

# `rich` is imported where something is printed with it.
if TYPE_CHECKING:
    from rich.console import Console

FILE_COLUMNS = 300
"""Columns of a file or pipe: enough for the tables of a run, which use no more than they need."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose messages escape control characters."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        super().error(printable(message))


def console() -> Console:
    """A console on standard output. Tables are not cropped in a file or pipe."""
    from rich.console import Console

    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console()
    return Console(width=FILE_COLUMNS)


def size_text(size: int) -> str:
    """Bytes as people read them, in powers of 1,000."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size} B" if size else "0"


def open_closed_outputs() -> None:
    """Redirect standard output and error to /dev/null where they were closed before the start (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it stays open


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Inside, characters that the encoding of an output lacks are escaped, and what is written to a terminal that is
    gone is dropped: what has been trained is still to be saved.
    """
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    with contextlib.redirect_stdout(cast(TextIO, _Terminal(sys.stdout)) if sys.stdout.isatty() else sys.stdout):
        yield


class _Terminal:
    """A terminal, which may go."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._unless_gone(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._unless_gone(self._stream.flush)

    def _unless_gone(self, act: Callable[..., object], *arguments: str) -> None:
        try:
            act(*arguments)
        except OSError:  # Its buffer would be flushed again at exit, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
