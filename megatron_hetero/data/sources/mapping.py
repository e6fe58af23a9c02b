"""Mappings of fields: which value in a record of a data set becomes which field of a `Record`.

A path such as `json.conversations`, `qa[0].question` or `qa.0.question` has keys of objects and numbers of list
entries. Keys may contain dots: the longest existing key counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_hetero.base.errors import UserError, quoted
from megatron_hetero.data.item_fields import PLURALS
from megatron_hetero.data.keys import FORMS, READ
from megatron_hetero.data.validation import ItemField

_QUESTIONS = ("question", "answer")
_KEYS = re.compile(r"[^.\[\]]+")


def keys_of(path: str) -> tuple[str, ...]:
    """Return the keys of a path; empty for a path without names."""
    return tuple(_KEYS.findall(path))


def known_fields(items: Iterable[str]) -> tuple[str, ...]:
    """Return the fields that a record may have, including `items`, the item fields of all encoders."""
    return tuple(dict.fromkeys([*items, *READ["record"]]))


class FieldMap(NamedTuple):
    """Mapping of fields: the path of each mapped field in a data set's records. Other fields keep their names."""

    paths: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def parse(cls, fields: Mapping[str, str], items: Sequence[ItemField], setting: str) -> FieldMap:
        """Parse the mapping given by a `setting`, for records with these item fields.

        Raises:
            UserError: an unknown field, or no path.
        """
        known = known_fields(item.name for item in items)
        for name, path in fields.items():
            if name not in known:
                found, expected = quoted(name), f"one of {', '.join(known)}"
                raise UserError.at(setting, found=found, expected=expected, fix="map fields to these")
            if not keys_of(path):
                found, expected = quoted(path), "the name of a column, a tar's field or a key"
                raise UserError.at(f"{setting}.{name}", found=found, expected=expected, fix="correct it")
        return cls(tuple((name, keys_of(path)) for name, path in fields.items()))

    def apply(self, value: Any, where: str) -> Any:
        """Return the record with its fields mapped. Raises `UserError` if a mapped text is missing."""
        if not self.paths or not isinstance(value, dict):
            return value
        mapped = {name for name, _ in self.paths}
        dropped = set(mapped)
        if not mapped.isdisjoint(FORMS):  # A mapped text replaces all texts of the record.
            dropped.update(set(FORMS).difference(() if mapped.isdisjoint(_QUESTIONS) else _QUESTIONS))
        for one, other in PLURALS.items():
            if not mapped.isdisjoint((one, other)):
                dropped.update((one, other))
        record = {name: each for name, each in value.items() if name not in dropped}
        for name, path in self.paths:
            mapped_value = value_at(value, path)
            if mapped_value is None and name in FORMS:
                keys = ", ".join(map(str, value)) or "nothing"
                missing, expected = f"nothing at {'.'.join(path)}", f"a text, in a record with {keys}"
                fix = "correct `fields` of the data set, or the record"
                raise UserError.at(f"{where}: field '{name}'", found=missing, expected=expected, fix=fix)
            if mapped_value is not None:
                record[name] = mapped_value
        return record


def value_at(value: Any, path: Sequence[str]) -> Any:
    """Return the value at a path; None if the path does not exist."""
    if not path:
        return value
    if isinstance(value, list):
        inside = path[0].isdecimal() and len(path[0]) < 10 and int(path[0]) < len(value)
        return value_at(value[int(path[0])], path[1:]) if inside else None
    if isinstance(value, dict):
        for count in range(len(path), 0, -1):
            if (key := ".".join(path[:count])) in value:
                return value_at(value[key], path[count:])
    return None
