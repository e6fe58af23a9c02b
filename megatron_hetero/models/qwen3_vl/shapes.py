"""The shapes of the modules of Qwen3-VL, from its configuration in `transformers`, and what encoding costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_hetero.models.architecture import Architecture, End
from megatron_hetero.models.common.language_shape import LanguageModelShape
from megatron_hetero.models.common.stored_names import ENCODER
from megatron_hetero.models.items.pictures.geometry import ImageSize, PictureOrder, picture_order
from megatron_hetero.models.items.pictures.shape import ImageEncoderShape
from megatron_hetero.models.layers.attention import SelfAttention
from megatron_hetero.models.layers.ends import Merger, PatchEmbedding
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.qwen3_vl.checks import DEFAULT_SECTIONS, FAMILY
from megatron_hetero.models.qwen3_vl.position_table import PositionTable
from megatron_hetero.names import ROWS

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
    def position_dims(self) -> int:
        """Coordinates of a patch: row and column, and how many there are of each in its image."""
        return 4

    @property
    def outputs(self) -> Mapping[str, int]:
        """The rows of the last layer, and those of earlier ones."""
        return {ROWS: self.layers - 1} | {f"{DEEPSTACK}{i}": layer for i, layer in enumerate(self.deepstack)}

    def order(self, size: ImageSize) -> PictureOrder:
        """The image in raster order."""
        return picture_order(size, self.merge, window=1, sides=True)

    @property
    def architecture(self) -> Architecture:
        """Layers of one kind, patch embedding and learned positions before them, and mergers of several layers."""
        return _encoder(self)


@lru_cache
def _encoder(v: VisionShape) -> Architecture:
    def norm(width: int) -> Norm:
        return Norm(width, v.norm_eps, rms=False)

    def merger(normed: int) -> Merger:
        return Merger(v.hidden, v.unit, v.out_hidden, norm(normed), stored=("norm", "linear_fc1", "linear_fc2"))

    attention = SelfAttention(
        v.hidden,
        v.heads,
        v.heads,
        v.head_dim,
        stored=("attn.qkv", "attn.proj"),
        causal=False,
        qkv_bias=True,
        out_bias=True,
    )
    names = "mlp.linear_fc1", "mlp.linear_fc2"
    mlp = MLP(v.hidden, v.ffn, stored=names, activation="gelu_tanh", gated=False, bias=True)
    layer = Layer(attention, mlp, (norm(v.hidden), norm(v.hidden)), ("norm1", "norm2"))
    patch = (v.channels, v.temporal_patch, v.patch, v.patch)
    deeper = (
        End(
            f"deepstack_merger_{i}",
            merger(v.hidden * v.unit),
            f"deepstack_merger_list.{i}.",
            at,
            output=f"{DEEPSTACK}{i}",
            projector=True,
        )
        for i, at in enumerate(v.deepstack)
    )
    return Architecture(
        entry=End("patch_embed", PatchEmbedding(patch, v.hidden, bias=True), "patch_embed.", "first"),
        layers=(layer,) * v.layers,
        ends=(
            End("merger", merger(v.hidden), "merger.", "last", output=ROWS, projector=True),
            End("pos_embed", PositionTable(v.table_side, v.hidden), "pos_embed.", "first"),
            *deeper,
        ),
        stored="blocks.",
        namespace=ENCODER,
    )


@dataclass(frozen=True)
class TextShape(LanguageModelShape):
    """The language model."""

    qkv_bias, head_norms = False, True

    @property
    def family(self) -> str:
        """The `model_type` of its family."""
        return FAMILY

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
