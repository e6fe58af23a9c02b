"""Converts values from YAML and flags to the type of their field.

Both take the same path. Flags are text, so numbers and booleans are accepted as text.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from megatron_hetero.files.paths import unusable
from megatron_hetero.layout.grammar import did_you_mean


class ConversionError(Exception):
    """The value found, and the value expected."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found, self.expected = found, expected


def convert(value: object, kind: object, base: Path) -> object:
    """`value` as a `kind`.

    Args:
        value: a YAML value: text, a number, a boolean, None or a list of these.
        kind: str, int, float, bool, Path, a Literal of texts or of integers, one of these or None, a tuple of
            one of these, or the union of a Literal and the type of any other value.
        base: the folder that relative paths start from.

    Raises:
        ConversionError: the value is not a `kind`.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if NoneType in args and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
            return None
        *words, other = (arg for arg in args if arg is not NoneType)
        return _word_or(value, [word for kind in words for word in get_args(kind)], other, base)
    if origin is Literal:
        return _choice(value, args)
    if origin is tuple:
        return _items(value, args, kind, base)
    if kind is Path:
        return _path(value, base)
    return _SCALARS[kind](value)


def describe(kind: object) -> str:
    """A type in a user's words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join("none" if arg is NoneType else describe(arg) for arg in args)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin is tuple:
        return f"list of {describe(args[0])}" if args[-1] is Ellipsis else f"{len(args)} {describe(args[0])}s"
    return {str: "text", int: "integer", float: "number", bool: "true|false", Path: "path"}[kind]


def show(value: object) -> str:
    """A value as error messages quote it, with its type."""
    if value is None:
        return "null"
    names = {bool: "the boolean", int: "the integer", float: "the number", str: "the text", list: "the list"}
    # Only the first items of lists and mappings: YAML aliases expand a few lines without limit.
    text = str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else reprlib.repr(value)
    return f"{names.get(type(value), f'a {type(value).__name__}')} `{text[:80]}`"


def _word_or(value: object, words: list[str], other: object, base: Path) -> object:
    """One of the `words`, or the value as an `other`."""
    if value in words:
        return value
    try:
        return convert(value, other, base)
    except ConversionError as error:
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        expected = " or ".join(filter(None, [", ".join(words), error.expected]))
        raise ConversionError(f"{error.found}{hint}", expected) from None


def _choice(value: object, options: tuple[str | int, ...]) -> str | int:
    named = {str(option): option for option in options}
    # `true` equals 1, and is none.
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value) in named:
        return named[str(value)]
    hint = did_you_mean(value, list(named)) if isinstance(value, str) else ""
    raise ConversionError(f"{show(value)}{hint}", f"one of {', '.join(named)}")


def _items(value: object, args: tuple[object, ...], kind: object, base: Path) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise ConversionError(show(value), f"a {describe(kind)}" if args[-1] is Ellipsis else describe(kind))
    if args[-1] is not Ellipsis and len(value) != len(args):
        raise ConversionError(f"{len(value)} values", f"{len(args)}")
    return tuple(convert(item, args[0], base) for item in value)


def _path(value: object, base: Path) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConversionError(show(value), "a path")
    try:
        home = Path(value).expanduser()
    except RuntimeError:
        raise ConversionError(show(value), "a path with an existing home folder") from None
    # Links stay unresolved, so that messages name the path that the user wrote.
    path = Path(os.path.abspath(base / home))
    if (why := unusable(path)) is not None:
        raise ConversionError(f"{show(value)}, {why}", "a valid path")
    return path


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConversionError(show(value), "text")
    return value


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ConversionError(show(value), "true or false")


def _integer(given: object) -> int:
    value = given
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", value):
        value = int(value) if len(value) <= 30 else 2**63  # Python refuses thousands of digits.
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) < 2**63:
            return value
        raise ConversionError(show(given), "an integer below 2^63")
    raise ConversionError(show(given), "an integer")


def _number(value: object) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ConversionError(show(value), "a finite number")


_SCALARS: dict[object, Callable[[object], object]] = {str: _text, bool: _boolean, int: _integer, float: _number}
