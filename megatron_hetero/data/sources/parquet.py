"""Parquet files with pictures and videos in their columns, as bytes (as `datasets` writes them) or as paths.

A row group is the unit of reading. Records are read from the texts of a row group alone: the bytes of items are stored
elsewhere in the file, and are read when an item is opened. Texts and items stay in a cache.
"""

from __future__ import annotations

import contextlib
import io
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from megatron_hetero.base.contents import InMemory, StoredFile, Version
from megatron_hetero.base.errors import UserError, in_short, listed
from megatron_hetero.data.keys import FORMS, REFUSED
from megatron_hetero.data.sources import parquet_groups as groups
from megatron_hetero.data.sources.formats import Arrays, Columns, Place, RawRecord, changed, prefetch
from megatron_hetero.data.sources.json_files import MAX_TEXT_BYTES
from megatron_hetero.data.sources.mapping import keys_of, known_fields
from megatron_hetero.data.sources.parquet_groups import Column, Footer, Group, GroupCache, Table, Tree

CACHE_BYTES, TEXT_BYTES = 1 << 30, 1 << 25
"""Maximum decoded bytes of cached row groups over all data sets: of items, and of texts."""
MAX_FOOTERS = 256
"""Maximum number of files whose footers are cached."""
BATCH_ROWS = 1 << 10
"""Number of rows whose size is checked together before they become Python objects."""

Path: TypeAlias = "tuple[str | int, ...]"
"""Names of fields and numbers of list elements, from a column's value to an item."""


@dataclass(frozen=True)
class Cell:
    """An item in a column of a file. `row`: number of the row in the file, from 0. `path`: path from the column's value
    to the item. `name`: name of the item's original file, or empty. `source`: reads the item.
    """

    file: StoredFile
    group: int
    row: int
    column: str
    path: Path
    name: str
    source: ParquetFiles = field(compare=False, repr=False)

    @property
    def label(self) -> str:
        """Column and path of the item, followed by the name of its original file."""
        return f"{self._place} {self.name}".rstrip()

    @property
    def _place(self) -> str:
        return self.column + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)

    def __str__(self) -> str:
        return f"column {self._place} of {self.file} row {self.row + 1}"

    def open(self) -> BinaryIO:
        """Open the item for reading and seeking. Raises `OSError`, and `UserError` if the file is damaged."""
        return io.BytesIO(self.source.bytes_of(self))

    def version(self) -> Version:
        """Return the version of the file and the place of the item in it. Raises `OSError`."""
        return *self.file.version(), self.group, self.row, self._place

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the bytes of the item, so that another process need not read the row group.
        return InMemory, (self.source.bytes_of(self), str(self), self.label, self.version())


class ParquetFiles:
    """`Format` for Parquet files. Index column: `groups`, the first row of each row group.

    Columns of a file are read if they are mapped or have the name of a field of records.
    """

    def __init__(self, fields: Mapping[str, str], items: Collection[str] = ()) -> None:
        """Check that pyarrow is installed.

        Args:
            fields: paths in a row, by field of records.
            items: names of item fields other than the fields of pictures and videos.

        Raises:
            UserError: pyarrow is not installed.
        """
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            problem = f"pyarrow, which reads Parquet files, is not installed ({in_short(error)})"
            raise UserError.at("data.registry", problem=problem, fix="install it with `pip install pyarrow`") from error
        self._arguments = dict(fields), tuple(items)
        paths = tuple((name, keys_of(path)) for name, path in fields.items())
        names = frozenset(known_fields(items)).union(name for level, name in REFUSED if level == "record")
        self._wanted = _Wanted(paths, names.difference(fields))

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetFiles, self._arguments

    def __repr__(self) -> str:
        return f"ParquetFiles{self._arguments}"

    def scan(self, file: StoredFile, columns: Columns) -> Iterator[Place]:
        """Yield the places of all rows, see `Format.scan`. Only the footer is read."""
        footer = self._footer(file)
        columns["groups"] = array("q", footer.starts[:-1].tolist())
        for group in map(footer.group, range(footer.groups)):
            size = group.size([leaf for column in footer.columns for leaf in column.leaves])
            if group.rows > groups.MAX_GROUP_ROWS or not 0 <= size <= groups.MAX_GROUP_BYTES:
                raise group.too_large(size)
            if group.rows:
                share = (group.first + group.rows) / int(footer.starts[-1])
                yield from repeat(Place(size // group.rows, share, group.number), group.rows)

    def read(self, file: StoredFile, columns: Arrays, numbers: range) -> Iterator[RawRecord]:
        """Yield consecutive rows as records, see `Format.read`."""
        footer, firsts, row = self._footer(file), columns["groups"], numbers.start
        while row < numbers.stop:
            group = footer.group_of(row)
            end = group.first + group.rows
            if row >= end or len(firsts) != footer.groups or firsts[group.number] != group.first:
                raise changed(f"{file} row {row + 1}")
            yield from self._records(group, range(row, min(end, numbers.stop)))
            row = end

    def read_ahead(self, file: StoredFile, columns: Arrays, numbers: np.ndarray) -> None:
        """Prefetch the row groups of these records, see `Format.read_ahead`."""
        with contextlib.suppress(UserError, OSError, ValueError):  # Errors are raised when the rows are read.
            footer = self._footer(file)
            leaves = [leaf for column in footer.columns for leaf in column.leaves]
            chosen = dict.fromkeys(map(footer.group_of, numbers.tolist()))
            prefetch(file, (group.place(leaf) for group in chosen for leaf in leaves))

    def unread(self, file: StoredFile) -> list[str]:
        """Return the columns of a file that are not read. Raises `UserError`, `OSError`."""
        footer = self._footer(file)
        names, used = footer.metadata.schema.to_arrow_schema().names, {column.name for column in footer.columns}
        return [name for name in names if name not in used]

    def bytes_of(self, cell: Cell) -> bytes:
        """Return the bytes of an item. Raises `OSError`, and `UserError` if the file is damaged."""
        footer = self._footer(cell.file)
        column = next((column for column in footer.columns if column.name == cell.column), None)
        group = footer.group_of(cell.row)
        value: Any = None
        if column is None or group.number != cell.group:
            raise changed(str(cell))
        with contextlib.suppress(LookupError, TypeError):  # Raised if the file has changed.
            item: Any = self._whole(group, column).column(0)[cell.row - group.first]
            for key in cell.path:
                item = item[key]
            stored: Any = item.as_py()
            value = stored["bytes"] if isinstance(stored, dict) else stored
        if not isinstance(value, bytes):
            raise changed(str(cell))
        return value

    def _footer(self, file: StoredFile) -> Footer:
        return _read_footer(file, file.version(), self._wanted)

    def _texts(self, group: Group) -> _Texts:
        """Return the texts of a row group from the cache, loading them if needed."""
        return _TEXT_CACHE.get(group, "", group.texts, partial(_load_texts, group))

    def _whole(self, group: Group, column: Column) -> Table:
        """Return the table of a column with items from the cache, loading it if needed."""
        return _CACHE.get(group, column.name, column.leaves, partial(groups.load, group, column.leaves))

    def _records(self, group: Group, rows: range) -> Iterator[RawRecord]:
        """Yield consecutive records of a row group."""
        texts = self._texts(group)
        columns = dict(zip(texts.table.column_names, texts.table.columns, strict=True))
        columns |= {column.name: self._whole(group, column).column(0) for column in texts.unclear}
        for start in range(rows.start, rows.stop, BATCH_ROWS):
            yield from self._batch(group, texts, columns, range(start, min(start + BATCH_ROWS, rows.stop)))

    def _batch(self, group: Group, texts: _Texts, columns: Mapping[str, Any], rows: range) -> Iterator[RawRecord]:
        """Yield records of a row group, decoded together, or one by one if a value cannot be decoded."""
        import pyarrow as pa

        values, start = None, rows.start - group.first
        try:
            is_small = texts.size <= MAX_TEXT_BYTES
            size = texts.size if is_small else _size(texts.table.slice(start, len(rows)))
            problem = f"{size:,} bytes of text"
            if size <= MAX_TEXT_BYTES:
                values = [self._values(group, each, columns.get(each.name), rows) for each in group.footer.columns]
        except (ValueError, ArithmeticError, LookupError, TypeError, pa.ArrowException) as error:
            problem = f"a value that cannot be decoded ({in_short(error)})"
        where = [f"{group.footer.file} row {row + 1}" for row in rows]
        if values is not None:
            names = [column.name for column in group.footer.columns]
            records = (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))
            yield from map(RawRecord, records, where)
        elif len(rows) > 1:
            for row in rows:
                yield from self._batch(group, texts, columns, range(row, row + 1))
        else:
            expected = f"UTF-8 text of at most {MAX_TEXT_BYTES:,} bytes"
            fix = "split or remove the record; if the file is damaged, copy it again"
            yield RawRecord(UserError.at(where[0], found=problem, expected=expected, fix=fix), where[0])

    def _values(self, group: Group, column: Column, array: Any, rows: range) -> list[Any]:
        """Return the values of a column in some rows. `array`: the column of the row group; None if each row has one
        item and the column has nothing else.
        """
        cells = [partial(Cell, group.footer.file, group.number, row, column.name, source=self) for row in rows]
        if array is None:
            return [cell((), "") for cell in cells]
        values = array.slice(rows.start - group.first, len(rows)).to_pylist()
        return [_with_cells(value, column.tree, (), cell) for value, cell in zip(values, cells, strict=True)]


class _Wanted(NamedTuple):
    """Choice of columns: columns at the `paths` of mapped fields, which must exist, and columns with other `names`."""

    paths: tuple[tuple[str, tuple[str, ...]], ...]
    names: frozenset[str]

    def choose(self, file: StoredFile, schema: Any) -> set[str]:
        """Return the names of the columns of a file to read. Raises `UserError` for a missing or unfit column."""
        present, roots = f"columns {listed(schema.names, 30)}", dict[str, str]()
        for name, path in self.paths:
            tried = (".".join(path[:count]) for count in range(len(path), 0, -1))
            root = next((each for each in tried if each in schema.names), None)
            if root is None:
                fix = "correct `fields` of the data set"
                raise UserError.at(file, found=present, expected=f"a column {path[0]} for the field {name}", fix=fix)
            roots[name] = root
        chosen = {*roots.values(), *self.names.intersection(schema.names)}
        texts = [roots.get(form, form) for form in FORMS if roots.get(form, form) in chosen]
        if not texts:
            fix = "name the column that has the text in `fields` of the data set"
            raise UserError.at(file, found=present, expected=f"one of {', '.join(FORMS)}", fix=fix)
        for name in chosen:
            if schema.names.count(name) > 1:
                raise UserError.at(file, problem=f"two columns {name}", fix="rename one of them")
            if name in texts and groups.is_bytes(schema.field(name).type):
                fix = "write it with a type of texts, STRING in Parquet"
                raise UserError.at(file, found=f"bytes in column {name}", expected="texts", fix=fix)
        return chosen


@lru_cache(maxsize=MAX_FOOTERS)
def _read_footer(file: StoredFile, version: Version, wanted: _Wanted) -> Footer:
    """Read the footer of a file of this version. Raises `UserError`, `OSError`."""
    return groups.read_footer(file, (version, wanted), partial(wanted.choose, file))


@dataclass(frozen=True, eq=False)
class _Texts:
    """The texts of a row group. `size`: decoded bytes, see `decoded_size`. `unclear`: columns whose texts and
    statistics do not show which items have bytes.
    """

    table: Table
    size: int
    unclear: tuple[Column, ...]

    @property
    def nbytes(self) -> int:
        return self.table.nbytes


def _load_texts(group: Group) -> _Texts:
    table = groups.load(group, group.texts)
    items = [column for column in group.footer.columns if column.tree is not None]
    return _Texts(
        table, _size(table), tuple(column for column in items if not groups.has_all_bytes(group, table, column))
    )


def _size(table: Table) -> int:
    return groups.decoded_size([chunk for column in table.columns for chunk in column.chunks])


# ------------------------------------------------------------------------------------------------- Python's values


def _with_cells(value: Any, tree: Tree, path: Path, cell: Callable[[Path, str], Cell]) -> Any:
    """Return a value with cells in place of items that have bytes, and paths in place of other items. Null fields of
    objects are left out, since structs have the fields of all rows.
    """
    if value is None:
        return None
    if tree == groups.ITEM:
        given, name = (value, value.get("path")) if isinstance(value, dict) else ({}, None)
        # If there is no field `bytes`, all items are bytes.
        return name if given.get("bytes", b"") is None else cell(path, re.split(r"[/\\]", name or "")[-1])
    if isinstance(value, dict):
        trees = tree or {}
        return {
            name: _with_cells(each, trees.get(name), (*path, name), cell)
            for name, each in value.items()
            if each is not None
        }
    if isinstance(value, list):
        inner = tree[0] if tree else None
        return [_with_cells(each, inner, (*path, k), cell) for k, each in enumerate(value)]
    return value


_CACHE, _TEXT_CACHE = GroupCache(CACHE_BYTES), GroupCache(TEXT_BYTES)
