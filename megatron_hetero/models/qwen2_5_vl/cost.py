"""What encoding an image costs, and how many patches a rank holds. Pure."""

from __future__ import annotations

import numpy as np

from megatron_hetero.models.qwen2_5_vl.shapes import VisionShape


def padded_patches(patches: int, unit: int, sequence_shards: int) -> int:
    """Patches of a shard with padding: whole units for each of the ranks that share its activations, and never none.

    `sequence_shards`: tp with sequence-parallel activations, else 1. An empty shard takes part in collectives, and
    Megatron's layers do not accept tensors without elements.
    """
    share = unit * sequence_shards
    return max(1, -(-patches // share)) * share


def forward_flops_per_patch(shape: VisionShape) -> tuple[float, float]:
    """Cost model of encoding: (flops per patch, flops per patch and patch of its sequence in full-attention layers)."""
    window_patches = shape.window**2 * shape.unit
    linear = (
        shape.layers * (8 * shape.hidden**2 + 6 * shape.hidden * shape.ffn) + 2 * shape.patch_elements * shape.hidden
    )
    merger = 2 * shape.hidden * (shape.hidden * shape.unit + shape.out_hidden)
    windowed = (shape.layers - len(shape.full_layers)) * 4 * shape.hidden * window_patches
    return float(linear + merger + windowed), float(len(shape.full_layers) * 4 * shape.hidden)


def encoding_cost(grid: tuple[int, int, int], shape: VisionShape) -> float:
    """Predicted forward flops of encoding an image of `grid` patches."""
    linear, quadratic = forward_flops_per_patch(shape)
    frame = float(np.prod(grid[1:]))
    return grid[0] * (linear * frame + quadratic * frame * frame)
