"""The shape of the language model of Qwen3.5-MoE. Its encoder is Qwen3-VL's."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.models.families.moe import ExpertShape
from megatron_hetero.models.families.qwen3_5 import shapes
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.parts import MLPPart


@dataclass(frozen=True)
class TextShape(ExpertShape, shapes.TextShape):
    """Language model in which every layer has experts in place of an MLP, and an MLP for all tokens beside them."""

    family = "qwen3_5_moe"

    shared_ffn: int
    """Width of the MLP beside the experts."""

    def mlp(self, number: int) -> MLPPart:
        """Return the experts of layer `number` and the MLP beside them."""
        gate, up, down = (f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down"))
        return self.expert_mlp(MLP(self.hidden, self.shared_ffn, stored=(gate, up, down)))
