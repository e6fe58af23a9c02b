"""Where the patches of images go: windows, the cut over `sp`, and positions. Pure, on NumPy integers.

Words: a *patch* is 14 x 14 pixels; a *unit* is the 2 x 2 patches that become one row; a *window* is 4 x 4 units
(less at the lower and right edges). Pixel values arrive in unit order: unit u of an image, counted along its
rows (*raster order*), holds patches 4u .. 4u + 3. The encoder works in *window order*: all units of the first
window, then of the second, ... A shard is a contiguous run of whole windows, over the images of a replica:

    image 0: windows 0 1 2 3 | image 1: windows 4 5        sp = 2: rank 0 has 0 1 2, rank 1 has 3 4 5

so that window attention stays on a rank, and the sequence that full attention sees is the shards in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Grid = tuple[int, int, int]
"""Frames, rows and columns of an image in patches."""


@dataclass(frozen=True)
class ImageGeometry:
    """One image in window order.

    `units`: int64 [units], raster index of each unit. `windows`: int64 [windows], units of each window.
    `positions`: int64 [2, units * merge^2], row and column of each patch.
    """

    units: np.ndarray
    windows: np.ndarray
    positions: np.ndarray


@lru_cache(maxsize=4096)
def image_geometry(grid: Grid, merge: int, window: int) -> ImageGeometry:
    """The geometry of an image of `grid` patches, with `window` units a side per window."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    raster = np.arange(frames * rows * columns).reshape(frames, rows, columns)
    frame, row, column = np.indices(raster.shape)
    across = -(-columns // window)
    down = -(-rows // window)
    window_of = (frame * down + row // window) * across + column // window
    order = np.argsort(window_of.ravel(), kind="stable")
    inside = np.arange(merge)
    patch_row = row[..., None, None] * merge + inside[:, None]
    patch_column = column[..., None, None] * merge + inside[None, :]
    positions = np.stack(np.broadcast_arrays(patch_row, patch_column)).reshape(2, raster.size, merge * merge)
    return ImageGeometry(
        units=order,
        windows=np.bincount(window_of.ravel(), minlength=frames * down * across),
        positions=positions[:, order].reshape(2, -1),
    )


@dataclass(frozen=True)
class ImageSlice:
    """The units [start, stop) of one image, in its window order, and where its patches begin in the shard."""

    image: int
    start: int
    stop: int


@dataclass(frozen=True)
class EncoderPlan:
    """What each `sp`/`cp` member of one vision replica encodes. Lengths are patches.

    `slices`: per member, its parts of images. `windows`: per member, the lengths of its windows.
    `sequences`: the lengths of the segments of full attention (frames of images) over all members.
    """

    slices: tuple[tuple[ImageSlice, ...], ...]
    windows: tuple[tuple[int, ...], ...]
    sequences: tuple[int, ...]
    unit: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Patches of each member."""
        return tuple(sum(windows) for windows in self.windows)


def plan_encoder(images: Sequence[int], grids: Sequence[Grid], members: int, merge: int, window: int) -> EncoderPlan:
    """Cut the windows of a replica's `images` (their ids, with their `grids`) into `members` contiguous shards.

    Shards hold whole windows and are as even in patches as these allow; they may be empty.
    """
    geometries = [image_geometry(grid, merge, window) for grid in grids]
    lengths = np.concatenate([g.windows for g in geometries]) if geometries else np.zeros(0, np.int64)
    owner = np.repeat(np.arange(len(geometries)), [len(g.windows) for g in geometries])
    ends = np.cumsum(lengths)
    cuts = _even_cuts(ends, members)
    image_start = np.cumsum([0] + [len(g.units) for g in geometries])
    slices, windows = [], []
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        parts = []
        for image in np.unique(owner[first:last]):
            mine = np.flatnonzero(owner[first:last] == image) + first
            start = ends[mine[0]] - lengths[mine[0]] - image_start[image]
            parts.append(ImageSlice(images[image], int(start), int(ends[mine[-1]] - image_start[image])))
        slices.append(tuple(parts))
        windows.append(tuple(int(n) * merge * merge for n in lengths[first:last]))
    sequences = tuple(rows * columns for frames, rows, columns in grids for _ in range(frames))
    return EncoderPlan(tuple(slices), tuple(windows), sequences, merge * merge)


def _even_cuts(ends: np.ndarray, members: int) -> np.ndarray:
    """Window indices [members + 1] at which running lengths `ends` come nearest to even shares."""
    total = ends[-1] if len(ends) else 0
    targets = np.arange(1, members) * (total / members)
    boundaries = np.concatenate([[0], ends])
    right = np.clip(np.searchsorted(boundaries, targets), 1, max(1, len(boundaries) - 1))
    nearer_left = targets - boundaries[right - 1] < boundaries[np.minimum(right, len(boundaries) - 1)] - targets
    return np.concatenate([[0], np.where(nearer_left, right - 1, np.minimum(right, len(ends))), [len(ends)]])


def deal_images(costs: Sequence[float], replicas: int) -> list[list[int]]:
    """Deal images to replicas so that the sums of `costs` are even: the largest first, each to the least loaded.

    Returns the images of each replica, in ascending order. (Graham's rule: within 4/3 of the best.)
    """
    loads = [0.0] * replicas
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    for image in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        replica = min(range(replicas), key=lambda r: (loads[r], r))
        loads[replica] += costs[image]
        dealt[replica].append(image)
    return [sorted(images) for images in dealt]
