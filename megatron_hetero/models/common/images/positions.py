"""Multimodal rotary positions of one sample (Qwen2-VL, arXiv 2409.12191, section 2.1)."""

from __future__ import annotations

import numpy as np


def rope_positions(length: int, image_starts: np.ndarray, merged_grids: np.ndarray) -> np.ndarray:
    """Positions in time, height and width of each token.

    Text advances all three together. The tokens of an image share one time and take their row and column on its merged
    grid, all counted from the position where the image begins; after it the count goes on from its longer side.

    Args:
        length: tokens of the sample, image tokens included.
        image_starts: [images] index of each image's first token.
        merged_grids: [images, 3] time, height, width in tokens; time is 1 for images.

    Returns:
        int64 [3, length].
    """
    positions = np.empty((3, length), dtype=np.int64)
    token = position = 0
    for start, merged in zip(image_starts.tolist(), merged_grids, strict=True):
        text = start - token
        positions[:, token:start] = np.arange(position, position + text)
        token, position = start + int(merged.prod()), position + text
        positions[:, start:token] = position + np.indices(merged).reshape(3, -1)
        position += int(merged[1:].max())
    positions[:, token:] = np.arange(position, position + length - token)
    return positions
