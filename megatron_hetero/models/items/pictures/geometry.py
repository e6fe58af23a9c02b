"""Sizes of images, where their patches are, and positions of tokens. Pure, on NumPy integers.

Pixel values arrive in unit order: unit u of an image, counted along its rows (*raster order*), holds the patches of
merge x merge places, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class ImageSize(NamedTuple):
    """In patches, before merging. An image has one frame."""

    frames: int
    rows: int
    columns: int


def patch_places(units: np.ndarray, rows: int, columns: int, merge: int) -> np.ndarray:
    """Row and column of each patch of `units`, raster indices in an image of `rows` x `columns` units per frame: int64
    [2, patches]. `merge`: patches per side of a unit.
    """
    units = units.astype(np.int64)[:, None, None]
    inside = np.arange(merge)
    row = units // columns % rows * merge + inside[:, None]
    column = units % columns * merge + inside[None, :]
    return np.stack([x.ravel() for x in np.broadcast_arrays(row, column)])


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
