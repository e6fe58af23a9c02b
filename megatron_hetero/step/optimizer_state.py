"""What an optimizer keeps of a module on this rank: master weights and moments of a flat range of each parameter.

Those of weights of one dtype lie one after the other, in the order of the gradients' memory: what is done to all of
them is done at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megatron_hetero.groups.platform import Platform
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.number_formats import (
    BLOCK,
    Blocks8,
    Fp32Master,
    Fp32Weights,
    Plain,
    RoundedMaster,
    SplitMaster,
    Spread,
    Stored,
    code_of_zero,
)

SECOND_MOMENT = "exp_avg_sq"


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """Elements [start, stop) of a flattened parameter, and what an optimizer keeps of them.

    Attributes:
        start: in the parameter of this rank.
        stop: in the parameter of this rank.
        at: where they begin in the `OptimizerState`.
        gradient: a view of the gradient buffer, [stop - start].
        master: the weights that are updated.
        moments: by their names in the state of PyTorch's optimizer.
        updates: how often they were updated, fp32 [] on the host.
    """

    start: int
    stop: int
    at: int
    gradient: Tensor
    master: Stored
    moments: Mapping[str, Stored]
    updates: Tensor

    @property
    def stored(self) -> dict[str, Stored]:
        """All numbers, by their kinds in a checkpoint."""
        return {"weights": self.master, **self.moments}


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """What an optimizer keeps of a module's weights of one dtype on this rank.

    Attributes:
        gradients: of all shards, one after the other.
        master: likewise.
        moments: likewise, by their names in the state of PyTorch's optimizer.
        updates: how often each was updated, fp32 [shards] on the host; theirs are views of it.
        shards: by the names of their parameters.
    """

    gradients: Spread
    master: Stored
    moments: Mapping[str, Stored]
    updates: Tensor
    shards: Mapping[str, OptimizerShard]

    @cached_property
    def is_plain(self) -> bool:
        """Whether all numbers are kept as they are computed with, but for the memory that they are in."""
        stored = [self.master, *self.moments.values()]
        kept = [*self.gradients.tensors, *(tensor for each in stored for tensor in each.tensors)]
        return all(isinstance(each, Fp32Weights | Fp32Master | Plain) for each in stored) and all(
            tensor.dtype == torch.float32 for tensor in kept
        )


@dataclass(frozen=True)
class Numbers:
    """How an optimizer stores its states.

    Attributes:
        names: of the moments.
        master: numbers of the master weights of bfloat16 weights: float32, split or none.
        moments: numbers of the moments: float32, bfloat16 or 8bit.
        offload: whether masters and moments are in host memory, pinned where a GPU computes.
    """

    names: tuple[str, ...]
    master: str
    moments: str
    offload: bool


def build_states(module: TrainedModule, numbers: Numbers, platform: Platform) -> tuple[OptimizerState, ...]:
    """The states of all trained parameters of which this rank updates any elements, one for each dtype of weights.
    Moments are zero.
    """
    ranges = {name: owned for name, owned in module.data_parallel.owned.items() if owned[0] < owned[1]}
    gradients, by_dtype = {name: module.gradient(name) for name in ranges}, dict[torch.dtype, list[str]]()
    for name in _in_memory_order(gradients):
        by_dtype.setdefault(module.parameters[name].dtype, []).append(name)

    def build(names: Sequence[str]) -> OptimizerState:
        weights = [module.weight(name) for name in names]
        make = _Make(tuple(map(len, weights)), platform, numbers.offload)
        master = make.master(weights, numbers.master)
        moments = {name: make.moment(numbers.moments, squares=name == SECOND_MOMENT) for name in numbers.names}
        updates = torch.zeros(len(names))
        ends = accumulate(make.sizes)
        shards = {
            name: OptimizerShard(
                *ranges[name],
                end - size,
                gradients[name],
                master.part(end - size, end),
                {moment: stored.part(end - size, end) for moment, stored in moments.items()},
                count,
            )
            for name, size, end, count in zip(names, make.sizes, ends, updates.unbind(), strict=True)
        }
        return OptimizerState(Spread.of([gradients[name] for name in names]), master, moments, updates, shards)

    return tuple(map(build, by_dtype.values()))


def _in_memory_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of flat tensors: those in one memory together, as they lie in it."""
    memories: dict[int, int] = {}
    for tensor in tensors.values():
        memories.setdefault(tensor.untyped_storage()._cdata, len(memories))
    return sorted(
        tensors, key=lambda name: (memories[tensors[name].untyped_storage()._cdata], tensors[name].storage_offset())
    )


@dataclass(frozen=True)
class _Make:
    """Makes what is kept of shards of `sizes`. `on_host`: in host memory."""

    sizes: tuple[int, ...]
    platform: Platform
    on_host: bool

    def master(self, weights: list[Tensor], numbers: str) -> Stored:
        """Master weights that are the `weights`."""
        spread, size = Spread.of(weights), sum(self.sizes)
        if spread.dtype == torch.float32:
            return Fp32Weights(spread)
        if numbers == "none":
            return RoundedMaster(spread)
        if numbers == "split":
            return SplitMaster(spread, self._zeros(size, torch.int16))
        kept = self._zeros(size, torch.float32)
        torch._foreach_copy_(list(kept.split(self.sizes)), weights)
        return Fp32Master(spread, Plain(kept, self.platform.device))

    def moment(self, numbers: str, *, squares: bool) -> Stored:
        """Zeros in `numbers`, see `Numbers`."""
        size, device = sum(self.sizes), self.platform.device
        if numbers == "8bit":
            codes = self._zeros(size, torch.uint8).fill_(code_of_zero(squares))
            scales = self._zeros(sum(-(-each // BLOCK) for each in self.sizes), torch.float32)
            return Blocks8(codes, scales, device, squares, self.sizes)
        return Plain(self._zeros(size, getattr(torch, numbers)), device)

    def _zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        if self.on_host:
            return self.platform.host_zeros(count, dtype)
        return torch.zeros(count, dtype=dtype, device=self.platform.device)
