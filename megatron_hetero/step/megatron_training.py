"""Megatron-Core in the layouts of a topology: what a program needs to build and run its models, and optimizers with the
settings of its `OptimizerConfig` (Megatron's own for a module in its `DistributedDataParallel`, PyTorch's for others).

    prepare_megatron(topology, seed=1)
    model = GPTModel(config, spec, vocabulary, length, pg_collection=topology.collection("text"))
    forward_backward = megatron_schedule(topology, "text", config)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.communicators import GRADIENT_AXES
from megatron_hetero.layout.layout import Layout
from megatron_hetero.step.gradients import sum_of_squares
from megatron_hetero.step.module import ModuleOptimizer, TrainedModule
from megatron_hetero.step.torch_optimizer import InnerOptimizer, TorchOptimizer
from megatron_hetero.step.wrapped import Wrapped, is_sharded


def is_megatron_config(config: Any) -> bool:
    """Whether this is Megatron's `OptimizerConfig`."""
    return hasattr(config, "clip_grad") and hasattr(config, "lr") and not callable(config)


def build_with_megatrons_settings(module: TrainedModule, config: Any) -> ModuleOptimizer:
    """The optimizer of a module with something to train. Raises `UserError`."""
    inside = in_megatrons_ddp(module)
    outside = [name for name in module.trained if name not in inside]
    if inside and outside:
        found = f"Megatron's DistributedDataParallel around some parameters, not around {outside[0]}"
        refuse(module, found, "it around all that train, or none")
    if getattr(config, "fp16", False):
        refuse(module, "config.fp16", "bf16 or fp32, since a loss scale would have to be shared by all modules")
    return (
        MegatronOptimizer(module, config)
        if inside
        else TorchOptimizer(module, _torch_from(module, config), config.bf16)
    )


def in_megatrons_ddp(module: TrainedModule) -> frozenset[str]:
    """The parameters whose gradients are in the buffers of Megatron's `DistributedDataParallel`."""
    return module.data_parallel.in_main_grad if isinstance(module.data_parallel, Wrapped) else frozenset()


def refuse(module: TrainedModule, found: str, expected: str) -> NoReturn:
    """Raise the `UserError` of a wrapper and a configuration that do not fit."""
    fix = "change the wrapper of that module or its configuration, which may be given by name"
    raise UserError.at(f"build_optimizers: `{module.name}`", found=found, expected=expected, fix=fix)


def _torch_from(module: TrainedModule, config: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    """PyTorch's optimizer with Megatron's settings and rules: biases and norms have no weight decay."""
    plain = [p for p in module.trained.values() if not is_sharded(p)]
    if config.use_distributed_optimizer and plain:
        refuse(module, "config.use_distributed_optimizer", "Megatron's DistributedDataParallel around it, or FSDP2")
    for field in ("optimizer_cpu_offload", "use_precision_aware_optimizer", "decoupled_lr"):
        if getattr(config, field, None):
            refuse(module, f"config.{field}", "Megatron's DistributedDataParallel around it")
    narrow = [name for name, p in module.trained.items() if p.element_size() < 4]
    if narrow and not config.bf16:
        refuse(module, f"16-bit parameters ({narrow[0]}) and config.bf16 False", "bf16=True, for fp32 copies of them")
    if config.optimizer not in ("adam", "sgd"):
        refuse(module, f"config.optimizer {config.optimizer}", "adam or sgd, or a function of parameters")

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
    """A group with the keys that Megatron's scheduler reads."""
    decay = 0.0 if exempt else config.weight_decay
    rates = {"max_lr": config.lr, "min_lr": config.min_lr, "lr_mult": 1.0, "wd_mult": 0.0 if exempt else 1.0}
    return {"params": parameters, "weight_decay": decay, **rates}


class MegatronOptimizer(InnerOptimizer):
    """Megatron's optimizer of a module in its `DistributedDataParallel`."""

    def __init__(self, module: TrainedModule, config: Any):
        from megatron.core.optimizer import get_megatron_optimizer

        from megatron_hetero.groups.megatron import own_parameter_groups

        topology, ddps = module.topology, module.data_parallel.ddps if isinstance(module.data_parallel, Wrapped) else ()
        self.module = module
        for chunk in ddps:
            if (found := chunk.ddp_config.use_distributed_optimizer) != config.use_distributed_optimizer:
                refuse(module, f"use_distributed_optimizer {found} in DDP and not in config", "the same in both")
        with topology.platform.megatron_scope(), own_parameter_groups():
            self.optimizer: Any = get_megatron_optimizer(
                config,
                list(ddps),  # pyright: ignore[reportArgumentType]
                use_gloo_process_groups=False,
                pg_collection=topology.collection(module.name),
            )
        for group in self.optimizer.param_groups:
            # Without Megatron's own scheduler nothing else applies the multiplier.
            group["weight_decay"] *= group.get("wd_mult", 1.0)
        place = topology.layouts[module.name].coordinate(topology.rank)._asdict()
        self._is_first_replica = all(place[axis] == 0 for axis in GRADIENT_AXES)

    @property
    def _inner(self) -> Sequence[Any]:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    @torch.no_grad()
    @override
    def squares(self) -> Tensor:
        """Copy the gradients to the optimizer, too."""
        with self.module.topology.platform.megatron_scope():
            self.optimizer.prepare_grads()
        # The distributed optimizer has a share of each gradient, the others have all of it on all replicas.
        counting = [o for o in self._inner if o.config.use_distributed_optimizer or self._is_first_replica]
        found = [g for o in counting for g in o.get_main_grads_for_grad_norm() if g.numel()]
        return sum_of_squares([(gradient, 1.0) for gradient in found], self.module.topology.platform.device)

    @torch.no_grad()
    @override
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        name = "decoupled_grad" if self._inner[0].config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        gradients = [getattr(p, name, None) for o in self._inner for p in o.get_parameters()]
        if found := [g for g in gradients if g is not None]:
            torch._foreach_mul_(found, scale)
        with self.module.topology.platform.megatron_scope():
            self.optimizer.step_with_ready_grads()

    @override
    def zero(self) -> None:
        self.optimizer.zero_grad()

    @override
    def reload_model_params(self) -> None:
        self.optimizer.reload_model_params()


def prepare_megatron(topology: Topology, seed: int) -> None:
    """Create Megatron-Core's memory buffer and random streams. All ranks call it before they build models; a second
    call seeds anew.

    PyTorch's generators are seeded alike on all ranks. Megatron's stream for tensor-parallel regions differs between
    the ranks along `tp` and `pp`, and is the same on all replicas. A rank with several modules takes the coordinates of
    the one with the largest `tp`; what others draw from it differs between their replicas, which `build_optimizers`
    then makes equal.

    If `parallel_state` is initialised, its buffer and the streams that it seeded are left alone; initialise it first.
    On a CPU a literal `device="cuda"`, and `Tensor.cuda()`, mean the CPU from now on in this process.
    """
    from megatron_hetero.groups.megatron import prepare_layers

    platform = topology.platform
    platform.prepare_megatron()
    platform.enter_megatron_scope()
    torch.manual_seed(seed)
    own = [layout for layout in topology.layouts.values() if topology.rank in layout]
    place = max(own, key=lambda layout: layout.tp).coordinate(topology.rank) if own else None
    prepare_layers(seed, place.tp if place else 0, place.pp if place else 0)


def megatron_schedule(topology: Topology, module: str, config: Any) -> Callable[..., Any]:
    """Megatron's own `forward_backward_func` for a module, with the groups of the topology.

    It is called as Megatron calls it, by the ranks of the module:

        losses = forward_backward(
            forward_step_func=..., data_iterator=..., model=..., num_microbatches=8, seq_length=4096, micro_batch_size=1
        )

    Leave `config.finalize_model_grads_func` out: gradients are finished over all modules, after the gradients of rows
    have returned.

    Args:
        topology: built with `module` among its `megatron` modules, which is the default.
        module: name of the module.
        config: the model's `TransformerConfig`.

    Raises:
        UserError: `config` and the layout differ.
        KeyError: this rank has no part of the module.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    groups, layout = topology.collection(module), topology.layouts[module]
    _check(f"megatron_schedule: {module}", layout, config)
    run = get_forward_backward_func(layout.pp, config.virtual_pipeline_model_parallel_size)
    communicator = P2PCommunicator(groups.pp, config) if layout.pp > 1 else None
    return partial(run, p2p_communicator=communicator, pg_collection=groups)


def _check(where: str, layout: Layout, config: Any) -> None:
    """Check a configuration against the layout. Raises `UserError`."""
    for axis, field, degree in (
        ("tp", "tensor_model_parallel_size", layout.tp),
        ("pp", "pipeline_model_parallel_size", layout.pp),
        ("sp·cp", "context_parallel_size", layout.sp * layout.cp),
    ):
        if (size := getattr(config, field)) != degree:
            found, fix = f"config.{field} {size}", f"set config.{field} to {degree}"
            raise UserError.at(where, found=found, expected=f"{degree}, its {axis}", fix=fix)
    if not config.calculate_per_token_loss:
        because = "losses are summed over tokens and divided once, by those of the whole step"
        found, fix = "config.calculate_per_token_loss False", "return (sum of losses, tokens, what to log)"
        raise UserError.at(where, found=found, expected="True", because=because, fix=f"set it, and {fix}")
    if config.finalize_model_grads_func is not None:
        because = "gradients of rows return after the loop, and `finish_gradients` sums those of all modules"
        problem = "config.finalize_model_grads_func is set"
        raise UserError.at(where, problem=problem, because=because, fix="leave it out")
    if layout.pp == 2 and config.virtual_pipeline_model_parallel_size is not None and not config.overlap_p2p_comm:
        because = "two messages between the same two ranks in one batch are taken for each other"
        found, fix = "virtual stages on pp:2 and config.overlap_p2p_comm False", "use more stages, or overlap"
        raise UserError.at(where, found=found, expected="pp of 3 or more", because=because, fix=fix)
