"""The shapes of the modules of Qwen3-VL, from its configuration in `transformers`, and what encoding costs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_hetero.models.common.flops import TextFlopShape, VisionFlopShape
from megatron_hetero.models.common.images.shape import ImageSizes
from megatron_hetero.models.common.language_shape import kv_copies, text_flop_shape
from megatron_hetero.models.family import LayerKind
from megatron_hetero.models.qwen3_vl.geometry import RasterOrder, raster_order
from megatron_hetero.names import ROWS
from megatron_hetero.sharding.items import Size

FAMILY = "qwen3_vl"
DEFAULT_SECTIONS = (24, 20, 20)
"""Rotary frequencies for time, height and width, where a configuration gives none."""
DEEPSTACK = "deepstack."
"""What outputs that are made after earlier layers are called, before their number (Meng et al. 2024, arXiv 2406.04334).
"""


@dataclass(frozen=True)
class VisionShape(ImageSizes):
    """The vision encoder with its mergers (`projector`). Sizes in elements; `table_side`: places per side of the
    learned table of positions; `deepstack`: the layers whose outputs are merged besides the last one's, in order.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    table_side: int
    deepstack: tuple[int, ...]
    out_hidden: int
    rope_theta: float

    norm_eps: float = 1e-6
    family: str = FAMILY

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

    def order(self, size: Size) -> RasterOrder:
        """The image in raster order."""
        return raster_order(size, self.merge)

    def windows(self, size: Size) -> list[int]:
        """Patches of each unit: no attention is local, so that any cut will do."""
        return [self.unit] * self.rows(size)

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
class TextShape:
    """The language model. `tied` means that the head shares the embedding's weight."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
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
        return LayerKind(head_norms=True)

    @property
    def turns(self) -> tuple[int, ...]:
        """For each rotary frequency the position that it turns with: time, height and width in turns, until the
        sections of height and width are used up.
        """
        return tuple(i % 3 if i % 3 and i < 3 * self.mrope_section[i % 3] else 0 for i in range(self.head_dim // 2))

    def flop_shape(self, layers: int, head: bool) -> TextFlopShape:
        """What the operations of some of the layers depend on."""
        return text_flop_shape(self, layers, head)

    def kv_copies(self, tp: int) -> int:
        """How often each key/value head is held under `tp`."""
        return kv_copies(self.kv_heads, tp)

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
    return VisionShape(
        layers=vision.depth,
        hidden=vision.hidden_size,
        heads=vision.num_heads,
        ffn=vision.intermediate_size,
        channels=vision.in_channels,
        patch=vision.patch_size,
        temporal_patch=vision.temporal_patch_size,
        merge=vision.spatial_merge_size,
        table_side=math.isqrt(vision.num_position_embeddings),
        deepstack=tuple(vision.deepstack_visual_indexes),
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
        head_dim=text.head_dim,
        ffn=text.intermediate_size,
        vocab=text.vocab_size,
        tied=bool(config.tie_word_embeddings),
        rope_theta=float(rope["rope_theta"]),
        mrope_section=tuple(rope.get("mrope_section", DEFAULT_SECTIONS)),
        norm_eps=text.rms_norm_eps,
        max_positions=text.max_position_embeddings,
    )
