"""Headers of the pages in a column chunk of Parquet, which say what it decodes to, whatever the footer says.

pyarrow refuses a compressed page that has more or fewer bytes than its header says, and no other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# As in parquet.thrift. Of pages with values: by type, the number of their own header, and of the encoding in it.
_DICTIONARY, _OWN_HEADERS = 2, {0: (5, 2), 2: (7, 2), 3: (8, 4)}
_OF_DICTIONARY, _AFTER_PREFIX = (2, 8), 7


class Decoded(NamedTuple):
    """What a column chunk decodes to.

    Attributes:
        pages: bytes of its pages.
        values: number of values, with those of the dictionary.
        repeated: bytes that values repeat at most, of the dictionary or of values before them.
        largest: bytes of such a value at most.
        has_prefixes: whether some are in DELTA_BYTE_ARRAY.
    """

    pages: int
    values: int
    repeated: int
    largest: int
    has_prefixes: bool


def decoded(chunk: bytes) -> Decoded:
    """The figures of a column chunk. Raises an exception for damaged headers."""
    at = pages = values = dictionary = repeated = largest = 0
    has_prefixes = False
    while at < len(chunk):
        header, end = _struct(chunk, at)
        kind, size, stored = header[1], header[2], header[3]
        count, encoding = 0, None
        if kind in _OWN_HEADERS:
            own, of_encoding = _OWN_HEADERS[kind]
            count, encoding = header[own][1], header[own][of_encoding]
        if min(size, stored, count) < 0:
            raise ValueError("a negative number in the header of a page")
        size = max(size, stored)  # Where nothing is compressed pyarrow does not read the former.
        at, pages, values = end + stored, pages + size, values + count
        if kind == _DICTIONARY:
            dictionary += size
            continue
        has_prefixes |= encoding == _AFTER_PREFIX
        most = size if encoding == _AFTER_PREFIX else dictionary if encoding in _OF_DICTIONARY else 0
        repeated, largest = repeated + count * most, max(largest, most)
    return Decoded(pages, values, repeated, largest, has_prefixes)


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
