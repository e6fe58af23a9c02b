"""The gated delta net of `transformers` with which tests compare ours, and its small sizes."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

HIDDEN, KEY_DIM, VALUE_DIM, TAPS = 32, 8, 12, 4


def theirs(heads: tuple[int, int]) -> Qwen3_5GatedDeltaNet:
    """A layer with so many heads of keys and of values, and random weights."""
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=heads[0],
        linear_num_value_heads=heads[1],
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        linear_conv_kernel_dim=TAPS,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    module, generator = Qwen3_5GatedDeltaNet(config, 0), torch.Generator().manual_seed(0)  # pyright: ignore[reportArgumentType]
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return module


def matrix(tensor: Tensor) -> Tensor:
    """A stored tensor as slices of it are read: with more than two dims it is a matrix."""
    return tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach()
