"""What families that read images have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_hetero.data.items import Modality
from megatron_hetero.models.common.demo.template import IMAGE_TOKENS
from megatron_hetero.models.common.images.geometry import rope_positions
from megatron_hetero.models.common.images.reader import ImageReader
from megatron_hetero.models.family import ItemTokens

_SHOWN: Mapping[Modality, ItemTokens] = {
    "image": ItemTokens("vision_start_token_id", "image_token_id", "vision_end_token_id"),
    "video": ItemTokens("vision_start_token_id", "video_token_id", "vision_end_token_id"),
}


class PictureFamily:
    """Part of a `megatron_hetero.models.family.Family`."""

    modality: Modality = "image"
    tokens: Mapping[str, str] = IMAGE_TOKENS
    shown = _SHOWN

    def reader(self, image_processor: Any, token_id: int, max_image_pixels: int) -> ImageReader:
        """What reads the sizes and the patches of images."""
        return ImageReader(image_processor, token_id, max_image_pixels)

    @property
    def positions(self) -> Callable[[int, np.ndarray, Sequence[np.ndarray]], np.ndarray]:
        """Rotary positions of a sample."""
        return rope_positions
