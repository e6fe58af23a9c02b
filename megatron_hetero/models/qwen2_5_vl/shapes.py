"""The shapes of the modules of Qwen2.5-VL, from its configuration in `transformers`, and what encoding costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_hetero.models.common.flops import TextFlopShape, VisionFlopShape
from megatron_hetero.models.common.images.shape import ImageSizes
from megatron_hetero.models.common.language_shape import kv_copies, text_flop_shape
from megatron_hetero.models.family import LayerKind
from megatron_hetero.models.qwen2_5_vl.geometry import ImageGeometry, image_geometry
from megatron_hetero.names import ROWS
from megatron_hetero.sharding.items import Size

FAMILY = "qwen2_5_vl"
DEFAULT_SECTIONS = (16, 24, 24)
"""Rotary frequencies for time, height and width, where a configuration gives none."""


@dataclass(frozen=True)
class VisionShape(ImageSizes):
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

    def order(self, size: Size) -> ImageGeometry:
        """The image in window order."""
        return image_geometry(size, self.merge, self.window)

    def windows(self, size: Size) -> list[int]:
        """Patches of each window of local attention."""
        return (self.order(size).windows * self.unit).tolist()

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
    def layer_kind(self) -> LayerKind:
        """What the layers are made of."""
        return LayerKind()

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads

    @property
    def turns(self) -> tuple[int, ...]:
        """For each rotary frequency the position that it turns with: a section for time, for height, for width."""
        return tuple(dim for dim, count in enumerate(self.mrope_section) for _ in range(count))

    def flop_shape(self, layers: int, head: bool) -> TextFlopShape:
        """What the operations of some of the layers depend on."""
        return text_flop_shape(self, layers, head)

    def kv_copies(self, tp: int) -> int:
        """How often each key/value head is held under `tp`."""
        return kv_copies(self.kv_heads, tp)

    def entry_layer(self, output: str) -> int | None:
        """Rows take the place of embeddings; nothing enters deeper."""
        return 0 if output == ROWS else None


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
