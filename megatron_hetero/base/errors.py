"""The one exception for input that the user can fix, whether all ranks raise it, and how messages quote files and
records.

What modules and their parts are called: in flags, records, layouts and messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Self, overload

MOST_QUOTED = 200
"""Characters shown of a quoted text."""
MOST_FOUND = 2000
"""Characters shown of a place and of what was found there, which may be a long list."""
# Advice of torch and transformers to load untrusted files, which is never right for our users.
_UNSAFE_ADVICE = re.compile(
    "weights[ _]only|safe_globals|allow_pickle|trust_remote_code|you trust|trusted source|file an issue", re.IGNORECASE
)


class UserError(ValueError):
    """Bad input: a setting, a file or a record that the user can fix.

    The message names the place (file and line, record, field), what was found, what was expected and why, and what
    to do. It is one string, so that it survives pickling between processes. Control characters are escaped, see
    `printable`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, but="\n"))

    @overload
    @classmethod
    def at(cls, where: object, *, found: str, expected: str, fix: str, because: str = "") -> Self: ...

    @overload
    @classmethod
    def at(cls, where: object, *, problem: str, fix: str, because: str = "") -> Self: ...

    @classmethod
    def at(
        cls, where: object, *, found: str = "", expected: str = "", problem: str = "", fix: str, because: str = ""
    ) -> Self:
        """Builds the message from its parts: either `found` and `expected`, or a `problem`.

        Args:
            where: file, record or field the error is about, for example ``train.jsonl:12: field 'image'``.
            found: what the input holds.
            expected: what it should hold.
            problem: what is wrong, where there is no value to quote, for example ``given twice``.
            fix: an instruction to the user, without a full stop.
            because: why this is expected, or wrong; may be left out.
        """
        assert bool(problem) != bool(found or expected), "an error quotes a value or states a problem"
        wrong = truncated(problem, MOST_FOUND) or f"found {truncated(found, MOST_FOUND)}, expected {expected}"
        reason = f", because {because}" if because else ""
        stop = "" if fix.endswith(("?", "!")) else "."
        text = f"{truncated(str(where), MOST_FOUND)}: {wrong}{reason}. {fix[:1].upper()}{fix[1:]}{stop}"
        # In one line: a name with a line end in it could pass for another message.
        return cls(printable(text))


def printable(text: str, but: str = "") -> str:
    """The text with everything escaped that a terminal would interpret or hide instead of showing it, except the
    characters in `but`: control characters, line ends, direction marks, lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    """A text of a file or record as messages show it: in quotes, on one line, truncated."""
    return repr(text[:MOST_QUOTED]) + truncated(text, MOST_QUOTED)[MOST_QUOTED:]


def truncated(text: str, most: int) -> str:
    """The first `most` characters, and how many are left out."""
    rest = len(text) - most
    return text if rest <= 0 else f"{text[:most]}... and {rest} more characters"


def in_short(error: BaseException) -> str:
    """Type and text of a library's exception, for a message: one line, truncated, without advice to load untrusted
    files.
    """
    sentences = re.split(r"(?<=[.!?:])\s+|\n", str(error))
    kept = " ".join(" ".join(s.split()) for s in sentences if s.strip() and not _UNSAFE_ADVICE.search(s))
    text = f"{kept[:MOST_QUOTED]}..." if len(kept) > MOST_QUOTED else kept
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def reason(error: OSError) -> str:
    """Why the operating system refused, as it fits into a sentence: ``no space left on device``."""
    return (error.strerror or str(error)).lower()


@contextmanager
def os_errors_as(refusal: Callable[[OSError], UserError]) -> Generator[None]:
    """Inside, an `OSError` is raised as the `UserError` that `refusal` makes of it."""
    try:
        yield
    except OSError as error:
        raise refusal(error) from None


class SharedError(UserError):
    """One that every rank raises at the same point, so that all can shut down together in order: the ranks have agreed
    on it, or it follows from what all of them know.
    """


class NotFiniteError(SharedError):
    """NaN or infinity during training: the weights before the step may already be at fault."""


def listed(names: Collection[str], most: int = 5) -> str:
    """Names for a message, sorted; the first `most` of them, and the number of the others."""
    shown = [printable(name) for name in sorted(names)[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


VISION, TEXT = "vision", "text"
"""The modules of a vision-language model's own folder. Further encoders have names of their own."""

ROWS, HIDDEN = "rows", "hidden"
"""What pipeline stages give, where they give several things: the rows that replace embeddings, and hidden states."""


def parts_of(module: str) -> tuple[str, ...]:
    """The parts of a module that can be frozen: of an encoder itself and its projector."""
    if module == TEXT:
        return (TEXT,)
    return module, "projector" if module == VISION else f"{module}_projector"


def is_pattern(entry: str) -> bool:
    """Whether an entry of `model.freeze` is a pattern over names of stored tensors, and not a part."""
    return any(mark in entry for mark in ".*?[")
