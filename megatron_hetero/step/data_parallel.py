"""How the ranks with the same weights of a module share these, their gradients and optimizer states.

    ZeRO stage   each rank of n stores 1/n of    class
    1            optimizer states                Replicated, in flat buffers
    2            and gradients                   FullySharded, over PyTorch's `fully_shard`
    3            and weights
    none         whatever wrappers of the user do `wrapped.Wrapped`

(Rajbhandari et al. 2020, arXiv 1910.02054.) A rank stores a flat range of the elements of each parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from megatron_hetero.schedule.contract import GatheredStage
from megatron_hetero.schedule.gathering import bucket_elements
from megatron_hetero.step.buffers import BucketSums, Buffer, Range, WeightGathers, accumulate, parts_of_stage


@dataclass(frozen=True, eq=False)
class DataParallel(ABC):
    """How the ranks of `group`, with the same parameters and other tokens, share a module.

    Attributes:
        parameters: parameters of this rank, by name, shaped as before the group shares them.
        group: the ranks.
        owned: for each trained parameter, the elements that this rank has the reduced gradient of, and updates.
        sharded: whether each rank updates a share of the elements.
        sums_shares: whether `reduce` gives a rank the sums of what it owns only.
    """

    parameters: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup
    owned: Mapping[str, Range]
    sharded: bool
    sums_shares: bool

    reduces_early: ClassVar[bool] = False
    """Whether gradients are reduced in each backward pass, and a rank stores its own weights and gradients only."""

    def copies(self, name: str) -> int:
        """The number of ranks in the group with the reduced gradient of the elements that this rank updates."""
        return 1 if self.sharded else self.group.size()

    @property
    def gathered(self) -> Sequence[GatheredStage]:
        """The stages whose weights are gathered when they run."""
        return ()

    @property
    def lives_on(self) -> bool:
        """Whether gradients are in the same memory in each step."""
        return True

    @property
    @abstractmethod
    def marked(self) -> Any:
        """The tensor of gradients whose attributes say how far they are; None if there are none."""

    @property
    @abstractmethod
    def summed(self) -> Sequence[Tensor]:
        """Gradients of this rank that are sums over the group, once they are reduced."""

    @abstractmethod
    def stored(self, name: str) -> Range:
        """The elements of a parameter that this rank stores from step to step."""

    @abstractmethod
    def weights(self, name: str) -> Tensor:
        """A flat view of them, as all ranks have updated them."""

    @abstractmethod
    def accumulated(self, name: str) -> tuple[Tensor, Range]:
        """The gradient that this rank accumulates of a parameter in a step, flat, and the range of its elements."""

    @abstractmethod
    def zero_gradients(self, *, set_to_none: bool = True) -> None:
        """Zero the gradients, or set those in `grad` to None."""

    def require_unsummed(self) -> None:  # noqa: B027
        """Check that further backward passes may add to the gradients of the step. Raises `UserError`."""

    def expect(self, parameters: Collection[nn.Parameter]) -> None:  # noqa: B027
        """Note that the next backward pass is the last of the step for `parameters`: their sums may begin within it."""

    @abstractmethod
    def start_reducing(self) -> Tensor:
        """Begin to sum the gradients over the group, unless backward passes have, without waiting. Collective; between
        it and `reduce` there is no other collective of the group.

        Returns whether this rank's gradients were finite before, fp64 scalar.
        """

    @abstractmethod
    def reduce(self) -> None:
        """Make the sums visible to what is computed next."""

    def share_weights(self) -> None:  # noqa: B027
        """Make the weights that each rank has updated visible to runs of the module. Collective if all ranks store all
        weights; it may run beside what is computed next: see `wait_for_weights`.
        """

    def wait_for_weights(self) -> None:  # noqa: B027
        """Wait before weights are written, or read other than by a run of the module or through `weights`."""

    def whole(self, name: str, flat: Tensor) -> Tensor:
        """Assemble a tensor shaped like a parameter from `flat`, numbers for the elements that each rank stores.
        Collective.
        """
        return flat.view(self.parameters[name].shape)


@dataclass(frozen=True, eq=False)
class Replicated(DataParallel):
    """Each rank stores all weights and gradients; with a sharded optimizer it updates a share of them.

    Attributes:
        memory: buffers of the gradients.
        sums: sums of the buckets.
        gathers: gathers of their weights, which are none unless ranks update shares.
        adds_up: whether a backward pass gives parameters several gradients.
        overlaps_gathers: whether a stage may run before all weights arrive: its `units()` wait for theirs.
    """

    memory: tuple[Buffer, ...]
    sums: BucketSums
    gathers: WeightGathers
    adds_up: bool
    overlaps_gathers: bool

    @classmethod
    def of(
        cls,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        chunks: Sequence[Any],
        group: dist.ProcessGroup,
        *,
        in_one_bucket: bool,
        prefers_all_reduce: bool,
        sharded: bool,
        gradients: torch.dtype,
        adds_up: bool,
    ) -> Replicated:
        """Allocate buffers for the models of a module's stages.

        Args:
            name: name of the module.
            parameters: parameters of all stages in one view, by name.
            chunks: models of the stages.
            group: the ranks that hold the same parameters.
            in_one_bucket: whether sums begin when all gradients are there: on stages whose backward pass is not the
                last of the step.
            prefers_all_reduce: whether the platform sums everything for each rank, as gloo does.
            sharded: whether each rank updates a share.
            gradients: dtype of the buffers.
            adds_up: whether a backward pass gives parameters several gradients.
        """
        own = {id(p) for p in parameters.values() if p.requires_grad}
        trained = [p for p in dict.fromkeys(p for each in chunks for p in each.parameters()) if id(p) in own]
        size = sum(p.numel() for p in parameters.values() if p.requires_grad)
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in trained:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        sums_shares = sharded and not prefers_all_reduce
        most = None if in_one_bucket else bucket_elements(size, group.size())
        memory = tuple(
            Buffer.of(of_dtype, gradients, most, group, sharded=sharded, sums_shares=sums_shares)
            for of_dtype in by_dtype.values()
        )
        ranges = {key: own for buffer in memory for key, own in buffer.owned.items()}
        owned = {name: ranges[id(p)] for name, p in parameters.items() if p.requires_grad}
        buckets = [bucket for buffer in memory for bucket in buffer.buckets]
        sums = BucketSums(name, buckets, group, list(accumulate(trained)))
        parts = [part for chunk in chunks for part in parts_of_stage(chunk)]
        gathers = WeightGathers(name, buckets if sharded else (), group, parts)
        overlaps = all(hasattr(chunk, "units") for chunk in chunks)
        return cls(parameters, group, owned, sharded, sums_shares, memory, sums, gathers, adds_up, overlaps)

    @property
    @override
    def marked(self) -> Any:
        return self.memory[0].gradients if self.memory else None

    @property
    @override
    def summed(self) -> Sequence[Tensor]:
        return [bucket.summed for bucket in self.sums.buckets]

    @override
    def stored(self, name: str) -> Range:
        return 0, self.parameters[name].numel()

    @override
    def weights(self, name: str) -> Tensor:
        self.wait_for_weights()
        return self.parameters[name].detach().view(-1)

    @override
    def accumulated(self, name: str) -> tuple[Tensor, Range]:
        parameter: Any = self.parameters[name]
        return parameter.main_grad.view(-1), (0, parameter.numel())

    @override
    def zero_gradients(self, *, set_to_none: bool = True) -> None:
        self.reduce()  # A sum that ends later would write over the zeros.
        for buffer in self.memory:
            buffer.gradients.zero_()
            for bucket in buffer.buckets:
                for parameter in bucket.parameters:
                    parameter.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]
        self.sums.begin_step()

    @override
    def require_unsummed(self) -> None:
        self.sums.require_before()

    @override
    def expect(self, parameters: Collection[nn.Parameter]) -> None:
        if not self.adds_up:
            self.sums.expect(parameters)

    @override
    def start_reducing(self) -> Tensor:
        return self.sums.start_rest()

    @override
    def reduce(self) -> None:
        self.sums.wait()

    @override
    def share_weights(self) -> None:
        self.gathers.start()
        if not self.overlaps_gathers:
            self.gathers.wait()

    @override
    def wait_for_weights(self) -> None:
        self.gathers.wait()
