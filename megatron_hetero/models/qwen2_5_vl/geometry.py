"""Where the patches of images go: windows, the cut over `sp` and `cp`, and positions. Pure, on NumPy integers.

Words: a *patch* is 14 x 14 pixels; a *unit* is the 2 x 2 patches that become one row; a *window* is 4 x 4 units
(less at the lower and right edges). Pixel values arrive in unit order: unit u of an image, counted along its
rows (*raster order*), holds patches 4u .. 4u + 3. The encoder works in *window order*: all units of the first
window, then of the second, ... A shard is a contiguous run of whole windows, over the images of a replica:

    image 0: windows 0 1 2 3 | image 1: windows 4 5        sp = 2: rank 0 has 0 1 2, rank 1 has 3 4 5

so that window attention stays on a rank, and the sequence that full attention sees is the shards in turn. Shards are
numbered with `sp` varying faster than `cp`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np

Grid = tuple[int, int, int]
"""Frames, rows and columns of an image in patches."""


@dataclass(frozen=True, eq=False)
class ImageGeometry:
    """One image in window order.

    `units`: int32 [units], raster index of each unit. `windows`: int32 [windows], units of each window. `rows`,
    `columns`: of the image, in units; `merge`: patches per side of a unit.
    """

    units: np.ndarray
    windows: np.ndarray
    rows: int
    columns: int
    merge: int

    def positions(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Row and column of each patch of the units [start, stop), in window order: int64 [2, patches]."""
        units = self.units[start:stop].astype(np.int64)[:, None, None]
        inside = np.arange(self.merge)
        row = units // self.columns % self.rows * self.merge + inside[:, None]
        column = units % self.columns * self.merge + inside[None, :]
        return np.stack([x.ravel() for x in np.broadcast_arrays(row, column)])


@lru_cache(maxsize=1024)
def image_geometry(grid: Grid, merge: int, window: int) -> ImageGeometry:
    """The geometry of an image of `grid` patches, with `window` units a side per window."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    frame, row, column = np.indices((frames, rows, columns))
    across, down = -(-columns // window), -(-rows // window)
    window_of = ((frame * down + row // window) * across + column // window).ravel()
    return ImageGeometry(
        units=np.argsort(window_of, kind="stable").astype(np.int32),
        windows=np.bincount(window_of, minlength=frames * down * across).astype(np.int32),
        rows=rows,
        columns=columns,
        merge=merge,
    )


@dataclass(frozen=True)
class ImageSlice:
    """The units [start, stop) of one image, in its window order, and where its patches begin in the shard."""

    image: int
    start: int
    stop: int


@dataclass(frozen=True)
class EncoderPlan:
    """What each member of one vision replica encodes: member cp_rank * sp + sp_rank. Lengths are patches.

    `slices`: per member, its parts of images. `windows`: per member, the lengths of its windows.
    `sequences`: the lengths of the segments of full attention (frames of images) over all members.
    """

    slices: tuple[tuple[ImageSlice, ...], ...]
    windows: tuple[tuple[int, ...], ...]
    sequences: tuple[int, ...]
    unit: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Patches of each member."""
        return tuple(sum(windows) for windows in self.windows)


def plan_encoder(
    images: Sequence[int], grids: Sequence[Grid], sp: int, cp: int, merge: int, window: int, cost: tuple[float, float]
) -> EncoderPlan:
    """Cut the windows of a replica's `images` (their ids, with their `grids`) into cp * sp contiguous shards.

    `cost`: flops per patch, and flops per patch and patch of its frame, as of `forward_flops_per_patch`. The runs of
    the `cp` members are as even in these flops as whole windows allow: queries are theirs, and meet all keys of a
    frame. Each run is cut over its `sp` members evenly in patches: in full attention these deal heads, evenly whatever
    the cut, so that it decides on the work per patch only. Shards may be empty.
    """
    geometries, ends, cuts = _cut(grids, sp, cp, merge, window, cost)
    starts = [0, *accumulate(len(g.units) for g in geometries)]
    patches = (np.diff(ends) * merge**2).tolist()
    return EncoderPlan(
        slices=tuple(tuple(_parts(images, starts, first, last)) for first, last in pairwise(ends[cuts].tolist())),
        windows=tuple(tuple(patches[first:last]) for first, last in pairwise(cuts.tolist())),
        sequences=tuple(rows * columns for frames, rows, columns in grids for _ in range(frames)),
        unit=merge**2,
    )


def shard_units(
    grids: Sequence[Grid], sp: int, cp: int, merge: int, window: int, cost: tuple[float, float]
) -> np.ndarray:
    """The units of each member's shard, int64 [cp * sp]: what `plan_encoder` comes to, for replicas of which no more
    is needed.
    """
    if not grids:
        return np.zeros(cp * sp, np.int64)
    if cp * sp == 1:
        return np.array([sum(frames * rows * columns for frames, rows, columns in grids) // merge**2])
    _, ends, cuts = _cut(grids, sp, cp, merge, window, cost)
    return np.diff(ends[cuts])


def _cut(
    grids: Sequence[Grid], sp: int, cp: int, merge: int, window: int, cost: tuple[float, float]
) -> tuple[list[ImageGeometry], np.ndarray, np.ndarray]:
    """The geometries of the images, the units before each window and in all, and the windows at which shards begin."""
    geometries = [image_geometry(grid, merge, window) for grid in grids]
    units = np.concatenate([np.zeros(0, np.int64), *(g.windows for g in geometries)])
    ends, flops = _running(units), _running(units * _flops_per_patch(grids, geometries, cost))
    return geometries, ends, _even_cuts(ends, _even_cuts(flops, np.array([0, len(units)]), cp), sp)


def _flops_per_patch(
    grids: Sequence[Grid], geometries: Sequence[ImageGeometry], cost: tuple[float, float]
) -> np.ndarray:
    """Of each window of the images in turn, float64 [windows]."""
    linear, quadratic = cost
    of_images = [linear + quadratic * rows * columns for _, rows, columns in grids]
    return np.repeat(of_images, [len(g.windows) for g in geometries])


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


def _parts(images: Sequence[int], starts: Sequence[int], first: int, last: int) -> Iterator[ImageSlice]:
    """The units [first, last), counted over `images`, as parts of each. `starts`: where images begin, and the end."""
    place = bisect_right(starts, first) - 1
    while first < last:
        stop = min(last, starts[place + 1])
        yield ImageSlice(images[place], first - starts[place], stop - starts[place])
        first, place = stop, place + 1
