"""A module as it is trained: its part on this rank, and what that has in common with other ranks'.

There is one such value for every kind of module: of a model family (`family_module`), or any of PyTorch's or
Megatron-Core's, wrapped or not (`held`). The rule for gradients, the optimizers and checkpoints know nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import Held, WeightMap
from megatron_hetero.layout.axes import MAIN, View
from megatron_hetero.layout.communicators import ENDS
from megatron_hetero.schedule.contract import GatheredStage
from megatron_hetero.step.data_parallel import DataParallel

OverTp = Literal["sum", "mean"]


@dataclass(frozen=True, eq=False)
class TrainedModule:
    """The parameters of one view of a module on this rank. They are named as in the whole module; a module that has
    parameters in several views is several of these, with the same name, stages and chunks.

    Attributes:
        name: of the module.
        topology: of all modules.
        stages: numbers of the pipeline stages on this rank.
        chunks: the model of each of them.
        maps: for each rank of the group `holders` which parts of which stored tensors its parameters are.
        held: likewise how often that group has each parameter.
        parameters: of this rank, with the shapes that they have before data-parallel ranks share them; their values may
            be on the way between ranks, other than those of `weight` and `whole_weight`.
        data_parallel: how ranks share them.
        over_tp: what is done over `holders` with gradients that are parts, by parameter.
        tied: the parameter of which another stage has a copy, if any.
        tied_copy: the same, where it counts on the other stage: the head of a tied model.
        view: which ranks hold what parts of the parameters, and sum their gradients.
    """

    name: str
    topology: Topology
    stages: tuple[int, ...]
    chunks: tuple[Any, ...]
    maps: tuple[WeightMap, ...]
    held: tuple[Mapping[str, Held], ...]
    parameters: Mapping[str, nn.Parameter]
    data_parallel: DataParallel
    over_tp: Mapping[str, OverTp]
    tied: str | None = None
    tied_copy: str | None = None
    view: View = MAIN

    @property
    def key(self) -> str:
        """The name of the module, with that of a further view."""
        return self.name if self.view == MAIN else f"{self.name}.{self.view.name}"

    @cached_property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """Those of the parameters that train."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def holders(self) -> dist.ProcessGroup:
        """The ranks that hold different parts of the parameters: those of tensor parallelism in the main view."""
        return self.topology.group(self.name, *self.view.part_axes)

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks that have the same parameters and other tokens, whose gradients are summed."""
        return self.topology.group(self.name, *self.view.sum_axes)

    @property
    def ends(self) -> dist.ProcessGroup:
        """The ranks with copies of the tied parameter. `KeyError` where the topology knows of none."""
        return self.topology.group(self.name, *ENDS)

    def gradient(self, name: str) -> Tensor:
        """The reduced gradient of what this rank updates of a parameter, flat."""
        values, (begin, _) = self.data_parallel.accumulated(name)
        start, stop = self.data_parallel.owned[name]
        return values[start - begin : stop - begin]

    def weight(self, name: str) -> Tensor:
        """What this rank updates of a parameter, flat: a view."""
        (begin, _), (start, stop) = self.data_parallel.kept(name), self.data_parallel.owned[name]
        return self.data_parallel.weights(name)[start - begin : stop - begin]

    def whole_weight(self, name: str) -> Tensor:
        """A parameter, shaped as in `parameters`. Collective where data-parallel ranks share it."""
        return self.data_parallel.whole(name, self.data_parallel.weights(name))

    def whole_gradient(self, name: str) -> Tensor:
        """What is accumulated of its gradient, likewise; zero where it is frozen."""
        if name not in self.trained:
            return torch.zeros(self.parameters[name].shape)
        return self.data_parallel.whole(name, self.data_parallel.accumulated(name)[0])

    def expect(self, stage: int) -> None:
        """Know that the next backward pass of that pipeline stage is its last in the step: sums of gradients may begin
        within it. Not those of a parameter that other stages of this rank have, too.
        """
        of_chunks = [set(chunk.parameters()) for chunk in self.chunks]
        own = of_chunks.pop(self.stages.index(stage))
        # Of a further view behind the backward pass: its sums may share a communicator with those of the main view,
        # where all ranks begin them in one order.
        if self.view == MAIN:
            self.data_parallel.expect([p for p in own.difference(*of_chunks) if p.requires_grad])

    @property
    def overlaps_sums(self) -> bool:
        """Whether its gradients are summed over ranks behind its last backward pass, and not within backward passes."""
        return bool(self.trained) and not self.data_parallel.reduces_early

    @property
    def own_map(self) -> WeightMap:
        """The weight map of this rank."""
        return self.maps[self.holders.rank()]

    @property
    def own_held(self) -> Mapping[str, Held]:
        """How often the group `holders` has each of this rank's parameters."""
        return self.held[self.holders.rank()]

    def shared_by(self, data_parallel: DataParallel, chunks: Sequence[Any] | None = None) -> TrainedModule:
        """The module whose ranks share weights and gradients in another way."""
        own = self.chunks if chunks is None else tuple(chunks)
        return replace(self, data_parallel=data_parallel, parameters=data_parallel.parameters, chunks=own)


def gathered_stages(modules: Iterable[TrainedModule]) -> dict[int, list[GatheredStage]]:
    """By stage number, what is gathered of the views of one module."""
    found = dict[int, list[GatheredStage]]()
    for module in modules:
        for number, stage in zip(module.stages, module.data_parallel.gathered, strict=False):
            found.setdefault(number, []).append(stage)
    return found
