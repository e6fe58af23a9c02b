"""Reads raw records from a JSON list or a JSONL file, and locates syntax errors by line."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from pathlib import Path
from typing import IO, Any, NoReturn

from megatron_hetero.errors import UserError, quoted, reason
from megatron_hetero.files.opening import open_regular

_FORMATS = "a JSON list of records, or JSONL with one record on each line"
_BOM, _GZIP = b"\xef\xbb\xbf", b"\x1f\x8b"
MOST_RECORD_BYTES = 8 * 2**20
"""Limit of a JSONL line, and of a list element in characters: twice what `MOST_CHARACTERS` of text take."""
BLOCK = 2**20
"""Bytes of a list read at a time."""


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
    """Decodes one element at a time: the Python objects of a whole list take several times its text."""
    with open_regular(path) as file:
        for index, value in enumerate(_elements(_Ahead(path, file))):
            yield RawRecord(value, record_place(path, index, 0), 0)


class _Ahead:
    """What lies ahead in a file with a list, of which a block or two are in memory: `text` from `position` on."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.text, self.position = "", 0
        self._decoder = getincrementaldecoder("utf-8")()
        self._lines = self._columns = 0  # Line ends before `text`, and characters between the last of them and it.
        self._ended = False

    def character(self) -> str:
        """The next character that is not blank, which is not taken yet; empty at the end of the file."""
        while True:
            self.position = WHITESPACE.match(self.text, self.position).end()
            if self.position < len(self.text) or not self._read():
                return self.text[self.position : self.position + 1]

    def value(self, index: int) -> Any:
        """The next value, which is taken. `index`: its number in the list. Raises `UserError`."""
        self.character()
        while True:
            begin = self.position
            try:
                value, end = self._decoded()
            except json.JSONDecodeError as error:
                enough = len(self.text) - begin > MOST_RECORD_BYTES
                if enough and _is_cut_off(error):
                    raise _too_large(record_place(self.path, index, 0), "record", "characters") from None
                # What is broken may only be cut off where the text in memory ends.
                if enough or not self._read():
                    self.refuse(error.msg, self.position + error.pos - begin)
                continue
            if end - begin > MOST_RECORD_BYTES:
                raise _too_large(record_place(self.path, index, 0), "record", "characters")
            # A number at the very end of it may continue.
            if end < len(self.text) or not self._read():
                self.position += end - begin
                return value

    def refuse(self, message: str, position: int | None = None) -> NoReturn:
        """Raises the `UserError` of broken JSON at a position of `text`, by default where it is."""
        position = self.position if position is None else position
        line_end = self.text.rfind("\n", 0, position)
        column = position - line_end + (self._columns if line_end < 0 else 0)
        _syntax_error(self.path, self._lines + self.text.count("\n", 0, position) + 1, column, message)

    def _decoded(self) -> tuple[Any, int]:
        try:
            return _DECODER.raw_decode(self.text, self.position)
        except json.JSONDecodeError:
            raise
        except (RecursionError, ValueError) as error:
            raise json.JSONDecodeError(str(error), self.text, self.position) from error

    def _read(self) -> bool:
        """Read one more block, and forget what was taken. Returns whether there was one."""
        if self._ended:
            return False
        taken, rest = self.text[: self.position], self.text[self.position :]
        line_end = taken.rfind("\n")
        self._columns = len(taken) - line_end - 1 + (self._columns if line_end < 0 else 0)
        self._lines += taken.count("\n")
        self.text, self.position = rest, 0
        block = self.file.read(BLOCK)
        self._ended = not block
        try:
            more = self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            line = self._lines + rest.count("\n") + error.object.count(b"\n", 0, error.start) + 1
            raise _not_utf8(self.path, line, error) from error
        first = self._lines == self._columns == 0 and not rest
        self.text = rest + (more.removeprefix("\ufeff") if first else more)
        return not self._ended


def _is_cut_off(error: json.JSONDecodeError) -> bool:
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc)


def _elements(ahead: _Ahead) -> Iterator[Any]:
    ahead.character()
    ahead.position += 1
    closed, index = ahead.character() == "]", 0
    while not closed:
        yield ahead.value(index)
        separator, index = ahead.character(), index + 1
        if separator not in (",", "]") or not separator:
            ahead.refuse("Expecting ',' or ']'")
        closed = separator == "]"
        ahead.position += not closed
    ahead.position += 1
    if ahead.character():
        ahead.refuse("Extra data after the list")


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
