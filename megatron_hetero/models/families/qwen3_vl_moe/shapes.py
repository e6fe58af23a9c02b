"""The shape of the language model of Qwen3-VL-MoE. Its encoder is Qwen3-VL's."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.models.families.moe import ExpertShape
from megatron_hetero.models.families.qwen3_vl import shapes
from megatron_hetero.models.layers.parts import MLPPart


@dataclass(frozen=True)
class TextShape(ExpertShape, shapes.TextShape):
    """Language model in which some layers, the `sparse` ones, have experts in place of an MLP."""

    family = "qwen3_vl_moe"

    sparse: tuple[bool, ...]
    """Whether each layer is sparse."""

    def mlp(self, number: int) -> MLPPart:
        """Return the MLP or the experts of layer `number`."""
        return self.expert_mlp() if self.sparse[number] else super().mlp(number)
