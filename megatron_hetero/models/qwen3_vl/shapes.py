"""The shapes of the modules of Qwen3-VL, from its configuration in `transformers`, and what encoding costs."""

from __future__ import annotations

import math
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

FAMILY = "qwen3_vl"
DEFAULT_SECTIONS = (24, 20, 20)
"""Rotary frequencies for time, height and width, where a configuration gives none."""
DEEPSTACK = "deepstack."
"""What outputs that are made after earlier layers are called, before their number (Meng et al. 2024, arXiv 2406.04334).
"""


@dataclass(frozen=True)
class VisionShape(ImageEncoderShape):
    """The vision encoder with its mergers (`projector`)."""

    table_side: int
    """Places per side of the learned table of positions."""
    deepstack: tuple[int, ...]
    """The layers before the last whose outputs are merged too, in order."""

    @property
    def family(self) -> str:
        """The `model_type` of its family."""
        return FAMILY

    @property
    def layer_kind(self) -> LayerKind:
        """What the layers are made of."""
        return LayerKind(rms_norm=False, gated=False)

    @property
    def position_dims(self) -> int:
        """Coordinates of a patch: row and column, and how many there are of each in its image."""
        return 4

    @property
    def outputs(self) -> Mapping[str, int]:
        """The rows of the last layer, and those of earlier ones."""
        return {ROWS: self.layers - 1} | {f"{DEEPSTACK}{i}": layer for i, layer in enumerate(self.deepstack)}

    @property
    def full_layers(self) -> Collection[int]:
        """All layers."""
        return range(self.layers)

    def order(self, size: ImageSize) -> PictureOrder:
        """The image in raster order."""
        return picture_order(size, self.merge, window=1, sides=True)

    def flop_shape(self, layers: Collection[int], embeds: bool) -> VisionFlopShape:
        """What the operations of some of the layers depend on."""
        return VisionFlopShape(
            layers=len(layers),
            full_layers=len(layers),
            hidden=self.hidden,
            ffn=self.ffn,
            patch_elements=self.patch_elements if embeds else 0,
            merge=self.unit,
            out=self.out_hidden,
            gated=False,
            more_mergers=sum(layer in layers for layer in self.deepstack),
        )

    def flops_per_patch(self) -> tuple[float, float]:
        """Forward flops per patch, and per patch and patch of its sequence."""
        return _flops_per_patch(self)


@lru_cache
def _flops_per_patch(shape: VisionShape) -> tuple[float, float]:
    layers = shape.layers * (8 * shape.hidden**2 + 4 * shape.hidden * shape.ffn)
    embedding = 2 * shape.patch_elements * shape.hidden
    merger = 2 * shape.hidden * (shape.hidden * shape.unit + shape.out_hidden)
    return float(layers + embedding + len(shape.outputs) * merger), float(shape.layers * 4 * shape.hidden)


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
        return LayerKind(head_norms=True)

    @property
    def turns(self) -> tuple[int, ...]:
        """For each rotary frequency the position that it turns with: time, height and width in turns, until the
        sections of height and width are used up.
        """
        return tuple(i % 3 if i % 3 and i < 3 * self.mrope_section[i % 3] else 0 for i in range(self.head_dim // 2))

    def entry_layer(self, output: str) -> int | None:
        """Rows take the place of embeddings; those of the encoder's earlier layers are added after as many layers of
        this model, the first ones after the first.
        """
        if output == ROWS:
            return 0
        number = output.removeprefix(DEEPSTACK)
        known = number != output and number.isdecimal() and int(number) < self.layers
        return int(number) if known else None


def vision_shape(vision: Any) -> VisionShape:
    """Of the configuration `vision_config`."""
    side, deepstack = math.isqrt(vision.num_position_embeddings), tuple(vision.deepstack_visual_indexes)
    return VisionShape.of(vision, table_side=side, deepstack=deepstack)


def text_shape(config: Any) -> TextShape:
    """Of the configuration of a whole model."""
    return TextShape.of(config, config.text_config.head_dim, DEFAULT_SECTIONS)
