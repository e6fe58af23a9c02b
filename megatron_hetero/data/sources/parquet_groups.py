"""Row groups of Parquet files: the structure of a file, columns as Arrow tables, and a cache of tables.

Footers are not trusted. The decoded size of a column is computed from the headers of its pages before it is decoded;
pyarrow refuses a compressed page with more or fewer bytes than its header says. Repeated values, which are stored only
once, are counted while they are decoded, batch by batch.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from megatron_hetero.base.contents import StoredFile
from megatron_hetero.base.errors import UserError, in_short

MAX_GROUP_BYTES = 1 << 32
"""Maximum decoded bytes of the columns of a row group that are read together."""
MAX_GROUP_ROWS = 1 << 24
"""Maximum number of rows of a row group."""
VALUE_BYTES = 16
"""Bytes counted for each value of any type, since nulls and empty texts take memory too."""
BATCH_BYTES = 1 << 30
"""Maximum bytes decoded at a time, since offsets in Arrow arrays have 32 bits."""
_BYTES = "BYTE_ARRAY", "NONE"
"""Parquet's physical and logical types of bytes."""
_COPY = "copy the file again, or write it anew"

# pyarrow is not typed.
Table: TypeAlias = Any
Array: TypeAlias = Any
DataType: TypeAlias = Any
Tree: TypeAlias = Any
"""Places of items in values of a type: `ITEM` for an item itself, a dictionary of trees by field for a struct, a list
of one tree for a list, and None for a type without items.
"""
ITEM = "item"

# --------------------------------------------------------------------------------------------------- the footer


class Leaf(NamedTuple):
    """A leaf of a column's type, which Parquet stores as a separate column: its number and path in the file, and
    whether its values are bytes.
    """

    number: int
    path: str
    is_bytes: bool


class Column(NamedTuple):
    """A column that is read. `tree`: places of items in its values, see `Tree`."""

    name: str
    type: DataType
    tree: Tree
    leaves: tuple[Leaf, ...]

    def texts(self) -> tuple[Leaf, ...]:
        """Return the leaves other than bytes of items, if they show which items exist; otherwise an empty tuple."""
        texts = tuple(leaf for leaf in self.leaves if not leaf.is_bytes)
        for leaf in self.leaves:
            item, _, name = leaf.path.rpartition(".")
            if leaf.is_bytes and not (name == "bytes" and any(each.path.startswith(f"{item}.") for each in texts)):
                return ()
        return texts


@dataclass(frozen=True, eq=False)
class Footer:
    """The structure of a file. `key`: differs between versions of files and choices of columns. `metadata`: pyarrow's
    view of the footer. `starts`: first row of each row group, and the number of rows, int64 [groups + 1]. `columns`:
    the columns that are read.
    """

    file: StoredFile
    key: Hashable
    metadata: Any
    starts: np.ndarray
    columns: tuple[Column, ...]

    @property
    def groups(self) -> int:
        """Number of row groups."""
        return len(self.starts) - 1

    def group(self, number: int) -> Group:
        """Return the row group with this number."""
        first, end = self.starts[number : number + 2].tolist()
        return Group(self, number, first, end - first)

    def group_of(self, row: int) -> Group:
        """Return the row group of a row; the last row group for rows beyond the end."""
        return self.group(min(int(np.searchsorted(self.starts, row, side="right")), self.groups) - 1)


class Group(NamedTuple):
    """A row group of a file: its number, first row, and number of rows."""

    footer: Footer
    number: int
    first: int
    rows: int

    def __str__(self) -> str:
        return f"{self.footer.file} row group {self.number} (rows {self.first + 1} to {self.first + self.rows})"

    @property
    def key(self) -> Hashable:
        """Key of the row group in a cache."""
        return self.footer.key, self.number

    @property
    def texts(self) -> list[Leaf]:
        """Leaves that records are read from, without bytes of items."""
        return [leaf for column in self.footer.columns for leaf in column.texts()]

    def chunk(self, leaf: Leaf) -> Any:
        """Return pyarrow's metadata of a leaf's column chunk."""
        return self.footer.metadata.row_group(self.number).column(leaf.number)

    def place(self, leaf: Leaf) -> tuple[int, int]:
        """Return the byte range of a leaf in the file: start and stop."""
        chunk = self.chunk(leaf)
        start = min(at for at in (chunk.data_page_offset, chunk.dictionary_page_offset) if at and at > 0)
        return start, start + chunk.total_compressed_size

    def size(self, leaves: Sequence[Leaf]) -> int:
        """Return the decoded bytes of leaves according to the footer."""
        return sum(self.chunk(leaf).total_uncompressed_size for leaf in leaves)

    def too_large(self, size: int) -> UserError:
        """Return the error for a row group whose columns decode to `size` bytes."""
        found = f"{self.rows:,} rows with {size:,} bytes"
        expected = f"at most {MAX_GROUP_ROWS:,} rows and {MAX_GROUP_BYTES:,} bytes"
        fix = "write row groups of 100 to 1,000 rows, and leave out a row that is larger by itself"
        return UserError.at(self, found=found, expected=expected, because="a row group is decoded whole", fix=fix)


def read_footer(file: StoredFile, key: Hashable, choose: Callable[[Any], Collection[str]]) -> Footer:
    """Read a file's footer. `choose`: returns the columns to read of an Arrow schema. Raises `UserError`, `OSError`."""
    import pyarrow.parquet as pq

    with _reading(file), file.open() as opened, pq.ParquetFile(opened) as parquet:
        metadata, schema = parquet.metadata, parquet.schema_arrow
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] or [0]
        if any(count < 0 for count in rows):
            raise UserError.at(file, problem="a row group with a negative number of rows", fix=_COPY)
        columns = _columns(schema, metadata.schema, choose(schema)) if any(rows) else ()
        _check_chunks(opened, metadata, [leaf.path for column in columns for leaf in column.leaves])
        return Footer(file, key, metadata, np.cumsum([0, *rows], dtype=np.int64), columns)


@contextlib.contextmanager
def _reading(place: object) -> Iterator[None]:
    """Convert errors of pyarrow inside the context to `UserError`s. Errors of the operating system are not changed."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Arrow raises `OSError`s without an errno for files that it cannot decode.
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise
        if re.search("(en|de)crypt", str(error), re.IGNORECASE):
            problem, fix = f"encrypted ({in_short(error)})", "write the file without encryption"
            raise UserError.at(place, problem=problem, fix=fix) from error
        found = f"data that cannot be read ({in_short(error)})"
        raise UserError.at(place, found=found, expected="an intact Parquet file", fix=_COPY) from error


class _Planned(Exception):
    """Raised when pyarrow reads for the first time, after it has planned all reads."""


def _check_chunks(opened: BinaryIO, metadata: Any, paths: Sequence[str]) -> None:
    """Check the footer's metadata of some leaves by planning to read the leaves. On access to damaged or encrypted
    metadata pyarrow aborts the process, but while it plans a read it raises an exception.
    """
    import pyarrow.parquet as pq

    def read(_: int) -> bytes:
        raise _Planned

    planned = SimpleNamespace(read=read, seek=opened.seek, tell=opened.tell, closed=False, mode="rb")
    with contextlib.suppress(_Planned), pq.ParquetFile(planned, metadata=metadata, pre_buffer=True) as parquet:
        next(parquet.iter_batches(1, range(metadata.num_row_groups), list(paths), use_threads=False), None)


def _columns(schema: Any, leaves: Any, chosen: Collection[str]) -> tuple[Column, ...]:
    """Return the chosen columns of a file, given its Arrow `schema` and the `leaves` of its Parquet schema."""
    columns, first = [], 0
    for each in schema:
        numbers = range(first, first := first + _leaf_count(each.type))
        if each.name in chosen:
            stored = [(number, leaves.column(number)) for number in numbers]
            types = [(leaf.physical_type, leaf.logical_type.type) for _, leaf in stored]
            own_leaves = [Leaf(k, leaf.path, kind == _BYTES) for (k, leaf), kind in zip(stored, types, strict=True)]
            columns.append(Column(each.name, each.type, _tree(each.type), tuple(own_leaves)))
    return tuple(columns)


def _leaf_count(kind: DataType) -> int:
    storage = getattr(kind, "storage_type", kind)  # Storage type of an extension type.
    return sum(_leaf_count(storage.field(k).type) for k in range(storage.num_fields)) or 1


def _tree(kind: DataType) -> Tree:
    """Return the tree of a type, see `Tree`."""
    from pyarrow import types

    if is_item(kind):
        return ITEM
    if types.is_struct(kind):
        trees = {each.name: _tree(each.type) for each in kind}
        return trees if any(tree is not None for tree in trees.values()) else None
    inner = _tree(kind.value_type) if is_list(kind) else None
    return None if inner is None else [inner]


def _width(kind: DataType) -> int:
    """Return the number of fixed-size values (or bytes) to which a null of a type may be decoded."""
    from pyarrow import types

    storage = getattr(kind, "storage_type", kind)
    size = storage.list_size if types.is_fixed_size_list(storage) else 1
    size = storage.byte_width if types.is_fixed_size_binary(storage) else size
    return max(1, size) * max([_width(storage.field(k).type) for k in range(storage.num_fields)], default=1)


def is_bytes(kind: DataType) -> bool:
    """Return whether values of a type are bytes."""
    from pyarrow import types

    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def is_item(kind: DataType) -> bool:
    """Return whether values of a type are items: bytes, or a struct with a field `bytes`, as `datasets` writes it."""
    from pyarrow import types

    if not types.is_struct(kind):
        return is_bytes(kind)
    return any(each.name == "bytes" and (is_bytes(each.type) or types.is_null(each.type)) for each in kind)


def is_list(kind: DataType) -> bool:
    """Return whether values of a type are lists."""
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


# --------------------------------------------------------------------------------------------------- row groups


def load(group: Group, leaves: Sequence[Leaf]) -> Table:
    """Load leaves of a row group. Raises `OSError`, and `UserError` as soon as more than `MAX_GROUP_BYTES` are decoded,
    so that at most this limit and one batch are in memory.
    """
    import pyarrow as pa

    chunks = dict[int, bytes]()
    with _reading(group), group.footer.file.open() as opened:
        for leaf in leaves:
            start, stop = group.place(leaf)
            opened.seek(start)
            chunks[start] = opened.read(stop - start)
        rows, by_dictionary = _batch_rows(group, leaves, chunks.values())
        table = pa.Table.from_batches(list(_batches(opened, chunks, group, leaves, rows, by_dictionary)))
    if table.num_rows != group.rows:
        expected = f"{group.rows:,} as in its footer"
        raise UserError.at(group, found=f"{table.num_rows:,} rows", expected=expected, fix=_COPY)
    return table


def _batch_rows(group: Group, leaves: Sequence[Leaf], chunks: Collection[bytes]) -> tuple[int, list[int]]:
    """Return the number of rows to decode at a time, and the numbers of the leaves to decode as dictionaries, given the
    stored `chunks` of the leaves.

    If all values fit into the limit even if each one repeats the largest, no leaf is decoded as a dictionary. Otherwise
    leaves with dictionaries are; for leaves that pyarrow cannot decode as dictionaries, the largest values bound a row.
    Raises `UserError` for values that certainly exceed the limit, or for a single row that may.
    """
    # Bytes of values stored once; upper bounds for repeated values, and for a row of leaves without dictionaries.
    once, repeated, by_row, by_dictionary = 0, 0, 1, list[int]()
    types = {leaf: column.type for column in group.footer.columns for leaf in column.leaves}
    for leaf, chunk in zip(leaves, chunks, strict=True):
        pages, schema = page_totals(chunk), group.footer.metadata.schema.column(leaf.number)
        levels = schema.max_definition_level + schema.max_repetition_level
        once += pages.bytes + pages.values * _width(types[leaf]) * (VALUE_BYTES + 4 * levels)
        if schema.physical_type != "BYTE_ARRAY":
            continue
        repeated += pages.repeated
        # Columns of extension types are never read as dictionaries.
        if pages.has_prefixes or "extension<" in str(types[leaf]):
            by_row += pages.repeated if schema.max_repetition_level else pages.largest
        elif pages.repeated:
            by_dictionary.append(leaf.number)
    if once + repeated <= MAX_GROUP_BYTES:
        once, by_row, by_dictionary = once + repeated, 1, []
    elif max(once, by_row) > MAX_GROUP_BYTES:
        raise group.too_large(max(once, by_row))
    # Half, since pyarrow has two copies of a batch while it converts extension types.
    rows = min(group.rows, group.rows * BATCH_BYTES // max(1, once), BATCH_BYTES // 2 // by_row)
    return max(1, rows), by_dictionary


def _batches(
    opened: BinaryIO,
    chunks: Mapping[int, bytes],
    group: Group,
    leaves: Sequence[Leaf],
    rows: int,
    by_dictionary: list[int],
) -> Iterator[Table]:
    """Yield batches of `rows` rows. `chunks`: bytes of leaves by start in the file. Raises `UserError` if too large."""
    import pyarrow.parquet as pq

    def read(size: int) -> bytes:
        return chunks[opened.tell()][:size]

    file, total = SimpleNamespace(read=read, seek=opened.seek, tell=opened.tell, closed=False, mode="rb"), 0
    options = {"metadata": group.footer.metadata, "page_checksum_verification": True}
    with pq.ParquetFile(file, read_dictionary=by_dictionary, pre_buffer=False, **options) as parquet:
        # Select leaves by number, since several leaves may have the same path.
        for batch in parquet.reader.iter_batches(rows, [group.number], [leaf.number for leaf in leaves], False):
            total += max(batch.nbytes, decoded_size(batch.columns))
            if total > MAX_GROUP_BYTES:
                raise group.too_large(total)
            yield batch


def decoded_size(arrays: Sequence[Array]) -> int:
    """Return the bytes of arrays with their dictionaries expanded, plus one for each value at any depth."""
    import pyarrow.compute as pc
    from pyarrow import types

    size = 0
    for array in arrays:
        size += len(array)
        if types.is_struct(array.type):
            size += decoded_size(array.flatten())
        elif types.is_map(array.type):
            first, *_, last = array.offsets.to_numpy().tolist() or [0, 0]
            size += decoded_size([array.values[first:last]])
        elif is_list(array.type):
            size += decoded_size([array.flatten()])
        elif types.is_dictionary(array.type):
            lengths = pc.call_function("binary_length", [array.dictionary]).take(array.indices)
            size += pc.call_function("sum", [lengths]).as_py() or 0
        else:
            size += array.nbytes
    return size


def has_all_bytes(group: Group, texts: Table, column: Column) -> bool:
    """Return whether all items of a column have bytes, by the footer's statistics and the table of texts."""
    stored, items = 0, group.rows if column.tree == ITEM else 0
    for leaf in column.leaves:
        if leaf.is_bytes:
            chunk = group.chunk(leaf)
            # pyarrow aborts the process on access to statistics whose type is not the column's.
            if chunk.physical_type != "BYTE_ARRAY" or chunk.statistics is None or not chunk.statistics.has_null_count:
                return False
            stored += chunk.num_values - chunk.statistics.null_count
    if column.texts():
        items = sum(_item_count(chunk, column.tree) for chunk in texts.column(column.name).chunks)
    return stored == items and (column.tree == ITEM or bool(column.texts()))


def _item_count(array: Array, tree: Tree) -> int:
    """Return the number of items in an array that are not null. `tree`: tree of the array's type."""
    if tree is None:
        return 0
    if tree == ITEM:
        return len(array) - array.null_count
    if isinstance(tree, list):
        return _item_count(array.flatten(), tree[0])
    fields = zip(array.type, array.flatten(), strict=True)
    return sum(_item_count(each, tree[field.name]) for field, each in fields if field.name in tree)


# --------------------------------------------------------------------------------------------- headers of pages

# Numbers in parquet.thrift. By type of a page with values: field of its header, and field of the encoding there.
_DICTIONARY, _TYPE_HEADERS = 2, {0: (5, 2), 2: (7, 2), 3: (8, 4)}
_BY_DICTIONARY, _AFTER_PREFIX = (2, 8), 7


class PageTotals(NamedTuple):
    """Totals over the pages of a column chunk, from the headers of the pages.

    Attributes:
        bytes: decompressed bytes of the pages.
        values: number of values, including dictionary values.
        repeated: upper bound of the bytes of repeated dictionary values, and of prefixes repeated from earlier values.
        largest: upper bound of the bytes of the largest repeated value or prefix.
        has_prefixes: whether some pages are encoded as DELTA_BYTE_ARRAY.
    """

    bytes: int
    values: int
    repeated: int
    largest: int
    has_prefixes: bool


def page_totals(chunk: bytes) -> PageTotals:
    """Return the totals of a column chunk. Raises an exception for damaged headers."""
    at = total = values = dictionary = repeated = largest = 0
    has_prefixes = False
    while at < len(chunk):
        header, end = _struct(chunk, at)
        kind, size, stored = header[1], header[2], header[3]
        count, encoding = 0, None
        if kind in _TYPE_HEADERS:
            type_field, encoding_field = _TYPE_HEADERS[kind]
            count, encoding = header[type_field][1], header[type_field][encoding_field]
        if min(size, stored, count) < 0:
            raise ValueError("a negative number in the header of a page")
        size = max(size, stored)  # pyarrow ignores `size` of uncompressed pages.
        at, total, values = end + stored, total + size, values + count
        if kind == _DICTIONARY:
            dictionary += size
            continue
        has_prefixes |= encoding == _AFTER_PREFIX
        bound = size if encoding == _AFTER_PREFIX else dictionary if encoding in _BY_DICTIONARY else 0
        repeated, largest = repeated + count * bound, max(largest, bound)
    return PageTotals(total, values, repeated, largest, has_prefixes)


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Decode a struct in Thrift's compact protocol. Returns its fields by number, and the position after it."""
    fields, number = dict[int, Any](), 0
    while (head := data[at]) != 0:
        at, number, kind = at + 1, number + (head >> 4), head & 15
        if head < 16 or kind not in (1, 2, 5, 6, 8, 12):
            raise ValueError("a field of another type in the header of a page")
        if kind == 12:
            fields[number], at = _struct(data, at)
        elif kind > 2:  # Kinds 1 and 2 are booleans, whose value is in the kind.
            value, at = _varint(data, at)
            at += value if kind == 8 else 0  # Skip the bytes of a string.
            fields[number] = value >> 1 ^ -(value & 1)
            if kind == 5 and value >> 32:
                raise ValueError("a number of more than 32 bits in the header of a page")
    return fields, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) >= 128:
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
    return value | byte << shift, at + 1


# ---------------------------------------------------------------------------------------------------- the cache


class _Entry:
    """A cache entry: the result of a load, which may still be running, and its size in bytes, estimated until then."""

    def __init__(self, size: int) -> None:
        self.loaded, self.size = Future[Any](), size


class GroupCache:
    """Cache of columns of row groups, with at most `limit` bytes. The least recently used columns are dropped, except
    columns of the row group that was loaded last.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._entries = OrderedDict[tuple[Hashable, str], _Entry]()

    def get(self, group: Group, name: str, leaves: Sequence[Leaf], load: Callable[[], Any]) -> Any:
        """Return the cached result of `load` for these leaves of a row group. One thread loads, while others wait."""
        key = group.key, name
        with self._lock:
            entry = self._entries.get(key)
            is_new = entry is None
            if entry is None:
                entry = self._entries[key] = _Entry(group.size(leaves))
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
                if total > self._limit and old[0] != key[0] and self._entries[old].loaded.done():
                    total -= self._entries.pop(old).size
