"""A pipeline stage of any module: the torch modules of its layers and ends, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_hetero.execution.contract import Gathered
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.architecture import Architecture
from megatron_hetero.models.common.offload.activations import ActivationOffload
from megatron_hetero.models.layers.attention import AttentionPlan
from megatron_hetero.models.layers.parts import Site

Between = Callable[[Tensor], Tensor]
"""From the hidden states after a layer to those that the next one takes."""
NOTHING: Mapping[int, Between] = {}


class ModuleStage(torch.nn.Module):
    """The layers and ends of `stage`, the whole module where it is None. Ends are attributes with their names; an end
    whose weight is that of another end of the stage is none.

    `offload`: where layers keep their activations, if not on the device.
    """

    def __init__(
        self,
        architecture: Architecture,
        site: Site,
        stage: Stage | None = None,
        offload: ActivationOffload | None = None,
    ):
        super().__init__()
        self.stage = stage = stage or Stage.whole(len(architecture.layers))
        self.offload, self.config, self.groups = offload, site.config, site.groups
        self.splits_activations = site.splits_activations
        held = [end for end in architecture.ends_of(stage) if not architecture.holds_copy(end, stage)]
        if architecture.entry in held:
            self.add_module(architecture.entry.name, architecture.entry.part.build(site, 0))
        remade = site.recompute.whole_layers(len(stage.layers))
        self.layers = torch.nn.ModuleList(
            architecture.layers[number].build(site, number, whole=place < remade)
            for place, number in enumerate(stage.layers)
        )
        for end in held:
            if end is not architecture.entry:
                self.add_module(end.name, end.part.build(site, 0))

    def units(self) -> tuple[Gathered, ...]:
        """The parts of this stage that are gathered by themselves, in the order in which they run."""
        return tuple(Gathered(layer) for layer in self.layers)

    def _run(
        self, hidden: Tensor, table_2nD: Tensor, plan: AttentionPlan, after: Mapping[int, Between] = NOTHING
    ) -> Tensor:
        """`hidden` [S, 1, hidden] after the layers of this stage, and after its final norm where it has one.

        `after`: what is done after a layer, by its number in the whole module.
        """
        with self._saving(table_2nD):
            hidden = _viewless(hidden)
            for layer in self.layers:
                each: Any = layer
                hidden = _viewless(after.get(each.number, _unchanged)(each(hidden, table_2nD, plan)))
            norm = self._final_norm
            return hidden if norm is None else _viewless(norm(hidden))

    @property
    def _final_norm(self) -> Any:
        return getattr(self, "final_layernorm", None)

    def _saving(self, table_2nD: Tensor) -> AbstractContextManager[None]:
        if self.offload is None or not torch.is_grad_enabled():
            return nullcontext()
        norm = self._final_norm
        return self.offload.saving(list(self.layers), [] if norm is None else [norm], [table_2nD])


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


def _viewless(hidden: Tensor) -> Tensor:
    return make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
