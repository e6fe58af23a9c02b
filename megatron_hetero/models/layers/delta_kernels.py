"""Choice between optional packages and PyTorch for gated delta nets."""

from __future__ import annotations

from typing import Any

import torch

from megatron_hetero.models.layers.delta_rule import delta_rule
from megatron_hetero.models.layers.short_convolution import convolved


def rule_for(device: torch.device, dtype: torch.dtype) -> Any:  # noqa: ARG001
    """Return the rule."""
    return delta_rule


def convolution_for(device: torch.device, dtype: torch.dtype) -> Any:  # noqa: ARG001
    """Return the convolution."""
    return convolved
