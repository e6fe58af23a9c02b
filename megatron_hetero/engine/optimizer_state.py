"""What an optimizer keeps of a module on this rank: master weights and moments of a flat range of each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hetero.config.optimizers import OptimizerKind
from megatron_hetero.config.schema import PrecisionConfig
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.engine.module import TrainedModule
from megatron_hetero.engine.number_formats import (
    BLOCK,
    Blocks8,
    Fp32Master,
    Plain,
    RoundedMaster,
    SplitMaster,
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
        gradient: a view of the gradient buffer, [stop - start].
        master: the weights that are updated.
        moments: by their names in the state of PyTorch's optimizer.
        updates: how often they were updated, fp32 [].
    """

    start: int
    stop: int
    gradient: Tensor
    master: Stored
    moments: Mapping[str, Stored]
    updates: Tensor

    @property
    def stored(self) -> dict[str, Stored]:
        """All numbers, by their kinds in a checkpoint."""
        return {"weights": self.master, **self.moments}


def build_shards(
    module: TrainedModule, kind: OptimizerKind, precision: PrecisionConfig, *, on_host: bool, platform: Platform
) -> tuple[dict[str, OptimizerShard], Tensor]:
    """The shards of all trained parameters of which this rank updates any elements, by name, and the counts of their
    updates, fp32 [shards]. Moments are zero.

    `on_host`: whether masters and moments lie in host memory, pinned where a GPU computes.
    """
    ranges = {name: owned for name, owned in module.data_parallel.owned.items() if owned[0] < owned[1]}
    updates = torch.zeros(len(ranges), device=platform.device)
    shards = {
        name: _shard(module, name, owned, count, kind, precision, on_host, platform)
        for (name, owned), count in zip(ranges.items(), updates.unbind(), strict=True)
    }
    return shards, updates


def _shard(
    module: TrainedModule,
    name: str,
    owned: tuple[int, int],
    updates: Tensor,
    kind: OptimizerKind,
    precision: PrecisionConfig,
    on_host: bool,
    platform: Platform,
) -> OptimizerShard:
    start, stop = owned
    size, device = stop - start, platform.device
    begin, _ = module.data_parallel.kept(name)
    weights = module.data_parallel.weights(name)[start - begin : stop - begin]

    def zeros(count: int, dtype: torch.dtype) -> Tensor:
        if on_host:
            return platform.host_zeros(count, dtype)
        return torch.zeros(count, dtype=dtype, device=device)

    def moment(name: str) -> Stored:
        if precision.moments == "8bit":
            codes, scales = zeros(size, torch.uint8), zeros(-(-size // BLOCK), torch.float32)
            squares = name == SECOND_MOMENT
            return Blocks8(codes.fill_(code_of_zero(squares)), scales, device, squares)
        return Plain(zeros(size, getattr(torch, precision.moments)), device)

    def master() -> Stored:
        if weights.dtype == torch.float32:
            return Plain(weights, device)
        if precision.master == "none":
            return RoundedMaster(weights)
        if precision.master == "split":
            return SplitMaster(weights, zeros(size, torch.int16))
        kept = zeros(size, torch.float32)
        kept.copy_(weights)
        return Fp32Master(weights, Plain(kept, device))

    return OptimizerShard(
        start,
        stop,
        module.gradient(name),
        master(),
        {name: moment(name) for name in kind.moments},
        updates,
    )
