"""Annotation files as compact, read-only sequences of records."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

import numpy as np

from megatron_hetero.data.reading import read_records, record_place
from megatron_hetero.data.validation import IMAGES, ItemField, ItemRef, validate_record
from megatron_hetero.errors import UserError, quoted
from megatron_hetero.models.items.types import Item

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
