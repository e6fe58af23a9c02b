"""Standard output: what cannot be written there is said in a sentence, and tables keep their width in files; the
command lines of tools.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from megatron_hetero.errors import UserError, printable

# `rich` is imported where something is printed with it.
if TYPE_CHECKING:
    from rich.console import Console

FILE_COLUMNS = 300
"""Columns of what is no terminal: enough for the tables of a run, which take no more than they need."""


class Parser(argparse.ArgumentParser):
    """Of a command line. What it quotes in a message is escaped where a terminal would obey it."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        super().error(printable(message))


def console() -> Console:
    """A console on the standard output. A file or a pipe has no width at which a table would have to be cut."""
    from rich.console import Console

    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console()
    return Console(width=FILE_COLUMNS)


def open_closed_outputs() -> None:
    """Send nowhere what is written to a standard output, or for errors, that was closed before the start (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it stays open


@contextlib.contextmanager
def told_output() -> Iterator[None]:
    """Inside, a standard output that cannot be written (a full disk, a reader that has gone) raises `UserError`, and
    characters that the locale's encoding lacks are escaped. What is written to a terminal that has gone is lost.
    Raises it, too, where the working directory has been removed.
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
                because="names of files and texts are in it",
                fix="set PYTHONUTF8=1 or LC_ALL=C.UTF-8",
            ) from None
        output.flush()


def _require_working_directory() -> None:
    """Check that there is one. Raises `UserError`."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError.at(
            "working directory",
            found="that it has been removed",
            expected="a folder",
            because="paths are relative to it, and torch does not start without one",
            fix="change to a folder that is there (cd)",
        ) from None


class _Output:
    """A stream whose `OSError` is the user's to mend, but for a terminal that has gone: nobody reads there any more."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._was_terminal = stream.isatty()

    def write(self, text: str) -> int:
        with self._told():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is left in its buffer would be written again at the end, and fail again.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._was_terminal and error.errno == errno.EIO:
                return
            raise UserError.at(
                "standard output",
                found=error.strerror or str(error),
                expected="to write to it",
                fix="make space where it is redirected to, or redirect it elsewhere",
            ) from None
