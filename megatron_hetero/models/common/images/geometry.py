"""Where the patches of an image are. Pure, on NumPy integers.

Pixel values arrive in unit order: unit u of an image, counted along its rows (*raster order*), holds the patches of
merge x merge places, row by row.
"""

from __future__ import annotations

import numpy as np


def patch_places(units: np.ndarray, rows: int, columns: int, merge: int) -> np.ndarray:
    """Row and column of each patch of `units`, raster indices in an image of `rows` x `columns` units per frame: int64
    [2, patches]. `merge`: patches per side of a unit.
    """
    units = units.astype(np.int64)[:, None, None]
    inside = np.arange(merge)
    row = units // columns % rows * merge + inside[:, None]
    column = units % columns * merge + inside[None, :]
    return np.stack([x.ravel() for x in np.broadcast_arrays(row, column)])
