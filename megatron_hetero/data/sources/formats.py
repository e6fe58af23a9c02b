"""The interface of file formats: a scan finds all records of a file once; then they are read by number in any order."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from megatron_hetero.base.contents import StoredFile, is_url
from megatron_hetero.base.errors import UserError

Columns: TypeAlias = "dict[str, array[int] | bytearray]"
"""Numbers (int64) or bytes about the records of one file, by name."""
Arrays: TypeAlias = Mapping[str, np.ndarray]
"""Columns as arrays: int64 or uint8 [entries]."""


class Place(NamedTuple):
    """A record found by a scan.

    Attributes:
        size: bytes to read for the record.
        share: share of the file up to the end of the record, 0 to 1.
        block: number of the block of the file that must be read for the record; None if the format has no blocks.
    """

    size: int
    share: float
    block: int | None = None


class RawRecord(NamedTuple):
    """A record that was read.

    Attributes:
        value: a JSON value, with `Content` for items in the file; an error if the text cannot be decoded.
        where: name of the record in messages.
    """

    value: Any
    where: str


class Format(Protocol):
    """Interface for reading files of one format. Instances can be pickled and used by several threads, and their `repr`
    includes everything that an index depends on.
    """

    def scan(self, file: StoredFile, columns: Columns) -> Iterator[Place]:
        """Yield the places of all records of a file in order, and add to `columns` what `read` needs.

        Raises:
            UserError: the file is damaged, or not of this format.
            OSError: the file cannot be read.
        """
        ...

    def read(self, file: StoredFile, columns: Arrays, numbers: range) -> Iterator[RawRecord]:
        """Yield consecutive records, numbered from 0, of a file with these columns. Raises the errors of `scan`."""
        ...

    def read_ahead(self, file: StoredFile, columns: Arrays, numbers: np.ndarray) -> None:
        """Prefetch the records with these numbers, if that makes reading faster."""


Opened: TypeAlias = tuple[Format, tuple[StoredFile, ...], Mapping[str, str]]
"""A format, its files, and the mapping of fields that is stored in the data set."""


def finished(column: array[int] | bytearray | None) -> np.ndarray:
    """Return a column as an array, int64 or uint8 [entries]; empty for None."""
    kind = np.uint8 if isinstance(column, bytearray) else np.int64
    return np.frombuffer(column, kind) if column else np.zeros(0, kind)


def prefetch(file: StoredFile, ranges: Iterable[tuple[int, int]]) -> None:
    """Prefetch byte ranges (start, stop) in the background, if the file is on this machine."""
    if is_url(file.name) or not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError), file.open() as opened:
        for start, stop in ranges:
            os.posix_fadvise(opened.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)


def changed(where: str) -> UserError:
    """Return the error for a file whose contents differ from its index."""
    problem, because = "not what the index of its file says", "the file has been changed or replaced"
    fix = "do not change data while it is read, and start again: a changed file is indexed anew"
    return UserError.at(where, problem=problem, because=because, fix=fix)
