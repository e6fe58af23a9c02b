"""Qwen2.5-VL: which configurations are supported, its items, and its names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_hetero.models.families.common import SUPPORTED, canonical_name, head_dim, of_text, of_vision, require
from megatron_hetero.models.family import Family
from megatron_hetero.models.items.pictures import IMAGE_TOKENS, Pictures, rope_positions

# Shapes import torch, which takes a second.
if TYPE_CHECKING:
    from megatron_hetero.models.families.qwen2_5_vl.shapes import TextShape, VisionShape

DEFAULT_SECTIONS = (16, 24, 24)
"""Rotary frequencies for time, height and width if a configuration has no `mrope_section`."""


def mrope_section(head_dim: int) -> list[int]:
    """Rotary frequencies for time, height and width; as in Qwen2.5-VL, time gets what the other two leave."""
    frequencies = head_dim // 2
    space = 3 * frequencies // 8
    return [frequencies - 2 * space, space, space]


def _image_processor() -> type:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil


class Qwen25VL(Family):
    """The family `qwen2_5_vl`, with language models `qwen2`."""

    model_type, title = "qwen2_5_vl", "Qwen2.5-VL"
    language_models = ("qwen2",)
    built = SUPPORTED
    tokens = IMAGE_TOKENS
    items = (Pictures(_image_processor),)

    def check_encoder(self, folder: Path, config: Any) -> None:
        vision = config.vision_config
        require(folder, self.title, (
            ("vision_config.hidden_act", vision.hidden_act, "silu"),
            *of_vision(vision, config.text_config),
            ("vision_config.window_size % (patch_size * spatial_merge_size)",
             vision.window_size % (vision.patch_size * vision.spatial_merge_size), 0),
            ("vision_config.fullatt_block_indexes from depth on",
             [layer for layer in vision.fullatt_block_indexes if layer >= vision.depth], []),
        ))  # fmt: skip

    def check_text(self, folder: Path, config: Any) -> None:
        text = config.text_config
        implied = text.hidden_size // text.num_attention_heads
        require(folder, self.title, (
            ("text_config.hidden_size % num_attention_heads", text.hidden_size % text.num_attention_heads, 0),
            *head_dim("text_config", text, implied),
            *of_text(text, implied, DEFAULT_SECTIONS),
        ))  # fmt: skip

    def rope_settings(self, head_dim: int) -> dict[str, Any]:
        return {"mrope_section": mrope_section(head_dim)}

    def encoder_shape(self, config: Any) -> VisionShape:
        from megatron_hetero.models.families.qwen2_5_vl.shapes import VisionShape

        vision = config.vision_config
        return VisionShape.of(
            vision,
            window=vision.window_size // vision.spatial_merge_size // vision.patch_size,
            full_layers=frozenset(vision.fullatt_block_indexes),
        )

    def text_shape(self, config: Any) -> TextShape:
        from megatron_hetero.models.families.qwen2_5_vl.shapes import TextShape

        text = config.text_config
        return TextShape.of(config, text.hidden_size // text.num_attention_heads, DEFAULT_SECTIONS)

    def positions(self, tokens: int, starts: np.ndarray, places: Sequence[np.ndarray], /) -> np.ndarray:
        return rope_positions(tokens, starts, places)

    def canonical_name(self, stored: str, /) -> str:
        return canonical_name(stored)


QWEN2_5_VL = Qwen25VL()
