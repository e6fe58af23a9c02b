"""Multimodal rotary positions of one sample (Qwen2-VL, arXiv 2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rope_positions(length: int, starts: np.ndarray, places: Sequence[np.ndarray]) -> np.ndarray:
    """Positions in time, height and width of each token.

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
