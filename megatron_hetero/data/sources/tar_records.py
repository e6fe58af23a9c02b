"""Samples of tars as records: texts decoded, and fields that follow from the names of parts."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_hetero.base.contents import Content
from megatron_hetero.base.errors import UserError, quoted
from megatron_hetero.data.item_fields import FRAME_SUFFIXES, PLURALS, is_content
from megatron_hetero.data.keys import FORMS
from megatron_hetero.data.sources.json_files import BOM, MAX_TEXT_BYTES, decode_json, lone_surrogate, not_utf8

VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv", ".mov", ".avi", ".mpg", ".mpeg", ".m4v")
"""A part with such a suffix is a video."""
_ITEMS = {"video": VIDEO_SUFFIXES, "image": (*FRAME_SUFFIXES, ".gif")}
_CAPTIONS = ("txt", "text", "caption")
TEXTS = (*_CAPTIONS, "cls", "json")
"""Suffixes of parts that are text."""
_CONVERT = "convert the text, or rename the part"


def decoded(value: Content | bytes | int, part: str, where: str) -> Any:
    """The value of a part, whose text is given as bytes, or as the number of too many. Raises `UserError`."""
    where = f"{where} part {part}"
    if isinstance(value, int):
        found, expected = f"{value} bytes", f"a text of at most {MAX_TEXT_BYTES} bytes"
        raise UserError.at(where, found=found, expected=expected, fix="rename the part, or remove the sample")
    if not isinstance(value, bytes):
        return value
    if part.endswith("json"):
        return decoded_json(value, where)
    try:
        return value.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error, where, _CONVERT) from None


def decoded_json(raw: bytes, where: str) -> Any:
    """The value of a JSON text. Raises `UserError`."""
    try:
        return decode_json(raw.removeprefix(BOM))
    except UnicodeDecodeError as error:
        raise not_utf8(error, where, _CONVERT) from None
    except UnicodeEncodeError as error:
        raise lone_surrogate(error, where) from None
    except (ValueError, RecursionError) as error:
        found = f"broken JSON ({error})"
        raise UserError.at(where, found=found, expected="one JSON value", fix="correct or remove the sample") from None


def with_defaults(parts: dict[str, Any], where: str, mapped: bool) -> dict[str, Any]:
    """The parts of a sample, with fields of records that follow from them.

    - Keys of the JSON part, an object. A list in it is `conversations` or `messages`, by the keys of its first entry.
    - `answer`, a text part, if there is no text in these.
    - `video` and `image`: the parts with such suffixes. Where the JSON names parts, these, in its order.

    Raises:
        UserError: the JSON names items that the sample does not have, and has others; not if fields are `mapped`.
    """
    given = _json_part(parts)
    items = _resolved(parts, given, where, mapped)
    if isinstance(given, list):
        given = {form_of(given): given}
    record = {**given, **items, **parts} if isinstance(given, dict) else items | parts
    caption = next((parts[name] for name in _CAPTIONS if isinstance(parts.get(name), str)), None)
    if caption is not None and all(record.get(name) is None for name in FORMS):
        record["answer"] = caption
    return record


def form_of(turns: Sequence[Any]) -> str:
    """The field that a list of turns belongs in."""
    return "messages" if turns and isinstance(turns[0], dict) and "role" in turns[0] else "conversations"


def _json_part(parts: dict[str, Any]) -> Any:
    """The value of the part `json`, or of the only part with that suffix."""
    others = [name for name in parts if name.endswith(".json")]
    return parts.get("json", parts[others[0]] if len(others) == 1 else None)


def _resolved(parts: dict[str, Any], given: Any, where: str, mapped: bool) -> dict[str, Any]:
    """The items of a sample by field, unless the JSON part `given` names them: then its names become contents."""
    contents = {name: value for name, value in parts.items() if is_content(value)}
    by_name = dict(contents)
    for value in contents.values():
        by_name |= {value.label.lower(): value, posixpath.basename(value.label).lower(): value}
    items, used = dict[str, Any](), list[Content]()
    for field, suffixes in _ITEMS.items():
        own = [value for name, value in contents.items() if f".{name}".endswith(suffixes) and value not in used]
        slots = _slots(given, field)
        names = [name for holder, key in slots for name in _strings(holder[key])]
        if not names:
            items |= {field: own[0] if len(own) == 1 else own} if own else {}
            continue
        named = [by_name.get(name.lower()) or by_name.get(posixpath.basename(name).lower()) for name in names]
        chosen = [value for value in named if value is not None] or own
        if len(chosen) == len(names):
            used += chosen
            coming = iter(chosen)
            for holder, key in slots:
                holder[key] = _refilled(holder[key], coming)
        elif chosen and not mapped:
            found = f"{', '.join(map(quoted, names))} in its JSON, and the parts {', '.join(contents)}"
            expected = "names of parts, or as many as there are parts"
            fix = f"map {field} in `fields` of the data set, or correct the sample"
            raise UserError.at(f"{where}: field '{field}'", found=found, expected=expected, fix=fix)
    return items


def _slots(given: Any, field: str) -> list[tuple[dict[str, Any], str]]:
    """The objects and keys of a JSON part that may name items of a field."""
    holders = [(given, field), (given, PLURALS[field])] if isinstance(given, dict) else []
    messages = given.get("messages") if isinstance(given, dict) else given
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        shown = content if isinstance(content, list) else []
        for part in (part for part in shown if isinstance(part, dict) and part.get("type") in (field, f"{field}_url")):
            key = next((key for key in (part["type"], field, "url", "path") if part.get(key)), field)
            holders.append((part[key], "url") if isinstance(part.get(key), dict) else (part, key))
    return [(holder, key) for holder, key in holders if holder.get(key)]


def _strings(value: Any) -> list[str]:
    """A text, or the texts in a list and in its lists, such as frames of videos."""
    listed = value if isinstance(value, list) else [value]
    return [text for each in listed for text in (each if isinstance(each, list) else [each]) if isinstance(text, str)]


def _refilled(value: Any, contents: Iterator[Content], depth: int = 2) -> Any:
    """The value with contents in place of its `_strings`."""
    if isinstance(value, list) and depth:
        return [_refilled(each, contents, depth - 1) for each in value]
    return next(contents) if isinstance(value, str) else value
