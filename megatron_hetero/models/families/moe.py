"""Base of the shapes of language models with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hetero.layout.axes import EXPERTS, Split
from megatron_hetero.models.language import LanguageModelShape
from megatron_hetero.models.layers.experts import ExpertMLP
from megatron_hetero.models.layers.mlp import MLP


@dataclass(frozen=True)
class ExpertShape(LanguageModelShape):
    """Base of the shapes of language models in which all or some layers have experts."""

    views = (EXPERTS,)

    experts: int
    """Number of experts of each sparse layer."""
    experts_per_token: int
    expert_ffn: int
    """Width of an expert's MLP."""

    @property
    def counts(self) -> Mapping[Split, int]:
        """Number of units that the expert view splits: the experts of a layer."""
        return {"experts": self.experts}

    def expert_mlp(self, shared: MLP | None = None) -> ExpertMLP:
        """Return the MLP part of a sparse layer: its experts, and the `shared` MLP if given."""
        return ExpertMLP(self.hidden, self.expert_ffn, self.experts, self.experts_per_token, "mlp.", shared)
