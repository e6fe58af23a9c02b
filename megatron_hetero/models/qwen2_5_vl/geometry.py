"""Where the patches of an image are: windows, and positions. Pure, on NumPy integers.

A *patch* is 14 x 14 pixels; a *unit* is the 2 x 2 patches that become one row; a *window* is 4 x 4 units (less at the
lower and right edges). Pixel values arrive in unit order: unit u of an image, counted along its rows (*raster order*),
holds patches 4u .. 4u + 3. The encoder works in *window order*: all units of the first window, then of the second, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_hetero.models.items.pictures.geometry import ImageSize, patch_places


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
        return patch_places(self.units[start:stop], self.rows, self.columns, self.merge)


@lru_cache(maxsize=1024)
def image_geometry(size: ImageSize, merge: int, window: int) -> ImageGeometry:
    """The geometry of an image of that size, with `window` units a side per window."""
    frames, rows, columns = size[0], size[1] // merge, size[2] // merge
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
