"""JSON lists and JSONL files, distinguished by the first character of a file and not by its suffix, since many
``.json`` files are JSONL.

Texts are decoded by msgspec, and by Python's slower decoder where msgspec refuses them.
"""

from __future__ import annotations

import json
import mmap
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec
import numpy as np

from megatron_hetero.base.contents import StoredFile, is_url
from megatron_hetero.base.errors import UserError
from megatron_hetero.data.sources.formats import Arrays, Columns, Place, RawRecord, changed

BOM = b"\xef\xbb\xbf"
"""Byte order mark, which some programs write before a text."""
MAX_TEXT_BYTES = 8 * 2**20
"""Maximum bytes of the text of a record."""

_FORMATS = "a JSON list of records, or JSONL with one record on each line"
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_OPENING, _BETWEEN = re.compile(rb"\s*\[\s*"), re.compile(rb"[\s,]*")
_SPACE = re.compile(r"[\s,]*")
_CHUNK = 1 << 24


def decode_json(raw: bytes) -> Any:
    """Decode a JSON text. Python's decoder, the fallback, also accepts `NaN`, and reports the place of an error.

    Raises:
        UnicodeDecodeError: the text is not UTF-8.
        UnicodeEncodeError: the value has a lone surrogate.
        ValueError: the text is malformed; a `json.JSONDecodeError` if the error has a place.
        RecursionError: the text is nested too deep.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = json.loads(raw.decode("utf-8"))
    json.dumps(value, ensure_ascii=False).encode()
    return value


def not_utf8(error: UnicodeDecodeError, where: str, fix: str) -> UserError:
    """Return the error for a text that is not UTF-8."""
    found = f"byte 0x{error.object[error.start]:02x}, which is not UTF-8"
    return UserError.at(where, found=found, expected="UTF-8 text", fix=fix)


def lone_surrogate(error: UnicodeEncodeError, where: str) -> UserError:
    """Return the error for half of a surrogate pair, which JSON can write as an escape."""
    problem, fix = f"lone surrogate (\\u{ord(error.object[error.start]):04x})", "correct the escape sequence"
    return UserError.at(where, problem=problem, because="UTF-8 cannot encode it", fix=fix)


@dataclass(frozen=True)
class JsonFiles:
    """`Format` for JSON and JSONL files. Index columns: `starts` and `sizes` of records in bytes, and for JSONL
    `lines`, the line numbers of records.
    """

    def scan(self, file: StoredFile, columns: Columns) -> Iterator[Place]:
        """Yield the places of all records, see `Format.scan`."""
        size = max(1, int(file.version()[1]))
        with file.open() as opened:
            if _first_character(opened) == b"[":
                yield from _scan_list(file, opened, columns, size)
            else:
                opened.seek(0)
                yield from _scan_lines(opened, columns, size)

    def read(self, file: StoredFile, columns: Arrays, numbers: range) -> Iterator[RawRecord]:
        """Yield consecutive records, see `Format.read`."""
        chosen = slice(numbers.start, numbers.stop)
        starts, sizes = columns["starts"][chosen].tolist(), columns["sizes"][chosen].tolist()
        lines = columns.get("lines", columns["starts"][:0])[chosen].tolist() or [0] * len(starts)
        for number, start, size, line in zip(numbers, starts, sizes, lines, strict=True):
            where = f"{file.name}:{line}" if line else f"{file.name} record {number + 1}"
            if size > MAX_TEXT_BYTES:
                yield RawRecord(_too_long(where, "a line" if line else "a record"), where)
                continue
            raw = file.read(start, size)
            try:
                value = decode_json(raw)
            except (ValueError, RecursionError) as error:
                if len(raw) < size:
                    raise changed(where) from None
                value = _fault(error, file, start, line, where)
            yield RawRecord(value, where)

    def read_ahead(self, file: StoredFile, columns: Arrays, numbers: np.ndarray) -> None:
        """Do nothing: records are small, and items are in other files."""


def _first_character(file: BinaryIO) -> bytes:
    """Return the first character that is not blank; empty for a blank file."""
    while block := file.read(4096):
        if stripped := block.removeprefix(BOM).lstrip():
            return stripped[:1]
    return b""


def _scan_lines(opened: BinaryIO, columns: Columns, whole: int) -> Iterator[Place]:
    columns["starts"], columns["sizes"], columns["lines"] = starts, sizes, lines = array("q"), array("q"), array("q")
    end = 0
    # Read at most one byte more than a record may have, and skip the rest of a longer line.
    for line, raw in enumerate(iter(lambda: opened.readline(MAX_TEXT_BYTES + 1), b""), start=1):
        start, end = end, end + len(raw)
        rest = raw if len(raw) > MAX_TEXT_BYTES else b"\n"
        while rest and not rest.endswith(b"\n"):
            end += len(rest := opened.readline(MAX_TEXT_BYTES))
        stripped = raw.removeprefix(BOM)
        size = len(stripped.rstrip())
        if not size:
            continue
        starts.append(start + len(raw) - len(stripped))
        sizes.append(size)
        lines.append(line)
        yield Place(end - start, end / whole)


def _scan_list(file: StoredFile, opened: BinaryIO, columns: Columns, whole: int) -> Iterator[Place]:
    columns["starts"], columns["sizes"] = starts, sizes = array("q"), array("q")
    opened.seek(0)
    # Map the file, so that elements refer to its pages without being copied.
    data: Any = opened.read() if is_url(file.name) else mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    at = len(BOM) if data[: len(BOM)] == BOM else 0
    view = memoryview(data)
    try:
        elements = map(len, map(memoryview, _LIST.decode(view[at:])))
    except (msgspec.DecodeError, RecursionError):
        elements = _decoded_sizes(file, bytes(view[at:]))
    for number, size in enumerate(elements):
        separator = (_BETWEEN if number else _OPENING).match(view, at)
        at = separator.end() if separator else at
        starts.append(at)
        sizes.append(size)
        at += size
        yield Place(size, at / whole)


def _decoded_sizes(file: StoredFile, raw: bytes) -> list[int]:
    """Return the bytes of each element of a list, using Python's decoder. Raises `UserError` if the text is no list."""
    try:
        decode_json(raw)
    except UnicodeEncodeError:
        pass  # Only the record with the lone surrogate is bad.
    except (ValueError, RecursionError) as error:
        raise _fault(error, file, 0, 1, str(file)) from None
    text, sizes, decoder = raw.decode(), list[int](), json.JSONDecoder()
    at = text.index("[") + 1
    while (start := _SPACE.match(text, at)) and text[start.end()] != "]":
        _, at = decoder.raw_decode(text, start.end())
        sizes.append(len(text[start.end() : at].encode()))
    return sizes


def _line_at(file: StoredFile, at: int) -> int:
    """Return the line number of a byte in a file."""
    return 1 + sum(file.read(k, min(_CHUNK, at - k)).count(b"\n") for k in range(0, at, _CHUNK))


def _too_long(where: str, what: str) -> UserError:
    found, because = f"{what} of more than {MAX_TEXT_BYTES} bytes", "no model takes more text"
    fix = "split or remove the record; if the file is damaged, copy it again"
    return UserError.at(where, found=found, expected=_FORMATS, because=because, fix=fix)


def _broken(place: str, column: int, problem: object) -> UserError:
    found = f"broken JSON at column {column} ({problem})"
    fix = "fix or remove this line; if the file is truncated, copy it again"
    return UserError.at(place, found=found, expected=_FORMATS, fix=fix)


def _fault(error: Exception, file: StoredFile, start: int, line: int, where: str) -> UserError:
    """Return the error for a record's text, which begins at byte `start` on line `line` (0: unknown, in a list)."""
    if isinstance(error, UnicodeEncodeError):
        return lone_surrogate(error, where)
    line = line or _line_at(file, start)
    if isinstance(error, UnicodeDecodeError):
        line += error.object.count(b"\n", 0, error.start)
        fix = "unpack a compressed file, or convert the text, for example with iconv -t utf-8"
        return not_utf8(error, f"{file}:{line}", fix)
    if isinstance(error, json.JSONDecodeError):
        return _broken(f"{file}:{line - 1 + error.lineno}", error.colno, error.msg)
    return _broken(f"{file}:{line}", 1, error)  # Errors about nesting or the number of digits have no position.
