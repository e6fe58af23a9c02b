"""Writes and reads `Entry`s with `torch.distributed.checkpoint`, on which Megatron's `dist_checkpointing` is built.

Not with `dist_checkpointing` itself: it shards every tensor evenly along its dims, unlike ragged vocabulary shards and
flat ranges of the distributed optimizer, and it reads a checkpoint's index with an unrestricted pickle. The file format
is the same: `__RANK_0.distcp`, and the index `.metadata`.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_hetero.checkpoint.format.hashed_files import HashedFiles
from megatron_hetero.checkpoint.format.keys import Entry
from megatron_hetero.distributed.collective import Working
from megatron_hetero.errors import UserError, in_short, listed, reason
from megatron_hetero.files.opening import read_bytes
from megatron_hetero.hf.folder_writer import plan_shards
from megatron_hetero.outputs.checkpoints import FileRecord

INDEX = ".metadata"
_ANOTHER = "use another checkpoint (--checkpoint.resume PATH)"
FILE_BYTES = 5 * 10**9
"""Maximum size of a tensor file, unless one tensor is larger: ranks verify a checkpoint file by file."""

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "float16"),
    ("torch", "uint8"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
"""The classes of an index: plain data only."""


class _IndexUnpickler(pickle._Unpickler):
    """Reads plain data only. The slower Python implementation, because the C one allocates as much memory as a damaged
    index claims.
    """

    dispatch: ClassVar = {
        code: work for code, work in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint index needs")
        return super().find_class(module, name)


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint: its tensors and where they are stored. Raises `UserError`; executes nothing in it."""
    path = folder / INDEX
    try:
        index = _IndexUnpickler(io.BytesIO(read_bytes(path, most=1 << 32))).load()
        _require_index(index)
    except Exception as error:  # a broken pickle raises nearly all that there are
        raise UserError.at(
            path,
            problem=f"cannot be read ({in_short(error)})",
            fix=_ANOTHER,
        ) from None
    return index


def open_index(folder: Path, files: Collection[str]) -> Metadata:
    """The index of a checkpoint of these `files`. Raises `UserError`, as `read_index`, and if it names others."""
    index = read_index(folder)
    if others := {place.relative_path for place in index.storage_data.values()} - set(files):
        raise UserError.at(
            folder / INDEX,
            problem=f"tensors in {listed(others)}, which the manifest does not name",
            fix=_ANOTHER,
        )
    return index


def _require_index(index: Any) -> None:
    """Check the structure of an index as far as it is used. Raises `ValueError`, `AttributeError` and the like."""
    if not isinstance(index, Metadata):
        raise ValueError(f"it is a {type(index).__name__}")
    for key, stored in index.state_dict_metadata.items():
        if not _is_tensor(key, stored):
            raise ValueError(f"what it says of {key!r:.80} describes no tensor")
    for key, info in index.storage_data.items():
        if not _is_place(key, info):
            raise ValueError(f"what it says of {key!r:.80} is no place in a file")


def _is_tensor(key: Any, stored: Any) -> bool:
    if not isinstance(stored, TensorStorageMetadata):
        return False
    sizes = [stored.size, *(size for chunk in stored.chunks for size in (chunk.offsets, chunk.sizes))]
    return (
        isinstance(key, str)
        and isinstance(stored.properties.dtype, torch.dtype)
        and all(isinstance(size, torch.Size) and len(size) == len(stored.size) for size in sizes)
    )


def _is_place(key: Any, info: Any) -> bool:
    return (
        isinstance(key, MetadataIndex)
        and isinstance(info, _StorageInfo)
        and isinstance(info.relative_path, str)
        and all(isinstance(number, int) and number >= 0 for number in (info.offset, info.length))
    )


def index_shapes(index: Metadata) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint and their shapes."""
    tensors = index.state_dict_metadata.items()
    return {key: tuple(stored.size) for key, stored in tensors if isinstance(stored, TensorStorageMetadata)}


def index_dtypes(index: Metadata) -> dict[str, torch.dtype]:
    """The tensors of a checkpoint and their dtypes."""
    tensors = index.state_dict_metadata.items()
    return {key: stored.properties.dtype for key, stored in tensors if isinstance(stored, TensorStorageMetadata)}


def write_entries(
    folder: Path,
    entries: Sequence[Entry],
    group: dist.ProcessGroup | None,
    value: Callable[[Entry], Tensor] = lambda entry: entry.values,
    working: Working = nullcontext,
) -> dict[str, FileRecord]:
    """Write all ranks' entries, each rank to its own files. Collective over `group`; None for a single process.

    `value` returns what to write for an entry, and is called just before; the entry's own values then only need a shape
    and a dtype (they may be on the `meta` device).

    Returns size and hash of each file that this process has written, on the first rank including the index. Raises
    `UserError` on every rank if one of them cannot write.
    """
    writer, planner = _Writer(folder), _EntryWriter(entries, value)
    writer.fs = files = HashedFiles(working)
    with _as_user_errors(folder, group), _no_checksums():
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    return files.records


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Inside, PyTorch writes no CRC-32, which would take longer than everything else; the manifest has SHA-256."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def read_entries(
    folder: Path,
    index: Metadata,
    entries: Sequence[Entry],
    group: dist.ProcessGroup | None,
    working: Working = nullcontext,
) -> None:
    """Fill the values of all entries of this rank. Collective over `group`; None for a single process. Raises
    `UserError` on every rank if one of them cannot read.
    """
    reader, planner = _IndexedReader(folder, index), _EntryReader(entries)
    reader.fs = HashedFiles(working)
    with _as_user_errors(folder, group, reading=True):
        dcp.load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


@contextmanager
def _as_user_errors(folder: Path, group: dist.ProcessGroup | None, reading: bool = False) -> Iterator[None]:
    try:
        with ExitStack() as stack:
            if group is None:  # Intended. With a group this may be a thread, and filters are process-wide.
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise _as_user_error(folder, error, reading) from None


def _as_user_error(folder: Path, failure: CheckpointException, reading: bool) -> BaseException:
    """The error of one of the ranks, as a `UserError` if the user can fix it."""
    rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
    if isinstance(error, UserError | KeyboardInterrupt):
        return error
    if not isinstance(error, OSError):
        return _unreadable(folder, rank, error) if reading else RuntimeError(f"{folder}: {failure}")
    return UserError.at(
        error.filename or folder,
        problem=f"{reason(error)} on rank {rank}",
        fix="free space or grant access, or choose another folder (of a run with --checkpoint.dir DIR)",
    )


def _unreadable(folder: Path, rank: int, error: BaseException) -> UserError:
    # Index and files match the hashes of the manifest, so they were written inconsistent.
    return UserError.at(
        folder,
        problem=f"unreadable tensors on rank {rank} ({in_short(error)})",
        fix=_ANOTHER,
    )


class _EntryWriter(DefaultSavePlanner):
    """Writes entries; the index is checked to cover every tensor exactly once."""

    def __init__(self, entries: Sequence[Entry], value: Callable[[Entry], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._value = value
        self._entries: Mapping[tuple[str, torch.Size | None], Entry] = {
            (entry.key, torch.Size(entry.offsets)): entry for entry in entries
        }
        self._items = [_write_item(entry) for entry in entries]

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._value(self._entries[index.fqn, index.offset]).detach()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object.contiguous()


def _write_item(entry: Entry) -> WriteItem:
    offsets = torch.Size(entry.offsets)
    chunk = ChunkStorageMetadata(offsets, entry.values.size())
    data = TensorWriteData(chunk, _properties(entry.values.dtype), torch.Size(entry.size))
    return WriteItem(MetadataIndex(entry.key, offsets), WriteItemType.SHARD, tensor_data=data)


@cache
def _properties(dtype: torch.dtype) -> TensorProperties:
    # One object per dtype: pickling is slow, and done once per object.
    return TensorProperties(dtype=dtype)


class _Writer(dcp.FileSystemWriter):
    """Writes one tensor at a time: the base class keeps those of a file in host memory until it is closed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As the base class."""
        results = []
        sizes = dict(enumerate(map(_bytes_of, plan.items)))
        for number, places in enumerate(plan_shards(sizes, FILE_BYTES)):
            items = [plan.items[place] for place in places]
            name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as file:
                results += [_write(file, name, item, planner.resolve_data(item)) for item in items]
                file.flush()
                os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None, "checkpoints hold tensors only"
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _write(file: Any, name: str, item: WriteItem, values: Any) -> WriteResult:
    start, values = file.tell(), values.cpu()
    # torch.save writes the whole storage, of which a view is only a part.
    values = values if values.untyped_storage().nbytes() == values.nbytes else values.clone()
    try:
        torch.save(values, file)
    except RuntimeError as error:
        # On a full disk or Ctrl-C, torch.save fails, and then again when it closes the file.
        raise error.__context__ if isinstance(error.__context__, OSError | KeyboardInterrupt) else error from None
    length = file.tell() - start
    return WriteResult(item.index, length, _StorageInfo(name, start, length))


class _EntryReader(LoadPlanner):
    """Reads entries regardless of the blocks in which they were written."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._by_key: dict[str, list[Entry]] = {}
        for entry in entries:
            self._by_key.setdefault(entry.key, []).append(entry)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None, "a checkpoint has an index"
        self._index = metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for key, entries in self._by_key.items() for item in self._items(key, entries)])

    def _items(self, key: str, entries: Sequence[Entry]) -> list[ReadItem]:
        stored: Any = self._index.state_dict_metadata[key]
        chunks = [ChunkStorageMetadata(torch.Size(entry.offsets), entry.values.size()) for entry in entries]
        items = create_read_items_for_chunk_list(key, stored, chunks)
        read, wanted = sum(item.lengths.numel() for item in items), sum(entry.values.numel() for entry in entries)
        if read != wanted:
            raise UserError.at(
                INDEX,
                found=f"{read} elements of {key}",
                expected=f"the {wanted} that this rank needs",
                fix="use another checkpoint",
            )
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("checkpoints hold tensors only")

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        raise NotImplementedError("checkpoints hold tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None, "the reads of a list of chunks name the chunk"
        values = self._by_key[read_item.dest_index.fqn][read_item.dest_index.index].values
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _IndexedReader(dcp.FileSystemReader):
    """Reads a checkpoint with a given index: the base class would read it with an unrestricted pickle."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self) -> Metadata:
        return self._index
