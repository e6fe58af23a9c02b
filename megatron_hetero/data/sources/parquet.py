"""Parquet files with pictures and videos in their columns, as bytes (as `datasets` writes them) or as paths.

A row group is what can be read by itself. Records are made of its texts alone: the bytes of items are in another part
of the file, and are read when an item is opened. Both stay in a cache.
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice, repeat
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from megatron_hetero.base.contents import InMemory, StoredFile, Version
from megatron_hetero.base.errors import UserError, in_short, listed
from megatron_hetero.data.keys import FORMS, REFUSED
from megatron_hetero.data.sources.formats import Arrays, Columns, Found, Place, changed
from megatron_hetero.data.sources.json_files import MAX_TEXT_BYTES
from megatron_hetero.data.sources.mapping import keys_of, known_fields
from megatron_hetero.data.sources.parquet_pages import decoded

CACHE_BYTES, TEXT_BYTES = 1 << 30, 1 << 25
"""Decompressed bytes of row groups in memory, of all data sets: of items, and of texts, which are read again soon. One
row group is there whatever its size.
"""
MAX_GROUP_BYTES = 1 << 32
"""Limit of the decompressed bytes of a row group, in columns that are used."""
MAX_GROUP_ROWS = 1 << 24
"""Limit of the rows of a row group."""
MAX_FOOTERS = 256
"""Files whose footers stay in memory."""
VALUE_BYTES = 16
"""Bytes that a value of any type counts, since nulls and empty texts take memory too."""
BATCH_ROWS = 1 << 10
"""Rows that are converted to Python's objects at a time."""
BATCH_BYTES = 1 << 30
"""Bytes that are decompressed at a time: offsets in Arrow's arrays have 32 bits."""
_COPY = "copy the file again, or write it anew"

# pyarrow is not typed.
Table: TypeAlias = Any
Array: TypeAlias = Any
DataType: TypeAlias = Any
Steps: TypeAlias = "tuple[str | None, ...]"
"""The way from a column to its items: the name of a struct's field, or None for the elements of a list."""


@dataclass(frozen=True)
class Cell:
    """An item in a column of a file. `row`: from 0. `number`: in its row and column, from 0. `name`: of the file that
    it was, or empty.
    """

    file: StoredFile
    group: int
    row: int
    column: str
    steps: Steps
    number: int
    name: str
    source: ParquetFiles = field(compare=False, repr=False)

    @property
    def label(self) -> str:
        """Name of the column, then of the file that the item was."""
        return f"{self._place} {self.name}".rstrip()

    @property
    def _place(self) -> str:
        names = ".".join([self.column, *filter(None, self.steps)])
        return f"{names}[{self.number}]" if None in self.steps else names

    def __str__(self) -> str:
        return f"column {self._place} of {self.file} row {self.row + 1}"

    def open(self) -> BinaryIO:
        """Open it for reading and seeking. Raises `OSError`, and `UserError` if the file is damaged."""
        return io.BytesIO(self.source.bytes_of(self))

    def version(self) -> Version:
        """Version of the file, and the place in it. Raises `OSError`."""
        return *self.file.version(), self.group, self.row, self._place, self.number

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process need not read the row group.
        return InMemory, (self.source.bytes_of(self), str(self), self.label, self.version())


class ParquetFiles:
    """See `megatron_hetero.data.sources.formats.Format`. Column: `groups`, the first row of each row group.

    Columns of a file that are used are those that are mapped, and those that are called like fields of records.
    """

    def __init__(self, fields: Mapping[str, str], items: Collection[str] = ()) -> None:
        """Checks that pyarrow is there.

        Args:
            fields: paths in a row, by field of records.
            items: fields of items besides those of pictures and videos.

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
        self._background = ThreadPoolExecutor(1, "read ahead")

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetFiles, self._arguments

    def __repr__(self) -> str:
        return f"ParquetFiles{self._arguments}"

    def scan(self, file: StoredFile, columns: Columns) -> Iterator[Place]:
        """See `Format.scan`. Reads the footer alone."""
        footer = self._footer(file)
        columns["groups"] = array("q", footer.starts[:-1].tolist())
        for group in map(footer.group, range(footer.groups)):
            size = sum(group.size(column.leaves) for column in footer.columns)
            if group.rows > MAX_GROUP_ROWS or not 0 <= size <= MAX_GROUP_BYTES:
                raise _too_large(group, size)
            if group.rows:
                share = (group.first + group.rows) / int(footer.starts[-1])
                yield from repeat(Place(size // group.rows, share, group.number), group.rows)

    def read(self, file: StoredFile, columns: Arrays, numbers: range) -> Iterator[Found]:
        """See `Format.read`."""
        footer, firsts, at = self._footer(file), columns["groups"], numbers.start
        while at < numbers.stop:
            group = footer.group_of(at)
            end = group.first + group.rows
            if at >= end or len(firsts) != footer.groups or firsts[group.number] != group.first:
                raise changed(f"{file} row {at + 1}")
            yield from self._rows(group, range(at, min(end, numbers.stop)))
            at = end

    def read_ahead(self, file: StoredFile, columns: Arrays, numbers: np.ndarray) -> None:
        """See `Format.read_ahead`. Loads row groups in the background, into at most half of the cache."""
        self._background.submit(self._load_ahead, file, numbers)

    def unread(self, file: StoredFile) -> list[str]:
        """Columns of a file that are not read. Raises `UserError`, `OSError`."""
        footer = self._footer(file)
        names, used = footer.metadata.schema.to_arrow_schema().names, {column.name for column in footer.columns}
        return [name for name in names if name not in used]

    def bytes_of(self, cell: Cell) -> bytes:
        """The bytes of an item. Raises `OSError`, and `UserError` if the file is damaged."""
        footer = self._footer(cell.file)
        column = next((column for column in footer.columns if column.name == cell.column), None)
        group = footer.group_of(cell.row)
        if column is None or group.number != cell.group:
            raise changed(str(cell))
        chunks = self._whole(group, column).column(0).slice(cell.row - group.first, 1).chunks
        found = next((_flat(chunk, cell.steps) for chunk in chunks if len(chunk)), ())
        value = found[cell.number].as_py() if cell.number < len(found) else None
        if value is None:
            raise changed(str(cell))
        return value

    def _footer(self, file: StoredFile) -> _Footer:
        return _read_footer(file, file.version(), self._wanted)

    def _texts(self, group: _Group, ahead: bool = False) -> Any:
        """The `_Texts` of a row group; None if they are to be loaded ahead, and there is no room."""
        return _TEXT_CACHE.get(group.key, "", lambda: group.size(group.text_leaves), partial(_load_texts, group), ahead)

    def _whole(self, group: _Group, column: _Column, ahead: bool = False) -> Table:
        """The table of a column with items; None as for texts."""
        load = partial(_load, group, column.leaves)
        return _CACHE.get(group.key, column.name, lambda: group.size(column.leaves), load, ahead)

    def _load_ahead(self, file: StoredFile, numbers: np.ndarray) -> None:
        with contextlib.suppress(Exception):  # Whoever reads meets the error again.
            footer = self._footer(file)
            for number in dict.fromkeys((np.searchsorted(footer.starts, numbers, side="right") - 1).tolist()):
                group = footer.group(number)
                if self._texts(group, ahead=True) is None:
                    return
                for column in footer.columns:
                    if column.has_items:
                        self._whole(group, column, ahead=True)

    def _rows(self, group: _Group, numbers: range) -> Iterator[Found]:
        """Consecutive records of a row group."""
        import pyarrow as pa

        texts = self._texts(group)
        table = texts.table
        if texts.unclear:
            columns = dict(zip(table.column_names, table.columns, strict=True))
            table = pa.table(columns | {each.name: self._whole(group, each).column(0) for each in texts.unclear})
        at = numbers.start
        for batch in table.slice(at - group.first, len(numbers)).to_batches(max_chunksize=BATCH_ROWS):
            yield from self._found(group, texts, batch, at)
            at += batch.num_rows

    def _found(self, group: _Group, texts: _Texts, batch: Table, at: int) -> Iterator[Found]:
        """The records of some rows, the first of which has the number `at`."""
        import pyarrow as pa

        file, columns, values = group.footer.file, group.footer.columns, None
        try:
            is_small = texts.size <= MAX_TEXT_BYTES and batch.num_columns == texts.table.num_columns
            size = texts.size if is_small else sum(map(_size, batch.columns))
            found = f"{size:,} bytes of text"
            if size <= MAX_TEXT_BYTES:
                values = [self._values(group, column, batch, at) for column in columns]
        except (ValueError, ArithmeticError, LookupError, TypeError, pa.ArrowException) as error:
            found = f"a value that cannot be decoded ({in_short(error)})"
        if values is None and batch.num_rows > 1:
            half = batch.num_rows // 2
            yield from self._found(group, texts, batch.slice(0, half), at)
            yield from self._found(group, texts, batch.slice(half), at + half)
            return
        if values is None:
            where, expected = f"{file} row {at + 1}", f"UTF-8 text of at most {MAX_TEXT_BYTES:,} bytes"
            fix = "split or remove the record; if the file is damaged, copy it again"
            yield Found(UserError.at(where, found=found, expected=expected, fix=fix), where)
            return
        names = [column.name for column in columns]
        for number, row in enumerate(zip(*values, strict=True), start=at + 1):
            yield Found(dict(zip(names, row, strict=True)), f"{file} row {number}")

    def _values(self, group: _Group, column: _Column, batch: Table, at: int) -> list[Any]:
        """The values of a column in some rows."""
        array: Any = batch.column(column.name) if column.name in batch.schema.names else None
        if not column.has_items:
            return [_without_nulls(each) for each in array.to_pylist()]

        def cells(array: Array, steps: Steps, rows: np.ndarray) -> list[Any]:
            # Rows ascend, so that an item's number is its distance from the first one of its row.
            numbers = np.arange(len(rows)) - np.searchsorted(rows, rows)
            paths, are_here = _paths_and_bytes(array, len(rows))
            place = group.footer.file, group.number
            return [
                Cell(*place, row, column.name, steps, number, _base_name(path), self) if is_here else path
                for row, number, path, is_here in zip(rows.tolist(), numbers.tolist(), paths, are_here, strict=True)
            ]

        return _python_values(array, column.type, (), np.arange(at, at + batch.num_rows), cells)


# --------------------------------------------------------------------------------------------------- the footer


class _Wanted(NamedTuple):
    """Columns to read: those of `paths` to mapped fields, which must be there, and `names` of others."""

    paths: tuple[tuple[str, tuple[str, ...]], ...]
    names: frozenset[str]


class _Leaf(NamedTuple):
    """A part of a column that is stored by itself: its number and path in the file, the way to the items whose bytes it
    has (None for other values), how many values of a fixed size a null is stored as, and whether its column has an
    extension type.
    """

    number: int
    path: str
    steps: Steps | None
    width: int
    is_extended: bool


class _Column(NamedTuple):
    """A column. `is_light`: whether leaves without bytes tell which items there are."""

    name: str
    type: DataType
    leaves: tuple[_Leaf, ...]
    is_light: bool

    @property
    def has_items(self) -> bool:
        """Whether there are items in it."""
        return any(leaf.steps is not None for leaf in self.leaves)


@dataclass(frozen=True, eq=False)
class _Footer:
    """The structure of a file. `starts`: int64 [groups + 1], the first row of each row group. `columns`: those used."""

    file: StoredFile
    version: Version
    wanted: _Wanted
    metadata: Any
    starts: np.ndarray
    columns: tuple[_Column, ...]

    @property
    def groups(self) -> int:
        return len(self.starts) - 1

    def group(self, number: int) -> _Group:
        first, end = self.starts[number : number + 2].tolist()
        return _Group(self, number, first, end - first)

    def group_of(self, row: int) -> _Group:
        """The row group of a row; the last one for rows that are not there."""
        return self.group(min(int(np.searchsorted(self.starts, row, side="right")), self.groups) - 1)


class _Group(NamedTuple):
    """A row group: its number, first row, and number of rows."""

    footer: _Footer
    number: int
    first: int
    rows: int

    def __str__(self) -> str:
        return f"{self.footer.file} row group {self.number} (rows {self.first + 1} to {self.first + self.rows})"

    @property
    def key(self) -> Hashable:
        return self.footer.version, self.footer.wanted, self.number

    @property
    def text_leaves(self) -> list[_Leaf]:
        """The leaves that records are made of."""
        columns = [column for column in self.footer.columns if column.is_light]
        return [leaf for column in columns for leaf in column.leaves if leaf.steps is None]

    def chunk(self, leaf: _Leaf) -> Any:
        """The footer's figures about a leaf."""
        return self.footer.metadata.row_group(self.number).column(leaf.number)

    def size(self, leaves: Sequence[_Leaf]) -> int:
        """Bytes of leaves when decompressed."""
        return sum(self.chunk(leaf).total_uncompressed_size for leaf in leaves)


def _too_large(group: _Group, size: int) -> UserError:
    found = f"{group.rows:,} rows with {size:,} bytes"
    expected = f"at most {MAX_GROUP_ROWS:,} rows and {MAX_GROUP_BYTES:,} bytes"
    fix = "write row groups of 100 to 1,000 rows, and leave out a row that is larger by itself"
    return UserError.at(group, found=found, expected=expected, because="a row group is decoded whole", fix=fix)


@contextlib.contextmanager
def _reading(place: object) -> Iterator[None]:
    """Inside, all errors of pyarrow are raised as `UserError`s. Those of the operating system are not changed."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Arrow's own errors of reading have no number.
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise
        if re.search("(en|de)crypt", str(error), re.IGNORECASE):
            problem, fix = f"encrypted ({in_short(error)})", "write the file without encryption"
            raise UserError.at(place, problem=problem, fix=fix) from error
        found = f"data that cannot be read ({in_short(error)})"
        raise UserError.at(place, found=found, expected="an intact Parquet file", fix=_COPY) from error


@lru_cache(maxsize=MAX_FOOTERS)
def _read_footer(file: StoredFile, version: Version, wanted: _Wanted) -> _Footer:
    """The footer of a file of this version. Raises `UserError`, `OSError`."""
    import pyarrow.parquet as pq

    with _reading(file), file.open() as opened, pq.ParquetFile(opened) as parquet:
        metadata, schema = parquet.metadata, parquet.schema_arrow
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] or [0]
        paths = [metadata.schema.column(k).path for k in range(metadata.num_columns)]
        if any(count < 0 for count in rows):
            raise UserError.at(file, problem="a row group with a negative number of rows", fix=_COPY)
        columns = _columns(schema, paths, _chosen(file, schema, wanted)) if any(rows) else ()
        _check_chunks(opened, metadata, [leaf.path for column in columns for leaf in column.leaves])
        return _Footer(file, version, wanted, metadata, np.cumsum([0, *rows], dtype=np.int64), columns)


class _Planned(Exception):
    """A read has been planned."""


def _check_chunks(opened: BinaryIO, metadata: Any, paths: Sequence[str]) -> None:
    """Check what a footer says of some leaves: asked for it, pyarrow ends the process if it is damaged or encrypted,
    but when it plans to read, it raises errors.
    """
    import pyarrow.parquet as pq

    def read(_: int) -> bytes:
        raise _Planned

    planned = SimpleNamespace(read=read, seek=opened.seek, tell=opened.tell, closed=False, mode="rb")
    with contextlib.suppress(_Planned), pq.ParquetFile(planned, metadata=metadata, pre_buffer=True) as parquet:
        next(parquet.iter_batches(1, range(metadata.num_row_groups), list(paths), use_threads=False), None)


def _chosen(file: StoredFile, schema: Any, wanted: _Wanted) -> set[str]:
    """The names of the columns to read. Raises `UserError` for one that is not there, or not fit."""
    there, roots = f"columns {listed(schema.names, 30)}", dict[str, str]()
    for name, path in wanted.paths:
        tried = (".".join(path[:count]) for count in range(len(path), 0, -1))
        root = next((each for each in tried if each in schema.names), None)
        if root is None:
            fix = "correct `fields` of the data set"
            raise UserError.at(file, found=there, expected=f"a column {path[0]} for the field {name}", fix=fix)
        roots[name] = root
    chosen = {*roots.values(), *wanted.names.intersection(schema.names)}
    texts = [roots.get(form, form) for form in FORMS if roots.get(form, form) in chosen]
    if not texts:
        fix = "name the column that has the text in `fields` of the data set"
        raise UserError.at(file, found=there, expected=f"one of {', '.join(FORMS)}", fix=fix)
    for name in chosen:
        if schema.names.count(name) > 1:
            raise UserError.at(file, problem=f"two columns {name}", fix="rename one of them")
        if name in texts and _is_bytes(schema.field(name).type):
            fix = "write it with a type of texts, STRING in Parquet"
            raise UserError.at(file, found=f"bytes in column {name}", expected="texts", fix=fix)
    return chosen


def _columns(schema: Any, paths: Sequence[str], chosen: Collection[str]) -> tuple[_Column, ...]:
    """The chosen columns of a file whose leaves, in the order of the schema, have these paths."""
    numbered, columns = iter(enumerate(paths)), []
    for each in schema:
        kinds = list(_leaves(each.type))
        leaves = tuple(_Leaf(*next(numbered), steps, *_width(each.type)) for steps, _ in kinds)
        if each.name in chosen:
            columns.append(_Column(each.name, each.type, leaves, all(is_light for _, is_light in kinds)))
    return tuple(columns)


def _leaves(kind: DataType, steps: Steps = ()) -> Iterator[tuple[Steps | None, bool]]:
    """For each leaf of a type, the way to the items whose bytes it has, if any, and whether other leaves tell which
    items there are.
    """
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        yield from ((None, True) for _ in _leaves(kind.storage_type))
    elif pa.types.is_map(kind):
        yield from ((None, True) for each in (kind.key_type, kind.item_type) for _ in _leaves(each))
    elif pa.types.is_struct(kind):
        for each in kind:
            if each.name == "bytes" and _is_item(kind):
                yield steps, kind.num_fields > 1
            else:
                yield from _leaves(each.type, (*steps, each.name))
    elif _is_list(kind):
        yield from _leaves(kind.value_type, (*steps, None))
    else:
        yield (steps, False) if _is_bytes(kind) else (None, True)


def _width(kind: DataType) -> tuple[int, bool]:
    """The most values, or bytes, of fixed size that a null of a type is stored as; whether it has an extension type."""
    import pyarrow as pa
    from pyarrow import types

    if isinstance(kind, pa.BaseExtensionType):
        return _width(kind.storage_type)[0], True
    size = kind.list_size if types.is_fixed_size_list(kind) else 1
    size = kind.byte_width if types.is_fixed_size_binary(kind) else size
    inner = [_width(kind.field(k).type) for k in range(kind.num_fields)] or [(1, False)]
    return max(1, size) * max(width for width, _ in inner), any(is_extended for _, is_extended in inner)


def _is_bytes(kind: DataType) -> bool:
    from pyarrow import types

    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _is_item(kind: DataType) -> bool:
    """Whether values of a type are items: bytes, or a struct that has them, as `datasets` writes it."""
    from pyarrow import types

    if not types.is_struct(kind):
        return _is_bytes(kind)
    return any(each.name == "bytes" and (_is_bytes(each.type) or types.is_null(each.type)) for each in kind)


def _is_list(kind: DataType) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


# --------------------------------------------------------------------------------------------------- row groups


@dataclass(frozen=True, eq=False)
class _Texts:
    """A row group without bytes. `size`: as of `_size`. `unclear`: columns in which items may have no bytes."""

    table: Table
    size: int
    unclear: tuple[_Column, ...]

    @property
    def nbytes(self) -> int:
        return self.table.nbytes


def _load_texts(group: _Group) -> _Texts:
    table = _load(group, group.text_leaves)
    unclear = tuple(each for each in group.footer.columns if not _has_all_bytes(group, table, each))
    return _Texts(table, sum(_size(chunk) for column in table.columns for chunk in column.chunks), unclear)


def _has_all_bytes(group: _Group, table: Table, column: _Column) -> bool:
    """Whether all items of a column have bytes, as statistics say."""
    for leaf in column.leaves:
        if leaf.steps is None:
            continue
        chunk, count = group.chunk(leaf), group.rows
        if column.is_light:
            items = (_flat(each, leaf.steps) for each in table.column(column.name).chunks)
            count = sum(len(each) - each.null_count for each in items)
        elif not _is_bytes(column.type):
            return False
        # pyarrow ends the process if it is asked for statistics of another type than the column's.
        if chunk.physical_type != "BYTE_ARRAY" or chunk.statistics is None or not chunk.statistics.has_null_count:
            return False
        if chunk.num_values - chunk.statistics.null_count != count:
            return False
    return True


def _load(group: _Group, leaves: Sequence[_Leaf]) -> Table:
    """Leaves of a row group. Raises `OSError`, and `UserError` if they decode to more than `MAX_GROUP_BYTES`: no more
    than these and a batch are in memory then.
    """
    import pyarrow as pa

    # Bytes of values once, of those repeated at most, and of the latter in a row where pyarrow has no dictionaries.
    chunks, once, repeated = dict[int, bytes](), 0, 0
    by_dictionary, of_row = list[int](), 1
    with _reading(group), group.footer.file.open() as opened:
        for leaf in leaves:
            chunk, schema = group.chunk(leaf), group.footer.metadata.schema.column(leaf.number)
            start = min(at for at in (chunk.data_page_offset, chunk.dictionary_page_offset) if at and at > 0)
            opened.seek(start)
            chunks[start] = opened.read(chunk.total_compressed_size)
            size = decoded(chunks[start])
            levels = schema.max_definition_level + schema.max_repetition_level
            once += size.pages + size.values * leaf.width * (VALUE_BYTES + 4 * levels)
            if schema.physical_type != "BYTE_ARRAY":
                continue
            repeated += size.repeated
            if size.has_prefixes or leaf.is_extended:
                of_row += size.repeated if schema.max_repetition_level else size.largest
            elif size.repeated:
                by_dictionary.append(leaf.number)
        if once + repeated <= MAX_GROUP_BYTES:
            once, of_row, by_dictionary = once + repeated, 1, []
        elif max(once, of_row) > MAX_GROUP_BYTES:
            raise _too_large(group, max(once, of_row))
        # Half, since pyarrow has a batch twice while it converts extension types.
        rows = max(1, min(group.rows, group.rows * BATCH_BYTES // max(1, once), BATCH_BYTES // 2 // of_row))
        table = pa.Table.from_batches(list(_batches(opened, chunks, group, leaves, rows, by_dictionary)))
    if table.num_rows != group.rows:
        expected = f"{group.rows:,} as in its footer"
        raise UserError.at(group, found=f"{table.num_rows:,} rows", expected=expected, fix=_COPY)
    return table


def _batches(
    opened: BinaryIO,
    chunks: Mapping[int, bytes],
    group: _Group,
    leaves: Sequence[_Leaf],
    rows: int,
    by_dictionary: list[int],
) -> Iterator[Table]:
    """Batches of so many rows, of leaves whose chunks start at these places, some as numbers of values in dictionaries.
    Raises `UserError` for too many bytes.
    """
    import pyarrow.parquet as pq

    def read(size: int) -> bytes:
        return chunks[opened.tell()][:size]

    file, total = SimpleNamespace(read=read, seek=opened.seek, tell=opened.tell, closed=False, mode="rb"), 0
    options = {"metadata": group.footer.metadata, "page_checksum_verification": True}
    with pq.ParquetFile(file, read_dictionary=by_dictionary, pre_buffer=False, **options) as parquet:
        # By number: another leaf may have the same path.
        for batch in parquet.reader.iter_batches(rows, [group.number], [leaf.number for leaf in leaves], False):
            total += max(batch.nbytes, sum(_size(each, items=True) for each in batch.columns))
            if total > MAX_GROUP_BYTES:
                raise _too_large(group, total)
            yield batch


def _size(array: Array, items: bool = False) -> int:
    """Bytes of an array when decoded, and one for each value at any depth. `items`: those of items, too."""
    import pyarrow.compute as pc
    from pyarrow import types

    kind, size = array.type, len(array)
    if types.is_struct(kind):
        return size + sum(_size(each, items) for each in array.flatten())
    if types.is_map(kind):
        first, *_, last = array.offsets.to_numpy().tolist() or [0, 0]
        return size + _size(array.values[first:last], items)
    if _is_list(kind):
        return size + _size(array.flatten(), items)
    if not items and _is_bytes(kind.value_type if types.is_dictionary(kind) else kind):
        return size
    if types.is_dictionary(kind):
        lengths = pc.call_function("binary_length", [array.dictionary]).take(array.indices)
        return size + (pc.call_function("sum", [lengths]).as_py() or 0)
    return size + array.nbytes


def _flat(array: Array, steps: Steps) -> Array:
    """The items of an array, one after another: their bytes, or structs without them if these were not read."""
    for step in steps:
        array = array.flatten() if step is None else _child(array, step)
    return _child(array, "bytes") if _has_child(array, "bytes") else array


def _child(array: Array, name: str) -> Array:
    """A field of an array of structs, null where these are."""
    return array.flatten()[array.type.get_field_index(name)]


def _has_child(array: Array, name: str) -> bool:
    from pyarrow import types

    return types.is_struct(array.type) and array.type.get_field_index(name) >= 0


Cells: TypeAlias = Callable[[Array, Steps, np.ndarray], "list[Any]"]
"""Values of an array of items, for the way to them, and the row of each, int64."""


def _python_values(array: Array, kind: DataType, steps: Steps, rows: np.ndarray, cells: Cells) -> list[Any]:
    """The values of an array of a type, without its bytes or with them. `rows`: the row of each."""
    from pyarrow import types

    if _is_item(kind):
        return cells(array, steps, rows)
    if types.is_struct(kind):
        names = [each.name for each in kind]
        fields = [
            _python_values(_child(array, each.name), each.type, (*steps, each.name), rows, cells) for each in kind
        ]
        rows_of = (zip(names, row, strict=True) for row in zip(*fields, strict=True))
        values = [{name: each for name, each in row if each is not None} for row in rows_of]
    elif _is_list(kind):
        sizes = [size or 0 for size in array.value_lengths().to_pylist()]
        rows = np.repeat(rows, sizes)
        inner = iter(_python_values(array.flatten(), kind.value_type, (*steps, None), rows, cells))
        values = [list(islice(inner, size)) for size in sizes]
    else:
        return array.to_pylist()
    if not array.null_count:
        return values
    return [value if is_valid else None for value, is_valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def _without_nulls(value: Any) -> Any:
    """A value without fields of objects that are null: structs have the fields of all rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _paths_and_bytes(array: Array, count: int) -> tuple[list[Any], list[bool]]:
    """The path, if any, of each of so many items, and whether it has bytes."""
    if array is None:  # All have bytes, and none has a path.
        return [None] * count, [True] * count
    paths = _child(array, "path").to_pylist() if _has_child(array, "path") else [None] * count
    return paths, _flat(array, ()).is_valid().to_pylist()


def _base_name(path: str | None) -> str:
    return re.split(r"[/\\]", path)[-1] if path else ""


# ---------------------------------------------------------------------------------------------------- the cache


class _Entry:
    """A part of a row group, which the thread that made the entry loads. `is_ahead`: nobody has asked for it yet."""

    def __init__(self, size: int, is_ahead: bool) -> None:
        self.loaded, self.size, self.is_ahead = Future[Any](), size, is_ahead


class _Cache:
    """`most` bytes of row groups in parts. The least recently used are dropped, but none of the group last loaded."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._entries = OrderedDict[tuple[Hashable, str], _Entry]()

    def get(
        self, group: Hashable, part: str, size: Callable[[], int], load: Callable[[], Any], ahead: bool = False
    ) -> Any:
        """A part, of about this size, of a row group, loaded if it is not there: by one thread, while others wait.

        None if it is loaded `ahead` of its use, and all that was and is not used yet would exceed half of the cache.
        """
        key = group, part
        with self._lock:
            entry = self._entries.get(key)
            is_new = entry is None
            if entry is None:
                unused = sum(each.size for each in self._entries.values() if each.is_ahead)
                entry = _Entry(size(), ahead)
                if ahead and unused + entry.size > self._most // 2:
                    return None
                self._entries[key] = entry
            entry.is_ahead &= ahead
            self._entries.move_to_end(key)
        if is_new:
            self._load(key, entry, load)
        return entry.loaded.result()

    def _load(self, key: tuple[Hashable, str], entry: _Entry, load: Callable[[], Any]) -> None:
        try:
            value = load()
        except BaseException as error:
            with self._lock:
                del self._entries[key]
            entry.loaded.set_exception(error)
            return
        with self._lock:
            entry.size = value.nbytes
            entry.loaded.set_result(value)
            total = sum(each.size for each in self._entries.values())
            for old in list(self._entries):
                if total > self._most and old[0] != key[0] and self._entries[old].loaded.done():
                    total -= self._entries.pop(old).size


_CACHE, _TEXT_CACHE = _Cache(CACHE_BYTES), _Cache(TEXT_BYTES)
