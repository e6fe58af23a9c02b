"""Rotary tables: cosines and sines per token, from positions of several dims."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megatron_hetero.distributed.platform import on_device
from megatron_hetero.models.common.attention import rotary_frequencies


def axial_table(positions_2n: Tensor, theta: float, head_dim: int) -> Tensor:
    """Cosines and sines of the 2-D rotary embedding, fp32 [2, n, head_dim]: half of the angles by row, half by
    column.
    """
    frequencies = rotary_frequencies(theta, head_dim // 2, positions_2n.device)
    angles = (positions_2n[..., None].float() * frequencies).transpose(0, 1).flatten(1)
    return _cosines_and_sines(angles)


def multimodal_table(positions_3n: Tensor, theta: float, head_dim: int, turns: tuple[int, ...]) -> Tensor:
    """Cosines and sines of the multimodal rotary embedding, fp32 [2, n, head_dim].

    `turns`: for each frequency the position that it turns with: 0 time, 1 height, 2 width (Wang et al. 2024,
    arXiv 2409.12191).
    """
    device = positions_3n.device
    frequencies = rotary_frequencies(theta, head_dim, device)
    return _cosines_and_sines(positions_3n[_index(turns, device)].transpose(0, 1).float() * frequencies)


def _cosines_and_sines(angles: Tensor) -> Tensor:
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


@lru_cache(maxsize=16)
def _index(turns: tuple[int, ...], device: torch.device) -> Tensor:
    """Moved to the device once."""
    return on_device(torch.tensor(turns), device)
