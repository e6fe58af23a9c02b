"""How the ranks that hold the same weights of a module share these, their gradients and their optimizer.

    ZeRO stage   each rank of n keeps 1/n of     class
    1            optimizer states                Replicated, in flat buffers
    2            and gradients                   FullySharded, over PyTorch's `fully_shard`
    3            and weights
    none         whatever wrappers of the user do `wrapped.Wrapped`

(Rajbhandari et al. 2020, arXiv 1910.02054.) What a rank keeps of a parameter is a flat range of its elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from megatron_hetero.schedule.contract import GatheredStage
from megatron_hetero.schedule.gathering import bucket_elements
from megatron_hetero.step.buffers import BucketSums, Buffer, Range, WeightGathers, accumulate, parts_of_stage


@dataclass(frozen=True, eq=False)
class DataParallel(ABC):
    """What a rank keeps of a module over `group`, the ranks that have the same parameters and other tokens.

    `parameters`: of this rank, by name, with the shapes that they have before that group shares them.
    """

    parameters: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup

    @property
    @abstractmethod
    def sharded(self) -> bool:
        """Whether each rank updates a share of the elements."""

    @property
    def reduces_early(self) -> bool:
        """Whether gradients are reduced in each backward pass: a rank keeps weights and gradients of its own."""
        return False

    @property
    def sums_shares(self) -> bool:
        """Whether `reduce` gives a rank the sums of what it owns only."""
        return False

    def zero_unsummed(self, names: Collection[str]) -> None:  # noqa: B027 (nothing where no rank accumulates others)
        """Zero what `reduce` has not summed of the gradients of these parameters."""

    def copies(self, name: str) -> int:
        """How many ranks of the group have the reduced gradient of the elements that this rank updates."""
        return 1 if self.sharded else self.group.size()

    @property
    @abstractmethod
    def owned(self) -> Mapping[str, Range]:
        """Of each trained parameter what this rank has the reduced gradient of, and updates."""

    @property
    def gathered(self) -> Sequence[GatheredStage]:
        """The stages whose weights are gathered when they run, if any."""
        return ()

    @property
    def buffers(self) -> Sequence[Tensor]:
        """All gradients of this rank, in flat tensors, where there are such."""
        return ()

    @property
    def lives_on(self) -> bool:
        """Whether gradients are in the same memory in each step."""
        return True

    @property
    def marked(self) -> Any:
        """A tensor of gradients to note on how far they are; None while there are none."""
        return next(iter(self.buffers), None)

    @property
    def summed(self) -> Sequence[Tensor]:
        """Of `buffers` what is summed over the group once gradients are reduced."""
        return ()

    @abstractmethod
    def kept(self, name: str) -> Range:
        """What this rank keeps of the weights of a parameter from step to step."""

    @abstractmethod
    def weights(self, name: str) -> Tensor:
        """A view of them, flat, as all ranks have updated them."""

    @abstractmethod
    def accumulated(self, name: str) -> tuple[Tensor, Range]:
        """What this rank accumulates of a parameter's gradient in a step, flat, and which elements these are."""

    @abstractmethod
    def zero_gradients(self, *, set_to_none: bool = True) -> None:
        """Zero the gradients, before a step; those in `grad` become None unless told otherwise."""

    def require_unsummed(self) -> None:  # noqa: B027
        """Check that further backward passes may add to the gradients of the step. Raises `UserError`."""

    def expect(self, parameters: Collection[nn.Parameter]) -> None:  # noqa: B027
        """Know that the next backward pass is the last of the step that gives `parameters` gradients: their sums over
        the group may begin within it.
        """

    @abstractmethod
    def start_reducing(self) -> Tensor:
        """Begin to sum the gradients over the group, where backward passes have not: nothing waits for it. Collective;
        between it and `reduce` there is no other collective of the group.

        Returns whether this rank's gradients were finite before, fp64 scalar.
        """

    @abstractmethod
    def reduce(self) -> None:
        """Have what is computed from here on see the sums."""

    def share_weights(self) -> None:  # noqa: B027
        """Let runs of the module see the weights that each rank has updated. Collective where all keep all of them,
        which may go on beside what is computed next: `wait_for_weights`.
        """

    def wait_for_weights(self) -> None:  # noqa: B027
        """Wait before weights are written, or read other than by a run of the module or through `weights`."""

    def whole(self, name: str, flat: Tensor) -> Tensor:
        """`flat`, numbers for what each rank keeps of a parameter, put together: shaped as that. Collective."""
        return flat.view(self.parameters[name].shape)


@dataclass(frozen=True, eq=False)
class Replicated(DataParallel):
    """Each rank keeps all weights and gradients, the latter in `memory`; with a sharded optimizer it updates a share of
    them.

    `sums`: of the buckets; None where nothing trains. `gathers`: of their weights, where ranks update shares.
    `prefers_all_reduce`: whether the platform sums everything for each rank, as gloo does. `adds_up`: whether a
    backward pass gives parameters several gradients. `overlaps_gathers`: whether weights may still be on the way when a
    stage runs: it then names its parts in `units()`, which wait for theirs.
    """

    memory: tuple[Buffer, ...]
    sums: BucketSums | None
    gathers: WeightGathers | None
    prefers_all_reduce: bool
    adds_up: bool
    overlaps_gathers: bool = False

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
        gradients: torch.dtype | None,
        adds_up: bool,
    ) -> Replicated:
        """Buffers for the models of a module's stages.

        Args:
            name: of the module.
            parameters: of all stages, by name; those of one view.
            chunks: models of the stages.
            group: the ranks that hold the same parameters.
            in_one_bucket: whether sums begin when all gradients are there: on stages whose backward pass is not the
                last of the step.
            prefers_all_reduce: of the platform.
            sharded: whether each rank updates a share.
            gradients: dtype of the buffers; None for that of the weights.
            adds_up: whether a backward pass gives parameters several gradients.
        """
        own = {id(p) for p in parameters.values() if p.requires_grad}
        trained = [p for p in dict.fromkeys(p for each in chunks for p in each.parameters()) if id(p) in own]
        if not trained:
            return cls(parameters, group, (), None, None, prefers_all_reduce, adds_up)
        size = sum(p.numel() for p in parameters.values() if p.requires_grad)
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in trained:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        memory = tuple(
            Buffer.of(
                of_dtype,
                gradients or dtype,
                None if in_one_bucket else bucket_elements(size, group.size()),
                group,
                sharded=sharded,
                sums_shares=sharded and not prefers_all_reduce,
            )
            for dtype, of_dtype in by_dtype.items()
        )
        buckets = [bucket for buffer in memory for bucket in buffer.buckets]
        sums, gathers = BucketSums(name, buckets, group, list(accumulate(trained))), None
        if sharded:
            gathers = WeightGathers(name, buckets, group, [part for chunk in chunks for part in parts_of_stage(chunk)])
        overlaps = all(hasattr(chunk, "units") for chunk in chunks)
        return cls(parameters, group, memory, sums, gathers, prefers_all_reduce, adds_up, overlaps)

    @property
    @override
    def sharded(self) -> bool:
        return self.gathers is not None

    @property
    @override
    def sums_shares(self) -> bool:
        return self.sharded and not self.prefers_all_reduce

    @override
    def zero_unsummed(self, names: Collection[str]) -> None:
        if not self.sums_shares:
            return
        found = ((self.accumulated(name)[0], *self.owned[name]) for name in names)
        parts = [part for gradient, start, stop in found for part in (gradient[:start], gradient[stop:])]
        if parts := [part for part in parts if part.numel()]:
            torch._foreach_zero_(parts)

    @property
    @override
    def owned(self) -> Mapping[str, Range]:
        return self._owned

    @cached_property
    def _owned(self) -> Mapping[str, Range]:
        """With a sharded optimizer what lies in this rank's part of the parameter's bucket, else all of it."""
        ranges = {key: own for buffer in self.memory for key, own in buffer.owned.items()}
        return {name: ranges[id(p)] for name, p in self.parameters.items() if p.requires_grad}

    @property
    @override
    def buffers(self) -> Sequence[Tensor]:
        return [buffer.gradients for buffer in self.memory]

    @property
    @override
    def summed(self) -> Sequence[Tensor]:
        return [] if self.sums is None else [bucket.summed for bucket in self.sums.buckets]

    @override
    def kept(self, name: str) -> Range:
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
        if self.sums is not None:
            self.sums.begin_step()

    @override
    def require_unsummed(self) -> None:
        if self.sums is not None:
            self.sums.require_before()

    @override
    def expect(self, parameters: Collection[nn.Parameter]) -> None:
        if self.sums is not None and not self.adds_up:
            self.sums.expect(parameters)

    @override
    def start_reducing(self) -> Tensor:
        assert self.sums is not None, "something trains"
        return self.sums.start_rest()

    @override
    def reduce(self) -> None:
        if self.sums is not None:
            self.sums.wait()

    @override
    def share_weights(self) -> None:
        if self.gathers is not None:
            self.gathers.start()
            if not self.overlaps_gathers:
                self.gathers.wait()

    @override
    def wait_for_weights(self) -> None:
        if self.gathers is not None:
            self.gathers.wait()
