"""How the ranks that hold the same weights of a module share these, their gradients and their optimizer.

    ZeRO stage   each rank of n keeps 1/n of     class
    1            optimizer states                Replicated, over Megatron's `DistributedDataParallel`
    2            and gradients                   FullySharded, over PyTorch's `fully_shard`
    3            and weights

(Rajbhandari et al. 2020, arXiv 1910.02054.) What is kept of a parameter is a flat range of its elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from typing_extensions import override

from megatron_hetero.distributed.platform import Platform
from megatron_hetero.engine.bucket_sums import Bucket, BucketSums
from megatron_hetero.engine.weight_gathers import WeightBucket, WeightGathers, parts_of_stage
from megatron_hetero.execution.contract import GatheredStage
from megatron_hetero.execution.gathering import bucket_elements

Range = tuple[int, int]
"""Elements [start, stop) of a flattened parameter of this rank."""


@dataclass(frozen=True, eq=False)
class DataParallel(ABC):
    """What a rank keeps of a module over the data- and context-parallel group.

    `parameters`: of this rank, by name, with the shapes that they have before that group shares them.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    groups: ProcessGroupCollection

    @property
    @abstractmethod
    def sharded(self) -> bool:
        """Whether each rank updates a share of the elements."""

    @property
    @abstractmethod
    def reduces_early(self) -> bool:
        """Whether gradients are reduced in each backward pass: a rank keeps weights and gradients of its own."""

    @property
    def sums_shares(self) -> bool:
        """Whether `reduce` gives a rank the sums of what it owns only."""
        return True

    def zero_unsummed(self, names: Collection[str]) -> None:  # noqa: B027 (nothing where no rank accumulates others)
        """Zero what `reduce` has not summed of the gradients of these parameters."""

    @property
    @abstractmethod
    def owned(self) -> Mapping[str, Range]:
        """Of each trained parameter what this rank has the reduced gradient of, and updates."""

    @property
    def gathered(self) -> Sequence[GatheredStage]:
        """The stages whose weights are gathered when they run, if any."""
        return ()

    @property
    @abstractmethod
    def buffers(self) -> Sequence[Tensor]:
        """All gradients of this rank, in flat tensors."""

    @property
    @abstractmethod
    def summed(self) -> Sequence[Tensor]:
        """Of `buffers` what is summed over the group once gradients are reduced."""

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
    def zero_gradients(self) -> None:
        """Before a step."""

    @abstractmethod
    def expect(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """The next backward pass is the last of the step that gives `parameters` gradients: their sums over the group
        may begin within it.
        """

    @abstractmethod
    def start_reducing(self) -> Tensor:
        """Begin to sum the gradients over the group, where backward passes have not: nothing waits for it. Collective;
        between it and `reduce` there is no other collective of the group.

        Returns whether this rank's gradients were finite before, fp64 scalar.
        """

    @abstractmethod
    def reduce(self) -> None:
        """What is computed from here on sees the sums."""

    @abstractmethod
    def share_weights(self) -> None:
        """Let runs of the module see the weights that each rank has updated. Collective where all keep all of them,
        which may go on beside what is computed next: `wait_for_weights`.
        """

    @abstractmethod
    def wait_for_weights(self) -> None:
        """Before weights are written, or read other than by a run of the module or through `weights`."""

    @abstractmethod
    def whole(self, name: str, flat: Tensor) -> Tensor:
        """`flat`, numbers for what each rank keeps of a parameter, put together: shaped as that. Collective."""


@dataclass(frozen=True, eq=False)
class Replicated(DataParallel):
    """Each rank keeps all weights and gradients; with the distributed optimizer it updates a share of them.

    `ddp`: Megatron's buffers; None where nothing trains. `platform`: where they are reduced. Not by Megatron, which
    overlaps the reductions of buckets with the backward pass only where each parameter gets a gradient in each step.
    `sums`: of its buckets, likewise; `gathers`: of their weights, with the distributed optimizer. `adds_up`: whether a
    backward pass gives parameters several gradients.
    """

    ddp: DistributedDataParallel | None
    platform: Platform
    sums: BucketSums | None
    gathers: WeightGathers | None
    adds_up: bool

    @classmethod
    def of(
        cls,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        chunks: Sequence[Any],
        groups: ProcessGroupCollection,
        platform: Platform,
        *,
        sharded: bool,
        gradients: torch.dtype,
        adds_up: bool,
    ) -> Replicated:
        """With buffers of `gradients`, that dtype, for the models of a module's stages. `name`: of the module.
        `sharded`: with the distributed optimizer.
        """
        trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
        if not trained:
            return cls(parameters, groups, None, platform, None, None, adds_up)
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=gradients == torch.float32,
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=True,
            bucket_size=bucket_elements(trained, groups.dp_cp.size()),
        )
        model = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
        ddp = DistributedDataParallel(chunks[0].config, config, model, pg_collection=groups)
        config.overlap_grad_reduce = False  # Which has made several buckets; Megatron's hooks need not sum them.
        made = cls(parameters, groups, ddp, platform, None, None, adds_up)
        every = [p for p in ddp.module.parameters() if p.requires_grad]
        accumulators = list(zip(every, ddp.grad_accs, strict=True))
        sums, gathers = BucketSums(name, made.summed_buckets(), groups.dp_cp, accumulators), None
        if sharded:
            parts = [part for chunk in chunks for part in parts_of_stage(chunk)]
            gathers = WeightGathers(name, made.weight_buckets(), groups.dp_cp, parts)
        return replace(made, sums=sums, gathers=gathers)

    @property
    @override
    def sharded(self) -> bool:
        return self.ddp is not None and self.ddp.ddp_config.use_distributed_optimizer

    @property
    @override
    def reduces_early(self) -> bool:
        return False

    @property
    @override
    def sums_shares(self) -> bool:
        return self.sharded and not self.platform.prefers_all_reduce

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
        """With the distributed optimizer what lies in this rank's part of the parameter's bucket, else all of it."""
        ranges: dict[int, Range] = {}
        for buffer in self._ddp_buffers:
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel()
                share = size // self.groups.dp_cp.size() if self.sharded else size
                low = bucket.offset + (share * self.groups.dp_cp.rank() if self.sharded else 0)
                for parameter in bucket.params:
                    start, stop, _ = buffer.param_index_map[parameter]
                    first = min(max(start, low), stop)
                    ranges[id(parameter)] = first - start, max(first, min(stop, low + share)) - start
        return {name: ranges[id(p)] for name, p in self.parameters.items() if p.requires_grad}

    @property
    def _ddp_buffers(self) -> Sequence[Any]:
        buffers: Any = () if self.ddp is None else self.ddp.buffers
        return buffers

    @property
    @override
    def buffers(self) -> Sequence[Tensor]:
        return [buffer.grad_data for buffer in self._ddp_buffers]

    def summed_buckets(self) -> list[Bucket]:
        """In the order in which they are summed: about that in which gradients come."""
        return [
            Bucket(
                each.grad_data,
                self._share(each.grad_data) if self.sums_shares else each.grad_data,
                tuple(each.params_list),
            )
            for each in self._ddp_buckets
        ]

    def weight_buckets(self) -> list[WeightBucket]:
        """The weights of the same parameters, where ranks update shares of them."""
        return [
            WeightBucket(each.param_data, self._share(each.param_data), tuple(each.params_list))
            for each in self._ddp_buckets
        ]

    @property
    def _ddp_buckets(self) -> Sequence[Any]:
        return [bucket for buffer in self._ddp_buffers for bucket in buffer.buckets]

    def _share(self, flat: Tensor) -> Tensor:
        """That of this rank in a bucket."""
        return flat.view(self.groups.dp_cp.size(), -1)[self.groups.dp_cp.rank()]

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
    def zero_gradients(self) -> None:
        if self.ddp is not None and self.sums is not None:
            self.ddp.zero_grad_buffer()
            self.sums.begin_step()

    @override
    def expect(self, parameters: Collection[torch.nn.Parameter]) -> None:
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

    @override
    def wait_for_weights(self) -> None:
        if self.gathers is not None:
            self.gathers.wait()

    @override
    def whole(self, name: str, flat: Tensor) -> Tensor:
        return flat.view(self.parameters[name].shape)
