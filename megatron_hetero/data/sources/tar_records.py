"""Converts samples of tars to records: decodes texts, and derives record fields from the names of members."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_hetero.base.contents import Content
from megatron_hetero.base.errors import UserError, quoted
from megatron_hetero.data.item_fields import NAMES, is_content
from megatron_hetero.data.keys import FORMS
from megatron_hetero.data.sources.json_files import BOM, MAX_TEXT_BYTES, decode_json, lone_surrogate, not_utf8
from megatron_hetero.models.items.types import Modality

_CAPTIONS = ("txt", "text", "caption")
TEXTS = (*_CAPTIONS, "cls", "json")
"""Suffixes of fields that contain text."""
_CONVERT = "convert the text, or rename the field"


def decoded(value: Content | bytes | int, field: str, where: str) -> Any:
    """Return the value of a field. `value`: bytes of a text, their number if it exceeds the limit, or a content, which
    is returned unchanged. Raises `UserError`.
    """
    where = f"{where} field {field}"
    if isinstance(value, int):
        found, expected = f"{value} bytes", f"a text of at most {MAX_TEXT_BYTES} bytes"
        raise UserError.at(where, found=found, expected=expected, fix="rename the field, or remove the sample")
    if not isinstance(value, bytes):
        return value
    if field.endswith("json"):
        return decoded_json(value, where)
    try:
        return value.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error, where, _CONVERT) from None


def decoded_json(raw: bytes, where: str) -> Any:
    """Decode a JSON text. Raises `UserError`."""
    try:
        return decode_json(raw.removeprefix(BOM))
    except UnicodeDecodeError as error:
        raise not_utf8(error, where, _CONVERT) from None
    except UnicodeEncodeError as error:
        raise lone_surrogate(error, where) from None
    except (ValueError, RecursionError) as error:
        found = f"broken JSON ({error})"
        raise UserError.at(where, found=found, expected="one JSON value", fix="correct or remove the sample") from None


def with_defaults(fields: dict[str, Any], where: str, mapped: bool) -> dict[str, Any]:
    """Return the fields of a sample, together with the record fields that are derived from them.

    - The keys of the JSON field, if it is an object; if it is a list, it becomes `conversations` or `messages`,
      depending on the keys of its first entry.
    - `answer`, from a text field, if the fields so far have no text.
    - `video` and `image`, from fields with such suffixes; in the order of the JSON if the JSON names them.

    Raises:
        UserError: the JSON names other items than the sample has, unless fields are `mapped`.
    """
    given = _json_field(fields)
    items = _resolved(fields, given, where, mapped)
    if isinstance(given, list):
        given = {form_of(given): given}
    record = {**given, **items, **fields} if isinstance(given, dict) else items | fields
    caption = next((fields[name] for name in _CAPTIONS if isinstance(fields.get(name), str)), None)
    if caption is not None and all(record.get(name) is None for name in FORMS):
        record["answer"] = caption
    return record


def form_of(turns: Sequence[Any]) -> str:
    """Return the name of the record field for a list of turns."""
    return "messages" if turns and isinstance(turns[0], dict) and "role" in turns[0] else "conversations"


def _json_field(fields: dict[str, Any]) -> Any:
    """Return the value of the field `json`, or of the only field with the suffix `.json`."""
    others = [name for name in fields if name.endswith(".json")]
    return fields.get("json", fields[others[0]] if len(others) == 1 else None)


def _resolved(fields: dict[str, Any], given: Any, where: str, mapped: bool) -> dict[str, Any]:
    """Return the items of a sample by modality, except items that the JSON field `given` names; in `given`, their names
    are replaced by contents.
    """
    contents = {name: value for name, value in fields.items() if is_content(value)}
    by_name = dict(contents)
    for value in contents.values():
        by_name |= {value.label.lower(): value, posixpath.basename(value.label).lower(): value}
    items, used = dict[str, Any](), list[Content]()
    for modality in ("video", "image"):  # Videos first, since a video may be a list of pictures.
        suffixes = NAMES[modality].suffixes
        unnamed = [value for name, value in contents.items() if f".{name}".endswith(suffixes) and value not in used]
        slots = _slots(given, modality)
        names = [name for holder, key in slots for name in _strings(holder[key])]
        if not names:
            items |= {modality: unnamed[0] if len(unnamed) == 1 else unnamed} if unnamed else {}
            continue
        named = [by_name.get(name.lower()) or by_name.get(posixpath.basename(name).lower()) for name in names]
        chosen = [value for value in named if value is not None] or unnamed
        if len(chosen) == len(names):
            used += chosen
            coming = iter(chosen)
            for holder, key in slots:
                holder[key] = _refilled(holder[key], coming)
        elif chosen and not mapped:
            found = f"{', '.join(map(quoted, names))} in its JSON, and the fields {', '.join(contents)}"
            expected = "names of fields, or as many names as the sample has fields"
            fix = f"map {modality} in `fields` of the data set, or correct the sample"
            raise UserError.at(f"{where}: field '{modality}'", found=found, expected=expected, fix=fix)
    return items


def _slots(given: Any, modality: Modality) -> list[tuple[dict[str, Any], str]]:
    """Return the objects and keys in a JSON field whose values name items of a modality."""
    names = NAMES[modality]
    slots = [(given, modality), (given, names.plural)] if isinstance(given, dict) else []
    messages = given.get("messages") if isinstance(given, dict) else given
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for entry in content if isinstance(content, list) else []:
            if isinstance(entry, dict) and entry.get("type") in (modality, names.url):
                key = next((key for key in (entry["type"], modality, "url", "path") if entry.get(key)), modality)
                slots.append((entry[key], "url") if isinstance(entry.get(key), dict) else (entry, key))
    return [(holder, key) for holder, key in slots if holder.get(key)]


def _strings(value: Any) -> list[str]:
    """Return the texts in a value: a text itself, or all texts in a list and its inner lists, such as frames."""
    listed = value if isinstance(value, list) else [value]
    return [text for each in listed for text in (each if isinstance(each, list) else [each]) if isinstance(text, str)]


def _refilled(value: Any, contents: Iterator[Content], depth: int = 2) -> Any:
    """Return the value with its texts (`_strings`) replaced by contents, in order."""
    if isinstance(value, list) and depth:
        return [_refilled(each, contents, depth - 1) for each in value]
    return next(contents) if isinstance(value, str) else value
