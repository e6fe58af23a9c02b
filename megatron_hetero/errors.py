"""The one exception for input that the user can mend, whether all ranks know of it, and how messages quote what comes
from files and records.
"""

from __future__ import annotations

import re
from collections.abc import Collection

MOST_QUOTED = 200
"""Characters of a quoted text that are shown."""
MOST_FOUND = 2000
"""Characters of a place, and of what was found there, which may be a list of many things."""
# Advice of torch and transformers to load what is not trusted. It is right for nobody who reads our messages.
_UNSAFE_ADVICE = re.compile(
    "weights[ _]only|safe_globals|allow_pickle|trust_remote_code|you trust|trusted source|file an issue", re.IGNORECASE
)


class UserError(ValueError):
    """Bad input: a setting, a file or a record that the user can mend.

    The message names the place (file and line, record, field), what was found, what was expected and why, and what
    to do. It holds everything in one string, so that it survives pickling between processes. What a terminal would
    obey is escaped, see `printable`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, but="\n"))

    @classmethod
    def at(cls, where: object, *, found: str, expected: str, fix: str, because: str = "") -> UserError:
        """Builds the message from its parts.

        Args:
            where: file, record or field the error is about, for example ``train.jsonl:12: field 'image'``.
            found: what the input holds.
            expected: what it should hold.
            fix: an instruction to the user, without a full stop.
            because: why this is expected; may be left out.
        """
        reason = f", because {because}" if because else ""
        stop = "" if fix.endswith(("?", "!")) else "."
        place, found = _cut(str(where), MOST_FOUND), _cut(found, MOST_FOUND)
        text = f"{place}: found {found}, expected {expected}{reason}. {fix[:1].upper()}{fix[1:]}{stop}"
        # In one line: a name with a line end in it could pass for another message.
        return cls(printable(text))


def printable(text: str, but: str = "") -> str:
    """The text with everything escaped, but the characters of `but`, that a terminal would obey or hide instead of
    showing it: control characters, line ends, marks of direction, halves of surrogate pairs.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    """A text of a file or record as messages show it: in quotes, in one line, and cut where it is long."""
    return repr(text[:MOST_QUOTED]) + _cut(text, MOST_QUOTED)[MOST_QUOTED:]


def _cut(text: str, most: int) -> str:
    rest = len(text) - most
    return text if rest <= 0 else f"{text[:most]}... and {rest} more characters"


def in_short(error: BaseException) -> str:
    """Kind and text of a library's exception, for a message: in one line, cut where it is long, and without advice to
    load what is not trusted.
    """
    sentences = re.split(r"(?<=[.!?:])\s+|\n", str(error))
    kept = " ".join(" ".join(s.split()) for s in sentences if s.strip() and not _UNSAFE_ADVICE.search(s))
    text = f"{kept[:MOST_QUOTED]}..." if len(kept) > MOST_QUOTED else kept
    return f"{type(error).__name__}{': ' if text else ''}{text}"


class SharedError(UserError):
    """One that every rank raises at the same point, after ranks have told each other or from what all of them know: all
    can go on together to an orderly end.
    """


class NotFiniteError(SharedError):
    """NaN or infinity in what training computes: the weights that it began with may be at fault."""


def listed(names: Collection[str], most: int = 5) -> str:
    """Names for a message, sorted; of many the first ones, and how many more there are."""
    shown = [printable(name) for name in sorted(names)[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
