"""The shape of the language model of Qwen3-VL-MoE. Its encoder is Qwen3-VL's."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.models.families.moe import ExpertShape
from megatron_hetero.models.families.qwen3_vl import shapes
from megatron_hetero.models.layers.parts import MLPPart


@dataclass(frozen=True)
class TextShape(ExpertShape, shapes.TextShape):
    """Shape of the language model, whose `sparse` layers have experts instead of an MLP."""

    family = "qwen3_vl_moe"

    sparse: tuple[bool, ...]
    """For each layer, whether it has experts."""

    def mlp(self, number: int) -> MLPPart:
        """Return the MLP part of layer `number`: experts in a sparse layer, else an MLP."""
        return self.expert_mlp() if self.sparse[number] else super().mlp(number)
