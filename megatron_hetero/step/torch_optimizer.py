"""Optimizers of PyTorch, for 16-bit parameters with fp32 copies of them, and of Megatron-Core."""

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


class MasterOptimizer(Optimizer):
    """An optimizer of PyTorch that updates fp32 copies of 16-bit parameters.

    PyTorch's checkpoints (`torch.distributed.checkpoint.state_dict`) and schedulers see an optimizer of the parameters
    themselves, with the copy in the state of each as `master`. `masters`: the copies, by parameter. A step uses the
    gradient of each copy, or of the parameter if the copy has none.
    """

    def __init__(self, parameters: Sequence[Any], make: Callable[[list[Any]], Optimizer]):
        self.masters: dict[Any, Any] = {p: nn.Parameter(p.detach().float()) for p in parameters if p.element_size() < 4}
        for p, master in self.masters.items():
            vars(master).update({key: value for key, value in vars(p).items() if not key.startswith("_")})
        self.inner = make([self.masters.get(p, p) for p in parameters])
        by_master = {master: p for p, master in self.masters.items()}
        groups = [
            {**group, "params": [by_master.get(p, p) for p in group["params"]]} for group in self.inner.param_groups
        ]
        super().__init__(groups, self.inner.defaults)

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state of each parameter, with its `master`; empty before the first step."""
        inner, states = self.inner.state, {}
        for p in chain.from_iterable(group["params"] for group in self.param_groups) if inner else ():
            master = self.masters.get(p)
            states[p] = inner[p] if master is None else {**inner[master], "master": master.detach()}
        return states

    @state.setter
    def state(self, _: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass  # PyTorch's class sets it.

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the copies, and the parameters from them."""
        _copy_settings(self.param_groups, self.inner.param_groups)
        for p, master in self.masters.items():
            if master.grad is None and p.grad is not None:
                master.grad = p.grad.float()
        self.inner.step()
        for p, master in self.masters.items():
            p.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of parameters and copies."""
        super().zero_grad(set_to_none)
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's state, with `master` in that of each 16-bit parameter."""
        result = self.inner.state_dict()
        for number, p in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
            if p in self.masters:
                result["state"][number] = {**result["state"].get(number, {}), "master": self.masters[p].detach()}
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load the state and the copies, and compute the parameters from these."""
        saved = state_dict["state"]
        without_masters = {
            key: {name: value for name, value in state.items() if name != "master"} for key, state in saved.items()
        }
        self.inner.load_state_dict({**state_dict, "state": without_masters})
        _copy_settings(self.inner.param_groups, self.param_groups)
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(keys, parameters, strict=True):
            if p in self.masters:
                self.masters[p].copy_(saved[key]["master"])
                p.copy_(self.masters[p])


def _copy_settings(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy the settings of groups, which are all values but the parameters."""
    for source_group, target_group in zip(source, target, strict=True):
        target_group.update({name: value for name, value in source_group.items() if name != "params"})


class TorchOptimizer(ModuleOptimizer):
    """An optimizer of PyTorch for a module. With `masters`, it updates fp32 copies of 16-bit parameters."""

    def __init__(self, module: TrainedModule, make: Callable[[list[nn.Parameter]], Optimizer], masters: bool = False):
        self.module = module
        trained: list[Any] = list(module.trained.values())
        self.optimizer = MasterOptimizer(trained, make) if masters else make(trained)
        self._masters = self.optimizer.masters if isinstance(self.optimizer, MasterOptimizer) else {}
        self._inner = getattr(self.optimizer, "inner", self.optimizer)
        names = {id(p): name for name, p in module.parameters.items()}
        ordered = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        self._names = [names.get(id(p), f"parameter {number}") for number, p in enumerate(ordered)]

    @override
    def squares(self) -> Tensor:
        return squares_of(self.module)

    @torch.no_grad()
    @override
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        for p, master in self._masters.items():
            master.grad = p.grad.float()
        used: list[Any] = [self._masters.get(p, p) for p in self.module.trained.values()]
        if isinstance(scale, Tensor) or scale != 1.0:
            torch._foreach_mul_([local(p.grad) for p in used], scale)
        self.optimizer.step()

    @override
    def zero(self) -> None:
        for master in self._masters.values():
            master.grad = None

    @override
    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((local(p.detach()), local(master.detach())) for p, master in self._masters.items())

    @torch.no_grad()
    @override
    def reload_model_params(self) -> None:
        for p, master in self._masters.items():
            master.copy_(p)

    @override
    def state_dict(self) -> dict[str, Any]:
        """PyTorch's state by names of parameters; before the first update, with tensors to load into."""
        if not (updated := any(self._inner.state.values())):
            _create_states(self._inner)
        by_number = self.optimizer.state_dict()
        if not updated:
            self._inner.state.clear()
        states = {self._names[number]: state for number, state in by_number["state"].items()}
        groups = [
            {**group, "params": [self._names[number] for number in group["params"]]}
            for group in by_number["param_groups"]
        ]
        return {"updated": updated, "state": states, "param_groups": groups}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state))
        if not state["updated"]:
            self._inner.state.clear()


@torch.no_grad()
def _create_states(optimizer: Optimizer) -> None:
    """Create states by a step with gradients of zeros at a rate of 0, which changes no weights."""
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
    """Megatron's optimizer of a module in its `DistributedDataParallel`."""

    def __init__(self, module: TrainedModule, ddps: Sequence[Any], config: Any):
        from megatron_hetero.groups.megatron import megatron_optimizer

        self.module, topology = module, module.topology
        with topology.platform.megatron_scope():
            self.optimizer = megatron_optimizer(config, list(ddps), topology.collection(module.name))
        for group in self.optimizer.param_groups:
            # Megatron's scheduler would apply the multiplier.
            group["weight_decay"] *= group.get("wd_mult", 1.0)

    @property
    def _inner(self) -> Sequence[Any]:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def _replicas(self, inner: Any) -> dist.ProcessGroup:
        """Return the ranks with the parameters of one of the optimizers: experts have a separate one."""
        updates_experts = any(group.get("is_expert_parallel") for group in inner.param_groups)
        return self.module.topology.collection(self.module.name).expt_dp if updates_experts else self.module.replicas

    @torch.no_grad()
    @override
    def squares(self) -> Tensor:
        """Copy the gradients to the optimizer, too."""
        from megatron_hetero.groups.megatron import gradients_for_norm

        with self.module.topology.platform.megatron_scope():
            self.optimizer.prepare_grads()
        # The distributed optimizer has a share of each gradient, the others have all of it on all replicas.
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
