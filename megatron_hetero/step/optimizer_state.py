"""The masters and moments that this rank's optimizer stores, for a flat range of each parameter of a module.

The states of all weights of one dtype are concatenated, in the memory order of their gradients, so that few kernel
calls update all states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron_hetero.step.algorithms import Algorithm
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.number_formats import BLOCK, Blocks8, FlatTensors, Master, Plain, Stored, code_of_zero

SECOND_MOMENT = "exp_avg_sq"


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """Elements [start, stop) of a flattened parameter, and the optimizer's state of these elements.

    Attributes:
        start: the first element, in the parameter on this rank.
        stop: the end of the elements, in the parameter on this rank.
        at: the offset of the first element in the `OptimizerState`.
        gradient: a view of the gradient buffer, [stop - start].
        master: the master weights.
        moments: the moments, by their names in the state of PyTorch's optimizer.
        updates: the number of updates, an fp32 scalar on the host.
    """

    start: int
    stop: int
    at: int
    gradient: Tensor
    master: Master
    moments: Mapping[str, Stored]
    updates: Tensor

    @property
    def stored(self) -> dict[str, Stored]:
        """The masters and moments, by the names of their kinds in a checkpoint."""
        return {"weights": self.master, **self.moments}


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """The states of the weights of one dtype of a module on this rank.

    Attributes:
        gradients: gradients of all shards, concatenated.
        master: masters of all shards, concatenated.
        moments: moments of all shards, concatenated, by name.
        updates: the number of updates of each shard, fp32 [shards] on the host.
        shards: the shard of each parameter, as views of these tensors, by the parameter's name.
    """

    gradients: FlatTensors
    master: Master
    moments: Mapping[str, Stored]
    updates: Tensor
    shards: Mapping[str, OptimizerShard]


def build_states(module: TrainedModule, algorithm: Algorithm) -> tuple[OptimizerState, ...]:
    """Build the states of all parameters that this rank updates, at least in part, one state for each dtype of weights.
    Moments are zero.
    """
    ranges = {name: (start, stop) for name, (start, stop) in module.weights.owned.items() if start < stop}
    gradients = {name: module.gradient(name) for name in ranges}
    by_dtype = dict[torch.dtype, list[str]]()
    for name in _in_memory_order(gradients):
        by_dtype.setdefault(module.parameters[name].dtype, []).append(name)

    def build(names: Sequence[str]) -> OptimizerState:
        weights = [module.weight(name) for name in names]
        sizes, moment_names = tuple(map(len, weights)), algorithm.kind.moments
        master = _master(module, algorithm, weights)
        moments = {name: _moment(module, algorithm, sizes, name == SECOND_MOMENT) for name in moment_names}
        updates = torch.zeros(len(names))
        shards = dict[str, OptimizerShard]()
        for name, size, end, count in zip(names, sizes, accumulate(sizes), updates.unbind(), strict=True):
            start, stop = ranges[name]
            shards[name] = OptimizerShard(
                start=start,
                stop=stop,
                at=end - size,
                gradient=gradients[name],
                master=master.slice(end - size, end),
                moments={moment: stored.slice(end - size, end) for moment, stored in moments.items()},
                updates=count,
            )
        return OptimizerState(FlatTensors.of([gradients[name] for name in names]), master, moments, updates, shards)

    return tuple(map(build, by_dtype.values()))


def _in_memory_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of flat tensors, sorted by storage and by offset in the storage."""
    storages = dict.fromkeys(tensor.untyped_storage()._cdata for tensor in tensors.values())
    order = {storage: number for number, storage in enumerate(storages)}

    def place(name: str) -> tuple[int, int]:
        return order[tensors[name].untyped_storage()._cdata], int(tensors[name].storage_offset())

    return sorted(tensors, key=place)


def _master(module: TrainedModule, algorithm: Algorithm, weights: list[Tensor]) -> Master:
    """Create masters in the format of `algorithm`, with the values of the `weights`."""
    flat = FlatTensors.of(weights)
    if flat.dtype == torch.float32 or algorithm.master == "none":
        return Master(flat)
    sizes = list(map(len, weights))
    if algorithm.master == "split":
        return Master(flat, _zeros(module, algorithm, sum(sizes), torch.int16))
    masters = _zeros(module, algorithm, sum(sizes), torch.float32)
    torch._foreach_copy_(list(masters.split(sizes)), weights)
    return Master(flat, masters)


def _moment(module: TrainedModule, algorithm: Algorithm, sizes: tuple[int, ...], squares: bool) -> Stored:
    """Create a zero moment for parameters of the given `sizes`. `squares`: whether it is the second moment."""
    size, device = sum(sizes), module.topology.platform.device
    if algorithm.moments == "8bit":
        codes = _zeros(module, algorithm, size, torch.uint8).fill_(code_of_zero(squares))
        scales = _zeros(module, algorithm, sum(-(-each // BLOCK) for each in sizes), torch.float32)
        return Blocks8(codes, scales, device, squares, sizes)
    return Plain(_zeros(module, algorithm, size, getattr(torch, algorithm.moments)), device)


def _zeros(module: TrainedModule, algorithm: Algorithm, count: int, dtype: torch.dtype) -> Tensor:
    platform = module.topology.platform
    if algorithm.offload:
        return platform.host_zeros(count, dtype)
    return torch.zeros(count, dtype=dtype, device=platform.device)
