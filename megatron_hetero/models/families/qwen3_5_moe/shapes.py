"""The shape of the language model of Qwen3.5-MoE. Its encoder is Qwen3-VL's."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.models.families.moe import ExpertShape
from megatron_hetero.models.families.qwen3_5 import shapes
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.parts import MLPPart


@dataclass(frozen=True)
class TextShape(ExpertShape, shapes.TextShape):
    """Shape of a language model in which every layer has experts and a shared MLP for all tokens."""

    family = "qwen3_5_moe"

    shared_ffn: int
    """Width of the shared MLP."""

    def mlp(self, number: int) -> MLPPart:
        """Return the MLP part of layer `number`: its experts and the shared MLP."""
        gate, up, down = (f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down"))
        return self.expert_mlp(MLP(self.hidden, self.shared_ffn, stored=(gate, up, down)))
