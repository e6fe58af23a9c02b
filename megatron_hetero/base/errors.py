"""Errors that the user can fix, and texts in messages: quoted files and records, lines of programs."""

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
"""Maximum characters shown of a place and of a found value, which may be a long list."""
_INSTALLED = f"{Path(__file__).parents[1]}{os.sep}", f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen"
# Advice in errors of torch and transformers to load untrusted files, which is never right here.
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
        """Builds the message from either `found` and `expected`, or a `problem`.

        Args:
            where: file, record or field the error is about, for example ``train.jsonl:12: field 'image'``.
            found: the value in the input.
            expected: the value it should have.
            problem: what is wrong, if there is no value to quote, for example ``given twice``.
            fix: an instruction to the user, without a full stop.
            because: why this is expected, or wrong.
        """
        assert bool(problem) != bool(found or expected), "an error quotes a value or states a problem"
        wrong = truncated(problem, MAX_FOUND) or f"found {truncated(found, MAX_FOUND)}, expected {expected}"
        reason = f", because {because}" if because else ""
        stop = "" if fix.endswith(("?", "!")) else "."
        text = f"{truncated(str(where), MAX_FOUND)}: {wrong}{reason}. {fix[:1].upper()}{fix[1:]}{stop}"
        # On one line: a name that contains a line end could look like another message.
        return cls(printable(text))


def printable(text: str, but: str = "") -> str:
    """The text with control characters, line ends, direction marks and lone surrogates escaped, except those in `but`:
    a terminal would interpret or hide them.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    """Text of a file or record for a message: in quotes, on one line, truncated."""
    return repr(text[:MAX_QUOTED]) + truncated(text, MAX_QUOTED)[MAX_QUOTED:]


def truncated(text: str, limit: int) -> str:
    """The first `limit` characters, and the number of further ones."""
    rest = len(text) - limit
    return text if rest <= 0 else f"{text[:limit]}... and {rest} more characters"


def in_short(error: BaseException) -> str:
    """Type and text of a library's exception on one truncated line, without advice to load untrusted files."""
    sentences = re.split(r"(?<=[.!?:])\s+|\n", str(error))
    text = " ".join(" ".join(s.split()) for s in sentences if s.strip() and not _UNSAFE_ADVICE.search(s))
    text = f"{text[:MAX_QUOTED]}..." if len(text) > MAX_QUOTED else text
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def reason(error: OSError) -> str:
    """The operating system's reason in lower case: ``no space left on device``."""
    return (error.strerror or str(error)).lower()


@contextmanager
def os_errors_as(refusal: Callable[[OSError], UserError]) -> Generator[None]:
    """Inside, convert an `OSError` to the `UserError` that `refusal` returns for it."""
    try:
        yield
    except OSError as error:
        raise refusal(error) from None


class BadSample(NamedTuple):
    """A bad record: its data set, its number and place in messages, a kind of cause, and the message."""

    dataset: str
    record: int
    where: str
    cause: str
    message: str


class BadRecord(UserError):
    """A record that is bad on any machine."""

    found: BadSample


@contextmanager
def blaming(dataset: str, record: int, where: str, cause: str) -> Generator[None]:
    """Inside, raise a `UserError` as a `BadRecord`, unless the system, a missing package or a time-out caused it."""
    try:
        yield
    except UserError as error:
        if isinstance(error, BadRecord) or _is_of_the_machine(error):
            raise
        bad = BadRecord(str(error))
        bad.found = BadSample(dataset, record, where, cause, truncated(str(error), MAX_FOUND))
        raise bad from error


def _is_of_the_machine(error: BaseException | None) -> bool:
    """Whether an error, or its cause, comes from the machine rather than from data. Pillow reports bad data by plain
    `OSError`s without a number, PyAV by its own classes. A name or an offset that no file can have is bad data.
    """
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        data_errors = (errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG)
        return error.errno not in data_errors and (error.errno is not None or type(error) is not OSError)
    return isinstance(error, ImportError) or (error is not None and _is_of_the_machine(error.__cause__))


class SharedError(UserError):
    """An error that every rank raises at the same point, so that all can shut down in order."""


class NotFiniteError(SharedError):
    """NaN or infinity during training. The weights before the step may be bad already."""


def listed(names: Collection[str], limit: int = 5) -> str:
    """The first `limit` names in sorted order, and the number of further ones, for a message."""
    shown = [printable(name) for name in sorted(names)[:limit]]
    return ", ".join(shown) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def faults_of(kinds: Mapping[str, Collection[str]]) -> str:
    """Numbers and names of faults by kind: ``2 missing: a, b; 1 unexpected: c``. Empty if there are none."""
    return "; ".join(f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names)


def one_of(known: Iterable[object], kind: str, word: str = "one of") -> str:
    """The known names of a kind, such as edges, for a message: ``one of a, b`` or ``none, as there are no edges``."""
    names = ", ".join(map(str, known))
    return f"{word} {names}" if names else f"none, as there are no {kind}"


def is_pattern(entry: str) -> bool:
    """Whether an entry of `model.freeze` is a pattern of tensor names rather than a module or projector."""
    return any(mark in entry for mark in ".*?[")


def main_place() -> str:
    """The line of the user's program that the main thread runs."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    return place(traceback.walk_stack(frames.get(threading.main_thread().ident or 0)))


def place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost line of the user's program in a stack."""
    for frame, line in frames:
        file = frame.f_code.co_filename
        # Generated code has no lines.
        if line and not file.startswith(_INSTALLED) and "site-packages" not in file:
            return f", at {Path(file).name}:{line}"
    return ""
