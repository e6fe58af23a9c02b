"""JSON objects in files from elsewhere: read whole or refused, and checked key by key against a table.

A table maps keys to a `Rule`, or to the table of a nested object; other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeAlias

from megatron_hetero.errors import UserError, reason
from megatron_hetero.files.opening import read_bytes

MOST_BYTES = 4 * 2**20
"""Larger than any configuration. Parsed, it takes some thirty times as much memory."""
RESTORE = "restore the file as its model was published or saved"
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_IN_JSON = {None: "null", True: "true", False: "false"}

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"
"""What a file may hold."""


@dataclass(frozen=True)
class Rule:
    """What a value must satisfy; `expected`, `because` and `fix` as in `UserError.at`."""

    expected: str
    holds: Callable[[Any], bool]
    because: str = ""
    fix: str = RESTORE

    def or_null(self) -> Rule:
        """The same rule, for a value that may be null."""
        return Rule(f"{self.expected}, or null", lambda v: v is None or self.holds(v), self.because, self.fix)


Table: TypeAlias = "Mapping[str, Rule | Table]"


def whole(low: int, high: int) -> Rule:
    """A whole number, both bounds included."""
    return Rule(f"a whole number from {low} to {high}", lambda v: _is_a(v, int) and low <= v <= high)


def number(low: float, high: float, *, above: bool = False) -> Rule:
    """A number, both bounds included; `above`: without the lower one. NaN is none."""
    words = f"a number above {low:g}, {high:g} at most" if above else f"a number from {low:g} to {high:g}"
    return Rule(words, lambda v: _is_a(v, int | float) and low <= v <= high and not (above and v == low))


def one_of(*values: object) -> Rule:
    """One of these values."""
    return Rule(" or ".join(map(shown, values)), lambda v: not isinstance(v, list | dict) and v in values)


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """A list of values of one rule; of a `length`, where one is given."""
    words = f"a list of which each is {rule.expected}" if length is None else f"{length} values, each {rule.expected}"

    def holds(value: Json) -> bool:
        return isinstance(value, list) and (length is None or len(value) == length) and all(map(rule.holds, value))

    return Rule(words, holds)


def either(*rules: Rule) -> Rule:
    """What one of the rules allows."""
    return Rule("; or ".join(rule.expected for rule in rules), lambda v: any(rule.holds(v) for rule in rules))


FLAG = Rule("true or false", lambda v: isinstance(v, bool))
TEXT = Rule("text", lambda v: isinstance(v, str))
OBJECT = Rule("an object", lambda v: isinstance(v, dict))


def _is_a(value: object, kind: Any) -> bool:
    """Whether it is of that kind of number; true and false are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value as it stands in the file, on one short line."""
    return _IN_JSON[value] if value is None or isinstance(value, bool) else _SHORT.repr(value)


def check(path: Path, values: Mapping[str, Any], table: Table, at: str = "") -> None:
    """Check the object that the file `path` holds against its table. `at`: the keys above it, with a dot behind each.

    Raises:
        UserError: naming file, key and value.
    """
    for key in filter(values.__contains__, table):
        value, rule = values[key], table[key]
        if isinstance(rule, Rule):
            _require(path, at + key, value, rule)
        elif value is not None:
            _require(path, at + key, value, OBJECT)
            check(path, value, rule, f"{at}{key}.")


def _require(path: Path, key: str, value: object, rule: Rule) -> None:
    if not rule.holds(value):
        raise UserError.at(
            f"{path}: {key}", found=shown(value), expected=rule.expected, because=rule.because, fix=rule.fix
        )


def read_object(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object that the file `path` holds, of `most` bytes at most.

    Raises:
        UserError: it cannot be read, is broken, holds no object, is nested too deep, or has a key twice.
    """
    content = _content(path, most)
    try:
        value: Json = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        where, found = f"{path}:{error.lineno}", f"broken JSON at column {error.colno} ({error.msg})"
        raise _refused(where, found, "a JSON object") from None
    except _KeyTwice as error:
        raise _refused(path, f"the key {shown(error.args[0])} twice", "each key once") from None
    except RecursionError:
        raise _refused(path, "lists or objects too deep in one another", "a JSON object as its model has it") from None
    except ValueError as error:  # no UTF-8, or a number of thousands of digits
        raise _refused(path, f"an unreadable file ({error})", "a JSON object in UTF-8") from None
    if not isinstance(value, dict):
        raise _refused(path, f"{shown(value)} in place of an object", "a JSON object, { ... }")
    return value


def _content(path: Path, most: int) -> bytes:
    try:
        return read_bytes(path, most)
    except OSError as error:
        raise _refused(path, f"an unreadable file ({reason(error)})", "a JSON object in UTF-8") from None


class _KeyTwice(Exception):
    """A key that an object has twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _KeyTwice(name)
        found[name] = value
    return found


def _refused(where: object, found: str, expected: str) -> UserError:
    return UserError.at(where, found=found, expected=expected, fix=RESTORE)
