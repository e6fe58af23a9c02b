"""The shape of the language model of Qwen3.5-MoE. Its encoder is Qwen3-VL's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hetero.layout.axes import EXPERTS, Split
from megatron_hetero.models.families.qwen3_5 import shapes
from megatron_hetero.models.layers.experts import ExpertMLP
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.parts import MLPPart


@dataclass(frozen=True)
class TextShape(shapes.TextShape):
    """Language model of which all layers have experts in place of an MLP, and an MLP for all tokens beside them."""

    family = "qwen3_5_moe"
    views = (EXPERTS,)

    experts: int
    """Experts of a layer."""
    experts_per_token: int
    expert_ffn: int
    """Width of an expert."""
    shared_ffn: int
    """Width of the MLP beside the experts."""

    @property
    def counts(self) -> Mapping[Split, int]:
        """Number of experts."""
        return {"experts": self.experts}

    def mlp(self, number: int) -> MLPPart:
        """The experts of the layer with that number, and the MLP beside them."""
        gate, up, down = (f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down"))
        shared = MLP(self.hidden, self.shared_ffn, stored=(gate, up, down))
        return ExpertMLP(self.hidden, self.expert_ffn, self.experts, self.experts_per_token, "mlp.", shared)
