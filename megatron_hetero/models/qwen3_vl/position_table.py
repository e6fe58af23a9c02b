"""Learned positions of patches: a square table, which is stretched over images of any size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_hetero.distributed.platform import Platform


class PositionTable(torch.nn.Module):
    """`side` x `side` places of `config.hidden_size` elements, as `weight` [side * side, hidden]."""

    def __init__(self, config: TransformerConfig, side: int, platform: Platform):
        super().__init__()
        self.side = side
        self.weight = torch.nn.Parameter(
            torch.zeros(side * side, config.hidden_size, dtype=config.params_dtype, device=platform.device)
        )
        # As the patch embedding's: with sequence-parallel activations each rank embeds its own patches.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

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
