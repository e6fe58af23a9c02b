"""What Megatron's optimizers keep of a parameter on this rank: the only file of this package that looks inside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_hetero.config.optimizers import OPTIMIZERS


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """Elements [start, stop) of a flattened parameter whose fp32 weights (`master`, [stop - start]) and AdamW state an
    optimizer keeps here. `inner`: the optimizer of PyTorch that has the state, None without any (SGD).
    """

    start: int
    stop: int
    master: Tensor
    inner: torch.optim.Optimizer | None = None

    @property
    def state(self) -> dict[str, Tensor]:
        """Moments fp32 [stop - start], and `step`, a number; empty before the first update."""
        return self.inner.state[self.master] if self.inner is not None and self.master in self.inner.state else {}

    @property
    def moments(self) -> tuple[str, ...]:
        """The entries of the state other than `step`."""
        kind = type(self.inner).__name__
        return next((each.moments for each in OPTIMIZERS.values() if each.pytorch == kind), ())

    def make_state(self) -> dict[str, Tensor]:
        """Moments and step of zero, as before the first update; what is there is replaced."""
        step = torch.zeros((), dtype=torch.float32, device=self.master.device)
        # A step of its own for each parameter: a common one would count once for each of them.
        zeros = {name: torch.zeros_like(self.master.detach()) for name in self.moments}
        assert self.inner is not None, "an optimizer without state"
        self.inner.state[self.master] = {"step": step, **zeros}
        return self.inner.state[self.master]


def shard_of(optimizer: ChainedOptimizer, parameter: torch.nn.Parameter) -> OptimizerShard | None:
    """What `optimizer` (of one module) keeps of `parameter` on this rank, None where that is nothing."""
    if not parameter.requires_grad:
        return None
    for part in optimizer.chained_optimizers:
        if not isinstance(part, DistributedOptimizer):
            master = getattr(parameter, "main_param", parameter)
            return OptimizerShard(0, parameter.numel(), master.detach().view(-1))
        if parameter in part.model_param_group_index_map:
            group, place = part.model_param_group_index_map[parameter]
            own = part._get_model_param_range_map(parameter)["param"]
            return OptimizerShard(
                own.start, own.end, part.optimizer.param_groups[group]["params"][place], part.optimizer
            )
    return None
