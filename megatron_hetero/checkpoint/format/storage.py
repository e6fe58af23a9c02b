"""Writes and reads `Entry`s: each rank its own safetensors files, and the first rank the index of all.

Not with Megatron's `dist_checkpointing`: it shards every tensor evenly along its dims, unlike ragged vocabulary shards
and flat ranges of the distributed optimizer, and pickles. Nor with `torch.distributed.checkpoint`: in safetensors it
writes one part of a tensor per file (`_write_files_from_queue` of torch 2.13 stores them by the tensor's name alone).
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.checkpoint.format.blocks import common
from megatron_hetero.checkpoint.format.index import (
    DTYPES,
    INDEX,
    NAMES,
    Chunk,
    Index,
    Part,
    chunk_of,
    index_of,
    to_json,
)
from megatron_hetero.checkpoint.format.keys import Entry
from megatron_hetero.distributed.collective import FIRST, Working, on_every, on_first_of_all
from megatron_hetero.errors import UserError, in_short, os_errors_as, reason
from megatron_hetero.files.opening import open_regular
from megatron_hetero.hf.folder_writer import plan_shards
from megatron_hetero.hf.weight_map import Interval
from megatron_hetero.outputs.checkpoints import ANOTHER, FileRecord, wait_for, write_synced

FILE_BYTES = 5 * 10**9
"""Maximum size of a tensor file, unless one tensor is larger: ranks verify a checkpoint file by file."""
_REPORT = "report this: it is an error of the program; earlier checkpoints are intact"
_READ_BYTES = 1 << 22
"""Read at a time, unless one row is larger."""


class HashedFile:
    """A file that is written in order."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        """As any file's."""
        self._digest.update(data)
        self._size += len(data)
        self._file.write(data)

    def record(self) -> FileRecord:
        """Size and hash, once the disk has all of it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(self._size, self._digest.hexdigest())


def write_entries(
    folder: Path,
    entries: Sequence[Entry],
    group: dist.ProcessGroup | None,
    value: Callable[[Entry], Tensor] = Entry.current,
    working: Working = nullcontext,
) -> dict[str, FileRecord]:
    """Write all ranks' entries, each rank to its own files. Collective over `group`; None for a single process.

    `value` returns what to write for an entry, and is called just before; the entry's own values then only need a shape
    and a dtype (they may be on the `meta` device).

    Returns size and hash of each file that this process has written, on the first rank including the index. Raises
    `UserError` on every rank if one of them cannot write.
    """
    rank, records = _rank(group), dict[str, FileRecord]()

    def refused(error: OSError) -> UserError:
        return UserError.at(
            error.filename or folder,
            problem=f"{reason(error)} on rank {rank}",
            fix="free space or grant access, or choose another folder (of a run: --checkpoint.dir DIR)",
        )

    def write() -> list[Part]:
        with os_errors_as(refused):
            return list(_write(folder, rank, entries, value, records))

    def write_index(parts: list[list[Part]]) -> None:
        try:
            text = to_json(index_of(itertools.chain(*parts)))
        except ValueError as error:
            raise UserError.at(
                folder / INDEX, problem=f"what ranks wrote does not fit ({error})", fix=_REPORT
            ) from None
        with os_errors_as(refused):
            records[INDEX] = write_synced(folder / INDEX, text)

    on_first_of_all(group, write, write_index, working)
    return records


def _write(
    folder: Path,
    rank: int,
    entries: Sequence[Entry],
    value: Callable[[Entry], Tensor],
    records: dict[str, FileRecord],
) -> Iterator[Part]:
    """Write the files of a rank. Raises `OSError`."""
    # The first rank makes it. If it does not appear, the ranks do not share the disk, or it was removed.
    if not wait_for(folder.is_dir):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    sizes = {place: chunk_of(entry).size * entry.values.itemsize for place, entry in enumerate(entries)}
    for number, places in enumerate(plan_shards(sizes, FILE_BYTES)):
        name = f"tensors-{rank}-{number}.safetensors"
        # As safetensors does, to keep tensors aligned: large elements first.
        shard = sorted((entries[place] for place in places), key=lambda entry: -entry.values.itemsize)
        head, chunks = _layout(name, shard)
        with open(folder / name, "wb") as opened:
            file = HashedFile(opened)
            file.write(head)
            for entry in shard:
                file.write(_content(entry, value(entry)))
            records[name] = file.record()
        yield from chunks


def _content(entry: Entry, values: Tensor) -> memoryview:
    assert (values.shape, values.dtype) == (entry.values.shape, entry.values.dtype), "other values than announced"
    return _bytes_of(values.detach().cpu().contiguous())


def _layout(name: str, shard: Sequence[Entry]) -> tuple[bytes, list[Part]]:
    """The header of a safetensors file of these entries, and where it has them."""
    head, chunks, end = {}, [], 0
    for entry in shard:
        chunk = chunk_of(entry, name, end)
        begin, end = end, end + chunk.size * entry.values.itemsize
        (top, bottom), (left, right) = chunk.rows, chunk.columns
        dtype, shape = NAMES[entry.values.dtype], tuple(entry.values.shape)
        head[f"{entry.key}[{top}:{bottom},{left}:{right}]"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": (begin, end),
        }
        chunks.append((entry.key, dtype, entry.size, chunk))
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [(*of, replace(c, at=start + c.at)) for *of, c in chunks]


def read_entries(
    folder: Path,
    index: Index,
    entries: Iterable[Entry | Sequence[Entry]],
    group: dist.ProcessGroup | None,
    working: Working = nullcontext,
) -> None:
    """Fill the values of all entries of this rank, regardless of the chunks in which they were written. Entries of a
    sequence are filled before what comes after them is asked for. Collective over `group`; None for a
    single process. Raises `UserError` on every rank if one of them cannot read.
    """

    def read() -> None:
        try:
            alone = list[Entry]()
            for each in entries:
                if isinstance(each, Entry):
                    alone.append(each)
                else:
                    _read(folder, index, each)
            _read(folder, index, alone)
        except (MemoryError, torch.OutOfMemoryError):
            raise  # No fault of the checkpoint.
        except Exception as error:
            raise UserError.at(
                folder, problem=f"unreadable tensors on rank {_rank(group)} ({in_short(error)})", fix=ANOTHER
            ) from None

    on_every(group, read, working)


def _read(folder: Path, index: Index, entries: Sequence[Entry]) -> None:
    reads: dict[str, list[tuple[Chunk, Entry]]] = {}
    for entry in entries:
        wanted = chunk_of(entry)
        for chunk in index[entry.key].chunks:
            spans = common(chunk.rows, wanted.rows), common(chunk.columns, wanted.columns)
            if all(start < stop for start, stop in spans):
                reads.setdefault(chunk.file, []).append((chunk, entry))
    for name, parts in reads.items():
        with open_regular(folder / name) as file:
            for chunk, entry in sorted(parts, key=lambda part: part[0].at):
                _read_part(file, chunk, entry, DTYPES[index[entry.key].dtype])


def _read_part(file: BufferedReader, chunk: Chunk, entry: Entry, dtype: torch.dtype) -> None:
    """Fill an entry as far as the chunk goes, some rows of it at a time. Raises `EOFError` and `OSError`."""
    wanted, width = chunk_of(entry), chunk.columns[1] - chunk.columns[0]
    rows, columns = common(chunk.rows, wanted.rows), common(chunk.columns, wanted.columns)
    target = entry.values if entry.values.dim() == 2 else entry.values[:, None]
    target = target[_within(wanted.rows, rows), _within(wanted.columns, columns)]
    file.seek(chunk.at + (rows[0] - chunk.rows[0]) * width * dtype.itemsize)
    for some in target.split(max(1, _READ_BYTES // (width * dtype.itemsize))):
        values = torch.empty(len(some), width, dtype=dtype)
        if file.readinto(_bytes_of(values)) != values.nbytes:
            raise EOFError(f"{chunk.file} ends within {entry.key}")
        some.copy_(values[:, _within(chunk.columns, columns)])


def _within(outer: Interval, inner: Interval) -> slice:
    return slice(inner[0] - outer[0], inner[1] - outer[0])


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return values.view(-1).view(torch.uint8).numpy().data


def _rank(group: dist.ProcessGroup | None) -> int:
    return FIRST if group is None else dist.get_rank(group)
