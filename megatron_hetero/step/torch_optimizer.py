"""Adapters for optimizers of PyTorch, with fp32 masters of 16-bit parameters, and of Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from megatron_hetero.step.gradients import squares_of, sum_of_squares
from megatron_hetero.step.module import ModuleOptimizer, TrainedModule
from megatron_hetero.step.wrapped import local


class TorchOptimizer(ModuleOptimizer):
    """A `ModuleOptimizer` that uses an optimizer of PyTorch.

    Attributes:
        module: the module.
        masters_by_parameter: the fp32 masters of 16-bit parameters, which the optimizer updates instead of these.
        optimizer: the optimizer of PyTorch.
    """

    def __init__(self, module: TrainedModule, make: Callable[[list[nn.Parameter]], Optimizer], masters: bool = False):
        """`make`: builds the optimizer of a list of parameters. `masters`: whether 16-bit parameters have masters."""
        self.module = module
        narrow = [p for p in module.trained.values() if masters and p.element_size() < 4]
        self.masters_by_parameter: dict[Any, Any] = {p: nn.Parameter(p.detach().float()) for p in narrow}
        for p, master in self.masters_by_parameter.items():
            vars(master).update({key: value for key, value in vars(p).items() if not key.startswith("_")})
        updated = {name: self.masters_by_parameter.get(p, p) for name, p in module.trained.items()}
        self.optimizer = make(list(updated.values()))
        names = {id(p): name for name, p in updated.items()}
        ordered = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        self._names = [names.get(id(p), f"parameter {number}") for number, p in enumerate(ordered)]
        self._masters_by_name = {name: p for name, p in updated.items() if p is not module.trained[name]}

    @override
    def squares(self) -> Tensor:
        return squares_of(self.module)

    @torch.no_grad()
    @override
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        for p, master in self.masters_by_parameter.items():
            master.grad = p.grad.float()
        used: list[Any] = [self.masters_by_parameter.get(p, p) for p in self.module.trained.values()]
        if isinstance(scale, Tensor) or scale != 1.0:
            torch._foreach_mul_([local(p.grad) for p in used], scale)
        self.optimizer.step()
        self._copy_masters()

    def _copy_masters(self) -> None:
        for p, master in self.masters_by_parameter.items():
            p.copy_(master)

    @override
    def zero(self) -> None:
        for master in self.masters_by_parameter.values():
            master.grad = None

    @override
    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((local(p.detach()), local(master.detach())) for p, master in self.masters_by_parameter.items())

    @torch.no_grad()
    @override
    def reload_model_params(self) -> None:
        for p, master in self.masters_by_parameter.items():
            master.copy_(p)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return PyTorch's state by parameter name, with the key `master` for parameters with masters. Before the first
        update, the states are initial tensors, into which a checkpoint can be loaded.
        """
        if not (updated := any(self.optimizer.state.values())):
            _create_states(self.optimizer)
        by_number = self.optimizer.state_dict()
        if not updated:
            self.optimizer.state.clear()
        states = {self._names[number]: state for number, state in by_number["state"].items()}
        for name, master in self._masters_by_name.items():
            states[name] = {**states.get(name, {}), "master": master.detach()}
        groups = [
            {**group, "params": [self._names[number] for number in group["params"]]}
            for group in by_number["param_groups"]
        ]
        return {"updated": updated, "state": states, "param_groups": groups}

    @torch.no_grad()
    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state and the masters, and copy the masters to the parameters."""
        states = {
            parameter: {name: value for name, value in values.items() if name != "master"}
            for parameter, values in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": states})
        for name, master in self._masters_by_name.items():
            master.copy_(state["state"][name]["master"])
        self._copy_masters()
        if not state["updated"]:
            self.optimizer.state.clear()


@torch.no_grad()
def _create_states(optimizer: Optimizer) -> None:
    """Create an optimizer's states by a step with zero gradients and a learning rate of 0, which changes no weights."""
    groups = optimizer.param_groups
    gradients = [(p, p.grad) for group in groups for p in group["params"]]
    for p, _ in gradients:
        p.grad = torch.zeros_like(p)
    optimizer.param_groups = [{**group, "lr": group["lr"] * 0} if "lr" in group else group for group in groups]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
        for p, gradient in gradients:
            p.grad = gradient


class MegatronOptimizer(ModuleOptimizer):
    """A `ModuleOptimizer` that uses Megatron's optimizer, for a module in Megatron's `DistributedDataParallel`."""

    def __init__(self, module: TrainedModule, ddps: Sequence[Any], config: Any):
        from megatron_hetero.groups.megatron import megatron_optimizer

        self.module, topology = module, module.topology
        with topology.platform.megatron_scope():
            self.optimizer = megatron_optimizer(config, list(ddps), topology.collection(module.name))
        for group in self.optimizer.param_groups:
            # Apply the multiplier here: otherwise only Megatron's scheduler would apply it.
            group["weight_decay"] *= group.get("wd_mult", 1.0)

    @property
    def _inner(self) -> Sequence[Any]:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def _replicas(self, inner: Any) -> dist.ProcessGroup:
        """Return the ranks with the same parameters as one of the optimizers. Experts have a separate optimizer."""
        updates_experts = any(group.get("is_expert_parallel") for group in inner.param_groups)
        return self.module.topology.collection(self.module.name).expt_dp if updates_experts else self.module.replicas

    @torch.no_grad()
    @override
    def squares(self) -> Tensor:
        """Copy the gradients to the optimizer, and return this rank's term of their squared norm, an fp64 scalar."""
        from megatron_hetero.groups.megatron import gradients_for_norm

        with self.module.topology.platform.megatron_scope():
            self.optimizer.prepare_grads()
        # The distributed optimizer has a share of each gradient; other optimizers have whole gradients on each replica.
        counting = [o for o in self._inner if o.config.use_distributed_optimizer or self._replicas(o).rank() == 0]
        gradients = [g for o in counting for g in gradients_for_norm(o) if g.numel()]
        return sum_of_squares([(gradient, 1.0) for gradient in gradients], self.module.topology.platform.device)

    @torch.no_grad()
    @override
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        name = "decoupled_grad" if self._inner[0].config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        gradients = [getattr(p, name, None) for o in self._inner for p in o.get_parameters()]
        if present := [gradient for gradient in gradients if gradient is not None]:
            torch._foreach_mul_(present, scale)
        with self.module.topology.platform.megatron_scope():
            self.optimizer.step_with_ready_grads()

    @override
    def zero(self) -> None:
        self.optimizer.zero_grad()

    @override
    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        kinds = {"float16_groups": "fp32_from_float16_groups", "shard_float16_groups": "shard_fp32_from_float16_groups"}
        for inner, (weights, masters) in product(self._inner, kinds.items()):
            pairs = zip(chain(*getattr(inner, weights, ())), chain(*getattr(inner, masters, ())), strict=True)
            for weight, master in pairs:
                if weight is not None and master is not None:
                    yield weight.detach(), master.detach()

    @override
    def reload_model_params(self) -> None:
        self.optimizer.reload_model_params()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
