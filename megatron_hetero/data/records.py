"""Annotation files: a JSON list or JSONL, as compact, read-only sequences of records."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedReader
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from megatron_hetero.base.errors import UserError, quoted, reason
from megatron_hetero.base.files import open_regular, read_text
from megatron_hetero.data.validation import IMAGES, ItemField, ItemRef, validate_record
from megatron_hetero.models.items.types import Item

ChatRole = Literal["system", "user", "assistant"]

MOST_RECORD_BYTES = 8 * 2**20
"""Limit of a JSONL line in bytes, and of an element of a list in characters."""
MOST_LIST_BYTES = 2**32
"""Limit of a file with a JSON list, whose text every rank reads at once."""

_BOM = b"\xef\xbb\xbf"
_FORMATS = "a JSON list of records, or JSONL with one record on each line"
_DECODER = json.JSONDecoder()


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
        with open_regular(path) as file:
            first = _first_character(file)
            file.seek(0)
            yield from _read_list(path) if first == b"[" else _read_lines(path, file)
    except FileNotFoundError as error:
        fix = "correct its path (`annotations` in data.registry)"
        raise UserError.at(path, problem="no such file", fix=fix) from error
    except OSError as error:
        too_large = error.errno == errno.EFBIG
        fix = "write one record on each line (jq -c '.[]')" if too_large else "check path and permissions"
        raise UserError.at(path, problem=f"cannot be read ({reason(error)})", fix=fix) from error


def _first_character(file: BufferedReader) -> bytes:
    """The first character that is not blank; empty for a blank file."""
    while block := file.read(4096):
        if stripped := block.removeprefix(_BOM).lstrip():
            return stripped[:1]
    return b""


def _read_lines(path: Path, file: BufferedReader) -> Iterator[RawRecord]:
    index = 0
    # One byte more than a record may have: the rest of such a line is never read.
    for line, raw in enumerate(iter(lambda: file.readline(MOST_RECORD_BYTES + 1), b""), start=1):
        where = f"{path}:{line}"
        if len(raw) > MOST_RECORD_BYTES:
            raise _too_large(where, "line", "bytes")
        try:
            text = (raw.removeprefix(_BOM) if line == 1 else raw).decode("utf-8").rstrip()
            if text:
                yield RawRecord(_DECODER.decode(text), where, line)
                index += 1
        except UnicodeDecodeError as error:
            raise _not_utf8(where, error) from error
        except (ValueError, RecursionError) as error:
            raise _broken(where, error) from None


def _read_list(path: Path) -> Iterator[RawRecord]:
    try:
        text = read_text(path, MOST_LIST_BYTES).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _not_utf8(f"{path}:{line}", error) from error
    at = _after_blank(text, text.index("[") + 1)
    index, closed = 0, text[at : at + 1] == "]"
    # One element at a time: the Python objects of a whole list take several times its text.
    while not closed:
        where = record_place(path, index, 0)
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise _broken_at(path, text, at, error) from None
        if end - at > MOST_RECORD_BYTES:
            raise _too_large(where, "record", "characters")
        yield RawRecord(value, where, 0)
        at = _after_blank(text, end)
        closed = text[at : at + 1] == "]"
        if not closed and text[at : at + 1] != ",":
            raise _broken_at(path, text, at, json.JSONDecodeError("Expecting ',' or ']'", text, at))
        at = at if closed else _after_blank(text, at + 1)
        index += 1
    at = _after_blank(text, at + 1)
    if at < len(text):
        raise _broken_at(path, text, at, json.JSONDecodeError("Extra data after the list", text, at))


def _after_blank(text: str, at: int) -> int:
    return WHITESPACE.match(text, at).end()


def _broken_at(path: Path, text: str, at: int, error: Exception) -> UserError:
    """The error of a list; `at`: the character at which decoding began."""
    if not isinstance(error, json.JSONDecodeError):
        error = json.JSONDecodeError(str(error), text, at)
    return _broken(f"{path}:{error.lineno}", error)


def _broken(where: str, error: Exception) -> UserError:
    """`error`: of syntax, of nesting too deep, or of a number of too many digits."""
    column, what = (error.colno, error.msg) if isinstance(error, json.JSONDecodeError) else (1, str(error))
    return UserError.at(
        where,
        found=f"broken JSON at column {column} ({what})",
        expected=_FORMATS,
        fix="fix or remove this line; if the file is truncated, copy it again",
    )


def _too_large(where: str, what: str, unit: str) -> UserError:
    return UserError.at(
        where,
        found=f"a {what} of more than {MOST_RECORD_BYTES} {unit}",
        expected=_FORMATS,
        because="no model takes more text",
        fix="split or remove the record; if the file is damaged, copy it again",
    )


def _not_utf8(where: str, error: UnicodeDecodeError) -> UserError:
    return UserError.at(
        where,
        found=f"byte 0x{error.object[error.start]:02x}, which is not UTF-8",
        expected="UTF-8 text",
        fix="unpack a compressed file, or convert the text, for example with iconv -t utf-8",
    )


@dataclass(frozen=True)
class Turn:
    """One speaker's turn; a user's may contain placeholders such as ``<image>``."""

    role: ChatRole
    text: str


@dataclass(frozen=True)
class Record:
    """One conversation with its items.

    Attributes:
        dataset: name of the data set in the registry.
        index: position in its annotation file, from 0.
        where: ``train.jsonl:12`` or ``train.json record 12``, for messages.
        turns: an optional system turn, then user and assistant in turn.
        items: in the order of their placeholders, with paths relative to ``folder``.
        folder: None only without items.
    """

    dataset: str
    index: int
    where: str
    turns: tuple[Turn, ...]
    items: tuple[ItemRef, ...] = ()
    folder: Path | None = field(default=None, repr=False)

    def item(self, k: int) -> Item:
        """Item ``k`` with the absolute path of its file, links resolved. The file need not exist.

        Raises:
            UserError: the path leads out of the folder, for example through a symbolic link.
        """
        assert self.folder is not None, "records with items have a folder"
        ref, folder = self.items[k], os.path.realpath(self.folder)
        path = os.path.realpath(os.path.join(folder, ref.file))
        if os.path.commonpath([folder, path]) != folder:
            raise UserError.at(
                f"{self.where}: field '{ref.field.name}'",
                found=f"{quoted(ref.file)}, which leads to {path}",
                expected=f"a file inside {folder}",
                because="annotations must not reach files outside the image folder, not even through links",
                fix="copy the pictures into the folder, or set `images` in data.registry to a folder that has them",
            )
        return Item(Path(path), self.where)


class Annotations(Sequence[Record]):
    """The validated records of one annotation file.

    All records are in one bytes buffer with offsets: hundreds of thousands of Python objects would take several times
    the memory.
    """

    def __init__(self, name: str, path: Path, images: Path | None = None, fields: Sequence[ItemField] = IMAGES) -> None:
        """Reads and validates a JSON list or a JSONL file.

        Args:
            name: name of the data set, used in messages.
            path: the annotation file; its format follows from its first character.
            images: folder the paths of items are relative to; None for text-only data.
            fields: fields that items may be in, see `item_fields`.

        Raises:
            UserError: a missing, broken or empty file, a missing image folder, or a malformed record.
        """
        if images is not None and not os.path.isdir(images):  # noqa: PTH112
            raise UserError.at(
                f"data.registry.{name}.images",
                problem=f"{images} is not a readable folder",
                fix="correct the path, or remove `images` for text-only data",
            )
        self.name = name
        self.path = Path(path)
        self.images = images
        self._fields = {field.key: field for field in fields}
        buffer, ends, lines = bytearray(), [0], []
        for raw in read_records(self.path):
            turns, refs = validate_record(raw.value, raw.where, has_image_folder=images is not None, fields=fields)
            shown = [(ref.field.key, ref.file) for ref in refs]
            text = json.dumps([turns, shown], ensure_ascii=False, separators=(",", ":"))
            try:
                buffer += text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise UserError.at(
                    raw.where,
                    problem=f"lone surrogate (\\u{ord(text[error.start]):04x})",
                    because="UTF-8 cannot encode it",
                    fix="correct the escape sequence",
                ) from error
            ends.append(len(buffer))
            lines.append(raw.line)
        if not lines:
            raise UserError.at(
                path,
                problem=f"no records for data set {name!r}",
                fix="correct `annotations` in data.registry, or remove the data set from data.datasets",
            )
        self._buffer = bytes(buffer)
        self._ends = np.array(ends, dtype=np.int64)
        """int64 [n + 1], offsets into the buffer."""
        self._lines = np.array(lines, dtype=np.int64)
        """int64 [n], lines of the file; 0 in a JSON list."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the records, independent of the file's location and formatting."""
        digest = hashlib.sha256(self._ends.tobytes())
        digest.update(self._buffer)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: int) -> Record:  # type: ignore[override]  # no slices: they would build objects
        if not -len(self) <= i < len(self):
            raise IndexError(f"record {i} of data set {self.name!r}, which has {len(self)}")
        i = int(i) % len(self)
        turns, shown = json.loads(self._buffer[self._ends[i] : self._ends[i + 1]])
        return Record(
            dataset=self.name,
            index=i,
            where=record_place(self.path, i, int(self._lines[i])),
            turns=tuple(Turn(cast(ChatRole, role), text) for role, text in turns),
            items=tuple(ItemRef(self._fields[key], file) for key, file in shown),
            folder=self.images,
        )
