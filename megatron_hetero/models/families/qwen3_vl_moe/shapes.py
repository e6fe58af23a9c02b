"""The shape of the language model of Qwen3-VL-MoE. Its encoder is Qwen3-VL's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hetero.layout.axes import EXPERTS, Split
from megatron_hetero.models.families.qwen3_vl import shapes
from megatron_hetero.models.layers.experts import ExpertMLP
from megatron_hetero.models.layers.parts import MLPPart


@dataclass(frozen=True)
class TextShape(shapes.TextShape):
    """Language model of which some layers, the `sparse` ones, have experts in place of an MLP."""

    family = "qwen3_vl_moe"
    views = (EXPERTS,)

    experts: int
    """Experts of a sparse layer."""
    experts_per_token: int
    expert_ffn: int
    """Width of an expert."""
    sparse: tuple[bool, ...]
    """Whether each layer is sparse."""

    @property
    def counts(self) -> Mapping[Split, int]:
        """Number of experts."""
        return {"experts": self.experts}

    def mlp(self, number: int) -> MLPPart:
        """The MLP or the experts of the layer with that number."""
        if not self.sparse[number]:
            return super().mlp(number)
        return ExpertMLP(self.hidden, self.expert_ffn, self.experts, self.experts_per_token, stored="mlp.")
