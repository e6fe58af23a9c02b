"""The one exception for input that the user can mend, and whether all ranks know of it."""

from __future__ import annotations

from collections.abc import Collection


class UserError(ValueError):
    """Bad input: a setting, a file or a record that the user can mend.

    The message names the place (file and line, record, field), what was found, what was expected and why, and what
    to do. It holds everything in one string, so that it survives pickling between processes.
    """

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
        return cls(f"{where}: found {found}, expected {expected}{reason}. {fix[:1].upper()}{fix[1:]}{stop}")


class SharedError(UserError):
    """One that every rank raises at the same point, after ranks have told each other or from what all of them know: all
    can go on together to an orderly end.
    """


def listed(names: Collection[str], most: int = 5) -> str:
    """Names for a message, sorted; of many the first ones, and how many more there are."""
    shown = sorted(names)[:most]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
