"""What the shapes of language models with experts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hetero.layout.axes import EXPERTS, Split
from megatron_hetero.models.language import LanguageModelShape
from megatron_hetero.models.layers.experts import ExpertMLP
from megatron_hetero.models.layers.mlp import MLP


@dataclass(frozen=True)
class ExpertShape(LanguageModelShape):
    """Base of the shapes of language models whose layers, or some of them, have experts."""

    views = (EXPERTS,)

    experts: int
    """Experts of a layer that has any."""
    experts_per_token: int
    expert_ffn: int
    """Width of an expert."""

    @property
    def counts(self) -> Mapping[Split, int]:
        """Number of experts."""
        return {"experts": self.experts}

    def expert_mlp(self, shared: MLP | None = None) -> ExpertMLP:
        """Return the experts of a layer, with a `shared` MLP beside them."""
        return ExpertMLP(self.hidden, self.expert_ffn, self.experts, self.experts_per_token, "mlp.", shared)
