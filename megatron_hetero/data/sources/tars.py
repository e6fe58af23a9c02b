"""WebDataset tars: members with the same folder and the same name up to its first dot are the fields of one sample."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_hetero.base.contents import ByteRange, StoredFile
from megatron_hetero.base.errors import UserError
from megatron_hetero.data.sources.formats import Arrays, Columns, Place, RawRecord, changed, prefetch
from megatron_hetero.data.sources.json_files import MAX_TEXT_BYTES
from megatron_hetero.data.sources.tar_headers import BLOCK, Member, is_header_of, quoted_name, tar_members
from megatron_hetero.data.sources.tar_records import TEXTS, decoded, with_defaults

_BEFORE = 16 * BLOCK
"""Bytes before a header that are searched for extended headers."""
_NEAR = 1 << 17
"""Largest gap in bytes between two fields that are prefetched in one range."""


@dataclass(frozen=True)
class TarFiles:
    """`Format` for WebDataset tars. A record has the fields of a sample by name, texts decoded and others as `Content`,
    and the fields that `with_defaults` adds.

    Index columns: `keys` of samples, which end at `key_ends`; the end of each sample's fields, `field_ends`; for each
    field the number of its name, `fields`, and its bytes in the file, `starts` and `sizes`; `names` of fields, which
    end at `name_ends`.

    Attributes:
        mapped: whether the data set has `fields`. Then a JSON field may name items that do not exist.
    """

    mapped: bool = False

    def scan(self, file: StoredFile, columns: Columns) -> Iterator[Place]:
        """Yield the places of all samples, see `Format.scan`."""
        whole = int(file.version()[1])
        yield from collect(file, whole, columns, tar_members(file, whole))
        if not columns["key_ends"]:
            because = "members of samples are regular files named KEY.FIELD"
            fix = "name them such as 0001.jpg and 0001.json, or remove the file"
            raise UserError.at(file, problem="no samples", because=because, fix=fix)

    def read(self, file: StoredFile, columns: Arrays, numbers: range) -> Iterator[RawRecord]:
        """Yield consecutive samples as records, see `Format.read`."""
        for key, members in _samples(columns, numbers):
            where = f"{file.name}: {key}"
            raw = {
                field: self._text(file, key, field, start, size)
                if field.rpartition(".")[2] in TEXTS
                else ByteRange(file, start, size, f"{key}.{field}")
                for field, start, size in members
            }
            try:
                value = self._record({field: decoded(each, field, where) for field, each in raw.items()}, where)
            except UserError as error:
                value = error
            yield RawRecord(value, where)

    def read_ahead(self, file: StoredFile, columns: Arrays, numbers: np.ndarray) -> None:
        """Prefetch the members of these samples, see `Format.read_ahead`."""
        if len(numbers):
            prefetch(file, _ranges(columns, numbers).tolist())

    def _record(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the record of a sample with these fields. Raises `UserError`."""
        return with_defaults(fields, where, self.mapped)

    def _text(self, file: StoredFile, key: str, field: str, start: int, size: int) -> bytes | int:
        """Return the bytes of a field, or their number if too many. Raises `UserError` if the file has changed."""
        if size > MAX_TEXT_BYTES:
            return size
        # Read the field together with its header, which shows whether the index columns still fit.
        raw = file.read(start - BLOCK, BLOCK + size)
        first = max(0, start - BLOCK - _BEFORE)
        before = partial(file.read, first, start - BLOCK - first)
        if len(raw) < BLOCK + size or not is_header_of(raw[:BLOCK], f"{key}.{field}", size, before):
            raise changed(f"{file.name}: {key} field {field}")
        return raw[BLOCK:]


def _samples(columns: Arrays, numbers: range) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Yield the key and the fields of consecutive samples. A field is its name, start and size in bytes."""
    before = max(0, numbers.start - 1)  # The first sample starts where the previous sample ends.
    chosen = slice(before, numbers.stop)
    key_ends, field_ends = columns["key_ends"][chosen].tolist(), columns["field_ends"][chosen].tolist()
    if not numbers.start:
        key_ends, field_ends = [0, *key_ends], [0, *field_ends]
    keys, first = columns["keys"][key_ends[0] : key_ends[-1]].tobytes(), field_ends[0]
    fields, starts, sizes = (columns[name][first : field_ends[-1]].tolist() for name in ("fields", "starts", "sizes"))
    names = {field: _field_name(columns, field) for field in set(fields)}
    for k in range(len(numbers)):
        key = keys[key_ends[k] - key_ends[0] : key_ends[k + 1] - key_ends[0]].decode("utf-8", "backslashreplace")
        members = range(field_ends[k] - first, field_ends[k + 1] - first)
        yield key, [(names[fields[m]], starts[m], sizes[m]) for m in members]


def _field_name(columns: Arrays, field: int) -> str:
    ends = columns["name_ends"]
    return columns["names"][ends[field - 1] if field else 0 : ends[field]].tobytes().decode("utf-8")


def _ranges(columns: Arrays, numbers: np.ndarray) -> np.ndarray:
    """Return the byte ranges of samples in their file, int64 [ranges, 2], ascending, joined across small gaps."""
    ends = columns["field_ends"]
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
    """Yield the places of samples in a file of `whole` bytes, in the order of their first fields, and fill the columns.

    Raises:
        UserError: a sample has a field twice.
    """
    keys, names, spelled = dict[bytes, int](), dict[bytes, int](), dict[bytes, int]()
    owners, fields, starts, sizes = (array("q") for _ in range(4))
    size = end = 0
    for key, field, start, field_size in members:
        if key not in keys:
            if keys:
                yield Place(size, end / whole)
            keys[key], size = len(keys), 0
        if field not in spelled:  # In lower case, like the library webdataset.
            name = field.decode("utf-8", "backslashreplace").lower().encode()
            spelled[field] = names.setdefault(name, len(names))
        owners.append(keys[key])
        fields.append(spelled[field])
        starts.append(start)
        sizes.append(field_size)
        size, end = size + field_size, start + field_size
    if keys:
        yield Place(size, end / whole)
    samples, named = np.frombuffer(owners, np.int64), np.frombuffer(fields, np.int64)
    _require_distinct(file, list(keys), list(names), samples * len(names) + named)
    if np.any(samples[1:] < samples[:-1]):  # The members of some sample are not adjacent: sort fields by sample.
        order = np.argsort(samples, kind="stable")
        fields, starts, sizes = (
            array("q", np.frombuffer(each, np.int64)[order].tobytes()) for each in (fields, starts, sizes)
        )
    columns |= {"fields": fields, "starts": starts, "sizes": sizes}
    columns["field_ends"] = array("q", np.cumsum(np.bincount(samples, minlength=len(keys)), dtype=np.int64).tobytes())
    columns["keys"], columns["key_ends"] = bytearray().join(keys), array("q", accumulate(map(len, keys)))
    columns["names"], columns["name_ends"] = bytearray().join(names), array("q", accumulate(map(len, names)))


def _require_distinct(file: StoredFile, keys: Sequence[bytes], names: Sequence[bytes], codes: np.ndarray) -> None:
    """Check that all `codes` differ, since equal codes mean that a sample has a field twice. Raises `UserError`."""
    codes.sort()
    twice = codes[1:][codes[1:] == codes[:-1]]
    if len(twice):
        owner, field = divmod(int(twice[0]), len(names))
        problem = f"field {quoted_name(names[field])} given twice"
        fix = "rename one of the two members, or pack the samples anew"
        raise UserError.at(f"{file}: {quoted_name(keys[owner])}", problem=problem, fix=fix)
