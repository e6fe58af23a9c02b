"""Standard output, whose failures are reported in one sentence, consoles for tables, and the tools' argument parser."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from megatron_hetero.errors import UserError, printable, reason

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
    """Inside, a failing write to standard output (a full disk, a closed pipe) raises `UserError`, and characters that
    the locale's encoding lacks are escaped. Writes to a terminal that is gone are dropped.

    Raises `UserError` at once if the working directory no longer exists.
    """
    _require_working_directory()
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    with contextlib.redirect_stdout(cast(TextIO, _Output(sys.stdout))) as output:
        try:
            yield
        except SystemExit:  # Of a help text, mostly.
            output.flush()
            raise
        except UnicodeError as error:
            if sys.getfilesystemencoding() == "utf-8":
                raise
            raise UserError.at(
                "locale",
                found=f"the encoding {sys.getfilesystemencoding()} ({error})",
                expected="UTF-8",
                because="file names and texts use it",
                fix="set PYTHONUTF8=1 or LC_ALL=C.UTF-8",
            ) from None
        output.flush()


def _require_working_directory() -> None:
    """Check that it exists. Raises `UserError`."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError.at(
            "working directory",
            problem="no longer exists",
            because="paths are relative to it, and torch does not start without one",
            fix="change to an existing folder (cd)",
        ) from None


class _Output:
    """A stream whose `OSError` becomes a `UserError`, except for a terminal that is gone, which nobody reads, and for a
    closed pipe, which ends a command in silence.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._was_terminal = stream.isatty()

    def write(self, text: str) -> int:
        with self._reported():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._reported():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Its buffer would be flushed again at exit, and fail again.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._was_terminal and error.errno == errno.EIO:
                return
            if error.errno == errno.EPIPE and "RANK" not in os.environ:  # `--help | head`; a rank reports it.
                raise SystemExit(128 + signal.SIGPIPE) from None
            raise UserError.at(
                "standard output",
                problem=f"cannot be written ({reason(error)})",
                fix="free space where it is redirected to, or redirect it elsewhere",
            ) from None
