"""A record as a model reads it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hetero.data.items import Size
from megatron_hetero.data.records import Record


@dataclass(frozen=True, eq=False)
class TokenizedSample:
    """One record as tokens, each image already expanded to one token per merged patch.

    Attributes:
        input_ids: int64 [n].
        supervised: bool [n], true for the tokens the model is trained to produce.
        sizes: of each image, of the type of its encoder's family.
        position_ids: int64 [3, n], multimodal rotary positions from 0.
        image_positions: int64 [rows], the indices of image tokens, image by image in raster order.
        rows: int64 [images], the tokens of each image.
        record: its source, which also names the encoder of each image.
    """

    input_ids: np.ndarray
    supervised: np.ndarray
    sizes: tuple[Size, ...]
    position_ids: np.ndarray
    image_positions: np.ndarray
    rows: np.ndarray
    record: Record

    def __len__(self) -> int:
        return len(self.input_ids)
