"""What encoders encode, and how the items of a replica are cut over its ranks. Pure, on NumPy integers.

An *item* is an image, later a frame of video or a stretch of sound; its *size* is a value of its family's own type,
for an image its rows and columns of patches. A *patch* is what an encoder embeds as one token, a *unit* the patches
that become one row. Units are numbered in the order in which rows are placed, and worked on in the item's own order, in
which they lie in *windows*, which no cut divides. A shard is a contiguous run of whole windows, over the items of a
replica:

    item 0: windows 0 1 2 3 | item 1: windows 4 5        sp = 2: rank 0 has 0 1 2, rank 1 has 3 4 5

so that window attention stays on a rank, and the sequence that full attention sees is the shards in turn. Shards are
numbered with `sp` varying faster than `cp`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from megatron_hetero.data.items import Size


class ItemOrder(Protocol):
    """One item in the order in which its encoder works."""

    @property
    def units(self) -> np.ndarray:
        """int32 [units], the number of each unit."""
        ...

    @property
    def windows(self) -> np.ndarray:
        """int32 [windows], units of each window."""
        ...

    def positions(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Coordinates of each patch of the units [start, stop) of this order: int64 [dims, patches]."""
        ...


class ItemShape(Protocol):
    """What cutting needs to know of an encoder. A `size` is of the type of the encoder's family."""

    @property
    def unit(self) -> int:
        """Patches of a unit."""
        ...

    @property
    def unit_width(self) -> int:
        """Input elements of a unit."""
        ...

    @property
    def position_dims(self) -> int:
        """Coordinates of a patch."""
        ...

    def rows(self, size: Any) -> int:
        """Rows of an item, one for each unit."""
        ...

    def order(self, size: Any) -> ItemOrder:
        """The item in the order in which the encoder works."""
        ...

    def sequences(self, size: Any) -> tuple[int, ...]:
        """Patches of each sequence of full attention."""
        ...

    def cost(self, size: Any) -> float:
        """Predicted forward flops of encoding the item."""
        ...

    def cost_per_patch(self, size: Any) -> float:
        """Those of one of its patches, which meets all patches of its sequence."""
        ...


def padded_patches(patches: int, unit: int, sequence_shards: int) -> int:
    """Patches of a shard with padding: whole units for each of the ranks that share its activations, and never none.

    `sequence_shards`: tp with sequence-parallel activations, else 1. An empty shard takes part in collectives, and
    Megatron's layers do not accept tensors without elements.
    """
    share = unit * sequence_shards
    return max(1, -(-patches // share)) * share


@dataclass(frozen=True)
class ItemSlice:
    """The units [start, stop) of one item, in its own order."""

    item: int
    start: int
    stop: int


@dataclass(frozen=True)
class EncoderPlan:
    """What each member of one encoder replica encodes: member cp_rank * sp + sp_rank. Lengths are patches.

    `slices`: per member, its parts of items. `windows`: per member, the lengths of its windows.
    `sequences`: the lengths of the segments of full attention over all members.
    """

    slices: tuple[tuple[ItemSlice, ...], ...]
    windows: tuple[tuple[int, ...], ...]
    sequences: tuple[int, ...]
    unit: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Patches of each member."""
        return tuple(sum(windows) for windows in self.windows)


def plan_encoder(shape: ItemShape, items: Sequence[int], sizes: Sequence[Size], sp: int, cp: int) -> EncoderPlan:
    """Cut the windows of a replica's `items` (their numbers, with their `sizes`) into cp * sp contiguous shards.

    The runs of the `cp` members are as even in predicted flops as whole windows allow: queries are theirs, and meet all
    keys of a sequence. Each run is cut over its `sp` members evenly in patches: in full attention these exchange heads,
    evenly whatever the cut, so that it decides on the work per patch only. Shards may be empty.
    """
    orders, ends, cuts = _cut(shape, sizes, sp, cp)
    starts = [0, *accumulate(len(order.units) for order in orders)]
    patches = (np.diff(ends) * shape.unit).tolist()
    return EncoderPlan(
        slices=tuple(tuple(_parts(items, starts, first, last)) for first, last in pairwise(ends[cuts].tolist())),
        windows=tuple(tuple(patches[first:last]) for first, last in pairwise(cuts.tolist())),
        sequences=tuple(length for size in sizes for length in shape.sequences(size)),
        unit=shape.unit,
    )


def shard_units(shape: ItemShape, sizes: Sequence[Size], sp: int, cp: int) -> np.ndarray:
    """The units of each member's shard, int64 [cp * sp]: what `plan_encoder` comes to, for replicas of which no more
    is needed.
    """
    if not sizes:
        return np.zeros(cp * sp, np.int64)
    if cp * sp == 1:
        return np.array([sum(map(shape.rows, sizes))])
    _, ends, cuts = _cut(shape, sizes, sp, cp)
    return np.diff(ends[cuts])


def _cut(shape: ItemShape, sizes: Sequence[Size], sp: int, cp: int) -> tuple[list[ItemOrder], np.ndarray, np.ndarray]:
    """The orders of the items, the units before each window and in all, and the windows at which shards begin."""
    orders = [shape.order(size) for size in sizes]
    units = np.concatenate([np.zeros(0, np.int64), *(order.windows for order in orders)])
    costs = np.repeat([shape.cost_per_patch(size) for size in sizes], [len(order.windows) for order in orders])
    ends, flops = _running(units), _running(units * costs)
    return orders, ends, _even_cuts(ends, _even_cuts(flops, np.array([0, len(units)]), cp), sp)


def _running(lengths: np.ndarray) -> np.ndarray:
    """The totals before each of `lengths`, and after the last."""
    return np.concatenate([[0], np.cumsum(lengths)])


def _even_cuts(ends: np.ndarray, runs: np.ndarray, parts: int) -> np.ndarray:
    """Cut each run of windows into `parts`, at the windows where running totals come nearest to even shares of it.

    `ends`: [windows + 1], the totals before each window and after the last. `runs`: window indices at which runs begin,
    and where the last ends. Returns window indices [runs * parts + 1].
    """
    if parts == 1:
        return runs
    totals = ends[runs]
    shares = np.diff(totals) / parts
    targets = (totals[:-1, None] + shares[:, None] * np.arange(parts)).ravel()
    right = np.searchsorted(ends, targets)
    left = np.maximum(right - 1, 0)
    nearest = np.where(targets - ends[left] < ends[right] - targets, left, right)
    return np.append(nearest, runs[-1])


def _parts(items: Sequence[int], starts: Sequence[int], first: int, last: int) -> Iterator[ItemSlice]:
    """The units [first, last), counted over `items`, as parts of each. `starts`: where items begin, and the end."""
    place = bisect_right(starts, first) - 1
    while first < last:
        stop = min(last, starts[place + 1])
        yield ItemSlice(items[place], first - starts[place], stop - starts[place])
        first, place = stop, place + 1
