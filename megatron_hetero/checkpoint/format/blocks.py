"""Which rectangles of which stored tensors a flat range of a local parameter is. Pure.

The distributed optimizer cuts each local parameter into flat ranges over its data- and context-parallel ranks. A flat
range of a matrix is at most three rectangles, so that each rank can write and read its own range in terms of the stored
tensors, and nothing is gathered:

    . . a a      the rest of the first row,
    b b b b
    b b b b      whole rows,
    c . . .      the beginning of the last row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_hetero.hf.weight_map import Interval, TensorSlice, WeightMap


@dataclass(frozen=True)
class Block:
    """Rows and columns [start, stop) of the stored tensor `name`, and their place in a flat buffer: the first
    element at `offset`, rows `stride` elements apart.

    Stored tensors count as matrices: of one dim, they have one column; of more than two, all dims but the first are
    columns.
    """

    name: str
    rows: Interval
    columns: Interval
    offset: int
    stride: int

    @property
    def begins(self) -> bool:
        """Whether it contains the first element of the stored tensor."""
        return self.rows[0] == 0 and self.columns[0] == 0

    @property
    def length(self) -> int:
        """From its first element in the buffer to behind its last."""
        return (self.rows[1] - self.rows[0] - 1) * self.stride + self.columns[1] - self.columns[0]

    def view(self, flat: Tensor, dims: int) -> Tensor:
        """The block in its flat buffer, of one or two dims."""
        rows, columns = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        size, strides = ((rows,), (self.stride,)) if dims == 1 else ((rows, columns), (self.stride, 1))
        return flat.as_strided(size, strides, int(flat.storage_offset()) + self.offset)


def cut(slices: Iterable[TensorSlice], width: int, start: int, stop: int) -> Iterator[Block]:
    """The blocks of elements [start, stop) of a parameter made of `slices`, with rows of `width` elements. Offsets
    count from `start`; padding is skipped.
    """
    for tensor_slice in slices:
        left = 0 if tensor_slice.columns is None else tensor_slice.columns[0]
        used = width if tensor_slice.columns is None else tensor_slice.columns[1] - left
        lines = (tensor_slice.at, tensor_slice.at + tensor_slice.rows[1] - tensor_slice.rows[0])
        for rows, columns in _rectangles(start, stop, width):
            (top, bottom), (first, last) = common(rows, lines), common(columns, (0, used))
            if top < bottom and first < last:
                shift = tensor_slice.rows[0] - tensor_slice.at
                yield Block(
                    tensor_slice.name,
                    (top + shift, bottom + shift),
                    (first + left, last + left),
                    top * width + first - start,
                    width,
                )


def first_held(maps: Sequence[WeightMap], tp_rank: int) -> dict[str, tuple[TensorSlice, ...]]:
    """The slices that `tp_rank` is the first of its tensor-parallel group to hold, each once. Over the group, they
    cover every held element exactly once.
    """
    seen = {tensor_slice.rectangle for m in maps[:tp_rank] for slices in m.values() for tensor_slice in slices}
    own: dict[str, tuple[TensorSlice, ...]] = {}
    for name, slices in maps[tp_rank].items():
        new = {
            tensor_slice.rectangle: tensor_slice
            for tensor_slice in reversed(slices)
            if tensor_slice.rectangle not in seen and not tensor_slice.empty
        }
        own[name] = tuple(new.values())
        seen |= new.keys()
    return own


def _rectangles(start: int, stop: int, width: int) -> Iterator[tuple[Interval, Interval]]:
    """Rows and columns of the rectangles that a flat range is."""
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
    """What two intervals have in common; if nothing, it does not begin before it ends."""
    return max(a[0], b[0]), min(a[1], b[1])
