"""Consoles for tables, standard output, and the tools' argument parser."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from megatron_hetero.base.errors import printable

# `rich` is imported where something is printed with it.
if TYPE_CHECKING:
    from rich.console import Console

FILE_COLUMNS = 300
"""Columns of a file or pipe, enough for the tables of a run."""


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


def prepare_outputs() -> None:
    """Redirect standard output and error to /dev/null where they were closed before the start (`>&-`), and have them
    escape characters that their encoding lacks.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it stays open
        if reconfigure := getattr(getattr(sys, name), "reconfigure", None):
            reconfigure(errors="backslashreplace")
