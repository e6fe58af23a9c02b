"""Patches to rows: the `projector` of a model."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_hetero.models.family import EncoderShape


class PatchMerger(torch.nn.Module):
    """An MLP on each unit's concatenated patches, behind a norm of each patch, or of each unit (`of_units`)."""

    def __init__(
        self,
        config: TransformerConfig,
        shape: EncoderShape,
        provider: BackendSpecProvider,
        tp: Any,
        *,
        of_units: bool = False,
    ):
        super().__init__()
        self.width = width = shape.hidden * shape.unit
        self.of_units = of_units
        norm = provider.layer_norm(rms_norm=config.normalization == "RMSNorm")
        self.norm = norm(config=config, hidden_size=width if of_units else shape.hidden, eps=config.layernorm_epsilon)
        options = {"config": config, "init_method": None, "bias": True, "is_expert": False, "tp_group": tp}
        self.linear_fc1 = provider.column_parallel_linear()(
            width, width, gather_output=False, skip_bias_add=False, **options
        )
        self.linear_fc2 = provider.row_parallel_linear()(
            width, shape.out_hidden, input_is_parallel=True, skip_bias_add=False, **options
        )

    def forward(self, patches: Tensor) -> Tensor:
        """[S, 1, hidden] to rows [S / unit, out_hidden]."""
        if self.of_units:
            units = self.norm(patches.view(-1, 1, self.width))
        else:
            units = self.norm(patches).view(-1, 1, self.width)
        hidden, _ = self.linear_fc1(units)
        return self.linear_fc2(torch.nn.functional.gelu(hidden))[0].squeeze(1)
