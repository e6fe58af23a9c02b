"""The shapes of the modules of Qwen2.5-VL, from its configuration in `transformers`, and what encoding costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_hetero.models.common.flops import VisionFlopShape
from megatron_hetero.models.common.language_shape import LanguageModelShape
from megatron_hetero.models.family import LayerKind
from megatron_hetero.models.items.pictures.geometry import ImageSize, PictureOrder, picture_order
from megatron_hetero.models.items.pictures.shape import ImageEncoderShape
from megatron_hetero.names import ROWS

FAMILY = "qwen2_5_vl"
DEFAULT_SECTIONS = (16, 24, 24)
"""Rotary frequencies for time, height and width, where a configuration gives none."""


@dataclass(frozen=True)
class VisionShape(ImageEncoderShape):
    """The vision encoder with its merger (`projector`)."""

    window: int
    """Units per side of a window."""
    full_layers: frozenset[int]

    @property
    def family(self) -> str:
        """The `model_type` of its family."""
        return FAMILY

    @property
    def layer_kind(self) -> LayerKind:
        """What the layers are made of."""
        return LayerKind()

    @property
    def position_dims(self) -> int:
        """Coordinates of a patch: row and column."""
        return 2

    @property
    def outputs(self) -> Mapping[str, int]:
        """Rows alone."""
        return {ROWS: self.layers - 1}

    def order(self, size: ImageSize) -> PictureOrder:
        """The image in window order."""
        return picture_order(size, self.merge, self.window)

    def flop_shape(self, layers: Collection[int], embeds: bool) -> VisionFlopShape:
        """What the operations of some of the layers depend on."""
        full = sum(layer in self.full_layers for layer in layers)
        pixels = self.patch_elements if embeds else 0
        return VisionFlopShape(len(layers), full, self.hidden, self.ffn, pixels, self.unit, self.out_hidden)

    def flops_per_patch(self) -> tuple[float, float]:
        """Forward flops per patch, and per patch and patch of its sequence in layers of full attention."""
        return _flops_per_patch(self)


@lru_cache
def _flops_per_patch(shape: VisionShape) -> tuple[float, float]:
    window_patches = shape.window**2 * shape.unit
    linear = (
        shape.layers * (8 * shape.hidden**2 + 6 * shape.hidden * shape.ffn) + 2 * shape.patch_elements * shape.hidden
    )
    merger = 2 * shape.hidden * (shape.hidden * shape.unit + shape.out_hidden)
    windowed = (shape.layers - len(shape.full_layers)) * 4 * shape.hidden * window_patches
    return float(linear + merger + windowed), float(len(shape.full_layers) * 4 * shape.hidden)


@dataclass(frozen=True)
class TextShape(LanguageModelShape):
    """The language model."""

    @property
    def family(self) -> str:
        """The `model_type` of its family."""
        return FAMILY

    @property
    def layer_kind(self) -> LayerKind:
        """What the layers are made of."""
        return LayerKind()

    @property
    def turns(self) -> tuple[int, ...]:
        """For each rotary frequency the position that it turns with: a section for time, for height, for width."""
        return tuple(dim for dim, count in enumerate(self.mrope_section) for _ in range(count))

    def entry_layer(self, output: str) -> int | None:
        """Rows take the place of embeddings; nothing enters deeper."""
        return 0 if output == ROWS else None


def vision_shape(vision: Any) -> VisionShape:
    """Of the configuration `vision_config`."""
    return VisionShape.of(
        vision,
        window=vision.window_size // vision.spatial_merge_size // vision.patch_size,
        full_layers=frozenset(vision.fullatt_block_indexes),
    )


def text_shape(config: Any) -> TextShape:
    """Of the configuration of a whole model."""
    text = config.text_config
    return TextShape.of(config, text.hidden_size // text.num_attention_heads, DEFAULT_SECTIONS)
