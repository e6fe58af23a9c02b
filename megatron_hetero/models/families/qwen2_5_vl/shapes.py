"""Which configurations are built here: those of the published architecture.

The shapes of the modules of Qwen2.5-VL, from its configuration in `transformers`, and what encoding costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_hetero.base.errors import ROWS
from megatron_hetero.models.architecture import Architecture, End
from megatron_hetero.models.families.common import ENCODER, head_dim, of_text, of_vision, require
from megatron_hetero.models.items.pictures import ImageEncoderShape, ImageSize, PictureOrder, picture_order
from megatron_hetero.models.language import LanguageModelShape
from megatron_hetero.models.layers.attention import SelfAttention
from megatron_hetero.models.layers.ends import Merger, PatchEmbedding
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.norms import Norm

FAMILY, TITLE = "qwen2_5_vl", "Qwen2.5-VL"
DEFAULT_SECTIONS = (16, 24, 24)
"""Rotary frequencies for time, height and width, where a configuration gives none."""


def check_vision(folder: Path, config: Any) -> None:
    """Check that the vision encoder of `folder` is one that is built here. Raises `UserError`."""
    vision = config.vision_config
    require(folder, TITLE, (
        ("vision_config.hidden_act", vision.hidden_act, "silu"),
        *of_vision(vision, config.text_config),
        ("vision_config.window_size % (patch_size * spatial_merge_size)",
         vision.window_size % (vision.patch_size * vision.spatial_merge_size), 0),
        ("vision_config.fullatt_block_indexes from depth on",
         [layer for layer in vision.fullatt_block_indexes if layer >= vision.depth], []),
    ))  # fmt: skip


def check_text(folder: Path, config: Any) -> None:
    """Check that the language model of `folder` is one that is built here. Raises `UserError`."""
    text = config.text_config
    implied = text.hidden_size // text.num_attention_heads
    require(folder, TITLE, (
        ("text_config.hidden_size % num_attention_heads", text.hidden_size % text.num_attention_heads, 0),
        *head_dim("text_config", text, implied),
        *of_text(text, implied, DEFAULT_SECTIONS),
    ))  # fmt: skip


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

    @property
    def window_patches(self) -> int:
        """Patches of a whole window of local attention."""
        return self.window**2 * self.unit

    @property
    def architecture(self) -> Architecture:
        """Layers with window attention, and some with full attention, between patch embedding and merger."""
        return _encoder(self)


@lru_cache
def _encoder(v: VisionShape) -> Architecture:
    norm = Norm(v.hidden, v.norm_eps)
    mlp = MLP(v.hidden, v.ffn, stored=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), bias=True)

    def layer(number: int) -> Layer:
        attention = SelfAttention(
            v.hidden,
            v.heads,
            v.heads,
            v.head_dim,
            stored=("attn.qkv", "attn.proj"),
            causal=False,
            windowed=number not in v.full_layers,
            qkv_bias=True,
            out_bias=True,
        )
        return Layer(attention, mlp, (norm, norm), ("norm1", "norm2"))

    merger = Merger(v.hidden, v.unit, v.out_hidden, norm, stored=("ln_q", "mlp.0", "mlp.2"))
    patch = (v.channels, v.temporal_patch, v.patch, v.patch)
    return Architecture(
        entry=End("patch_embed", PatchEmbedding(patch, v.hidden, bias=False), "patch_embed.", "first"),
        layers=tuple(layer(i) for i in range(v.layers)),
        ends=(End("merger", merger, "merger.", "last", output=ROWS, projector=True),),
        stored="blocks.",
        namespace=ENCODER,
    )


@dataclass(frozen=True)
class TextShape(LanguageModelShape):
    """The language model."""

    qkv_bias, head_norms = True, False

    @property
    def family(self) -> str:
        """The `model_type` of its family."""
        return FAMILY

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
