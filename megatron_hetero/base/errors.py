"""Errors that the user can fix, and functions that format names, values and program lines for messages."""

from __future__ import annotations

import errno
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

MAX_QUOTED = 200
"""Maximum characters shown of a quoted text."""
MAX_FOUND = 2000
"""Maximum characters shown of a place or a found value, which may be a long list."""
_INSTALLED = f"{Path(__file__).parents[1]}{os.sep}", f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen"
# Matches advice of torch and transformers to load untrusted files, which is never right here.
_UNSAFE_ADVICE = re.compile(
    "weights[ _]only|safe_globals|allow_pickle|trust_remote_code|you trust|trusted source|file an issue", re.IGNORECASE
)


class UserError(ValueError):
    """Bad input: a setting, a file or a record that the user can fix.

    The message names the place (file and line, record, field), what was found, what was expected and why, and what
    to do. It is one string, so that it survives pickling between processes, with control characters escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, but="\n"))

    @classmethod
    def at(
        cls, where: object, *, found: str = "", expected: str = "", problem: str = "", fix: str, because: str = ""
    ) -> Self:
        """Build the message from either `found` and `expected`, or a `problem`.

        Args:
            where: the file, record or field with the error, for example ``train.jsonl:12: field 'image'``.
            found: the value in the input.
            expected: a description of valid values.
            problem: what is wrong, if there is no value to quote, for example ``given twice``.
            fix: an instruction to the user, without a full stop.
            because: the reason why this is expected or wrong.
        """
        assert bool(problem) != bool(found or expected), "an error quotes a value or states a problem"
        wrong = truncated(problem, MAX_FOUND) or f"found {truncated(found, MAX_FOUND)}, expected {expected}"
        reason = f", because {because}" if because else ""
        stop = "" if fix.endswith(("?", "!")) else "."
        text = f"{truncated(str(where), MAX_FOUND)}: {wrong}{reason}. {fix[:1].upper()}{fix[1:]}{stop}"
        # Keep the message on one line: a name with a line break could look like another message.
        return cls(printable(text))


def printable(text: str, but: str = "") -> str:
    """Escape control characters, line ends, direction marks and lone surrogates in `text`, except those in `but`: a
    terminal would interpret or hide such characters.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    """Quote text of a file or record for a message, on one line and truncated."""
    return repr(text[:MAX_QUOTED]) + truncated(text, MAX_QUOTED)[MAX_QUOTED:]


def truncated(text: str, limit: int) -> str:
    """Return the first `limit` characters of `text`, followed by the number of omitted characters."""
    rest = len(text) - limit
    return text if rest <= 0 else f"{text[:limit]}... and {rest} more characters"


def in_short(error: BaseException) -> str:
    """Return type and text of a library's exception on one short line, without advice to load untrusted files."""
    sentences = re.split(r"(?<=[.!?:])\s+|\n", str(error))
    text = " ".join(" ".join(s.split()) for s in sentences if s.strip() and not _UNSAFE_ADVICE.search(s))
    text = f"{text[:MAX_QUOTED]}..." if len(text) > MAX_QUOTED else text
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def reason(error: OSError) -> str:
    """Return the operating system's reason in lower case, such as ``no space left on device``."""
    return (error.strerror or str(error)).lower()


@contextmanager
def os_errors_as(refusal: Callable[[OSError], UserError]) -> Generator[None]:
    """Convert an `OSError` raised inside the context to the `UserError` that `refusal` returns for it."""
    try:
        yield
    except OSError as error:
        raise refusal(error) from None


class BadSample(NamedTuple):
    """A bad record: its data set, number, place for messages, kind of cause, and error message."""

    dataset: str
    record: int
    where: str
    cause: str
    message: str


class BadRecord(UserError):
    """An error in a record that is bad on every machine."""

    found: BadSample


@contextmanager
def blaming(dataset: str, record: int, where: str, cause: str) -> Generator[None]:
    """Convert a `UserError` raised inside to a `BadRecord`, unless the machine rather than the record caused it."""
    try:
        yield
    except UserError as error:
        if isinstance(error, BadRecord) or _is_of_the_machine(error):
            raise
        bad = BadRecord(str(error))
        bad.found = BadSample(dataset, record, where, cause, truncated(str(error), MAX_FOUND))
        raise bad from error


def _is_of_the_machine(error: BaseException | None) -> bool:
    """Return whether an error or its cause comes from the machine rather than from data. Pillow reports bad data as
    plain `OSError`s without a number, PyAV as special classes. An impossible file name or offset is bad data.
    """
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        data_errors = (errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG)
        return error.errno not in data_errors and (error.errno is not None or type(error) is not OSError)
    return isinstance(error, ImportError) or (error is not None and _is_of_the_machine(error.__cause__))


class SharedError(UserError):
    """An error that every rank raises at the same point, so that all can shut down in order."""


class NotFiniteError(SharedError):
    """An error for NaN or infinity during training; the weights may have been bad before the step already."""


def listed(names: Collection[str], limit: int = 5) -> str:
    """Format the first `limit` names in sorted order, and the number of further names, for a message."""
    shown = [printable(name) for name in sorted(names)[:limit]]
    return ", ".join(shown) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def faults_of(kinds: Mapping[str, Collection[str]]) -> str:
    """Format the faults of each kind, such as ``2 missing: a, b; 1 unexpected: c``; empty if there are none."""
    return "; ".join(f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names)


def one_of(known: Iterable[object], kind: str, word: str = "one of") -> str:
    """Format the known names of a kind, such as edges: ``one of a, b`` or ``none, as there are no edges``."""
    names = ", ".join(map(str, known))
    return f"{word} {names}" if names else f"none, as there are no {kind}"


def is_pattern(entry: str) -> bool:
    """Return whether an entry of `model.freeze` is a pattern of tensor names rather than a module or projector."""
    return any(mark in entry for mark in ".*?[")


def main_place() -> str:
    """Return the line of the user's program that the main thread executes, for a message."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    return place(traceback.walk_stack(frames.get(threading.main_thread().ident or 0)))


def place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line of the user's program in a stack, for a message; empty if there is none."""
    for frame, line in frames:
        file = frame.f_code.co_filename
        # Generated code has no line numbers.
        if line and not file.startswith(_INSTALLED) and "site-packages" not in file:
            return f", at {Path(file).name}:{line}"
    return ""
