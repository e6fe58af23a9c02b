"""Sizes of pictures, where their patches are, and positions of tokens. Pure, on NumPy integers.

Patches arrive in unit order: unit u of a picture, counted along its rows (*raster order*), holds the patches of
merge x merge places, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class ImageSize(NamedTuple):
    """In patches, before merging. An image has one frame."""

    frames: int
    rows: int
    columns: int


@dataclass(frozen=True, eq=False)
class PictureOrder:
    """One picture in *window order*: all units of the first window in raster order, then of the second, ...

    `units`: int32 [units], raster index of each unit. `windows`: int32 [windows], units of each window. `rows`,
    `columns`: of a frame, in units; `merge`: patches per side of a unit. `sides`: whether positions say how large the
    picture is.
    """

    units: np.ndarray
    windows: np.ndarray
    rows: int
    columns: int
    merge: int
    sides: bool

    def positions(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Row and column of each patch of the units [start, stop), and with `sides` the numbers of rows and columns of
        patches: int64 [2 or 4, patches].
        """
        units = self.units[start:stop].astype(np.int64)[:, None, None]
        inside = np.arange(self.merge)
        row = units // self.columns % self.rows * self.merge + inside[:, None]
        column = units % self.columns * self.merge + inside[None, :]
        places = np.stack([x.ravel() for x in np.broadcast_arrays(row, column)])
        if not self.sides:
            return places
        sides = np.array([[self.rows * self.merge], [self.columns * self.merge]])
        return np.concatenate([places, np.broadcast_to(sides, places.shape)])


@lru_cache(maxsize=1024)
def picture_order(size: ImageSize, merge: int, window: int, sides: bool = False) -> PictureOrder:
    """The order of a picture of that size with `window` units a side per window, less at the lower and right edges;
    windows of one unit are raster order.
    """
    frames, rows, columns = size[0], size[1] // merge, size[2] // merge
    frame, row, column = np.indices((frames, rows, columns))
    across, down = -(-columns // window), -(-rows // window)
    window_of = ((frame * down + row // window) * across + column // window).ravel()
    return PictureOrder(
        units=np.argsort(window_of, kind="stable").astype(np.int32),
        windows=np.bincount(window_of, minlength=frames * down * across).astype(np.int32),
        rows=rows,
        columns=columns,
        merge=merge,
        sides=sides,
    )


def rope_positions(length: int, starts: np.ndarray, places: Sequence[np.ndarray]) -> np.ndarray:
    """Multimodal rotary positions of one sample: time, height and width of each token (Qwen2-VL, arXiv 2409.12191,
    section 2.1).

    Text advances all three together. The tokens of an image share one time and take their row and column in it, all
    counted from the position where the image begins; the text after it continues from the largest of them.

    Args:
        length: tokens of the sample, image tokens included.
        starts: [images] index of each image's first token.
        places: of each image, int64 [3, tokens], time, row and column of its tokens from its first.

    Returns:
        int64 [3, length].
    """
    positions = np.empty((3, length), dtype=np.int64)
    token = position = 0
    for start, of_image in zip(starts.tolist(), places, strict=True):
        text = start - token
        positions[:, token:start] = np.arange(position, position + text)
        token, position = start + of_image.shape[1], position + text
        positions[:, start:token] = position + of_image
        position += int(of_image[1:].max()) + 1
    positions[:, token:] = np.arange(position, position + length - token)
    return positions
