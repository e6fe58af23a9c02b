"""WebDataset tars: members whose names agree up to the first dot of their last component are parts of one sample."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron_hetero.base.contents import Part, StoredFile, is_url
from megatron_hetero.base.errors import UserError, quoted
from megatron_hetero.data.sources.formats import Arrays, Columns, Found, Place, changed, integers, texts
from megatron_hetero.data.sources.json_files import MOST_TEXT_BYTES
from megatron_hetero.data.sources.tar_headers import BLOCK, Member, is_header_of, tar_members
from megatron_hetero.data.sources.tar_records import TEXTS, decoded, with_defaults

MOST_PARTS = 4096
"""Limit of the parts of a sample."""

_BEFORE = 16 * BLOCK
"""Bytes that extended headers are looked for in."""
_NEAR = 1 << 17
"""Bytes between two parts that are read ahead with them."""


@dataclass(frozen=True)
class TarFiles:
    """See `megatron_hetero.data.sources.formats.Format`. A record has the parts of a sample by name, texts decoded and
    others as `Content`, and the fields that `with_defaults` adds.

    Columns: names of samples in `keys` up to `key_ends`, and their parts up to `part_ends`; of each part its name's
    number in `parts`, and `starts` and `sizes` in bytes; `names` of parts up to `name_ends`.

    Attributes:
        mapped: whether fields are mapped. A record's names of items that it does not contain are then no errors.
    """

    mapped: bool = False

    def scan(self, file: StoredFile, columns: Columns) -> Iterator[Place]:
        """See `Format.scan`."""
        whole = int(file.version()[1])
        yield from collect(file, whole, columns, tar_members(file, whole))
        if not columns["key_ends"]:
            because = "members of samples are regular files named KEY.PART"
            fix = "name them such as 0001.jpg and 0001.json, or remove the file"
            raise UserError.at(file, problem="no samples", because=because, fix=fix)

    def read(self, file: StoredFile, columns: Arrays, numbers: range) -> Iterator[Found]:
        """See `Format.read`."""
        for key, members in _samples(columns, numbers):
            where = f"{file.name}: {key}"
            raw = {
                part: self._text(file, key, part, start, size)
                if part.rpartition(".")[2] in TEXTS
                else Part(file, start, size, f"{key}.{part}")
                for part, start, size in members
            }
            try:
                value = self._record({part: decoded(each, part, where) for part, each in raw.items()}, where)
            except UserError as error:
                value = error
            yield Found(value, where)

    def read_ahead(self, file: StoredFile, columns: Arrays, numbers: np.ndarray) -> None:
        """Have the system read these samples, if the file is on this machine."""
        if is_url(file.name) or not len(numbers) or not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError), file.open() as opened:
            for start, stop in _ranges(columns, numbers).tolist():
                os.posix_fadvise(opened.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)

    def _record(self, parts: dict[str, Any], where: str) -> dict[str, Any]:
        """The record of a sample with these parts. Raises `UserError`."""
        return with_defaults(parts, where, self.mapped)

    def _moved(self, where: str) -> UserError:
        """The error for a part that is not where the columns say."""
        return changed(where)

    def _text(self, file: StoredFile, key: str, part: str, start: int, size: int) -> bytes | int:
        """The bytes of a part, or their number if there are too many. Raises `UserError` if another part is there."""
        if size > MOST_TEXT_BYTES:
            return size
        # Its header comes along, and shows whether the columns are right.
        raw = file.read(start - BLOCK, BLOCK + size)
        first = max(0, start - BLOCK - _BEFORE)
        before = partial(file.read, first, start - BLOCK - first)
        if len(raw) < BLOCK + size or not is_header_of(raw[:BLOCK], f"{key}.{part}", size, before):
            raise self._moved(f"{file.name}: {key} part {part}")
        return raw[BLOCK:]


def _samples(columns: Arrays, numbers: range) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Yield key and parts of consecutive samples, each part with its name, start and size."""
    before = max(0, numbers.start - 1)  # The end of the sample before the first is where that starts.
    chosen = slice(before, numbers.stop)
    key_ends, part_ends = columns["key_ends"][chosen].tolist(), columns["part_ends"][chosen].tolist()
    if not numbers.start:
        key_ends, part_ends = [0, *key_ends], [0, *part_ends]
    keys, first = columns["keys"][key_ends[0] : key_ends[-1]].tobytes(), part_ends[0]
    parts, starts, sizes = (columns[name][first : part_ends[-1]].tolist() for name in ("parts", "starts", "sizes"))
    names = {part: _name_of_part(columns, part) for part in set(parts)}
    for k in range(len(numbers)):
        key = keys[key_ends[k] - key_ends[0] : key_ends[k + 1] - key_ends[0]].decode("utf-8", "backslashreplace")
        own = range(part_ends[k] - first, part_ends[k + 1] - first)
        yield key, [(names[parts[m]], starts[m], sizes[m]) for m in own]


def _name_of_part(columns: Arrays, part: int) -> str:
    ends = columns["name_ends"]
    return columns["names"][ends[part - 1] if part else 0 : ends[part]].tobytes().decode("utf-8")


def _ranges(columns: Arrays, numbers: np.ndarray) -> np.ndarray:
    """Where samples are in their file, int64 [ranges, 2]: start and stop in bytes, ascending, small gaps filled."""
    ends = columns["part_ends"]
    firsts = np.where(numbers > 0, ends[numbers - 1], 0)
    counts = ends[numbers] - firsts
    members = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    members = members[np.argsort(columns["starts"][members])]
    starts = columns["starts"][members] - BLOCK
    stops = np.maximum.accumulate(starts + BLOCK + columns["sizes"][members])
    is_apart = starts[1:] > stops[:-1] + _NEAR
    return np.stack([starts[np.append(True, is_apart)], stops[np.append(is_apart, True)]], axis=1)


# -------------------------------------------------------------------------------------------- members as samples


def collect(
    file: StoredFile, whole: int, columns: Columns, members: Iterable[Member], left_out: Sequence[str] = ()
) -> Generator[Place, None, int]:
    """Yield the places of samples in a file of `whole` bytes, in the order of their first parts, and fill the columns.

    Args:
        left_out: names of samples that are not used.

    Returns:
        The number of samples, with those left out.

    Raises:
        UserError: a sample has a part twice, or too many.
    """
    collector = _Collector(columns, frozenset(key.encode("utf-8", "backslashreplace") for key in left_out))
    size = end = 0
    is_first = True
    for key, part, start, part_size in members:
        if collector.add(key, part, start, part_size):
            if not is_first:
                yield Place(size, end / whole)
            is_first, size = False, 0
        size, end = size + part_size, start + part_size
    if not is_first:
        yield Place(size, end / whole)
    collector.finish(file)
    return len(columns["key_ends"]) + len(collector.left_out)


class _Collector:
    """Fills the columns of a file. Unless keys are out of order, it has no objects for each sample or part."""

    def __init__(self, columns: Columns, left_out: frozenset[bytes]) -> None:
        self._columns = columns
        self._keys, self._names = texts(columns, "keys"), texts(columns, "names")
        self._key_ends, self._name_ends = integers(columns, "key_ends"), integers(columns, "name_ends")
        self._of_parts = [integers(columns, name) for name in ("parts", "starts", "sizes")]
        self._owners = array("q")
        self._key: bytes | None = None
        self._owner, self._largest, self._is_out = -1, b"", False
        self._numbers: dict[bytes, int] | None = None
        self._parts: dict[bytes, int] = {}
        self._wanted_out, self.left_out = left_out, set[bytes]()

    def add(self, key: bytes, part: bytes, start: int, size: int) -> bool:
        """Add a part. Returns whether a sample begins with it."""
        is_new = key != self._key and self._turn_to(key)
        if self._is_out:
            return False
        number = self._parts.get(part)
        parts, starts, sizes = self._of_parts
        parts.append(self._new_part(part) if number is None else number)
        starts.append(start)
        sizes.append(size)
        self._owners.append(self._owner)
        return is_new

    def _turn_to(self, key: bytes) -> bool:
        """Make it the sample that parts are added to. Returns whether it is a new one."""
        self._key, self._is_out = key, key in self._wanted_out
        if self._is_out:
            self.left_out.add(key)
            return False
        if key > self._largest:  # Most files have ascending keys, whose numbers nobody asks for.
            self._largest = key
        elif self._numbers is None:
            ends = self._key_ends
            self._numbers = {
                bytes(self._keys[start:end]): k for k, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
            }
        new = len(self._key_ends)
        self._owner = new if self._numbers is None else self._numbers.setdefault(key, new)
        if self._owner < new:
            return False
        self._keys += key
        self._key_ends.append(len(self._keys))
        return True

    def _new_part(self, part: bytes) -> int:
        """The number of a part's name, in lower case as webdataset has it, that comes in this spelling first."""
        name = part.decode("utf-8", "backslashreplace").lower().encode()
        number = self._parts.get(name, len(self._name_ends))
        if number == len(self._name_ends):
            self._names += name
            self._name_ends.append(len(self._names))
        self._parts[name] = self._parts[part] = number
        return number

    def finish(self, file: StoredFile) -> None:
        """Bring the parts of each sample together. Raises `UserError`."""
        owners = np.frombuffer(self._owners, np.int64)
        counts = np.bincount(owners, minlength=len(self._key_ends))
        self._columns["part_ends"] = array("q", np.cumsum(counts, dtype=np.int64).tobytes())
        if len(counts) and counts.max() > MOST_PARTS:
            where, found = f"{file}: {self._quoted_key(int(counts.argmax()))}", f"{counts.max()} parts of one sample"
            because = "the key of a sample ends at the first dot of a member's name"
            fix = "name the members without other dots, such as 0001.jpg"
            raise UserError.at(where, found=found, expected=f"at most {MOST_PARTS}", because=because, fix=fix)
        parts = np.frombuffer(self._of_parts[0], np.int64)
        codes = owners * len(self._name_ends) + parts
        codes.sort()
        twice = codes[1:][codes[1:] == codes[:-1]]
        if len(twice):
            owner, part = divmod(int(twice[0]), len(self._name_ends))
            problem = f"part {quoted(_text_at(self._names, self._name_ends, part))} given twice"
            fix = "rename one of the two members, or pack the samples anew"
            raise UserError.at(f"{file}: {self._quoted_key(owner)}", problem=problem, fix=fix)
        if self._numbers is not None:
            order = np.argsort(owners, kind="stable")
            for name in ("parts", "starts", "sizes"):
                values = np.frombuffer(integers(self._columns, name), np.int64)
                self._columns[name] = array("q", values[order].tobytes())

    def _quoted_key(self, number: int) -> str:
        return quoted(_text_at(self._keys, self._key_ends, number))


def _text_at(data: bytearray, ends: array[int], number: int) -> str:
    return data[ends[number - 1] if number else 0 : ends[number]].decode("utf-8", "backslashreplace")
