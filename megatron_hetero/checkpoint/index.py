"""The index of a checkpoint, in JSON: its tensors, and for each rectangle of a tensor its file and offset.

Names of tensors do not depend on the layout: see docs/checkpoints.md, "Contents".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.base.errors import UserError, in_short, listed
from megatron_hetero.base.files import read_bytes
from megatron_hetero.base.outputs import ANOTHER, FileRecord
from megatron_hetero.hf.weight_map import Interval

WEIGHTS, STEP, RANDOM, BUFFERS = "weights", "step", "random", "buffers"

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """A rectangle of a tensor to be written or read.

    Attributes:
        key: name of the tensor.
        size: shape of the tensor.
        offsets: first row and column of the rectangle.
        values: view of the values to write, or to fill when reading; on the meta device if `load` is set.
        load: function that computes the values just before they are written.
    """

    key: str
    size: Shape
    offsets: Shape
    values: Tensor
    load: Callable[[], Tensor] | None = None

    def current(self) -> Tensor:
        """Return the values to write, computed by `load` if it is set."""
        return self.values if self.load is None else self.load()


def matrix(shape: Shape) -> Shape:
    """Return a shape as stored in checkpoints: dims after the first are flattened into one."""
    return shape if len(shape) <= 2 else (shape[0], prod(shape[1:]))


INDEX = "tensors.json"
DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
"""Torch dtypes by their names in safetensors."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a stored tensor, with rows and columns [start, stop), in row-major order in `file` from byte `at`
    on. One-dimensional tensors are treated as matrices with one column.
    """

    file: str
    at: int
    rows: Interval
    columns: Interval

    @property
    def size(self) -> int:
        """Number of elements in the chunk."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. `dtype` is a key of `DTYPES`; `chunks` cover every element exactly once."""

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


Index = Mapping[str, StoredTensor]
IndexEntry = tuple[str, str, Shape, Chunk]
"""A chunk with its tensor's key, dtype and shape: (key, dtype, shape, chunk)."""


def chunk_of(entry: Entry, file: str = "", at: int = 0) -> Chunk:
    """Return the chunk for the rectangle of an entry, stored in `file` from byte `at`."""
    (top, left), (rows, columns) = _as_matrix(entry.offsets, 0), _as_matrix(entry.values.shape)
    return Chunk(file, at, (top, top + rows), (left, left + columns))


def index_of(entries: Iterable[IndexEntry]) -> Index:
    """Return the index of a checkpoint from the index entries of all ranks."""
    chunks_by_tensor: dict[tuple[str, str, Shape], list[Chunk]] = {}
    for key, dtype, shape, chunk in entries:
        chunks_by_tensor.setdefault((key, dtype, shape), []).append(chunk)
    return {key: StoredTensor(dtype, shape, tuple(chunks)) for (key, dtype, shape), chunks in chunks_by_tensor.items()}


def to_json(index: Index) -> str:
    """Return an index as JSON text. Raises `ValueError` if the chunks of a tensor do not cover it."""
    _require_index(index)
    lines = (f"{json.dumps(key)}: {json.dumps(asdict(stored))}" for key, stored in sorted(index.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint. Raises `UserError`."""
    path = folder / INDEX
    try:
        index = {key: _stored(**fields) for key, fields in json.loads(read_bytes(path, _MAX_BYTES)).items()}
        _require_index(index)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError.at(path, problem=f"cannot be read ({in_short(error)})", fix=ANOTHER) from None
    return index


def open_index(folder: Path, files: Mapping[str, FileRecord]) -> Index:
    """Read the index of a checkpoint. Raises `UserError` if it is invalid or refers to files not in `files`."""
    index = read_index(folder)
    if others := {chunk.file for stored in index.values() for chunk in stored.chunks} - files.keys():
        problem = f"tensors in {listed(others)}, which the manifest does not name"
        raise UserError.at(folder / INDEX, problem=problem, fix=ANOTHER)
    return index


def index_shapes(index: Index) -> dict[str, Shape]:
    """Return the shapes of a checkpoint's tensors by key."""
    return {key: stored.shape for key, stored in index.items()}


def index_dtypes(index: Index) -> dict[str, torch.dtype]:
    """Return the dtypes of a checkpoint's tensors by key."""
    return {key: DTYPES[stored.dtype] for key, stored in index.items()}


def _stored(dtype: str, shape: Any, chunks: Any) -> StoredTensor:
    return StoredTensor(dtype, tuple(shape), tuple(_chunk(**fields) for fields in chunks))


def _chunk(file: str, at: int, rows: Any, columns: Any) -> Chunk:
    (top, bottom), (left, right) = rows, columns
    return Chunk(file, at, (top, bottom), (left, right))


def _require_index(index: Index) -> None:
    """Check that the chunks of each tensor are within its bounds and cover it exactly once. Raises `ValueError`."""
    for key, stored in index.items():
        are_sizes = all(type(size) is int and size >= 0 for size in stored.shape)
        if not (isinstance(stored.dtype, str) and stored.dtype in DTYPES and 1 <= len(stored.shape) <= 2 and are_sizes):
            raise ValueError(f"the entry {key!r:.80} describes no tensor")
        rows, columns = _as_matrix(stored.shape)
        for chunk in stored.chunks:
            (top, bottom), (left, right) = chunk.rows, chunk.columns
            has_types = isinstance(chunk.file, str) and all(
                type(number) is int for number in (chunk.at, top, bottom, left, right)
            )
            if not (has_types and chunk.at >= 0 and 0 <= top <= bottom <= rows and 0 <= left <= right <= columns):
                raise ValueError(f"a chunk of {key!r:.80} is no place in a file")
        if not _cover_once(stored.chunks, rows, columns):
            raise ValueError(f"the chunks of {key!r:.80} do not cover the tensor exactly once")


def _cover_once(chunks: Iterable[Chunk], rows: int, columns: int) -> bool:
    """Return whether each element of a `rows` x `columns` matrix is in exactly one chunk. Summing signed corners gives
    the number of chunks at each element, so the corners of the chunks must cancel the corners of the matrix.
    """
    corners = Counter[tuple[int, int]]()
    for (top, bottom), (left, right) in (((rows, 0), (0, columns)), *((c.rows, c.columns) for c in chunks)):
        corners[top, left] += 1
        corners[bottom, right] += 1
        corners[top, right] -= 1
        corners[bottom, left] -= 1
    return not any(corners.values())


def _as_matrix(shape: Shape, missing: int = 1) -> tuple[int, int]:
    return shape[0], shape[1] if len(shape) > 1 else missing
