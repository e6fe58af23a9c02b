"""Reads raw records from a JSON list or a JSONL file, and locates syntax errors by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn

from megatron_hetero.errors import UserError, quoted, reason
from megatron_hetero.files.opening import open_regular

_FORMATS = "a JSON list of records, or JSONL with one record on each line"
_BOM, _GZIP = b"\xef\xbb\xbf", b"\x1f\x8b"
MOST_RECORD_BYTES = 8 * 2**20
"""Limit of a JSONL line, and of a list element in characters: twice what `MOST_CHARACTERS` of text take."""
MOST_LIST_BYTES = 2**32
"""Limit of a file with a JSON list, which is read as a whole."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, where `json` itself would let the last of equal keys win."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {quoted(twice)} twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


@dataclass(frozen=True)
class RawRecord:
    """One decoded JSON value and the place it comes from (``line`` is 0 in a JSON list)."""

    value: Any
    where: str
    line: int


def record_place(path: Path, index: int, line: int) -> str:
    """``train.jsonl:12`` where the line is known, else ``train.json record 12``; both count from 1."""
    return f"{path}:{line}" if line else f"{path} record {index + 1}"


def read_records(path: Path) -> Iterator[RawRecord]:
    """Yields the records of an annotation file in order.

    The format follows from the first character, not from the suffix: many ``.json`` files hold JSONL.

    Raises:
        UserError: the file is missing, unreadable, not UTF-8 or not valid JSON.
    """
    try:
        first = _first_character(path)
        yield from _read_list(path) if first == b"[" else _read_lines(path)
    except FileNotFoundError as error:
        fix = "correct its path: `annotations` in data.registry, or --annotations of cli.evaluate"
        raise UserError.at(path, problem="no such file", fix=fix) from error
    except OSError as error:
        raise UserError.at(
            path, problem=f"cannot be read ({reason(error)})", fix="check path and permissions"
        ) from error


def _first_character(path: Path) -> bytes:
    """The first character that is not blank; empty for a blank file."""
    with open_regular(path) as file:
        if file.read(len(_GZIP)) == _GZIP:
            raise UserError.at(path, problem="a gzip archive", fix="unpack it with gunzip")
        file.seek(0)
        while block := file.read(4096):
            if stripped := block.removeprefix(_BOM).lstrip():
                return stripped[:1]
    return b""


def _read_lines(path: Path) -> Iterator[RawRecord]:
    index = 0
    with open_regular(path) as file:
        # One byte more than a record may have: the rest of such a line is never read.
        for line, raw in enumerate(iter(lambda: file.readline(MOST_RECORD_BYTES + 1), b""), start=1):
            if len(raw) > MOST_RECORD_BYTES:
                raise _too_large(f"{path}:{line}", "line", "bytes")
            text = _decode(path, raw.removeprefix(_BOM) if line == 1 else raw, line)
            if text.strip():
                yield RawRecord(_parse_line(path, line, text), record_place(path, index, line), line)
                index += 1


def _parse_line(path: Path, line: int, text: str) -> Any:
    try:
        return _DECODER.decode(text.rstrip())
    except json.JSONDecodeError as error:
        _syntax_error(path, line, error.colno, error.msg)
    except (RecursionError, ValueError) as error:  # nested too deep; a number of too many digits; a key twice
        _syntax_error(path, line, 1, str(error))


def _read_list(path: Path) -> Iterator[RawRecord]:
    text = _list_text(path)
    try:
        for index, (value, characters) in enumerate(_elements(text)):
            where = record_place(path, index, 0)
            if characters > MOST_RECORD_BYTES:
                raise _too_large(where, "record", "characters")
            yield RawRecord(value, where, 0)
    except json.JSONDecodeError as error:
        _syntax_error(path, error.lineno, error.colno, error.msg)


def _list_text(path: Path) -> str:
    with open_regular(path) as file:
        raw = file.read(MOST_LIST_BYTES + 1)
    if len(raw) > MOST_LIST_BYTES:
        raise UserError.at(
            path,
            found="a JSON list of more than 4 GiB",
            expected="a smaller one, or JSONL",
            because="a list is read as a whole, by every rank",
            fix="write one record on each line (jq -c '.[]'), or split the file",
        )
    try:
        return raw.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error.object.count(b"\n", 0, error.start) + 1, error) from error


def _elements(text: str) -> Iterator[tuple[Any, int]]:
    """The values of a list and their characters, decoded one at a time: the Python objects of a whole list take several
    times its text. Raises `JSONDecodeError`.
    """
    at = _after_blank(text, text.index("[") + 1)
    closed = text[at : at + 1] == "]"
    while not closed:
        begin = _after_blank(text, at)
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except json.JSONDecodeError:
            raise
        except (RecursionError, ValueError) as error:  # nested too deep; a number of too many digits; a key twice
            raise json.JSONDecodeError(str(error), text, begin) from error
        yield value, end - begin
        at = _after_blank(text, end)
        closed = text[at : at + 1] == "]"
        if not closed and text[at : at + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        at += not closed
    at = _after_blank(text, at + 1)
    if at < len(text):
        raise json.JSONDecodeError("Extra data after the list", text, at)


def _after_blank(text: str, at: int) -> int:
    return WHITESPACE.match(text, at).end()


def _too_large(where: str, what: str, unit: str) -> UserError:
    return UserError.at(
        where,
        found=f"a {what} of more than {MOST_RECORD_BYTES} {unit}",
        expected=_FORMATS,
        because="no model takes more text, and reading it could exhaust memory",
        fix="split or remove the record; if the file is damaged, copy it again",
    )


def _decode(path: Path, raw: bytes, line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, line, error) from error


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> UserError:
    return UserError.at(
        f"{path}:{line}",
        found=f"byte 0x{error.object[error.start]:02x}, which is not UTF-8",
        expected="UTF-8 text",
        fix="convert the file, for example with iconv -t utf-8",
    )


def _syntax_error(path: Path, line: int, column: int, message: str) -> NoReturn:
    raise UserError.at(
        f"{path}:{line}",
        found=f"broken JSON at column {column} ({message})",
        expected=_FORMATS,
        fix="fix or remove this line; if the file is truncated, copy it again",
    ) from None
