"""Headers of the pages in a column chunk of Parquet, which say what it decodes to, whatever the footer says.

pyarrow refuses a page that has more or fewer bytes than its header says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

# As in parquet.thrift.
_DATA, _INDEX, _DICTIONARY, _DATA_2 = range(4)
_OF_DICTIONARY, _AFTER_PREFIX = (2, 8), 7


class Decoded(NamedTuple):
    """What a column chunk decodes to: bytes of its pages, number of values, and bytes that values repeat at most, of
    the dictionary or of values before them.
    """

    pages: int
    values: int
    of_dictionary: int
    after_prefix: int


def decoded(chunk: bytes) -> Decoded:
    """The figures of a column chunk. Raises an exception for damaged headers."""
    pages = values = dictionary = of_dictionary = after_prefix = 0
    for _, kind, size, count, encoding in _pages(chunk):
        pages, values = pages + size, values + count
        dictionary += size if kind == _DICTIONARY else 0
        of_dictionary += count * dictionary if encoding in _OF_DICTIONARY else 0
        after_prefix += count * size if encoding == _AFTER_PREFIX else 0
    return Decoded(pages, values, of_dictionary, after_prefix)


def values_of_dictionary(chunk: bytes) -> bytes:
    """The chunk with other values in pages of a type that readers skip."""
    hidden = bytearray(chunk)
    for start, kind, _, _, encoding in _pages(chunk):
        if kind in (_DATA, _DATA_2) and encoding not in _OF_DICTIONARY:
            hidden[start + 1] = 2 * _INDEX
    return bytes(hidden)


def _pages(chunk: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """The start, type, decompressed size, number of values, and encoding of each page."""
    at = 0
    while at < len(chunk):
        header, end = _struct(chunk, at)
        kind, size, stored = header[1], header[2], header[3]
        values = encoding = 0
        if kind == _DATA:
            values, encoding = header[5][1], header[5][2]
        elif kind == _DATA_2:
            values, encoding = header[8][1], header[8][4]
        if min(size, stored, values) < 0:
            raise ValueError("a negative number in the header of a page")
        yield at, kind, size, values, encoding
        at = end + stored


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct in Thrift's compact protocol, by number, and where it ends."""
    fields, number = dict[int, Any](), 0
    while (head := data[at]) != 0:
        at, number, kind = at + 1, number + (head >> 4), head & 15
        if head < 16 or kind not in (1, 2, 5, 6, 8, 12):
            raise ValueError("a field of another type in the header of a page")
        if kind == 12:
            fields[number], at = _struct(data, at)
        elif kind > 2:  # The others are booleans.
            value, at = _varint(data, at)
            at += value if kind == 8 else 0  # Bytes.
            fields[number] = value >> 1 ^ -(value & 1)
            if kind == 5 and value >> 32:
                raise ValueError("a number of more than 32 bits in the header of a page")
    return fields, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) >= 128:
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
    return value | byte << shift, at + 1
