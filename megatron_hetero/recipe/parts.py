"""The optimizer of one module, PyTorch's or Megatron's, as `JointOptimizer` drives it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_hetero.distributed.communicators import GRADIENT_AXES
from megatron_hetero.errors import UserError
from megatron_hetero.recipe.gradients import gradients_of
from megatron_hetero.recipe.held import HeldModule, axes_of_mesh, is_sharded, local
from megatron_hetero.recipe.masters import MasterOptimizer
from megatron_hetero.recipe.reduction import copy_from_first

Config = Any  # A union with a function would hide the fields of the first.
"""Megatron's `OptimizerConfig`, or a function that makes an optimizer of PyTorch from a list of parameters."""


class Part(Protocol):
    """The optimizer of a module on this rank, whose gradients are finished."""

    optimizer: Any

    def prepare(self) -> Tensor:
        """Take over the gradients. Returns the sum of squares that count on this rank, fp64 []."""
        ...

    def scale(self, factor: Tensor) -> None:
        """Multiply what was taken over."""
        ...

    def update(self) -> None:
        """Update the weights."""
        ...

    def zero(self) -> None:
        """Forget the gradients that were taken over."""
        ...

    def reload_model_params(self) -> None:
        """Take the weights from the models."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        ...


def build_part(module: HeldModule, config: Config) -> Part:
    """The optimizer of a module with something to train. Raises `UserError`."""
    outside = [each.name for each in module.parameters if not each.in_main_grad]
    in_buffers = len(outside) < len(module.parameters)
    if not is_megatron_config(config):
        if in_buffers:
            _refuse(module, "Megatron's DistributedDataParallel", "an OptimizerConfig of Megatron for it")
        return TorchPart(module, config)
    if in_buffers and outside:
        found = f"Megatron's DistributedDataParallel around some parameters, not around {outside[0]}"
        _refuse(module, found, "it around all that train, or none")
    if getattr(config, "fp16", False):
        _refuse(module, "config.fp16", "bf16 or fp32, since a loss scale would have to be shared by all modules")
    return MegatronPart(module, config) if in_buffers else TorchPart(module, _torch_from(module, config), config.bf16)


def _refuse(module: HeldModule, found: str, expected: str) -> None:
    fix = "change the wrapper of that module or its configuration, which may be given by name"
    raise UserError.at(f"build_optimizers: `{module.name}`", found=found, expected=expected, fix=fix)


def equal_replicas(module: HeldModule) -> None:
    """Give all replicas of a module the weights of the first. Of what PyTorch shards, these are those along axes that
    its mesh does not have.
    """
    whole = [p for chunk in module.chunks for p in chunk.parameters() if not is_sharded(p)]
    copy_from_first([p.data for p in whole], module.topology.group(module.name, *GRADIENT_AXES))
    sharded = [p for chunk in module.chunks for p in chunk.parameters() if is_sharded(p)]
    for axis in GRADIENT_AXES:
        beside = [p for p in sharded if axis not in axes_of_mesh(module, p)]
        copy_from_first([local(p.detach()) for p in beside], module.topology.group(module.name, axis))


# ------------------------------------------------------------------------------------------ configurations


def is_megatron_config(config: Config) -> bool:
    """Whether this is Megatron's `OptimizerConfig`."""
    return hasattr(config, "clip_grad") and hasattr(config, "lr") and not callable(config)


def config_of(config: Any, module: str) -> Config:
    """Of a module. Raises `UserError` if there is none."""
    where = f"build_optimizers: config of `{module}`"
    if isinstance(config, Mapping):
        if module not in config:
            found, fix = f"configurations of {', '.join(config) or 'nothing'}", "give one for each module"
            raise UserError.at(where, found=found, expected=f"one of `{module}`", fix=fix)
        config = config[module]
    if not callable(config) and not is_megatron_config(config):
        expected = "Megatron's OptimizerConfig, or a function of parameters"
        raise UserError.at(where, found=type(config).__name__, expected=expected, fix="give one of these")
    return config


def clip_of(configs: Collection[Config], clip_grad: float | None) -> float:
    """The largest norm of all gradients, 0 for any. Raises `UserError` if configurations differ in it."""
    if clip_grad is None:
        found = {float(config.clip_grad) for config in configs if is_megatron_config(config)}
        if len(found) > 1:
            shown = " and ".join(map(str, sorted(found)))
            because, fix = "all modules are clipped together", "give `clip_grad` to build_optimizers"
            raise UserError.at("clip_grad", found=shown, expected="one value", because=because, fix=fix)
        clip_grad = found.pop() if found else 0.0
    if not clip_grad >= 0:
        raise UserError.at("clip_grad", found=str(clip_grad), expected="0 or more", fix="use 0 not to clip")
    return float(clip_grad)


# ----------------------------------------------------------------------------------------------- PyTorch's


class TorchPart:
    """An optimizer of PyTorch. With `masters`, 16-bit parameters have fp32 copies, which it updates."""

    def __init__(self, module: HeldModule, make: Callable[[list[nn.Parameter]], Optimizer], masters: bool = False):
        self._module = module
        own: list[Any] = [each.parameter for each in module.parameters]
        self.optimizer = MasterOptimizer(own, make) if masters else make(own)
        self._masters = self.optimizer.masters if isinstance(self.optimizer, MasterOptimizer) else {}

    def prepare(self) -> Tensor:
        """See `Part`."""
        gradients = gradients_of(self._module.parameters)
        for p, master in self._masters.items():
            master.grad = p.grad.float()
        counted = [g for g, each in zip(gradients, self._module.parameters, strict=True) if each.counts]
        return sum_of_squares(counted, self._module.topology.platform.device)

    def scale(self, factor: Tensor) -> None:
        """See `Part`."""
        used = (self._masters.get(each.parameter, each.parameter) for each in self._module.parameters)
        torch._foreach_mul_([local(p.grad) for p in used], factor)

    def update(self) -> None:
        """See `Part`."""
        self.optimizer.step()

    def zero(self) -> None:
        """See `Part`."""
        for master in self._masters.values():
            master.grad = None

    def reload_model_params(self) -> None:
        """See `Part`."""
        for p, master in self._masters.items():
            master.copy_(p)

    def state_dict(self) -> dict[str, Any]:
        """See `Part`."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Part`."""
        self.optimizer.load_state_dict(state["optimizer"])


def _torch_from(module: HeldModule, config: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    """PyTorch's optimizer with Megatron's settings, by its rules: biases and norms have no weight decay."""
    plain = [each for each in module.parameters if not is_sharded(each.parameter)]
    if config.use_distributed_optimizer and plain:
        _refuse(module, "config.use_distributed_optimizer", "Megatron's DistributedDataParallel around it, or FSDP2")
    for field in ("optimizer_cpu_offload", "use_precision_aware_optimizer", "decoupled_lr"):
        if getattr(config, field, None):
            _refuse(module, f"config.{field}", "Megatron's DistributedDataParallel around it")
    narrow = [each.name for each in module.parameters if each.parameter.element_size() < 4]
    if narrow and not config.bf16:
        _refuse(module, f"16-bit parameters ({narrow[0]}) and config.bf16 False", "bf16=True, for fp32 copies of them")
    if config.optimizer not in ("adam", "sgd"):
        _refuse(module, f"config.optimizer {config.optimizer}", "adam or sgd, or a function of parameters")

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        groups = [
            _group(config, [p for p in parameters if (p.dim() <= 1) == exempt], exempt) for exempt in (False, True)
        ]
        groups = [group for group in groups if group["params"]]
        if config.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
        kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        return kind(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)

    return make


def _group(config: Any, parameters: list[nn.Parameter], exempt: bool) -> dict[str, Any]:
    """With what Megatron's scheduler looks for."""
    decay = 0.0 if exempt else config.weight_decay
    rates = {"max_lr": config.lr, "min_lr": config.min_lr, "lr_mult": 1.0, "wd_mult": 0.0 if exempt else 1.0}
    return {"params": parameters, "weight_decay": decay, **rates}


# ---------------------------------------------------------------------------------------------- Megatron's


class MegatronPart:
    """Megatron's optimizer of a module in its `DistributedDataParallel`."""

    def __init__(self, module: HeldModule, config: Any):
        from megatron.core.optimizer import get_megatron_optimizer

        from megatron_hetero.distributed.megatron import own_parameter_groups

        topology = module.topology
        for chunk in module.megatrons_ddps:
            if (found := chunk.ddp_config.use_distributed_optimizer) != config.use_distributed_optimizer:
                _refuse(module, f"use_distributed_optimizer {found} in DDP and not in config", "the same in both")
        with topology.platform.megatron_scope(), own_parameter_groups():
            self.optimizer: Any = get_megatron_optimizer(
                config,
                list(module.megatrons_ddps),  # pyright: ignore[reportArgumentType]
                use_gloo_process_groups=False,
                pg_collection=topology.collection(module.name),
            )
        for group in self.optimizer.param_groups:
            # Otherwise only Megatron's own scheduler would exempt what is to be exempt.
            group["weight_decay"] *= group.get("wd_mult", 1.0)
        self._device = topology.platform.device
        place = topology.layouts[module.name].coordinate(topology.rank)._asdict()
        self._is_first_replica = all(place[axis] == 0 for axis in GRADIENT_AXES)

    @property
    def _inner(self) -> Sequence[Any]:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def prepare(self) -> Tensor:
        """See `Part`."""
        self.optimizer.prepare_grads()
        # The distributed optimizer holds a share of each gradient, the others hold all of it on all replicas.
        counting = [o for o in self._inner if o.config.use_distributed_optimizer or self._is_first_replica]
        return sum_of_squares([g for o in counting for g in o.get_main_grads_for_grad_norm()], self._device)

    def scale(self, factor: Tensor) -> None:
        """See `Part`."""
        name = "decoupled_grad" if self._inner[0].config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        gradients = [getattr(p, name, None) for o in self._inner for p in o.get_parameters()]
        if found := [g for g in gradients if g is not None]:
            torch._foreach_mul_(found, factor)

    def update(self) -> None:
        """See `Part`."""
        self.optimizer.step_with_ready_grads()

    def zero(self) -> None:
        """See `Part`."""
        self.optimizer.zero_grad()

    def reload_model_params(self) -> None:
        """See `Part`."""
        self.optimizer.reload_model_params()

    def state_dict(self) -> dict[str, Any]:
        """See `Part`."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Part`."""
        self.optimizer.load_state_dict(state["optimizer"])


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """fp64 []. Norms are formed tensor by tensor, in fp32 or wider."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(torch.promote_types(tensor.dtype, torch.float32), []).append(tensor)
    for dtype, alike in by_dtype.items():
        total += torch.stack(torch._foreach_norm(alike, 2, dtype=dtype)).double().square().sum()
    return total
