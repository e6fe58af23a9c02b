"""Raw records out of a JSON list or a JSONL file, with the line of every syntax error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn

from megatron_hetero.errors import UserError, quoted
from megatron_hetero.user_files import open_regular

_FORMATS = "a JSON list of records, or JSONL with one record on each line"
_BOM = b"\xef\xbb\xbf"


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
        raise UserError.at(
            path, found="no such file", expected="an annotation file", fix="correct `annotations` in data.registry"
        ) from error
    except OSError as error:
        raise UserError.at(
            path, found=f"an unreadable file ({error.strerror})", expected=_FORMATS, fix="check path and permissions"
        ) from error


def _first_character(path: Path) -> bytes:
    """The first character that is not blank; empty for a blank file."""
    with open_regular(path) as file:
        while block := file.read(4096):
            if stripped := block.removeprefix(_BOM).lstrip():
                return stripped[:1]
    return b""


def _read_lines(path: Path) -> Iterator[RawRecord]:
    index = 0
    with open_regular(path) as file:
        for line, raw in enumerate(file, start=1):
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
    """Decodes one element at a time: the Python objects of a whole list take several times its text."""
    with open_regular(path) as file:
        text = _decode(path, file.read().removeprefix(_BOM), line=1)
    try:
        for index, value in enumerate(_elements(text)):
            yield RawRecord(value, record_place(path, index, 0), 0)
    except json.JSONDecodeError as error:
        _syntax_error(path, error.lineno, error.colno, error.msg)


def _elements(text: str) -> Iterator[Any]:
    position = _skip_blanks(text, _skip_blanks(text, 0) + 1)
    closed = text[position : position + 1] == "]"
    while not closed:
        value, position = _decode_element(text, position)
        yield value
        position = _skip_blanks(text, position)
        separator = text[position : position + 1]
        if separator not in (",", "]") or not separator:
            raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
        closed = separator == "]"
        position = position if closed else _skip_blanks(text, position + 1)
    if (rest := _skip_blanks(text, position + 1)) != len(text):
        raise json.JSONDecodeError("Extra data after the list", text, rest)


def _decode_element(text: str, position: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise json.JSONDecodeError(str(error), text, position) from error


def _skip_blanks(text: str, position: int) -> int:
    return WHITESPACE.match(text, position).end()


def _decode(path: Path, raw: bytes, line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        raise UserError.at(
            f"{path}:{line}",
            found=f"byte 0x{raw[error.start]:02x}, which is not UTF-8",
            expected="UTF-8 text",
            fix="convert the file, for example with iconv -t utf-8",
        ) from error


def _syntax_error(path: Path, line: int, column: int, message: str) -> NoReturn:
    raise UserError.at(
        f"{path}:{line}",
        found=f"broken JSON at column {column} ({message})",
        expected=_FORMATS,
        fix="mend or remove this line; if the file was cut off, copy it again",
    ) from None
