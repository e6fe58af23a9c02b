"""Data sets as sequences of records, with files that are indexed once and read in any order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from megatron_hetero.base.contents import Content as FileContent
from megatron_hetero.base.contents import StoredFile, is_url
from megatron_hetero.base.errors import UserError, blaming, printable, quoted, reason
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.item_fields import ItemField, ItemRef, label_of
from megatron_hetero.data.keys import MAX_NAMES
from megatron_hetero.data.sources.energon import open_energon
from megatron_hetero.data.sources.formats import Opened
from megatron_hetero.data.sources.index import Blocks, Indexer
from megatron_hetero.data.sources.json_files import JsonFiles
from megatron_hetero.data.sources.mapping import FieldMap
from megatron_hetero.data.sources.parquet import ParquetFiles
from megatron_hetero.data.sources.patterns import files_of
from megatron_hetero.data.sources.tar_records import TEXTS
from megatron_hetero.data.sources.tars import TarFiles
from megatron_hetero.data.turns import Turn
from megatron_hetero.data.validation import IMAGES, Parsed, split_at_placeholders, validate_record
from megatron_hetero.models.items.types import Header, Item, ItemReader

_SUFFIXES = {".parquet": "parquet", ".tar": "webdataset"}


@dataclass(frozen=True)
class Record:
    """One conversation with its items.

    Attributes:
        dataset: name of the data set in the registry.
        index: position of the record in its data set, from 0.
        where: name of the record in messages, such as ``train.jsonl:12`` or ``train.json record 12``.
        turns: an optional system turn, then user and assistant alternately.
        items: items in the order of their placeholders, with paths relative to ``folder``.
        folder: image folder; None if no item has a path.
        headers: the header of each item, see `Item`; None if unknown.
        tools: descriptions of functions that the assistant may call, JSON objects for the chat template.
    """

    dataset: str
    index: int
    where: str
    turns: tuple[Turn, ...]
    items: tuple[ItemRef, ...] = ()
    folder: Path | None = field(default=None, repr=False)
    headers: tuple[Header, ...] | None = field(default=None, repr=False)
    tools: tuple[dict[str, Any], ...] = ()

    def item(self, k: int) -> Item:
        """Return item ``k`` with its content. A file has its absolute path with links resolved, and need not exist.

        Raises:
            UserError: the path leads out of the folder, for example through a symbolic link.
        """
        ref = self.items[k]
        frames = tuple(self._file(ref, file) for file in ref.frames)
        content = frames[0] if frames else self._file(ref, ref.file)
        return Item(content, self.where, frames, ref.given, None if self.headers is None else self.headers[k])

    def _file(self, ref: ItemRef, file: str | FileContent) -> FileContent:
        if not isinstance(file, str):
            return file
        assert self.folder is not None, "records with paths have a folder"
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
        return StoredFile(path)


class Reading(NamedTuple):
    """Options for reading data sets.

    `fields`: item fields of records, see `item_fields`. `cache`: folder of stored indexes; None: indexes are not
    stored. `readers`: readers by field, to store the headers of items in the index; None: headers are read when needed.
    `strict`: whether a bad record, or with `readers` an item that cannot be read, is an error.
    """

    fields: Sequence[ItemField] = IMAGES
    cache: Path | None = None
    readers: Mapping[ItemField, ItemReader] | None = None
    strict: bool = True


PLAIN = Reading()
"""Options for records with pictures only, without a stored index."""


class Dataset(Sequence[Record]):
    """The records of one data set."""

    def __init__(self, name: str, entry: DatasetConfig, reading: Reading = PLAIN) -> None:
        """Open the index of data set `name` of the registry, or compute it.

        Raises:
            UserError: a missing, broken or empty file, a missing image folder, or a malformed record.
        """
        self.name, self.entry, self._reading, setting = name, entry, reading, f"data.registry.{name}"
        if entry.images is not None and not os.path.isdir(entry.images):  # noqa: PTH112
            raise UserError.at(
                f"{setting}.images",
                problem=f"{entry.images} is not a readable folder",
                fix="correct the path, or remove `images` for data without images in it",
            )
        self._format, files, stored_map = _open_files(entry, setting, [field.name for field in reading.fields])
        self._map = FieldMap.parse(entry.fields or stored_map, reading.fields, f"{setting}.fields")
        self._mapped = {".".join(path[:n]) for _, path in self._map.paths for n in range(1, len(path) + 1)}
        scan, strict = reading.readers is not None, reading.strict
        folder = entry.images and os.path.realpath(entry.images)
        key = (self._format, entry.video_placeholder, folder, scan and strict, self._map, *map(tuple, reading.fields))
        indexer = Indexer(name, files, self._format, self._checked, repr(key), reading.cache, scan=scan, strict=strict)
        self._index = indexer.index()
        if not len(self._index):
            raise UserError.at(
                self.path,
                problem=f"no records for data set {name!r}",
                fix=f"correct {setting}, or remove the data set from data.datasets",
            )

    @property
    def path(self) -> str:
        """The data set's file, or the pattern of its files."""
        return str(self.entry.annotations or self.entry.files)

    @property
    def digest(self) -> str:
        """SHA-256 of the records, independent of the files' location and formatting."""
        return self._index.digest

    @property
    def bad(self) -> int:
        """Number of bad records; 0 if `Reading.strict`."""
        return self._index.bad

    @cached_property
    def good_records(self) -> np.ndarray:
        """Numbers of the records that are not bad, int64, ascending."""
        return np.delete(np.arange(len(self)), self._index.bad_records())

    @property
    def problems(self) -> tuple[str, ...]:
        """Messages about the first bad records."""
        return self._index.problems

    @property
    def unread(self) -> str:
        """Message that lists record keys that were not read; empty without such keys. Raises `UserError`, `OSError`."""
        columns = self._format.unread(self._index.files[0]) if isinstance(self._format, ParquetFiles) else ()
        counts = {**dict.fromkeys(columns[:MAX_NAMES], len(self)), **self._index.unread}
        names = ", ".join(f"{name} ({number:,})" for name, number in counts.items())
        return names and printable(f"data set {self.name}: keys that are not read, by number of records: {names}")

    @cached_property
    def blocks(self) -> Blocks:
        """Blocks of records that are read most efficiently together."""
        return self._index.blocks()

    def read_ahead(self, records: np.ndarray) -> None:
        """Prefetch the records with these numbers, int64, if the format supports that."""
        files = np.searchsorted(self._index.starts, records, side="right") - 1
        for file in np.unique(files).tolist():
            numbers = records[files == file] - self._index.starts[file]
            self._format.read_ahead(self._index.files[file], self._index.columns(file), numbers)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> Record:  # type: ignore[override]  # no slices: they would build objects
        if not -len(self) <= i < len(self):
            raise IndexError(f"record {i} of data set {self.name!r}, which has {len(self)}")
        i = int(i) % len(self)
        file, number = self._index.file_of(i)
        stored = self._index.files[file]
        try:
            raw = next(self._format.read(stored, self._index.columns(file), range(number, number + 1)))
        except OSError as error:
            problem, fix = f"cannot be read ({reason(error)})", "keep data sets in place while they are read"
            raise UserError.at(stored, problem=problem, fix=fix) from error
        with blaming(self.name, i, raw.where, "record"):
            if isinstance(raw.value, UserError):
                raise raw.value
            turns, items, tools, _ = self._parsed(raw.value, raw.where)
        record = Record(
            dataset=self.name,
            index=i,
            where=raw.where,
            turns=tuple(turns),
            items=tuple(items),
            folder=self.entry.images,
            tools=tools,
        )
        known = self._index.headers(file, number)
        # If a file has changed since it was indexed, headers are read when needed.
        if known is None or [stamp for stamp, *_ in known] != [_stamp(record.item(k)) for k in range(len(items))]:
            return record
        return replace(record, headers=tuple((first, second) for _, first, second in known))

    def _parsed(self, value: Any, where: str) -> Parsed:
        """Return the validated contents of a record. Raises `UserError`."""
        return validate_record(
            self._map.apply(value, where),
            where,
            folder=self.entry.images,
            fields=self._reading.fields,
            video_placeholder=self.entry.video_placeholder,
        )

    def _checked(self, value: Any, where: str) -> tuple[bytes, Sequence[tuple[int, int, int]], Sequence[str]]:
        """Check a record for the index, see `megatron_hetero.data.sources.index.Check`."""
        turns, items, tools, names = self._parsed(value, where)
        is_tar = isinstance(self._format, TarFiles)  # All text fields of a tar are read.
        unread = [n for n in names if n not in self._mapped and not (is_tar and n.rpartition(".")[2] in TEXTS)]
        shown = [
            (ref.field.key, label_of(ref.file), [*map(label_of, ref.frames)], ref.given)
            if ref.frames or ref.given
            else (ref.field.key, label_of(ref.file))
            for ref in items
        ]
        turns_shown = [
            turn[:2]
            if turn.supervised and not turn.further and type(turn.content) is str and "<" not in turn.content
            else self._digested(turn)
            for turn in turns
        ]
        text = msgspec.json.encode((turns_shown, shown, tools) if tools else (turns_shown, shown))
        readers = self._reading.readers
        if readers is None or not items:
            return text, (), unread
        record = Record(self.name, 0, where, (), tuple(items), self.entry.images)
        try:
            readable = [(readers[ref.field], record.item(k)) for k, ref in enumerate(items)]
            return text, [(_stamp(item), *reader.header(item)) for reader, item in readable], unread
        except UserError:
            if self._reading.strict:
                raise
            return text, (), unread  # The files may exist later, when they are needed.

    def _digested(self, turn: Turn) -> tuple[object, ...]:
        """Return a turn for the digest: its role and text if it has nothing else, as in digests of older versions."""
        if turn.supervised and not turn.further:
            text, items = turn.text, [entry for entry in turn.entries if not isinstance(entry, str)]
            is_plain = turn.role == "assistant" or text.count("<") == len(items)
            if is_plain or split_at_placeholders(text, self._reading.fields) == turn.content:
                return turn.role, text
        entries = [entry if isinstance(entry, str) else (entry.key,) for entry in turn.entries]
        return turn.role, entries, turn.supervised, turn.further


def _open_files(entry: DatasetConfig, setting: str, items: Sequence[str]) -> Opened:
    """Find the files of a data set. `setting`: its setting. `items`: names of item fields. Raises `UserError`."""
    if entry.annotations is not None:
        return JsonFiles(), (StoredFile(str(entry.annotations)),), {}
    pattern, chosen = entry.files or "", entry.format
    if chosen == "auto":
        is_folder = not is_url(pattern) and Path(pattern).is_dir()
        chosen = "energon" if is_folder else _SUFFIXES.get(Path(pattern).suffix.lower(), "json")
    if chosen == "energon":
        return open_energon(Path(pattern), entry, f"{setting}.files")
    format = JsonFiles()
    if chosen == "parquet":
        format = ParquetFiles(entry.fields, items)
    elif chosen == "webdataset":
        format = TarFiles(bool(entry.fields))
    return format, files_of(pattern, f"{setting}.files"), {}


def _stamp(item: Item) -> int:
    """Return a number that changes with an item's file. It must be computed before the item's header is read."""
    try:
        version = repr(item.content.version()[1:])
    except OSError:
        return 0
    return int.from_bytes(hashlib.blake2b(version.encode(), digest_size=7).digest(), "little")
