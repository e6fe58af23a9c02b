"""Reads raw records from a JSON list or a JSONL file, and locates syntax errors by line.

Annotation files as compact, read-only sequences of records.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import numpy as np

from megatron_hetero.base.errors import UserError, quoted, reason
from megatron_hetero.base.files import open_regular
from megatron_hetero.data.validation import IMAGES, ItemField, ItemRef, validate_record
from megatron_hetero.models.items.types import Item

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


ChatRole = Literal["system", "user", "assistant"]
MOST_CHARACTERS = 4 * 2**20
"""Limit of a record's text: a tokenizer takes some 300 bytes of memory per character."""


@dataclass(frozen=True)
class Turn:
    """One speaker's turn; that of a user may hold literal placeholders such as ``<image>``."""

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
        items: what it shows, in the order of their placeholders, with paths relative to ``folder``.
        folder: None only without items.
    """

    dataset: str
    index: int
    where: str
    turns: tuple[Turn, ...]
    items: tuple[ItemRef, ...] = ()
    folder: Path | None = field(default=None, repr=False)

    @property
    def encoders(self) -> list[str]:
        """The encoder of each item."""
        return [ref.field.encoder for ref in self.items]

    @property
    def characters(self) -> int:
        """Characters in all turns."""
        return sum(len(turn.text) for turn in self.turns)

    def require_readable(self) -> None:
        """Check that the text is within `MOST_CHARACTERS`. Raises `UserError`."""
        if self.characters > MOST_CHARACTERS:
            raise UserError.at(
                f"{self.where}: field 'conversations'",
                found=f"a text of {self.characters} characters",
                expected=f"at most {MOST_CHARACTERS}",
                because="tokenizing more could exhaust memory",
                fix="shorten or remove the record",
            )

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

    All records live in one bytes buffer with offsets: hundreds of thousands of Python objects would take several times
    the memory, and touching their reference counts would copy every page in every forked worker.
    """

    def __init__(
        self,
        name: str,
        annotations: Path,
        images: Path | None,
        fields: Sequence[ItemField],
        buffer: bytes,
        ends: np.ndarray,
        lines: np.ndarray,
    ) -> None:
        """Use `load`. ``ends`` [n + 1] are offsets into ``buffer``; ``lines`` [n] file lines, 0 in a JSON list."""
        self.name = name
        self.path = annotations
        self.images = images
        self._fields = {field.key: field for field in fields}
        self._buffer = buffer
        self._ends = ends
        self._lines = lines

    @classmethod
    def load(
        cls, name: str, annotations: Path, images: Path | None, fields: Sequence[ItemField] = IMAGES
    ) -> Annotations:
        """Reads and validates a JSON list or a JSONL file.

        Args:
            name: name of the data set, used in messages.
            annotations: the file; its format follows from its first character.
            images: folder the image paths are relative to; None for text-only data.
            fields: those that items may be in, see `item_fields`.

        Raises:
            UserError: a missing, broken or empty file, a missing image folder, or a malformed record.
        """
        if images is not None and not os.path.isdir(images):  # noqa: PTH112
            raise UserError.at(
                f"data.registry.{name}.images",
                problem=f"{images} is not a readable folder",
                fix="correct the path, or remove `images` for text-only data",
            )
        try:
            found = cls._indexed(name, Path(annotations), images, fields)
        except MemoryError:
            raise UserError.at(
                annotations,
                problem="the records do not fit in the memory available to this process",
                fix="raise the memory limit (ulimit -v), or split the file into data sets and train on fewer of them",
            ) from None
        if not len(found):
            raise UserError.at(
                annotations,
                problem=f"no records for data set {name!r}",
                fix="correct `annotations` in data.registry, or remove the data set from data.datasets",
            )
        return found

    @classmethod
    def _indexed(cls, name: str, annotations: Path, images: Path | None, fields: Sequence[ItemField]) -> Annotations:
        buffer, ends, lines = bytearray(), [0], []
        for raw in read_records(annotations):
            turns, refs = validate_record(raw.value, raw.where, has_image_folder=images is not None, fields=fields)
            shown = [(ref.field.key, ref.file) for ref in refs]
            buffer += json.dumps([turns, shown], ensure_ascii=False, separators=(",", ":")).encode("utf-8")
            ends.append(len(buffer))
            lines.append(raw.line)
        offsets, line_numbers = np.array(ends, dtype=np.int64), np.array(lines, dtype=np.int64)
        return cls(name, annotations, images, fields, bytes(buffer), offsets, line_numbers)

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

    def __repr__(self) -> str:
        return f"Annotations({self.name!r}, {len(self)} records, {str(self.path)!r})"
