"""The shapes of the modules of Qwen2.5-VL, from its configuration in `transformers`, and what encoding costs."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_hetero.models.common.flops import TextFlopShape, VisionFlopShape
from megatron_hetero.models.qwen2_5_vl.geometry import ImageGeometry, image_geometry
from megatron_hetero.sharding.items import Size

FAMILY = "qwen2_5_vl"
DEFAULT_SECTIONS = (16, 24, 24)
"""Rotary frequencies for time, height and width, where a configuration gives none."""


@dataclass(frozen=True)
class VisionShape:
    """The vision encoder with its merger (`projector`). Sizes in elements; `window` in merged units per side."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    window: int
    full_layers: frozenset[int]
    out_hidden: int
    rope_theta: float

    norm_eps: float = 1e-6
    family: str = FAMILY

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads

    @property
    def patch_elements(self) -> int:
        """Pixel values of one patch: channels x temporal x height x width."""
        return self.channels * self.temporal_patch * self.patch**2

    @property
    def unit(self) -> int:
        """Patches that are merged into one row."""
        return self.merge**2

    @property
    def unit_width(self) -> int:
        """Pixel values of a unit."""
        return self.unit * self.patch_elements

    @property
    def position_dims(self) -> int:
        """Coordinates of a patch: row and column."""
        return 2

    def rows(self, size: Size) -> int:
        """Rows of an image of `size` patches (time, height, width)."""
        return math.prod(size) // self.unit

    def order(self, size: Size) -> ImageGeometry:
        """The image in window order."""
        return image_geometry(size, self.merge, self.window)

    def sequences(self, size: Size) -> tuple[int, ...]:
        """Patches of each frame: full attention sees one."""
        frames, rows, columns = size
        return (rows * columns,) * frames

    def cost(self, size: Size) -> float:
        """Predicted forward flops of encoding an image."""
        linear, quadratic = forward_flops_per_patch(self)
        frame = float(np.prod(size[1:]))
        return size[0] * (linear * frame + quadratic * frame * frame)

    def cost_per_patch(self, size: Size) -> float:
        """Those of one of its patches, which meets all patches of its frame."""
        linear, quadratic = forward_flops_per_patch(self)
        return linear + quadratic * size[1] * size[2]

    def square(self, side: int) -> Size:
        """The patches of a square image of `side` pixels, which is resized to whole units as the processor does."""
        patches = max(1, round(side / (self.patch * self.merge))) * self.merge
        return 1, patches, patches

    def side(self, size: Size) -> int:
        """Pixels of a side of a square image of that size."""
        return size[1] * self.patch

    def windows(self, size: Size) -> list[int]:
        """Patches of each window of local attention."""
        return (self.order(size).windows * self.unit).tolist()

    def flop_shape(self, layers: Collection[int], embeds: bool) -> VisionFlopShape:
        """What the operations of some of the layers depend on."""
        full = sum(layer in self.full_layers for layer in layers)
        pixels = self.patch_elements if embeds else 0
        return VisionFlopShape(len(layers), full, self.hidden, self.ffn, pixels, self.unit, self.out_hidden)


@lru_cache
def forward_flops_per_patch(shape: VisionShape) -> tuple[float, float]:
    """(flops per patch, flops per patch and patch of its sequence in full-attention layers)."""
    window_patches = shape.window**2 * shape.unit
    linear = (
        shape.layers * (8 * shape.hidden**2 + 6 * shape.hidden * shape.ffn) + 2 * shape.patch_elements * shape.hidden
    )
    merger = 2 * shape.hidden * (shape.hidden * shape.unit + shape.out_hidden)
    windowed = (shape.layers - len(shape.full_layers)) * 4 * shape.hidden * window_patches
    return float(linear + merger + windowed), float(len(shape.full_layers) * 4 * shape.hidden)


@dataclass(frozen=True)
class TextShape:
    """The language model. `tied` means that the head shares the embedding's weight."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    rope_theta: float
    mrope_section: tuple[int, ...]
    norm_eps: float
    max_positions: int
    family: str = FAMILY

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads

    def flop_shape(self, layers: int, head: bool) -> TextFlopShape:
        """What the operations of some of the layers depend on."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return TextFlopShape(layers, self.hidden, queries, keys, self.ffn, self.vocab if head else 0)

    def kv_copies(self, tp: int) -> int:
        """How often each key/value head is held under `tp`: once where tp divides their number, else until it does."""
        return math.lcm(self.kv_heads, tp) // self.kv_heads


def vision_shape(vision: Any) -> VisionShape:
    """Of the configuration `vision_config`."""
    return VisionShape(
        layers=vision.depth,
        hidden=vision.hidden_size,
        heads=vision.num_heads,
        ffn=vision.intermediate_size,
        channels=vision.in_channels,
        patch=vision.patch_size,
        temporal_patch=vision.temporal_patch_size,
        merge=vision.spatial_merge_size,
        window=vision.window_size // vision.spatial_merge_size // vision.patch_size,
        full_layers=frozenset(vision.fullatt_block_indexes),
        out_hidden=vision.out_hidden_size,
        rope_theta=float(vision.rope_parameters["rope_theta"]),
    )


def text_shape(config: Any) -> TextShape:
    """Of the configuration of a whole model."""
    text = config.text_config
    rope = text.rope_parameters
    return TextShape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        ffn=text.intermediate_size,
        vocab=text.vocab_size,
        tied=bool(config.tie_word_embeddings),
        rope_theta=float(rope["rope_theta"]),
        mrope_section=tuple(rope.get("mrope_section", DEFAULT_SECTIONS)),
        norm_eps=text.rms_norm_eps,
        max_positions=text.max_position_embeddings,
    )
