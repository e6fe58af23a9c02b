"""What is alike in families that read pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron_hetero.models.common.demo.template import IMAGE_TOKENS
from megatron_hetero.models.common.images.positions import rope_positions
from megatron_hetero.models.common.images.reader import ImageReader


class PictureFamily:
    """Part of a `megatron_hetero.models.family.Family`."""

    tokens: Mapping[str, str] = IMAGE_TOKENS

    def image_reader(self, image_processor: Any, token_id: int, max_image_pixels: int) -> ImageReader:
        """What reads the sizes and the patches of images."""
        return ImageReader(image_processor, token_id, max_image_pixels)

    @property
    def positions(self) -> Callable[[int, np.ndarray, np.ndarray], np.ndarray]:
        """Rotary positions of a sample."""
        return rope_positions
