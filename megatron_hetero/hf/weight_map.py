"""The slices of stored tensors that make up local parameters. The same map is used to load, save and count copies.

A local parameter is a stack of `TensorSlice`s: rectangles of stored tensors, one below the other, and zero elsewhere.
Under `tp` the rectangles differ between ranks. A rectangle that occurs on several ranks, or twice on one rank, is a
replicated slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

# Maps are computed without torch, whose import takes seconds.
if TYPE_CHECKING:
    from torch import Tensor

Interval = tuple[int, int]
TensorShapes = dict[str, tuple[int, ...]]
"""Shapes of stored tensors by name, in the order in which they are written."""
MAIN = "main"
"""The view of a layout to which parameters belong by default."""
ALIGNMENT = 8
"""Each rank's rows or columns of a width that is split over `tp` are padded to a multiple of this: 16 bytes in
bfloat16, the unit of matrix products on tensor cores (NVIDIA, "Matrix Multiplication Background User's Guide", 2023).
Weights and gradients of the padding are zero.
"""


class Share(NamedTuple):
    """The share of rank number `rank` when a view splits a parameter over `ranks` ranks."""

    rank: int
    ranks: int


@dataclass(frozen=True)
class TensorSlice:
    """Rows and columns (None: all) [start, stop) of the stored tensor `name`, at row `at` and below in a parameter.

    Stored tensors of more than two dims are matrices: all dims but the first are columns. `padding`: columns, or rows
    without `columns`, of zeros that follow in the parameter.
    """

    name: str
    rows: Interval
    at: int = 0
    columns: Interval | None = None
    padding: int = 0

    @property
    def rectangle(self) -> tuple[str, Interval, Interval | None]:
        """The rectangle of a stored tensor, regardless of its place in a parameter."""
        return self.name, self.rows, self.columns

    @property
    def empty(self) -> bool:
        """Whether the slice has no elements, as on the last ranks if `tp` does not divide a size."""
        return self.rows[0] == self.rows[1] or (self.columns is not None and self.columns[0] == self.columns[1])

    @property
    def place(self) -> tuple[slice, ...]:
        """The index of the slice in the local parameter."""
        rows = slice(self.at, self.at + self.rows[1] - self.rows[0])
        return (rows,) if self.columns is None else (rows, slice(0, self.columns[1] - self.columns[0]))

    @property
    def source(self) -> tuple[slice, ...]:
        """The index of the slice in the stored tensor as a matrix."""
        return (slice(*self.rows),) if self.columns is None else (slice(*self.rows), slice(*self.columns))


WeightMap = Mapping[str, tuple[TensorSlice, ...]]
"""The slices of each local parameter of one rank."""


class WeightSource(Protocol):
    """A source of a module's weights."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors by name."""
        ...

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        """Read the values of one slice: 1-D if the stored tensor is 1-D, else 2-D."""
        ...

    def require_copy(self, copy: str, original: str, slices: Iterable[TensorSlice]) -> None:
        """Check that tensors `copy` and `original` are equal in these `slices` of `original`. Raises `UserError`."""
        ...


def stack(*intervals: tuple[str, Interval]) -> tuple[TensorSlice, ...]:
    """Return slices of whole rows, one below the other, given tensor names and row intervals, which may be empty."""
    slices: list[TensorSlice] = []
    at = 0
    for name, (start, stop) in intervals:
        slices.append(TensorSlice(name, (start, stop), at))
        at += stop - start
    return tuple(slices)


def share(size: int, tp_rank: int, tp: int, multiple: int = 1) -> tuple[Interval, int]:
    """Return the interval [start, stop) of `size` on rank `tp_rank` of `tp`, and its length padded to a `multiple`."""
    length = -(-size // (tp * multiple)) * multiple
    start = min(size, length * tp_rank)
    return (start, min(size, start + length)), length


def split_length(size: int, ranks: int) -> int:
    """Return the padded length of each rank's share of `size`."""
    return share(size, 0, ranks, ALIGNMENT)[1]


def split_rows(name: str, size: int, member: Share) -> tuple[TensorSlice, ...]:
    """Return the slice with a rank's rows of a tensor of `size` rows, padded to the length of each share."""
    rows, length = share(size, *member, ALIGNMENT)
    return (TensorSlice(name, rows, padding=length - (rows[1] - rows[0])),)


def split_columns(name: str, rows: int, size: int, member: Share) -> tuple[TensorSlice, ...]:
    """Return the slice with a rank's columns of a matrix of `size` columns, padded to the length of each share."""
    columns, length = share(size, *member, ALIGNMENT)
    return (TensorSlice(name, (0, rows), columns=columns, padding=length - (columns[1] - columns[0])),)


def whole(name: str, rows: int) -> tuple[TensorSlice, ...]:
    """Return the slice that is a whole tensor of `rows` rows."""
    return stack((name, (0, rows)))


def columns(name: str, rows: int, interval: Interval) -> tuple[TensorSlice, ...]:
    """Return the slice with an interval of the columns of a matrix of `rows` rows."""
    return (TensorSlice(name, (0, rows), columns=interval),)


@dataclass(frozen=True)
class Held:
    """The copies of a parameter's slices in a tensor-parallel group. `sharded`: whether ranks have different slices.
    `copies`: the number of copies of each slice in the group.
    """

    sharded: bool
    copies: tuple[int, ...]

    @property
    def replicated_slices(self) -> bool:
        """Whether the parameter is sharded, but some of its slices have copies (key/value heads)."""
        return self.sharded and any(n > 1 for n in self.copies)


def held(maps: Sequence[WeightMap]) -> tuple[dict[str, Held], ...]:
    """Return, for each tp rank, the copies of its parameters by name, given the maps of all tp ranks in order."""
    result: list[dict[str, Held]] = [{} for _ in maps]
    for name in maps[0]:
        counts = Counter(tensor_slice.rectangle for m in maps for tensor_slice in m[name])
        sharded = any(m[name] != maps[0][name] for m in maps)
        for copies, m in zip(result, maps, strict=True):
            copies[name] = Held(sharded, tuple(1 if p.empty else counts[p.rectangle] for p in m[name]))
    return tuple(result)


def load_slices(parameter: Tensor, slices: Sequence[TensorSlice], values: Sequence[Tensor]) -> None:
    """Copy the `values` of `slices` to a local parameter, and zero the rest."""
    parameter = parameter.detach()
    parameter.zero_()
    for tensor_slice, rectangle in zip(slices, values, strict=True):
        if not tensor_slice.empty:
            parameter[tensor_slice.place].copy_(rectangle)


def extract_slice(parameter: Tensor, tensor_slice: TensorSlice) -> Tensor:
    """Return the values of one slice of a local parameter."""
    return parameter.detach()[tensor_slice.place]
