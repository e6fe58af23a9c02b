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
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from megatron_hetero.base.errors import UserError, quoted, reason
from megatron_hetero.base.files import open_regular, read_bytes
from megatron_hetero.data.validation import IMAGES, ItemField, ItemRef, validate_record
from megatron_hetero.models.items.types import Item

ChatRole = Literal["system", "user", "assistant"]

MOST_RECORD_BYTES = 8 * 2**20
"""Limit of a JSONL line."""
MOST_LIST_BYTES = 2**32
"""Limit of a file with a JSON list, whose text every rank reads at once."""

_BOM = b"\xef\xbb\xbf"
_FORMATS = "a JSON list of records, or JSONL with one record on each line"


def record_place(path: Path, index: int, line: int) -> str:
    """``train.jsonl:12`` where the line is known, else ``train.json record 12``; both count from 1."""
    return f"{path}:{line}" if line else f"{path} record {index + 1}"


def read_records(path: Path) -> Iterator[tuple[Any, int]]:
    """Yields the records of an annotation file in order, as decoded JSON, with their lines; these are 0 in a JSON list.

    The format follows from the first character, not from the suffix: many ``.json`` files hold JSONL.

    Raises:
        UserError: the file is missing, unreadable, not UTF-8 or not valid JSON.
    """
    try:
        with open_regular(path) as file:
            if _first_character(file) == b"[":
                yield from ((value, 0) for value in _decoded(path, read_bytes(path, MOST_LIST_BYTES), 1))
            else:
                file.seek(0)
                yield from _read_lines(path, file)
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


def _read_lines(path: Path, file: BufferedReader) -> Iterator[tuple[Any, int]]:
    # One byte more than a record may have: the rest of such a line is never read.
    for line, raw in enumerate(iter(lambda: file.readline(MOST_RECORD_BYTES + 1), b""), start=1):
        if len(raw) > MOST_RECORD_BYTES:
            raise UserError.at(
                f"{path}:{line}",
                found=f"a line of more than {MOST_RECORD_BYTES} bytes",
                expected=_FORMATS,
                because="no model takes more text",
                fix="split or remove the record; if the file is damaged, copy it again",
            )
        if text := raw.removeprefix(_BOM).rstrip():
            yield _decoded(path, text, line), line


def _decoded(path: Path, raw: bytes, line: int) -> Any:
    """The value of JSON text that begins on `line` of a file. Raises `UserError`."""
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        raise UserError.at(
            f"{path}:{line}",
            found=f"byte 0x{error.object[error.start]:02x}, which is not UTF-8",
            expected="UTF-8 text",
            fix="unpack a compressed file, or convert the text, for example with iconv -t utf-8",
        ) from error
    except (ValueError, RecursionError) as error:  # Nesting too deep, or a number of too many digits, has no place.
        place = (error.lineno, error.colno, error.msg) if isinstance(error, json.JSONDecodeError) else (1, 1, error)
        raise UserError.at(
            f"{path}:{line - 1 + place[0]}",
            found=f"broken JSON at column {place[1]} ({place[2]})",
            expected=_FORMATS,
            fix="fix or remove this line; if the file is truncated, copy it again",
        ) from None


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
        ref = self.items[k]
        frames = tuple(self._resolved(ref, file) for file in ref.frames)
        return Item(frames[0] if frames else self._resolved(ref, ref.file), self.where, frames, ref.given)

    def _resolved(self, ref: ItemRef, file: str) -> Path:
        assert self.folder is not None, "records with items have a folder"
        folder = os.path.realpath(self.folder)
        path = os.path.realpath(os.path.join(folder, file))
        if os.path.commonpath([folder, path]) != folder:
            raise UserError.at(
                f"{self.where}: field '{ref.field.name}'",
                found=f"{quoted(file)}, which leads to {path}",
                expected=f"a file inside {folder}",
                because="annotations must not reach files outside the image folder, not even through links",
                fix="copy the files into the folder, or set `images` in data.registry to a folder that has them",
            )
        return Path(path)


class Annotations(Sequence[Record]):
    """The validated records of one annotation file.

    All records are in one bytes buffer with offsets: hundreds of thousands of Python objects would take several times
    the memory.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        images: Path | None = None,
        fields: Sequence[ItemField] = IMAGES,
        video_placeholder: str = "<video>",
    ) -> None:
        """Reads and validates a JSON list or a JSONL file.

        Args:
            name: name of the data set, used in messages.
            path: the annotation file; its format follows from its first character.
            images: folder the paths of items are relative to; None for text-only data.
            fields: fields that items may be in, see `item_fields`.
            video_placeholder: what stands for a video in records without pictures.

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
        for index, (value, line) in enumerate(read_records(self.path)):
            where = record_place(self.path, index, line)
            if video_placeholder != "<video>":
                value = _with_video_marks(value, video_placeholder)
            turns, refs = validate_record(value, where, has_image_folder=images is not None, fields=fields)
            shown = [(ref.field.key, *ref[1 : None if ref.frames or ref.given else 2]) for ref in refs]
            text = json.dumps([turns, shown], ensure_ascii=False, separators=(",", ":"))
            try:
                buffer += text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise UserError.at(
                    where,
                    problem=f"lone surrogate (\\u{ord(text[error.start]):04x})",
                    because="UTF-8 cannot encode it",
                    fix="correct the escape sequence",
                ) from error
            ends.append(len(buffer))
            lines.append(line)
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
            items=tuple(ItemRef(self._fields[key], *_hashable(of_item)) for key, *of_item in shown),
            folder=self.images,
        )


def _hashable(value: Any) -> Any:
    """A JSON value with tuples in place of lists."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _with_video_marks(value: Any, placeholder: str) -> Any:
    """A record with videos alone, with `<video>` in place of `placeholder` in its turns."""
    turns = value.get("conversations") if isinstance(value, dict) else None
    if not isinstance(turns, list) or not value.get("video") or value.get("image"):
        return value
    marked = [
        {**turn, "value": turn["value"].replace(placeholder, "<video>")}
        if isinstance(turn, dict) and isinstance(turn.get("value"), str)
        else turn
        for turn in turns
    ]
    return {**value, "conversations": marked}
