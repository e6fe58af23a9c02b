"""Learned positions of patches: a square table, which is stretched over images of any size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.hf.weight_map import Share, TensorShapes, WeightMap, whole
from megatron_hetero.models.layers.parts import MainPart, Site


@dataclass(frozen=True)
class PositionTable(MainPart):
    """`side` x `side` places of `hidden` elements, as an end of an encoder."""

    side: int
    hidden: int

    def tensors(self) -> TensorShapes:
        """The table."""
        return {"weight": (self.side**2, self.hidden)}

    def slices(self, stored: str, share: Share) -> WeightMap:
        """All of it on every rank."""
        return {"weight": whole(f"{stored}weight", self.side**2)}

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """The torch module. With split activations each rank embeds its own patches."""
        return site.mark(_PositionTable(self, site))


class _PositionTable(torch.nn.Module):
    """The table as `weight` [side * side, hidden]."""

    def __init__(self, table: PositionTable, site: Site):
        super().__init__()
        self.side = table.side
        self.weight = torch.nn.Parameter(
            torch.zeros(table.side**2, table.hidden, dtype=site.dtype, device=site.platform.device)
        )

    def forward(self, positions_4n: Tensor) -> Tensor:
        """What is added to the embeddings of patches, fp32 [n, hidden]. `positions_4n`: of a `PictureOrder`."""
        places, weights = taps(positions_4n, self.side)
        return F.embedding_bag(places, self.weight.float(), per_sample_weights=weights, mode="sum")


def taps(positions_4n: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The four places of the table around each patch, int64 [n, 4], and their weights, fp32 [n, 4]: bilinear, with the
    corners of the image on the corners of the table.
    """
    positions, sizes = positions_4n.chunk(2)
    on_table = positions * (side - 1) / (sizes - 1).clamp(min=1)
    low, beyond = on_table.long(), on_table.frac()
    rows, columns = torch.stack([low, (low + 1).clamp(max=side - 1)], dim=-1)
    row_weights, column_weights = torch.stack([1 - beyond, beyond], dim=-1)
    places = rows[:, :, None] * side + columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return places.flatten(1), weights.flatten(1)
