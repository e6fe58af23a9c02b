"""Builds one optimizer for all modules of a topology."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.collective import Working, all_or_none, on_every, require_equal
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import watched
from megatron_hetero.schedule.gathering import shares_weights
from megatron_hetero.step.algorithms import SGD, AdamW, Algorithm
from megatron_hetero.step.buffers import in_buffers
from megatron_hetero.step.fully_sharded import ShardedStage, in_shards, shard_stage
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.library_modules import Chunks, require_replicas, spans, trained_modules
from megatron_hetero.step.module import ModuleOptimizer, TrainedModule
from megatron_hetero.step.optimizer import ShardOptimizer, build_shard_optimizer
from megatron_hetero.step.torch_optimizer import MegatronOptimizer, TorchOptimizer
from megatron_hetero.step.wrapped import WrappedGradients, copy_from_first, is_sharded, local

Config = Any  # A union that includes a function would hide the fields of the other types.
"""`AdamW` or `SGD`, Megatron's `OptimizerConfig`, or a function from a list of parameters to an optimizer of PyTorch.
"""


@watched
def build_optimizers(
    topology: Topology,
    modules: Mapping[str, Chunks | None],
    config: Config | Mapping[str, Config],
    *,
    clip_grad: float | None = None,
    error_if_nonfinite: bool = True,
) -> JointOptimizer:
    """Build one optimizer for all modules. All ranks call this function after the models are built, wrapped and frozen;
    `step` refuses later changes. After loading weights later, call `JointOptimizer.reload_model_params`.

    The weights of the first replica of a module are copied to the others. With `AdamW` or `SGD` of this package,
    gradients are accumulated in flat buffers (`main_grad`), a `Runner` with this optimizer sums the buffers during the
    last backward pass, and the ranks with the same parameters shard the states. With Megatron's `OptimizerConfig`,
    modules in Megatron's `DistributedDataParallel` have Megatron's optimizer, which may be distributed; other modules
    have PyTorch's optimizer with Megatron's settings, which updates fp32 copies of bfloat16 weights.

    A missing gradient counts as zeros, since other ranks may have a gradient: weight decay and momentum then change the
    parameter, whereas PyTorch's `step` would skip it. Freeze parameters that must not change.

    Args:
        topology: topology of all modules.
        modules: as for `finish_gradients`. A module whose parameters are all frozen has no optimizer.
        config: `AdamW` or `SGD`; Megatron's `OptimizerConfig`; or a function from a list of parameters to an optimizer
            of PyTorch, such as ``partial(torch.optim.AdamW, lr=1e-4)``; or one of these for each module, by name.
        clip_grad: the maximum gradient norm over all modules; 0 for no clipping. The default is the value in Megatron's
            `config`, or 0.
        error_if_nonfinite: whether `step` raises for NaN or infinite gradients, and for weights that have changed since
            the last update and would be overwritten by fp32 masters. The host waits for both checks.

    Raises:
        UserError: on all ranks. `modules` are not the rank's modules, replicas have different parameters, settings
            differ between ranks, or a setting is not supported for a module.
    """

    def read() -> tuple[tuple[TrainedModule, ...], dict[str, Config], float]:
        described = trained_modules(topology, modules)
        configs = {name: _config_of(config, name) for name in topology.layouts}
        return described, configs, _clip_of(configs.values(), clip_grad)

    described, configs, clip = all_or_none(topology.host, read)
    facts = {"clip_grad": str(clip), "error_if_nonfinite": str(error_if_nonfinite)}
    for name, each in configs.items():
        for field in fields(AdamW):
            value = getattr(each, field.name, None)
            facts[f"{field.name} of `{name}`"] = "a function" if callable(value) else str(value)
    require_equal(topology.host, "build_optimizers", facts, "call it in the same way on all ranks")
    all_or_none(topology.host, lambda: require_replicas(described))
    described = tuple(map(_with_tied_names, described))
    for module in described:
        _broadcast_weights(module)
    optimizer = join_optimizers(topology, described, configs, clip, error_if_nonfinite=error_if_nonfinite)
    optimizer.defaults = _common_defaults(topology, optimizer.optimizers)
    return optimizer


def join_optimizers(
    topology: Topology,
    modules: Sequence[TrainedModule],
    configs: Mapping[str, Config],
    clip_grad: float,
    *,
    error_if_nonfinite: bool = True,
    group: dist.ProcessGroup | None = None,
    working: Working = nullcontext,
) -> JointOptimizer:
    """Build the optimizer of each module, and join these in a `JointOptimizer`. All ranks call this function.

    `modules`: modules with equal weights on all replicas. Modules of a library user are sharded here; modules of a
    model family are already sharded. `configs`: the config of each module, by name. `group`: the ranks that share
    errors, by default `topology.host`. `working`: returns a context for work for which other ranks wait. Raises
    `UserError` on all ranks.
    """
    offloads = any(getattr(config, "offload", False) for config in configs.values())
    streams = topology.platform.side_streams(2) if offloads else ()

    def build() -> list[ModuleOptimizer]:
        return [
            _build_one(module, configs[module.name], streams)
            for module in modules
            if module.trained and not _updated_beside(module, configs[module.name])
        ]

    optimizers = {each.module.key: each for each in all_or_none(group or topology.host, build, working)}
    sharded = [optimizers[module.key].module if module.key in optimizers else module for module in modules]
    return JointOptimizer(topology, sharded, optimizers, clip_grad, error_if_nonfinite)


def _build_one(module: TrainedModule, config: Config, streams: Sequence[torch.cuda.Stream]) -> ModuleOptimizer:
    """Build the optimizer of a module that has trained parameters. Raises `UserError`."""
    if isinstance(config, AdamW | SGD):
        return build_shard_optimizer(_shared_by_zero(module, config), config, streams)
    gradients = _wrapped(module)
    outside = [name for name in module.trained if name not in gradients.in_main_grad]
    if not _is_megatrons(config):
        if gradients.in_main_grad:
            _refuse(module, "Megatron's DistributedDataParallel", "an OptimizerConfig of Megatron for it")
        return TorchOptimizer(module, config)
    if gradients.in_main_grad and outside:
        found = f"Megatron's DistributedDataParallel around some parameters, not around {outside[0]}"
        _refuse(module, found, "it around all that train, or none")
    if getattr(config, "fp16", False):
        _refuse(module, "config.fp16", "bf16 or fp32, since a loss scale would have to be shared by all modules")
    if not gradients.in_main_grad:
        return TorchOptimizer(module, _torch_from(module, config), config.bf16)
    for ddp in gradients.ddps:
        if (found := ddp.ddp_config.use_distributed_optimizer) != config.use_distributed_optimizer:
            _refuse(module, f"use_distributed_optimizer {found} in DDP and not in config", "the same in both")
    return MegatronOptimizer(module, gradients.ddps, config)


def _updated_beside(module: TrainedModule, config: Config) -> bool:
    """Return whether Megatron's optimizer of another view of the module also updates the parameters of this view."""
    return _is_megatrons(config) and bool(_wrapped(module).in_main_grad) and not _wrapped(module).ddps


def _wrapped(module: TrainedModule) -> WrappedGradients:
    """Return the `WrappedGradients` of a library user's module that no optimizer of this package shards."""
    assert isinstance(module.gradients, WrappedGradients), "a module of a library user"
    return module.gradients


def _is_megatrons(config: Config) -> bool:
    """Return whether `config` is Megatron's `OptimizerConfig`."""
    return hasattr(config, "clip_grad") and hasattr(config, "lr") and not callable(config)


def _refuse(module: TrainedModule, found: str, expected: str) -> NoReturn:
    """Raise `UserError` for a wrapper and a config that are incompatible."""
    fix = "change the wrapper of that module or its configuration, which may be given by name"
    raise UserError.at(f"build_optimizers: `{module.name}`", found=found, expected=expected, fix=fix)


def _torch_from(module: TrainedModule, config: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Return a function that builds PyTorch's optimizer with Megatron's settings. As in Megatron, biases and norms have
    no weight decay.
    """
    plain = [p for p in module.trained.values() if not is_sharded(p)]
    if config.use_distributed_optimizer and plain:
        _refuse(module, "config.use_distributed_optimizer", "Megatron's DistributedDataParallel around it, or FSDP2")
    for field in ("optimizer_cpu_offload", "use_precision_aware_optimizer", "decoupled_lr"):
        if getattr(config, field, None):
            _refuse(module, f"config.{field}", "Megatron's DistributedDataParallel around it")
    narrow = [name for name, p in module.trained.items() if p.element_size() < 4]
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
    """Return a parameter group with the keys that Megatron's learning-rate scheduler reads."""
    decay = 0.0 if exempt else config.weight_decay
    rates = {"max_lr": config.lr, "min_lr": config.min_lr, "lr_mult": 1.0, "wd_mult": 0.0 if exempt else 1.0}
    return {"params": parameters, "weight_decay": decay, **rates}


def _shared_by_zero(module: TrainedModule, algorithm: Algorithm) -> TrainedModule:
    """Move gradients to buffers and shard the module by its ZeRO stage. Return a module of a model family unchanged: it
    was sharded when it was built. Raises `UserError` for a wrapped module.
    """
    if not isinstance(module.gradients, WrappedGradients):
        return module
    _require_plain(module, module.gradients)
    group, platform, dtype = module.replicas, module.topology.platform, getattr(torch, algorithm.gradients)
    if not shares_weights(algorithm.zero, group.size(), bool(module.trained)):
        weights, gradients = in_buffers(
            module.key,
            module.parameters,
            module.chunks,
            group,
            in_one_bucket=False,
            prefers_all_reduce=platform.prefers_all_reduce,
            sharded=algorithm.kind.sharded,
            gradients=dtype,
            adds_up=False,
        )
        return replace(module, weights=weights, gradients=gradients)
    if module.topology.layouts[module.name].views:
        _refuse(module, f"zero={algorithm.zero} and a layout with further views", "zero=1")
    if len(dtypes := {str(p.dtype) for p in module.trained.values()}) > 1:
        found = f"{' and '.join(sorted(dtypes))} parameters with zero={algorithm.zero}"
        _refuse(module, found, "one dtype, which FSDP2 requires, or zero=1")
    names = {id(p): name for name, p in module.parameters.items()}
    stages, parameters = list[ShardedStage](), dict[str, nn.Parameter]()
    for chunk in module.chunks:
        name_by_path = {path: names[id(p)] for path, p in chunk.named_parameters()}
        stages += shard_stage(
            chunk,
            name_by_path.__getitem__,
            group,
            platform.device,
            _filled,
            frozenset(module.trained),
            gradients=dtype,
            zero=algorithm.zero,
            adds_up=False,
        )
        parameters |= {name_by_path[path]: p for path, p in chunk.named_parameters()}
    for stage in stages:
        stage.before_run(algorithm.zero == 2)  # A training loop without a `Runner` does not call `before_run`.
    weights, gradients = in_shards(module.key, parameters, group, tuple(stages))
    return replace(module, weights=weights, gradients=gradients)


def _filled(name: str, _: Tensor) -> None:
    raise AssertionError(f"{name} has values")


def _require_plain(module: TrainedModule, gradients: WrappedGradients) -> None:
    """Check that no wrapper shards the module or averages its gradients, and that its weights are in fp32 or bfloat16.
    Raises `UserError`.
    """
    for name, parameter in module.trained.items():
        expected = "the module itself: this optimizer shards its states, and with `zero` its weights"
        if name in gradients.in_main_grad:
            _refuse(module, "Megatron's DistributedDataParallel", expected)
        if is_sharded(parameter):
            _refuse(module, f"a DTensor ({name})", expected)
        if gradients.remaining[name].factor != 1.0:
            _refuse(module, "PyTorch's DistributedDataParallel", expected)
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            _refuse(module, f"{parameter.dtype} parameters ({name})", "float32 or bfloat16")


def _with_tied_names(module: TrainedModule) -> TrainedModule:
    """Return the module with the copy of a tied parameter, if any, named as the original parameter is stored."""
    if module.tied is None:
        return module
    names_by_end: list[Any] = [None] * module.ends.size()
    local_names = None if module.tied_copy else [weight_map[module.tied][0].name for weight_map in module.maps]
    dist.all_gather_object(names_by_end, local_names, group=module.ends)
    original = next((names for names in names_by_end if names is not None), None)
    if module.tied_copy is None or original is None:
        return module
    maps = tuple(
        {**weight_map, module.tied: tuple(replace(each, name=name) for each in weight_map[module.tied])}
        for weight_map, name in zip(module.maps, original, strict=True)
    )
    return replace(module, maps=maps)


@torch.no_grad()
def _broadcast_weights(module: TrainedModule) -> None:
    """Copy the weights of a module's first replica to the other replicas. A `DTensor` is copied along the axes that its
    mesh does not span.
    """
    parameters = list(module.parameters.values())
    copy_from_first([p.data for p in parameters if not is_sharded(p)], module.replicas)
    for axis in module.view.sum_axes:
        group = module.topology.group(module.name, axis)
        outside_mesh = [p for p in parameters if is_sharded(p) and not spans(p, group)]
        copy_from_first([local(p.detach()) for p in outside_mesh], group)


def _config_of(config: Any, module: str) -> Config:
    """Return the optimizer config of a module. Raises `UserError` if it is missing or of an unknown type."""
    where = f"build_optimizers: config of `{module}`"
    if isinstance(config, Mapping):
        if module not in config:
            found, fix = f"configurations of {', '.join(config) or 'nothing'}", "give one for each module"
            raise UserError.at(where, found=found, expected=f"one of `{module}`", fix=fix)
        config = config[module]
    if not callable(config) and not isinstance(config, AdamW | SGD) and not _is_megatrons(config):
        expected = "AdamW or SGD of this package, Megatron's OptimizerConfig, or a function of parameters"
        raise UserError.at(where, found=type(config).__name__, expected=expected, fix="give one of these")
    return config


def _clip_of(configs: Collection[Config], clip_grad: float | None) -> float:
    """Return the maximum gradient norm, 0 for no clipping. Raises `UserError` if configs have different values."""
    if clip_grad is None:
        limits = {float(config.clip_grad) for config in configs if _is_megatrons(config)}
        if len(limits) > 1:
            shown = " and ".join(map(str, sorted(limits)))
            because, fix = "all modules are clipped by one norm", "give `clip_grad` to build_optimizers"
            raise UserError.at("clip_grad", found=shown, expected="one value", because=because, fix=fix)
        clip_grad = limits.pop() if limits else 0.0
    if not clip_grad >= 0:
        raise UserError.at("clip_grad", found=str(clip_grad), expected="0 or more", fix="use 0 not to clip")
    return float(clip_grad)


def _common_defaults(topology: Topology, optimizers: Mapping[str, ModuleOptimizer]) -> dict[str, Any]:
    """Return the `defaults` entries that the optimizers of all ranks have in common. Schedulers such as `OneCycleLR`
    read them to find which settings to change, even on ranks without trained parameters.
    """
    by_rank = on_every(topology.host, lambda: [_defaults_of(each) for each in optimizers.values()])
    # An optimizer whose share has no elements has no defaults.
    known = [defaults for rank in by_rank for defaults in rank if defaults]
    first = known[0] if known else {}
    return {name: value for name, value in first.items() if all(name in defaults for defaults in known)}


def _defaults_of(optimizer: Any) -> dict[str, Any]:
    """Return the `defaults` of PyTorch's optimizer, possibly inside Megatron's, or a `ShardOptimizer`'s settings."""
    if isinstance(optimizer, ShardOptimizer):
        return {k: v for group in optimizer.param_groups[:1] for k, v in group.items() if k not in ("params", "names")}
    while optimizer is not None and not isinstance(optimizer, Optimizer):
        chained = getattr(optimizer, "chained_optimizers", None)
        optimizer = chained[0] if chained else getattr(optimizer, "optimizer", None)
    return {} if optimizer is None else dict(optimizer.defaults)
