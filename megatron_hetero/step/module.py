"""A module as it is trained: what a rank stores of its weights, how its gradients are reduced, and its optimizer.

There is one kind of value for all modules: of a model family (`family_module`), or of PyTorch or Megatron-Core, wrapped
or not (`library_modules`). The rule for gradients, the optimizers and checkpoints know nothing else.

Ranks with the same weights of a module share these, their gradients and optimizer states. A rank stores a flat range of
the elements of each parameter (Rajbhandari et al. 2020, arXiv 1910.02054).

    ZeRO stage   each rank of n stores 1/n of    `ModuleWeights` and `ModuleGradients` are in
    1            optimizer states                `buffers`: flat buffers
    2            and gradients                   `fully_sharded`, over PyTorch's `fully_shard`
    3            and weights
    none         whatever wrappers of the user do `wrapped`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import Held, WeightMap, held
from megatron_hetero.layout.axes import MAIN, View
from megatron_hetero.layout.communicators import ENDS
from megatron_hetero.step.gradient_state import GradientState, Phase

Range = tuple[int, int]
"""Elements [start, stop)."""
OverTp = Literal["sum", "mean"]


@dataclass(frozen=True, eq=False)
class ModuleWeights(ABC):
    """The weights of a module that this rank stores, and which elements it updates.

    Attributes:
        parameters: parameters of this rank, by name, shaped as before the group shares them.
        group: the ranks with the same parameters, which process other tokens.
        owned: for each trained parameter, the elements that this rank has the reduced gradient of, and updates.
        sharded: whether each rank updates a share of the elements.
    """

    parameters: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup
    owned: Mapping[str, Range]
    sharded: bool

    def copies(self, name: str) -> int:
        """The number of ranks in the group that update the same elements as this rank."""
        return 1 if self.sharded else self.group.size()

    def stored(self, name: str) -> Range:
        """The elements of a parameter that this rank stores from step to step."""
        return 0, self.parameters[name].numel()

    @abstractmethod
    def values(self, name: str) -> Tensor:
        """A flat view of the stored elements, as all ranks have updated them."""

    def publish(self) -> None:  # noqa: B027
        """Make the weights that each rank has updated visible to runs of the module. Collective if all ranks store all
        weights; later computation may overlap it: see `wait`.
        """

    def wait(self) -> None:  # noqa: B027
        """Wait before weights are written, or read other than by a run of the module or through `values`."""

    def whole(self, name: str, flat: Tensor) -> Tensor:
        """Assemble a tensor shaped like a parameter from `flat`, numbers for the elements that each rank stores.
        Collective.
        """
        return flat.view(self.parameters[name].shape)


class ModuleGradients(ABC):
    """How the gradients of a module are accumulated on this rank, and summed over the ranks with the same parameters.

    A step calls `expect` and `start` where it can, then `finish`; `state` notes how far it is.
    """

    state: GradientState

    reduces_early: ClassVar[bool] = False
    """Whether gradients are reduced in each backward pass, and a rank stores its own weights and gradients only."""

    @property
    def sums_shares(self) -> bool:
        """Whether `finish` gives a rank the sums only of the elements that it owns."""
        return False

    @property
    def persistent(self) -> bool:
        """Whether gradients are in the same memory in each step."""
        return True

    @property
    def first(self) -> Tensor | None:
        """The first tensor of gradients, by which `state` recognizes them; None if there is none."""
        return next(iter(self.summed), None)

    @property
    @abstractmethod
    def summed(self) -> Sequence[Tensor]:
        """Gradients of this rank that are sums over the group, once they are reduced."""

    @abstractmethod
    def accumulated(self, name: str) -> tuple[Tensor, Range]:
        """The gradient that this rank accumulates of a parameter in a step, flat, and the range of its elements."""

    def require_unsummed(self) -> None:  # noqa: B027
        """Check that further backward passes may add to the gradients of the step. Raises `UserError`."""

    def expect(self, parameters: Collection[nn.Parameter]) -> None:  # noqa: B027
        """Note that the next backward pass is the last of the step for `parameters`: their sums may begin within it."""

    def start(self) -> None:  # noqa: B027
        """Begin the sums over the group that have not begun, without waiting. Collective; between it and `finish` there
        is no other collective of the group.
        """

    @abstractmethod
    def finish(self) -> Tensor:
        """Make the sums over the group visible to later computation.

        Returns whether this rank's gradients were finite before they were summed, fp64 scalar.
        """

    def zero(self, *, set_to_none: bool = True) -> None:
        """Zero the gradients, or set those in `grad` to None: a new step begins."""
        self.clear(set_to_none=set_to_none)
        self.state.reset()

    @abstractmethod
    def clear(self, *, set_to_none: bool) -> None:
        """Zero the gradients, or set those in `grad` to None."""

    @torch.no_grad()
    def advance(self, phase: Phase) -> None:
        """Note that gradients have entered a phase. Raises `UserError` if it does not follow the current one."""
        self.state.advance(phase, self.first, persistent=self.persistent)


@dataclass(frozen=True, eq=False)
class TrainedModule:
    """The parameters of one view of a module on this rank, named as in the whole module. A module with parameters in
    several views is several of these, with the same name, stages and chunks.

    Attributes:
        name: name of the module.
        topology: topology of all modules.
        stages: numbers of the pipeline stages on this rank.
        chunks: the model of each of them.
        maps: for each rank of the group `holders`, which slices of which stored tensors its parameters are.
        weights: the parameters, and which of their elements this rank stores and updates.
        gradients: their gradients, and how these are summed over `replicas`.
        over_tp: how partial gradients are reduced over `holders`, by parameter.
        tied: the parameter of which another stage has a copy, if any.
        tied_copy: the same, if it counts on the other stage: the head of a tied model.
        view: which ranks hold which shards of the parameters, and sum their gradients.
    """

    name: str
    topology: Topology
    stages: tuple[int, ...]
    chunks: tuple[Any, ...]
    maps: tuple[WeightMap, ...]
    weights: ModuleWeights
    gradients: ModuleGradients
    over_tp: Mapping[str, OverTp]
    tied: str | None = None
    tied_copy: str | None = None
    view: View = MAIN

    @property
    def key(self) -> str:
        """The name of the module, followed by the name of a further view."""
        return self.name if self.view == MAIN else f"{self.name}.{self.view.name}"

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters by name, shaped as before data-parallel ranks share them. Their values may not have arrived yet;
        `weight` and `whole_weight` wait for them.
        """
        return self.weights.parameters

    @cached_property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The parameters that train."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def holders(self) -> dist.ProcessGroup:
        """The ranks that hold different shards of the parameters: tensor-parallel ranks in the main view."""
        return self.topology.group(self.name, *self.view.shard_axes)

    @property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks that have the same parameters and other tokens, whose gradients are summed."""
        return self.topology.group(self.name, *self.view.sum_axes)

    @property
    def ends(self) -> dist.ProcessGroup:
        """The ranks with copies of the tied parameter. Raises `KeyError` if the topology has no such group."""
        return self.topology.group(self.name, *ENDS)

    def gradient(self, name: str) -> Tensor:
        """The reduced gradient of the elements of a parameter that this rank updates, flat."""
        values, (begin, _) = self.gradients.accumulated(name)
        start, stop = self.weights.owned[name]
        return values[start - begin : stop - begin]

    def weight(self, name: str) -> Tensor:
        """The elements of a parameter that this rank updates: a flat view."""
        (begin, _), (start, stop) = self.weights.stored(name), self.weights.owned[name]
        return self.weights.values(name)[start - begin : stop - begin]

    def whole_weight(self, name: str) -> Tensor:
        """A parameter, shaped as in `parameters`. Collective if data-parallel ranks share it."""
        return self.weights.whole(name, self.weights.values(name))

    def expect(self, stage: int) -> None:
        """Note that the next backward pass of that pipeline stage is its last in the step: sums of gradients may begin
        within it, except of parameters that other stages of this rank have, too.
        """
        # Sums of a further view begin after the backward pass: they may share a communicator with those of the main
        # view, and all ranks begin them in one order.
        if self.view == MAIN:
            other_stages = [set(chunk.parameters()) for chunk in self.chunks]
            this_stage = other_stages.pop(self.stages.index(stage))
            self.gradients.expect([p for p in this_stage.difference(*other_stages) if p.requires_grad])

    @property
    def local_map(self) -> WeightMap:
        """The weight map of this rank."""
        return self.maps[self.holders.rank()]

    @cached_property
    def held(self) -> tuple[Mapping[str, Held], ...]:
        """For each rank of the group `holders`, how often that group has each parameter."""
        return held(self.maps)

    @property
    def local_held(self) -> Mapping[str, Held]:
        """The copies of each parameter of this rank in the group `holders`."""
        return self.held[self.holders.rank()]


class ModuleOptimizer(ABC):
    """The optimizer of a module on this rank, whose gradients are summed."""

    module: TrainedModule

    @abstractmethod
    def squares(self) -> Tensor:
        """This rank's term of the squared norm of the module's gradients, fp64 []."""

    @abstractmethod
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        """Update the weights with the gradients times `scale`. `step`: a number that no other update has; None for the
        number of updates.
        """

    def zero(self) -> None:  # noqa: B027 (the module zeroes its gradients)
        """Drop copies of gradients."""

    @abstractmethod
    def masters(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Weights in 16 bits that this rank updates, and their fp32 masters."""

    @abstractmethod
    def reload_model_params(self) -> None:
        """Copy the weights of the models to the masters."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state that is needed to resume."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict` on this rank."""
