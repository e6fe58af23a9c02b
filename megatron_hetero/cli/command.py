"""Argument types, the option `--encoder` and the progress bar of the command-line tools."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_hetero.base.errors import UserError, quoted
from megatron_hetero.base.files import unusable

if TYPE_CHECKING:
    from megatron_hetero.checkpoint.storage import Advance


def a_path(text: str) -> Path:
    """Parse a valid path, as an `argparse` type."""
    if why := unusable(text) if text else "empty":
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, {why}, expected a valid path")
    return Path(text)


def at_least(least: int, text: str) -> int:
    """Parse an integer of at least `least`, as an `argparse` type."""
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"found {text}, expected ≥ {least}")
    return number


def positive(text: str) -> float:
    """Parse a finite number above 0, as an `argparse` type."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text}, expected > 0")
    return number


def add_encoders(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option `--encoder NAME=DIR` with help `text` to a parser."""
    parser.add_argument("--encoder", type=_named_folder, action="append", default=[], metavar="NAME=DIR", help=text)


def _named_folder(text: str) -> tuple[str, Path]:
    """Parse `NAME=DIR` into a name and a folder, as an `argparse` type."""
    name, equals, folder = text.partition("=")
    if not name or not equals or not folder:
        raise argparse.ArgumentTypeError(f"found {text}, expected NAME=DIR")
    return name, a_path(folder)


def by_name(given: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    """Return the folders of `--encoder` by name. Raises `UserError` if a name is given twice."""
    folders = dict(given)
    if len(folders) < len(given):
        names = ", ".join(name for name, _ in given)
        raise UserError.at("--encoder", found=names, expected="each name once", fix="remove the duplicate")
    return folders


@contextmanager
def progress() -> Iterator[Advance]:
    """Yield a function that updates a progress bar on a terminal, and prints nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        tasks = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.update(tasks[what], completed=done)

        yield advance
