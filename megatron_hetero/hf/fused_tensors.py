"""Fused tensors: tensors of a folder that contain several matrices of the model, such as all experts of a layer.

A fused tensor has three dims. Matrices with the same index in dim 0 are stacked along their rows. In some
folders fused tensors are transposed: the last two dims are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megatron_hetero.hf.weight_map import Interval, TensorShapes


@dataclass(frozen=True)
class Cut:
    """The place of a matrix in a fused tensor: `index` in dim 0, and `rows` (columns, if the tensor is transposed)."""

    index: int
    rows: Interval
    transposed: bool

    def source(self, rows: Interval | None = None, columns: Interval | None = None) -> tuple[int, slice, slice]:
        """Return the index in the fused tensor of the matrix's `rows` and `columns`, by default all of them."""
        start, stop = rows or (0, self.rows[1] - self.rows[0])
        row_slice = slice(self.rows[0] + start, self.rows[0] + stop)
        column_slice = slice(None) if columns is None else slice(*columns)
        return (self.index, column_slice, row_slice) if self.transposed else (self.index, row_slice, column_slice)

    def turned(self, values: Tensor) -> Tensor:
        """Convert values from the orientation of the fused tensor to the orientation of the matrix, or back."""
        return values.t() if self.transposed else values


@dataclass(frozen=True)
class Fused:
    """A fused tensor. `names`: for each index in dim 0, the names of the stacked matrices. `rows`: rows of each stacked
    matrix. `columns`: columns of all matrices.
    """

    names: tuple[tuple[str, ...], ...]
    rows: tuple[int, ...]
    columns: int

    @property
    def matrices(self) -> Iterator[str]:
        """Names of all matrices in the fused tensor."""
        return (name for stacked in self.names for name in stacked)

    def shape(self, transposed: bool) -> tuple[int, int, int]:
        """Return the shape of the fused tensor, `transposed` or not."""
        rows = sum(self.rows)
        return (len(self.names), self.columns, rows) if transposed else (len(self.names), rows, self.columns)

    def is_transposed(self, shape: tuple[int, ...]) -> bool | None:
        """Return whether a tensor of this shape is the transposed fused tensor, or None if it is another tensor. A
        tensor with as many rows as columns counts as not transposed, as in transformers.
        """
        return next((each for each in (False, True) if self.shape(each) == shape), None)

    def cuts(self, transposed: bool) -> Iterator[tuple[str, Cut]]:
        """Yield the name and the place of each matrix."""
        for index, stacked in enumerate(self.names):
            for name, rows in zip(stacked, pairwise(accumulate(self.rows, initial=0)), strict=True):
                yield name, Cut(index, rows, transposed)


def fused_tensors(tensors: TensorShapes, fused_name: Callable[[str], tuple[str, int] | None]) -> dict[str, Fused]:
    """Return the fused tensors that consist of these `tensors`, by name. Matrices are stacked in the order of
    `tensors`. `fused_name`: see `Family.fused_name`.
    """
    stacked: dict[str, dict[int, list[str]]] = {}
    for name in tensors:
        if (place := fused_name(name)) is not None:
            fused, index = place
            stacked.setdefault(fused, {}).setdefault(index, []).append(name)
    return {name: _fused([stacks[i] for i in sorted(stacks)], tensors) for name, stacks in stacked.items()}


def _fused(stacks: Iterable[Iterable[str]], tensors: TensorShapes) -> Fused:
    names = tuple(map(tuple, stacks))
    return Fused(names, tuple(tensors[name][0] for name in names[0]), tensors[names[0][0]][1])


def fusing(
    fused: Fused, transposed: bool, dtype: torch.dtype, put: Callable[[Tensor], None]
) -> dict[str, Callable[[Tensor], None]]:
    """Return, for each matrix of a fused tensor, a function to be called once with the matrix's values. After the last
    call, `put` is called with the fused tensor.
    """
    cuts, whole = dict(fused.cuts(transposed)), list[Tensor]()
    missing = set(cuts)

    def take(name: str, matrix: Tensor) -> None:
        if not whole:
            whole.append(torch.empty(fused.shape(transposed), dtype=dtype))
        whole[0][cuts[name].source()] = cuts[name].turned(matrix)
        missing.remove(name)
        if not missing:
            put(whole.pop())

    return {name: partial(take, name) for name in cuts}
