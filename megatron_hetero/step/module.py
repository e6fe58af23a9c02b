"""Descriptions of trained modules: the weights that a rank stores, the reduction of gradients, and the optimizer.

All modules have the same interface: modules of a model family (`family_module`), and modules of PyTorch or Megatron-
Core, wrapped or not (`library_modules`). The rule for gradients, optimizers and checkpoints use only this interface.

Ranks with the same weights of a module shard optimizer states, and possibly gradients and weights. Each rank's shard is
a flat range of the elements of each parameter (Rajbhandari et al. 2020, arXiv 1910.02054).

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
"""A range [start, stop) of elements of a flattened tensor."""
OverTp = Literal["sum", "mean"]


@dataclass(frozen=True, eq=False)
class ModuleWeights(ABC):
    """The weights of a module that this rank stores, and the elements that it updates.

    Attributes:
        parameters: the parameters of this rank, by name, with their shapes before data-parallel sharding.
        group: the ranks with the same parameters, which process different tokens.
        owned: for each trained parameter, the elements whose reduced gradient this rank has, and which it updates.
        sharded: whether each rank updates only a share of the elements.
    """

    parameters: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup
    owned: Mapping[str, Range]
    sharded: bool

    def copies(self, name: str) -> int:
        """Return the number of ranks in the group that update the same elements of a parameter as this rank."""
        return 1 if self.sharded else self.group.size()

    def stored(self, name: str) -> Range:
        """Return the range of a parameter's elements that this rank stores between steps."""
        return 0, self.parameters[name].numel()

    @abstractmethod
    def values(self, name: str) -> Tensor:
        """Return a flat view of a parameter's stored elements, including the updates of all ranks."""

    def publish(self) -> None:  # noqa: B027
        """Make the weights that each rank has updated visible to runs of the module. Collective if all ranks store all
        weights. The communication may overlap later computation; `wait` waits for it.
        """

    def wait(self) -> None:  # noqa: B027
        """Wait for published weights. Call this before writing weights, or reading them outside a run or `values`."""

    def whole(self, name: str, flat: Tensor) -> Tensor:
        """Return a tensor of a parameter's full shape, gathered from each rank's `flat` values for its stored elements.
        Collective.
        """
        return flat.view(self.parameters[name].shape)


class ModuleGradients(ABC):
    """The gradients of a module on this rank: their accumulation, and their sums over ranks with the same parameters.

    A step optionally calls `expect` and `start`, and then `finish`. `state` tracks the phase of the gradients.
    """

    state: GradientState

    reduces_early: ClassVar[bool] = False
    """Whether each backward pass reduces gradients, and a rank stores only its shard of weights and gradients."""

    @property
    def sums_shares(self) -> bool:
        """Whether `finish` computes, on each rank, only the sums of the elements that the rank updates."""
        return False

    @property
    def persistent(self) -> bool:
        """Whether gradients are in the same tensors in each step."""
        return True

    @property
    def first(self) -> Tensor | None:
        """The first gradient tensor, which `state` tracks; None if there is none."""
        return next(iter(self.summed), None)

    @property
    @abstractmethod
    def summed(self) -> Sequence[Tensor]:
        """The gradient tensors of this rank that are sums over the group after `finish`."""

    @abstractmethod
    def accumulated(self, name: str) -> tuple[Tensor, Range]:
        """Return the flat gradient of a parameter that this rank accumulates in a step, and its range of elements."""

    def require_unsummed(self) -> None:  # noqa: B027
        """Check that backward passes may still add to the gradients of the step. Raises `UserError`."""

    def expect(self, parameters: Collection[nn.Parameter]) -> None:  # noqa: B027
        """Announce that the next backward pass is the last of the step for `parameters`, and may begin their sums."""

    def start(self) -> None:  # noqa: B027
        """Begin the sums over the group that have not begun, without waiting. Collective; the group must run no other
        collective between `start` and `finish`.
        """

    @abstractmethod
    def finish(self) -> Tensor:
        """Finish the sums over the group, so that later computation on the device can use them.

        Returns whether this rank's gradients were finite before the sums, as an fp64 scalar.
        """

    def zero(self, *, set_to_none: bool = True) -> None:
        """Begin a new step: zero the gradients, or set gradients in `grad` to None if `set_to_none`."""
        self.clear(set_to_none=set_to_none)
        self.state.reset()

    @abstractmethod
    def clear(self, *, set_to_none: bool) -> None:
        """Zero the gradients, or set gradients in `grad` to None if `set_to_none`."""

    @torch.no_grad()
    def advance(self, phase: Phase) -> None:
        """Record that gradients have entered `phase`. Raises `UserError` if it does not follow the current phase."""
        self.state.advance(phase, self.first, persistent=self.persistent)


@dataclass(frozen=True, eq=False)
class TrainedModule:
    """The parameters of a module on this rank in one view, named as in the whole module. A module with parameters in
    several views has a `TrainedModule` for each view, with the same name, stages and chunks.

    Attributes:
        name: name of the module.
        topology: topology of all modules.
        stages: numbers of the pipeline stages on this rank.
        chunks: the model of each stage.
        maps: for each rank of the group `holders`, the slices of stored tensors in each of its parameters.
        weights: the parameters, with the elements that this rank stores and updates.
        gradients: the gradients, and their sums over `replicas`.
        over_tp: for each parameter with partial gradients, the reduction of its gradient over `holders`.
        tied: the name of the parameter of which another stage has a copy, if any.
        tied_copy: the same name if this rank has the copy (the head of a tied model), whose norm is not counted.
        view: the view, which defines the ranks that shard the parameters, and the ranks that sum their gradients.
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
        """The name of the module, followed by the name of the view unless it is the main view."""
        return self.name if self.view == MAIN else f"{self.name}.{self.view.name}"

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters by name, with their shapes before data-parallel sharding. Updated values may still be in
        flight; `weight` and `whole_weight` wait for the values.
        """
        return self.weights.parameters

    @cached_property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The parameters that require gradients, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @cached_property
    def holders(self) -> dist.ProcessGroup:
        """The ranks with different shards of the parameters: tensor-parallel ranks in the main view."""
        return self.topology.group(self.name, *self.view.shard_axes)

    @cached_property
    def replicas(self) -> dist.ProcessGroup:
        """The ranks with the same parameters and different tokens, which sum their gradients."""
        return self.topology.group(self.name, *self.view.sum_axes)

    @property
    def ends(self) -> dist.ProcessGroup:
        """The ranks with copies of the tied parameter. Raises `KeyError` if the topology has no such group."""
        return self.topology.group(self.name, *ENDS)

    def gradient(self, name: str) -> Tensor:
        """Return the flat reduced gradient of a parameter's elements that this rank updates."""
        values, (begin, _) = self.gradients.accumulated(name)
        start, stop = self.weights.owned[name]
        return values[start - begin : stop - begin]

    def weight(self, name: str) -> Tensor:
        """Return a flat view of a parameter's elements that this rank updates."""
        (begin, _), (start, stop) = self.weights.stored(name), self.weights.owned[name]
        return self.weights.values(name)[start - begin : stop - begin]

    def whole_weight(self, name: str) -> Tensor:
        """Return a parameter in its shape in `parameters`. Collective if the parameter is sharded over `replicas`."""
        return self.weights.whole(name, self.weights.values(name))

    def expect(self, stage: int) -> None:
        """Announce that the next backward pass of a pipeline stage is its last one in the step: gradient sums may begin
        during it, except for parameters that other stages of this rank share.
        """
        # Sums in other views begin after the backward pass: they may share a communicator with the main view, and all
        # ranks must begin the sums in the same order.
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
        """For each rank of the group `holders`, the numbers of copies of its parameters in the group."""
        return held(self.maps)

    @property
    def local_held(self) -> Mapping[str, Held]:
        """For each parameter of this rank, the numbers of copies in the group `holders`."""
        return self.held[self.holders.rank()]


class ModuleOptimizer(ABC):
    """The optimizer of a module on this rank. It expects gradients that are already summed over ranks."""

    module: TrainedModule

    @abstractmethod
    def squares(self) -> Tensor:
        """Return this rank's term of the squared norm of the module's gradients, an fp64 scalar."""

    @abstractmethod
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        """Update the weights with the gradients times `scale`. `step`: a unique number of this update; None for the
        number of updates.
        """

    def zero(self) -> None:  # noqa: B027 (the module zeroes its gradients)
        """Free the optimizer's copies of gradients, if any."""

    @abstractmethod
    def masters(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return pairs of the 16-bit weights that this rank updates and their fp32 masters."""

    @abstractmethod
    def reload_model_params(self) -> None:
        """Copy the weights of the models to the masters."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state of this rank, from which training can resume."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict` on this rank."""
