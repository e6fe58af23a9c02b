"""Pictures as an item type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_hetero.models.items.pictures.geometry import ImageSize
from megatron_hetero.models.items.pictures.reader import ImageReader, check_agreement, load_image_processor
from megatron_hetero.models.items.types import ItemTokens, Modality

if TYPE_CHECKING:
    from megatron_hetero.config.schema import PlanConfig
    from megatron_hetero.models.items.pictures.shape import ImageEncoderShape


_TOKENS = ItemTokens("vision_start_token_id", "image_token_id", "vision_end_token_id")
IMAGE_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""The tokens that show pictures and videos in published folders, by what `config.json` calls their numbers."""


@dataclass(frozen=True)
class Pictures:
    """See `megatron_hetero.models.items.types.ItemType`. A size is an `ImageSize`; a picture is one piece."""

    image_processor_class: Callable[[], type]
    """The class of `transformers` whose patches the encoder takes."""
    modality: Modality = "image"
    tokens: ItemTokens = _TOKENS
    processor: str = "an image processor"

    def open(self, folder: Path, config: Any, section: Any, setting: str, token_id: int) -> ImageReader:
        """The reader with the image processor of a folder."""
        image_processor = load_image_processor(folder, self.image_processor_class(), section, setting)
        check_agreement(folder, config.vision_config, image_processor)
        return ImageReader(image_processor, token_id)

    def inputs(self, patches: np.ndarray, sizes: Sequence[ImageSize]) -> dict[str, Any]:
        """Patches, and the grid of each picture."""
        import torch

        return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.tensor(sizes)}

    def assumed(self, shape: ImageEncoderShape, plan: PlanConfig) -> ImageSize:
        """A square of whole units, as the image processor resizes it."""
        patches = max(1, round(plan.image_side / (shape.patch * shape.merge))) * shape.merge
        return ImageSize(1, patches, patches)

    def measures(self, shape: ImageEncoderShape, size: ImageSize) -> str:
        """Width and height in pixels."""
        return f"{size.columns * shape.patch:,}x{size.rows * shape.patch:,} pixels"
