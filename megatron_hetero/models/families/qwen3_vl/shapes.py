"""The shapes of the modules of Qwen3-VL, and its learned position embedding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.hf.weight_map import Share, TensorShapes, WeightMap, whole
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
from megatron_hetero.models.layers.parts import Part, Site


@dataclass(frozen=True)
class PositionTable(Part):
    """Learned position embedding, an end of an encoder: a table of `side` x `side` places with `hidden` elements each,
    which is interpolated for images of any size.
    """

    side: int
    hidden: int

    def tensors(self) -> TensorShapes:
        """Return the shape of the stored table."""
        return {"weight": (self.side**2, self.hidden)}

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return the slices of the parameter: the whole table on every rank."""
        return {"weight": whole(f"{stored}weight", self.side**2)}

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the torch module. If activations are split, each rank embeds its local patches."""
        return site.mark(_PositionTable(self, site))


class _PositionTable(torch.nn.Module):
    def __init__(self, table: PositionTable, site: Site):
        super().__init__()
        self.side = table.side
        self.weight = torch.nn.Parameter(
            torch.zeros(table.side**2, table.hidden, dtype=site.dtype, device=site.platform.device)
        )

    def forward(self, positions_4n: Tensor) -> Tensor:
        """Return the position embedding of patches, fp32 [n, hidden]. `positions_4n`: see `VisionShape.positions`."""
        places, weights = taps(positions_4n, self.side)
        return F.embedding_bag(places, self.weight.float(), per_sample_weights=weights, mode="sum")


def taps(positions_4n: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return the four places of the table around each patch, int64 [n, 4], and their bilinear weights, fp32 [n, 4]. The
    corners of the image coincide with the corners of the table.
    """
    positions, sizes = positions_4n.chunk(2)
    on_table = positions * (side - 1) / (sizes - 1).clamp(min=1)
    low, beyond = on_table.long(), on_table.frac()
    rows, columns = torch.stack([low, (low + 1).clamp(max=side - 1)], dim=-1)
    row_weights, column_weights = torch.stack([1 - beyond, beyond], dim=-1)
    places = rows[:, :, None] * side + columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return places.flatten(1), weights.flatten(1)


DEEPSTACK = "deepstack."
"""Prefix of the numbered names of outputs after inner layers (Meng et al. 2024, arXiv 2406.04334)."""


@dataclass(frozen=True)
class VisionShape(ImageEncoderShape):
    """Shape of the vision encoder, whose projector consists of several mergers."""

    family = "qwen3_vl"

    table_side: int
    """Number of places per side of the table of position embeddings."""
    deepstack: tuple[int, ...]
    """Inner layers after which there is an output, in order."""

    @property
    def position_dims(self) -> int:
        """Number of coordinates of a patch: its row and column, and the image's numbers of rows and columns."""
        return 4

    def order(self, size: ImageSize) -> ItemOrder:
        """Return the order of an image's units, which is raster order."""
        return picture_order(size, self.merge, window=1)

    def positions(self, size: ImageSize, units: np.ndarray) -> np.ndarray:
        """Return the row and column of each patch, and the image's numbers of rows and columns: int64 [4, patches]."""
        places = super().positions(size, units)
        return np.concatenate([places, np.broadcast_to([[size[1]], [size[2]]], places.shape)])

    @property
    def architecture(self) -> Architecture:
        """Patch and position embedding, identical layers, a final merger, and mergers after inner layers."""
        return _encoder(self)


@lru_cache
def _encoder(v: VisionShape) -> Architecture:
    def norm(width: int) -> Norm:
        return Norm(width, v.norm_eps, rms=False)

    def merger(normed: int) -> Merger:
        return Merger(v.hidden, v.unit, v.out_hidden, norm(normed), stored=("norm", "linear_fc1", "linear_fc2"))

    names = "mlp.linear_fc1", "mlp.linear_fc2"
    mlp = MLP(v.hidden, v.ffn, stored=names, activation="gelu_tanh", gated=False, bias=True)
    layer = Layer(v.attention(), mlp, (norm(v.hidden), norm(v.hidden)), ("norm1", "norm2"))
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
        added=v.added,
    )


@dataclass(frozen=True)
class TextShape(LanguageModelShape):
    """Shape of the language model, whose queries and keys are normalised."""

    family = "qwen3_vl"
    qkv_bias, head_norms = False, True

    @property
    def turns(self) -> tuple[int, ...]:
        """Axis of each rotary frequency: time, height and width in turn while their sections last, then time."""
        return tuple(i % 3 if i % 3 and i < 3 * self.mrope_section[i % 3] else 0 for i in range(self.head_dim // 2))

    def entry_layer(self, output: str) -> int | None:
        """Return the layer at which rows of `output` enter: 0 for `ROWS`; layer i for the encoder's inner output i;
        None if unknown.
        """
        if output == ROWS:
            return 0
        number = output.removeprefix(DEEPSTACK)
        known = number != output and number.isdecimal() and int(number) < self.layers
        return int(number) if known else None
