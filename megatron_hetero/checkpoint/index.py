"""The names of tensors in a checkpoint, which do not depend on the layout: see docs/checkpoints.md, "Contents".

The index of a checkpoint: its tensors, and which rectangle of each is where in which file. JSON.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
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
    """A rectangle of the tensor `key`, of shape `size`: it begins at `offsets`, and its values are (or go) in
    `values`, a view. What is kept in another form is on the meta device there, and `load` makes it just before it is
    written.
    """

    key: str
    size: Shape
    offsets: Shape
    values: Tensor
    load: Callable[[], Tensor] | None = None

    def current(self) -> Tensor:
        """The values as they are now."""
        return self.values if self.load is None else self.load()


def matrix(shape: Shape) -> Shape:
    """The shape of a stored tensor in checkpoints: at most two dims."""
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
"""By the names that safetensors gives them."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Chunk:
    """Rows and columns [start, stop) of a stored tensor, row by row in `file` from byte `at` on.

    As in `Block`, tensors of one dim count as matrices of one column.
    """

    file: str
    at: int
    rows: Interval
    columns: Interval

    @property
    def size(self) -> int:
        """Elements in it."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class Stored:
    """A stored tensor: `dtype` is one of `DTYPES`, and the chunks hold each of its elements once."""

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


Index = Mapping[str, Stored]
Part = tuple[str, str, Shape, Chunk]
"""A chunk of a tensor, behind the tensor's key, dtype and shape."""


def chunk_of(entry: Entry, file: str = "", at: int = 0) -> Chunk:
    """The rectangle that an entry is."""
    (top, left), (rows, columns) = _as_matrix(entry.offsets, 0), _as_matrix(entry.values.shape)
    return Chunk(file, at, (top, top + rows), (left, left + columns))


def index_of(parts: Iterable[Part]) -> Index:
    """The index of what all ranks have written."""
    found: dict[tuple[str, str, Shape], list[Chunk]] = {}
    for key, dtype, shape, chunk in parts:
        found.setdefault((key, dtype, shape), []).append(chunk)
    return {key: Stored(dtype, shape, tuple(chunks)) for (key, dtype, shape), chunks in found.items()}


def to_json(index: Index) -> str:
    """The text of an index."""
    _require_index(index)
    lines = (f"{json.dumps(key)}: {json.dumps(asdict(stored))}" for key, stored in sorted(index.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_index(folder: Path) -> Index:
    """The index of a checkpoint: its tensors and where they are stored. Raises `UserError`."""
    path = folder / INDEX
    try:
        index = {key: _stored(**fields) for key, fields in json.loads(read_bytes(path, _MOST_BYTES)).items()}
        _require_index(index)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError.at(path, problem=f"cannot be read ({in_short(error)})", fix=ANOTHER) from None
    return index


def open_index(folder: Path, files: Mapping[str, FileRecord]) -> Index:
    """The index of a checkpoint of these `files`. Raises `UserError`, as `read_index`, and if it names others."""
    index = read_index(folder)
    if others := {chunk.file for stored in index.values() for chunk in stored.chunks} - files.keys():
        problem = f"tensors in {listed(others)}, which the manifest does not name"
        raise UserError.at(folder / INDEX, problem=problem, fix=ANOTHER)
    return index


def index_shapes(index: Index) -> dict[str, Shape]:
    """The tensors of a checkpoint and their shapes."""
    return {key: stored.shape for key, stored in index.items()}


def index_dtypes(index: Index) -> dict[str, torch.dtype]:
    """The tensors of a checkpoint and their dtypes."""
    return {key: DTYPES[stored.dtype] for key, stored in index.items()}


def _stored(dtype: str, shape: Any, chunks: Any) -> Stored:
    return Stored(dtype, tuple(shape), tuple(_chunk(**fields) for fields in chunks))


def _chunk(file: str, at: int, rows: Any, columns: Any) -> Chunk:
    (top, bottom), (left, right) = rows, columns
    return Chunk(file, at, (top, bottom), (left, right))


def _require_index(index: Index) -> None:
    """Check that the chunks of each tensor hold each of its elements once. Raises `ValueError`."""
    for key, stored in index.items():
        if not (stored.dtype in DTYPES and 1 <= len(stored.shape) <= 2):
            raise ValueError(f"what it says of {key!r:.80} describes no tensor")
        rows, columns = _as_matrix(stored.shape)
        for chunk in stored.chunks:
            (top, bottom), (left, right) = chunk.rows, chunk.columns
            if not (0 <= top <= bottom <= rows and 0 <= left <= right <= columns):
                raise ValueError(f"what it says of {key!r:.80} is no place in a file")
        if sum(chunk.size for chunk in stored.chunks) != prod(stored.shape) or overlap(stored.chunks):
            raise ValueError(f"the parts of {key!r:.80} do not cover the tensor exactly once")


def overlap(chunks: Iterable[Chunk]) -> bool:
    """Whether any two chunks have an element in common: from the first row to the last, one pass."""
    current: list[Interval] = []
    """Columns of the chunks that the row is in, sorted."""
    ends: list[tuple[int, Interval]] = []
    for chunk in sorted((chunk for chunk in chunks if chunk.size), key=lambda chunk: chunk.rows):
        while ends and ends[0][0] <= chunk.rows[0]:
            del current[bisect_left(current, heappop(ends)[1])]
        place = bisect_left(current, chunk.columns)
        neighbours = current[max(0, place - 1) : place + 1]
        if any(start < chunk.columns[1] and chunk.columns[0] < stop for start, stop in neighbours):
            return True
        current.insert(place, chunk.columns)
        heappush(ends, (chunk.rows[1], chunk.columns))
    return False


def _as_matrix(shape: Shape, missing: int = 1) -> tuple[int, int]:
    return shape[0], shape[1] if len(shape) > 1 else missing
