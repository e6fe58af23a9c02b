"""The shapes of the modules of Qwen2.5-VL."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_hetero.layout.names import ROWS
from megatron_hetero.models.architecture import Architecture, End
from megatron_hetero.models.families.common import ENCODER
from megatron_hetero.models.items.image_encoder import ImageEncoderShape
from megatron_hetero.models.items.pictures import ImageSize, picture_order
from megatron_hetero.models.items.types import ItemOrder
from megatron_hetero.models.language import LanguageModelShape
from megatron_hetero.models.layers.ends import Merger, PatchEmbedding
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.norms import Norm


@dataclass(frozen=True)
class VisionShape(ImageEncoderShape):
    """Shape of the vision encoder, whose projector is a merger."""

    family = "qwen2_5_vl"

    window: int
    """Side of a window in units."""
    full_layers: frozenset[int]

    @property
    def position_dims(self) -> int:
        """Number of coordinates of a patch: row and column."""
        return 2

    def order(self, size: ImageSize) -> ItemOrder:
        """Return the order of an image's units, window by window."""
        return picture_order(size, self.merge, self.window)

    @property
    def window_patches(self) -> int:
        """Number of patches of a whole window."""
        return self.window**2 * self.unit

    @property
    def architecture(self) -> Architecture:
        """Patch embedding, layers with window or full attention, and merger."""
        return _encoder(self)


@lru_cache
def _encoder(v: VisionShape) -> Architecture:
    norm = Norm(v.hidden, v.norm_eps)
    mlp = MLP(v.hidden, v.ffn, stored=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), bias=True)

    def layer(number: int) -> Layer:
        attention = v.attention(windowed=number not in v.full_layers)
        return Layer(attention, mlp, (norm, norm), ("norm1", "norm2"))

    merger = Merger(v.hidden, v.unit, v.out_hidden, norm, stored=("ln_q", "mlp.0", "mlp.2"))
    patch = (v.channels, v.temporal_patch, v.patch, v.patch)
    return Architecture(
        entry=End("patch_embed", PatchEmbedding(patch, v.hidden, bias=False), "patch_embed.", "first"),
        layers=tuple(layer(i) for i in range(v.layers)),
        ends=(End("merger", merger, "merger.", "last", output=ROWS, projector=True),),
        stored="blocks.",
        namespace=ENCODER,
        added=v.added,
    )


@dataclass(frozen=True)
class TextShape(LanguageModelShape):
    """Shape of the language model, whose queries, keys and values have biases."""

    family = "qwen2_5_vl"
    qkv_bias, head_norms = True, False

    @property
    def turns(self) -> tuple[int, ...]:
        """Axis of each rotary frequency: consecutive sections for time (0), height (1) and width (2)."""
        return tuple(dim for dim, count in enumerate(self.mrope_section) for _ in range(count))
