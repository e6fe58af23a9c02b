"""WebDataset tars: members whose names agree up to the first dot of their last component are parts of one sample."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_hetero.base.contents import Part, StoredFile
from megatron_hetero.base.errors import UserError
from megatron_hetero.data.sources.formats import Arrays, Columns, Place, RawRecord, changed, prefetch
from megatron_hetero.data.sources.json_files import MAX_TEXT_BYTES
from megatron_hetero.data.sources.tar_headers import BLOCK, Member, is_header_of, quoted_name, tar_members
from megatron_hetero.data.sources.tar_records import TEXTS, decoded, with_defaults

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

    def read(self, file: StoredFile, columns: Arrays, numbers: range) -> Iterator[RawRecord]:
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
            yield RawRecord(value, where)

    def read_ahead(self, file: StoredFile, columns: Arrays, numbers: np.ndarray) -> None:
        """See `Format.read_ahead`. Prefetches the members of these samples."""
        if len(numbers):
            prefetch(file, _ranges(columns, numbers).tolist())

    def _record(self, parts: dict[str, Any], where: str) -> dict[str, Any]:
        """The record of a sample with these parts. Raises `UserError`."""
        return with_defaults(parts, where, self.mapped)

    def _text(self, file: StoredFile, key: str, part: str, start: int, size: int) -> bytes | int:
        """The bytes of a part, or their number if there are too many. Raises `UserError` if another part is there."""
        if size > MAX_TEXT_BYTES:
            return size
        # Its header comes along, and shows whether the columns are right.
        raw = file.read(start - BLOCK, BLOCK + size)
        first = max(0, start - BLOCK - _BEFORE)
        before = partial(file.read, first, start - BLOCK - first)
        if len(raw) < BLOCK + size or not is_header_of(raw[:BLOCK], f"{key}.{part}", size, before):
            raise changed(f"{file.name}: {key} part {part}")
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


def collect(file: StoredFile, whole: int, columns: Columns, members: Iterable[Member]) -> Iterator[Place]:
    """Yield the places of samples in a file of `whole` bytes, in the order of their first parts, and fill the columns.

    Raises:
        UserError: a sample has a part twice.
    """
    keys, names, spelled = dict[bytes, int](), dict[bytes, int](), dict[bytes, int]()
    owners, parts, starts, sizes = (array("q") for _ in range(4))
    size = end = 0
    for key, part, start, part_size in members:
        if key not in keys:
            if keys:
                yield Place(size, end / whole)
            keys[key], size = len(keys), 0
        if part not in spelled:  # In lower case, as webdataset has it.
            name = part.decode("utf-8", "backslashreplace").lower().encode()
            spelled[part] = names.setdefault(name, len(names))
        owners.append(keys[key])
        parts.append(spelled[part])
        starts.append(start)
        sizes.append(part_size)
        size, end = size + part_size, start + part_size
    if keys:
        yield Place(size, end / whole)
    samples, named = np.frombuffer(owners, np.int64), np.frombuffer(parts, np.int64)
    _require_distinct(file, list(keys), list(names), samples * len(names) + named)
    if np.any(samples[1:] < samples[:-1]):  # Bring the parts of each sample together.
        order = np.argsort(samples, kind="stable")
        parts, starts, sizes = (
            array("q", np.frombuffer(each, np.int64)[order].tobytes()) for each in (parts, starts, sizes)
        )
    columns |= {"parts": parts, "starts": starts, "sizes": sizes}
    columns["part_ends"] = array("q", np.cumsum(np.bincount(samples, minlength=len(keys)), dtype=np.int64).tobytes())
    columns["keys"], columns["key_ends"] = bytearray().join(keys), array("q", accumulate(map(len, keys)))
    columns["names"], columns["name_ends"] = bytearray().join(names), array("q", accumulate(map(len, names)))


def _require_distinct(file: StoredFile, keys: Sequence[bytes], names: Sequence[bytes], codes: np.ndarray) -> None:
    """Check the `codes` of parts, which are equal for one name in one sample. Raises `UserError`."""
    codes.sort()
    twice = codes[1:][codes[1:] == codes[:-1]]
    if len(twice):
        owner, part = divmod(int(twice[0]), len(names))
        problem = f"part {quoted_name(names[part])} given twice"
        fix = "rename one of the two members, or pack the samples anew"
        raise UserError.at(f"{file}: {quoted_name(keys[owner])}", problem=problem, fix=fix)
