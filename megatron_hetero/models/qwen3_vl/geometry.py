"""Where the patches of an image are. Pure, on NumPy integers.

A *patch* is 16 x 16 pixels; a *unit* is the 2 x 2 patches that become one row. The encoder works in raster order. No
layer attends inside windows, so that an image can be cut between any two units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_hetero.models.items.pictures.geometry import ImageSize, patch_places


@dataclass(frozen=True, eq=False)
class RasterOrder:
    """One image. `units`: int32 [units], raster index of each unit; `windows`: int32 [units], of one unit each. `rows`,
    `columns`: of a frame, in units; `merge`: patches per side of a unit.
    """

    units: np.ndarray
    windows: np.ndarray
    rows: int
    columns: int
    merge: int

    def positions(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Of each patch of the units [start, stop) its row and its column, and how many rows and columns of patches the
        image has: int64 [4, patches].
        """
        places = patch_places(self.units[start:stop], self.rows, self.columns, self.merge)
        sides = np.array([[self.rows * self.merge], [self.columns * self.merge]])
        return np.concatenate([places, np.broadcast_to(sides, places.shape)])


@lru_cache(maxsize=1024)
def raster_order(size: ImageSize, merge: int) -> RasterOrder:
    """The order of an image of that size."""
    frames, rows, columns = size[0], size[1] // merge, size[2] // merge
    units = np.arange(frames * rows * columns, dtype=np.int32)
    return RasterOrder(units, np.ones_like(units), rows, columns, merge)
