"""Writes and reads checkpoints atomically and in any layout, collectively over all ranks.

The distributed optimizer cuts each local parameter into flat ranges over its data- and context-parallel ranks. A flat
range of a matrix consists of at most three rectangles. Each rank writes and reads its range as rectangles of stored
tensors, without gathering:

    . . a a      the rest of the first row,
    b b b b
    b b b b      whole rows,
    c . . .      the beginning of the last row.

Each rank writes its entries to separate safetensors files, and the first rank writes the index of all files.

Two libraries are unsuitable. Megatron's `dist_checkpointing` uses pickle and shards tensors evenly, unlike our ragged
vocabulary shards and the flat ranges of the distributed optimizer. `torch.distributed.checkpoint` can store only one
slice of a tensor per safetensors file (torch 2.13's `_write_files_from_queue` names slices by their tensor alone).
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.base.errors import UserError, in_short, os_errors_as, reason
from megatron_hetero.base.files import open_own, open_regular
from megatron_hetero.base.outputs import (
    ANOTHER,
    FileRecord,
    clean,
    damaged,
    discard,
    name_of,
    partial_of,
    prune,
    publish,
    read_manifest,
    require_own_name,
    set_aside,
    unwritable,
    verify,
    wait_for,
    write_synced,
)
from megatron_hetero.checkpoint.index import (
    DTYPES,
    INDEX,
    NAMES,
    Chunk,
    Entry,
    Index,
    IndexEntry,
    chunk_of,
    index_of,
    open_index,
    to_json,
)
from megatron_hetero.groups.collective import FIRST, Working, on_every, on_first, on_first_of_all
from megatron_hetero.hf.model_files import plan_shards
from megatron_hetero.hf.weight_map import Interval, TensorSlice, WeightMap


@dataclass(frozen=True)
class FlatBlock:
    """Rectangle of the stored tensor `name`, with rows and columns [start, stop), and its place in a flat buffer: the
    first element is at `offset`, and rows are `stride` elements apart. The tensor is viewed as a matrix, see `matrix`.
    """

    name: str
    rows: Interval
    columns: Interval
    offset: int
    stride: int

    @property
    def begins(self) -> bool:
        """Whether the block contains the first element of the stored tensor."""
        return self.rows[0] == 0 and self.columns[0] == 0

    @property
    def length(self) -> int:
        """Number of buffer elements that the block spans, from its first element to its last."""
        return (self.rows[1] - self.rows[0] - 1) * self.stride + self.columns[1] - self.columns[0]

    def view(self, flat: Tensor, dims: int) -> Tensor:
        """Return a view of the block in the buffer `flat`, with one or two `dims`."""
        rows, columns = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        size, strides = ((rows,), (self.stride,)) if dims == 1 else ((rows, columns), (self.stride, 1))
        return flat.as_strided(size, strides, int(flat.storage_offset()) + self.offset)


def cut(slices: Iterable[TensorSlice], width: int, start: int, stop: int) -> Iterator[FlatBlock]:
    """Yield the blocks that make up elements [start, stop) of a flat parameter, which consists of `slices` with rows of
    `width` elements. Offsets of blocks count from `start`; padding is skipped.
    """
    for tensor_slice in slices:
        left = 0 if tensor_slice.columns is None else tensor_slice.columns[0]
        used = width if tensor_slice.columns is None else tensor_slice.columns[1] - left
        lines = (tensor_slice.at, tensor_slice.at + tensor_slice.rows[1] - tensor_slice.rows[0])
        for rows, columns in _rectangles(start, stop, width):
            (top, bottom), (first, last) = common(rows, lines), common(columns, (0, used))
            if top < bottom and first < last:
                shift = tensor_slice.rows[0] - tensor_slice.at
                yield FlatBlock(
                    tensor_slice.name,
                    (top + shift, bottom + shift),
                    (first + left, last + left),
                    top * width + first - start,
                    width,
                )


def first_owned(maps: Sequence[WeightMap], tp_rank: int) -> dict[str, tuple[TensorSlice, ...]]:
    """Return the slices by parameter that `tp_rank` owns: those that no lower rank of its tensor-parallel group has.
    Over the group, owned slices cover every element exactly once.
    """
    seen = {tensor_slice.rectangle for m in maps[:tp_rank] for slices in m.values() for tensor_slice in slices}
    owned: dict[str, tuple[TensorSlice, ...]] = {}
    for name, slices in maps[tp_rank].items():
        new = {
            tensor_slice.rectangle: tensor_slice
            for tensor_slice in reversed(slices)
            if tensor_slice.rectangle not in seen and not tensor_slice.empty
        }
        owned[name] = tuple(new.values())
        seen |= new.keys()
    return owned


def _rectangles(start: int, stop: int, width: int) -> Iterator[tuple[Interval, Interval]]:
    """Yield rows and columns of the rectangles that make up a flat range of a matrix with `width` columns."""
    if start >= stop:
        return
    (first, begin), (last, end) = divmod(start, width), divmod(stop, width)
    if first == last:
        yield (first, first + 1), (begin, end)
        return
    if begin:
        yield (first, first + 1), (begin, width)
        first += 1
    if first < last:
        yield (first, last), (0, width)
    if end:
        yield (last, last + 1), (0, end)


def common(a: Interval, b: Interval) -> Interval:
    """Return the intersection of two intervals; if it is empty, its start is at or after its end."""
    return max(a[0], b[0]), min(a[1], b[1])


FILE_BYTES = 5 * 10**9
"""Maximum size of a file unless one tensor is larger. Ranks divide verification by file, so files must not be large."""
_REPORT = "report this: it is an error of the program; earlier checkpoints are intact"
_READ_BYTES = 1 << 22
"""Number of bytes read at a time, unless one row is larger."""


def write_entries(
    folder: Path,
    entries: Sequence[Entry],
    group: dist.ProcessGroup | None,
    working: Working = nullcontext,
) -> dict[str, FileRecord]:
    """Write the entries of all ranks, each rank to separate files. Collective over `group`; None for a single process.

    Returns the size and hash of each file that this rank wrote; the first rank's files include the index. Raises
    `UserError` on every rank if any rank cannot write.
    """
    rank, records = _rank(group), dict[str, FileRecord]()

    def refused(error: OSError) -> UserError:
        fix = "free space or grant access, or choose another folder (of a run: --checkpoint.dir DIR)"
        return UserError.at(error.filename or folder, problem=f"{reason(error)} on rank {rank}", fix=fix)

    def write() -> list[IndexEntry]:
        with os_errors_as(refused):
            return list(_write(folder, rank, entries, records))

    def write_index(written: list[list[IndexEntry]]) -> None:
        try:
            text = to_json(index_of(itertools.chain(*written)))
        except ValueError as error:
            problem = f"the slices that ranks wrote do not fit ({error})"
            raise UserError.at(folder / INDEX, problem=problem, fix=_REPORT) from None
        with os_errors_as(refused):
            records[INDEX] = write_synced(folder / INDEX, text)

    on_first_of_all(group, write, write_index, working)
    return records


def _write(folder: Path, rank: int, entries: Sequence[Entry], records: dict[str, FileRecord]) -> Iterator[IndexEntry]:
    """Write the tensor files of a rank, add them to `records`, and yield their chunks. Raises `OSError`."""
    # The first rank creates the folder. If the folder does not appear, the disk is not shared, or it was removed.
    if not wait_for(folder.is_dir):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    sizes = {place: chunk_of(entry).size * entry.values.itemsize for place, entry in enumerate(entries)}
    for number, places in enumerate(plan_shards(sizes, FILE_BYTES)):
        name = f"tensors-{rank}-{number}.safetensors"
        # Order tensors by descending element size, as safetensors does, to keep all of them aligned.
        shard = sorted((entries[place] for place in places), key=lambda entry: -entry.values.itemsize)
        head, chunks = _layout(name, shard)
        digest, size = hashlib.sha256(head), len(head)
        with open_own(folder / name, "xb") as file:
            file.write(head)
            for entry in shard:
                values = entry.current()
                assert (values.shape, values.dtype) == (entry.values.shape, entry.values.dtype), "other values"
                content = _bytes_of(values.detach().cpu().contiguous())
                file.write(content)
                digest.update(content)
                size += len(content)
            file.flush()
            os.fsync(file.fileno())
        records[name] = FileRecord(size, digest.hexdigest())
        yield from chunks


def _layout(name: str, shard: Sequence[Entry]) -> tuple[bytes, list[IndexEntry]]:
    """Return the header of the safetensors file `name` with the entries `shard`, and the index entry of each."""
    head, chunks, end = {}, [], 0
    for entry in shard:
        chunk = chunk_of(entry, name, end)
        begin, end = end, end + chunk.size * entry.values.itemsize
        (top, bottom), (left, right) = chunk.rows, chunk.columns
        dtype, shape = NAMES[entry.values.dtype], tuple(entry.values.shape)
        described = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        head[f"{entry.key}[{top}:{bottom},{left}:{right}]"] = described
        chunks.append((entry.key, dtype, entry.size, chunk))
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    placed = [(key, dtype, size, replace(chunk, at=start + chunk.at)) for key, dtype, size, chunk in chunks]
    return len(text).to_bytes(8, "little") + text, placed


def read_entries(
    folder: Path,
    index: Index,
    entries: Iterable[Entry | Sequence[Entry]],
    group: dist.ProcessGroup | None,
    working: Working = nullcontext,
) -> None:
    """Read the values of this rank's entries in place, from chunks of any layout. A sequence of entries is complete
    before the next item of `entries` is requested. Collective over `group`; None for a single process. Raises
    `UserError` on every rank if any rank cannot read.
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
            raise  # Running out of memory is not a fault of the checkpoint.
        except Exception as error:
            problem = f"unreadable tensors on rank {_rank(group)} ({in_short(error)})"
            raise UserError.at(folder, problem=problem, fix=ANOTHER) from None

    on_every(group, read, working)


def _read(folder: Path, index: Index, entries: Sequence[Entry]) -> None:
    reads: dict[str, list[tuple[Chunk, Entry]]] = {}
    for entry in entries:
        wanted = chunk_of(entry)
        for chunk in index[entry.key].chunks:
            spans = common(chunk.rows, wanted.rows), common(chunk.columns, wanted.columns)
            if all(start < stop for start, stop in spans):
                reads.setdefault(chunk.file, []).append((chunk, entry))
    for name, chunks in reads.items():
        with open_regular(folder / name) as file:
            for chunk, entry in sorted(chunks, key=lambda read: read[0].at):
                _read_chunk(file, chunk, entry, DTYPES[index[entry.key].dtype])


def _read_chunk(file: BufferedReader, chunk: Chunk, entry: Entry, dtype: torch.dtype) -> None:
    """Read the elements of an entry that are in the chunk, some rows at a time. Raises `EOFError` and `OSError`."""
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
    """Return the bytes of a contiguous tensor as a view of its memory."""
    return values.view(-1).view(torch.uint8).numpy().data


def _rank(group: dist.ProcessGroup | None) -> int:
    return FIRST if group is None else dist.get_rank(group)


@dataclass(frozen=True)
class Saved:
    """The folder of a complete checkpoint, and its size in bytes."""

    path: Path
    size: int


def save(
    entries: Sequence[Entry],
    folder: Path,
    step: int,
    texts: Callable[[], Mapping[str, str]],
    keep_last: int | None,
    group: dist.ProcessGroup,
    working: Working = nullcontext,
) -> Saved:
    """Write the checkpoint after `step` into `folder` under a temporary name, check and rename it, then remove all but
    the newest `keep_last` checkpoints. Collective over `group`. `texts`: returns text files by name, on the first rank.

    Raises `UserError` on every rank if the checkpoint cannot be written; older checkpoints are then intact.
    """
    partial, rank = partial_of(folder / name_of(step)), dist.get_rank(group)

    def create() -> None:
        with _writing(partial):
            clean(folder)
            if os.path.lexists(partial):  # `clean` does not remove a folder with foreign files.
                set_aside(partial)
            partial.mkdir()

    def write_texts() -> dict[str, FileRecord]:
        if rank != FIRST:
            return tensors
        with _writing(partial):
            return tensors | {name: write_synced(partial / name, text) for name, text in texts().items()}

    def finish() -> Saved:
        with _writing(folder):
            _require_seen(partial, records)
            target = publish(partial, records)
            prune(folder, keep_last, target)
        return Saved(target, sum(record.size for record in records.values()))

    try:
        on_first(group, create, working)
        tensors = write_entries(partial, entries, group, working=working)
        by_rank = on_every(group, write_texts, working)
        records = dict(itertools.chain(*(files.items() for files in by_rank)))
        return on_first(group, finish, working)
    except UserError:
        # All ranks have stopped writing: free the space for the next checkpoint.
        if rank == FIRST:
            discard(partial)
        raise


def _require_seen(partial: Path, records: Mapping[str, FileRecord]) -> None:
    """Check that the first rank sees the files in `records`, which all ranks have written. Raises `UserError`."""
    for name, record in records.items():

        def is_seen(path: Path = partial / name, size: int = record.size) -> bool:
            return path.is_file() and path.stat().st_size == size

        if not wait_for(is_seen):
            problem = f"missing or truncated on the first rank ({record.size} bytes written by another)"
            fix = "choose a folder on storage that all nodes share (of a run: --checkpoint.dir DIR)"
            raise UserError.at(partial / name, problem=problem, fix=fix)


def _writing(where: Path) -> AbstractContextManager[None]:
    """Return a context that converts an `OSError`, such as a full disk, into a `UserError`."""
    return os_errors_as(lambda error: unwritable(where, error))


Advance = Callable[[str, int, int], None]
"""Progress callback; its arguments are the activity, bytes done and total bytes."""
Record = TypeVar("Record")


def open_checkpoint(
    folder: Path,
    record_name: str,
    read: Callable[[Path], Record],
    group: dist.ProcessGroup | None,
    working: Working = nullcontext,
    advance: Advance = lambda *_: None,
) -> tuple[Record, Index, Collection[str]]:
    """Verify a checkpoint, and read its record and index on the first rank. Collective over `group`; None for a single
    process.

    Args:
        folder: the checkpoint.
        record_name: name of the file that `read` reads.
        read: function that returns the record of a checkpoint; the record has a `step`.
        group: process group whose ranks divide verification of the files.
        working: context for reads for which other ranks wait.
        advance: callback for progress.

    Returns:
        The record, the index, and the names of all files.

    Raises:
        UserError: on every rank, naming all faults.
    """
    manifest = on_first(group, lambda: read_manifest(folder, (INDEX, record_name)))
    ranks = 1 if group is None else dist.get_world_size(group)
    names = sorted(manifest)[_rank(group) :: ranks]
    total = sum(manifest[name].size for name in names)

    def check() -> list[str]:
        faults, done = list[str](), 0
        for name in names:
            faults += verify(folder, manifest, [name])
            done += manifest[name].size
            advance("checking", done, total)
        return faults

    if faults := sorted(itertools.chain(*on_every(group, check, working))):
        raise damaged(folder, faults)

    def opened() -> tuple[Record, Index]:
        record: Any = read(folder)
        require_own_name(folder, record.step, record_name)
        return record, open_index(folder, manifest)

    return *on_first(group, opened, working), manifest.keys()
