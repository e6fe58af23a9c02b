"""Builds the optimizers of modules that a library user has built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.collective import all_or_none, on_every, require_equal
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import watched
from megatron_hetero.schedule.gathering import shares_weights
from megatron_hetero.step.algorithms import SGD, AdamW, Algorithm
from megatron_hetero.step.buffers import Replicated
from megatron_hetero.step.fully_sharded import FullySharded, ShardedStage, shard_stage
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.library_modules import Chunks, require_replicas, spans, trained_modules
from megatron_hetero.step.module import ModuleOptimizer, TrainedModule
from megatron_hetero.step.optimizer import ShardOptimizer, build_shard_optimizer
from megatron_hetero.step.torch_optimizer import MegatronOptimizer, TorchOptimizer
from megatron_hetero.step.wrapped import Wrapped, copy_from_first, is_sharded, local

Config = Any  # A union with a function would hide the fields of the others.
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
    """One optimizer for all modules. All ranks call it, after the models are built, wrapped and frozen; a later change
    is refused by `step`. Where weights are loaded into them later, see `JointOptimizer.reload_model_params`.

    Replicas of a module get the weights of the first. With `AdamW` or `SGD` of this package, gradients are accumulated
    in flat buffers (`main_grad`), which a `Runner` that knows the optimizer sums within the last backward pass, and
    the ranks with the same parameters shard the states. For modules in Megatron's `DistributedDataParallel` the
    optimizer is Megatron's, also its distributed one. For others it is PyTorch's, with Megatron's settings; weights in
    bfloat16 then have fp32 copies, which it updates.

    A missing gradient counts as zeros, since other ranks may have one: weight decay and momentum move the parameter,
    where PyTorch's own `step` would skip it. Freeze what must not change.

    Args:
        topology: topology of all modules.
        modules: as for `finish_gradients`. A module whose parameters are all frozen has no optimizer.
        config: `AdamW` or `SGD`; Megatron's `OptimizerConfig`; or a function from a list of parameters to an optimizer
            of PyTorch, such as ``partial(torch.optim.AdamW, lr=1e-4)``; or one of these for each module, by name.
        clip_grad: the largest norm over the gradients of all modules; 0 for any. The default is that of Megatron's
            `config`, or 0.
        error_if_nonfinite: whether `step` refuses gradients that are NaN or infinite, and weights that have changed
            since the last update where fp32 masters would overwrite them. The host waits for both; with False, NaN is
            applied.

    Raises:
        UserError: on all ranks. `modules` are not those of the rank, replicas have different parameters, ranks have
            different settings, or a setting does not fit a module.
    """

    def read() -> tuple[tuple[TrainedModule, ...], dict[str, Config], float]:
        own = trained_modules(topology, modules)
        configs = {name: _config_of(config, name) for name in topology.layouts}
        return own, configs, _clip_of(configs.values(), clip_grad)

    own, configs, clip = all_or_none(topology.host, read)
    facts = {"clip_grad": str(clip), "error_if_nonfinite": str(error_if_nonfinite)}
    for name, each in configs.items():
        settings = {setting.name: getattr(each, setting.name, None) for setting in fields(AdamW)}
        facts |= {f"{key} of `{name}`": "a function" if callable(of) else str(of) for key, of in settings.items()}
    require_equal(topology.host, "build_optimizers", facts, "call it alike on all ranks")
    all_or_none(topology.host, lambda: require_replicas(own))
    own = tuple(map(_with_tied_names, own))
    for module in own:
        _broadcast_weights(module)
    streams = topology.platform.side_streams(2) if any(getattr(c, "offload", False) for c in configs.values()) else ()
    trained = [module for module in own if module.trained and not _updated_beside(module, configs[module.name])]
    built = all_or_none(topology.host, lambda: [_build_one(each, configs[each.name], streams) for each in trained])
    optimizers = {each.module.key: each for each in built}
    every = [optimizers[module.key].module if module.key in optimizers else module for module in own]
    defaults = _common_defaults(topology, optimizers)
    return JointOptimizer(topology, every, optimizers, clip, defaults, error_if_nonfinite)


def _build_one(module: TrainedModule, config: Config, streams: Sequence[torch.cuda.Stream]) -> ModuleOptimizer:
    """The optimizer of a module of which something trains. Raises `UserError`."""
    if isinstance(config, AdamW | SGD):
        return build_shard_optimizer(_shared_by_zero(module, config), config, streams)
    sharing = _wrapped(module)
    inside = sharing.in_main_grad
    outside = [name for name in module.trained if name not in inside]
    if not _is_megatrons(config):
        if inside:
            _refuse(module, "Megatron's DistributedDataParallel", "an OptimizerConfig of Megatron for it")
        return TorchOptimizer(module, config)
    if inside and outside:
        found = f"Megatron's DistributedDataParallel around some parameters, not around {outside[0]}"
        _refuse(module, found, "it around all that train, or none")
    if getattr(config, "fp16", False):
        _refuse(module, "config.fp16", "bf16 or fp32, since a loss scale would have to be shared by all modules")
    if not inside:
        return TorchOptimizer(module, _torch_from(module, config), config.bf16)
    for ddp in sharing.ddps:
        if (found := ddp.ddp_config.use_distributed_optimizer) != config.use_distributed_optimizer:
            _refuse(module, f"use_distributed_optimizer {found} in DDP and not in config", "the same in both")
    return MegatronOptimizer(module, sharing.ddps, config)


def _updated_beside(module: TrainedModule, config: Config) -> bool:
    """Whether Megatron's optimizer of another view updates these parameters, too."""
    return _is_megatrons(config) and bool(_wrapped(module).in_main_grad) and not _wrapped(module).ddps


def _wrapped(module: TrainedModule) -> Wrapped:
    """How a module of a library user is shared before it has an optimizer."""
    assert isinstance(module.data_parallel, Wrapped), "a module of a library user"
    return module.data_parallel


def _is_megatrons(config: Config) -> bool:
    """Whether this is Megatron's `OptimizerConfig`."""
    return hasattr(config, "clip_grad") and hasattr(config, "lr") and not callable(config)


def _refuse(module: TrainedModule, found: str, expected: str) -> NoReturn:
    """Raise the `UserError` of a wrapper and a configuration that do not fit."""
    fix = "change the wrapper of that module or its configuration, which may be given by name"
    raise UserError.at(f"build_optimizers: `{module.name}`", found=found, expected=expected, fix=fix)


def _torch_from(module: TrainedModule, config: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    """PyTorch's optimizer with Megatron's settings and rules: biases and norms have no weight decay."""
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
    """A group with the keys that Megatron's scheduler reads."""
    decay = 0.0 if exempt else config.weight_decay
    rates = {"max_lr": config.lr, "min_lr": config.min_lr, "lr_mult": 1.0, "wd_mult": 0.0 if exempt else 1.0}
    return {"params": parameters, "weight_decay": decay, **rates}


def _shared_by_zero(module: TrainedModule, algorithm: Algorithm) -> TrainedModule:
    """Move gradients to buffers, and shard the module by its ZeRO stage. Raises `UserError` for one that is wrapped."""
    _require_plain(module)
    group, platform = module.replicas, module.topology.platform
    common: dict[str, Any] = {"gradients": getattr(torch, algorithm.gradients), "adds_up": False}
    if not shares_weights(algorithm.zero, group.size(), bool(module.trained)):
        sharing = Replicated.of(
            module.key,
            module.parameters,
            module.chunks,
            group,
            in_one_bucket=False,
            prefers_all_reduce=platform.prefers_all_reduce,
            sharded=algorithm.kind.sharded,
            **common,
        )
        return replace(module, data_parallel=sharing)
    if module.topology.layouts[module.name].views:
        _refuse(module, f"zero={algorithm.zero} and a layout with further views", "zero=1")
    if len(dtypes := {str(p.dtype) for p in module.trained.values()}) > 1:
        found = f"{' and '.join(sorted(dtypes))} parameters with zero={algorithm.zero}"
        _refuse(module, found, "one dtype, which FSDP2 requires, or zero=1")
    trained, names = frozenset(module.trained), {id(p): name for name, p in module.parameters.items()}
    stages, parameters = list[ShardedStage](), dict[str, nn.Parameter]()
    for chunk in module.chunks:
        place = {path: names[id(p)] for path, p in chunk.named_parameters()}
        name_of, device = place.__getitem__, platform.device
        stages += shard_stage(chunk, name_of, group, device, _filled, trained, zero=algorithm.zero, **common)
        parameters |= {place[path]: p for path, p in chunk.named_parameters()}
    for stage in stages:
        stage.before_run(algorithm.zero == 2)  # For loops without a `Runner`.
    return replace(module, data_parallel=FullySharded.of(parameters, group, tuple(stages)))


def _filled(name: str, _: Tensor) -> None:
    raise AssertionError(f"{name} has values")


def _require_plain(module: TrainedModule) -> None:
    """Check that no wrapper shards the module already, and that there are masters for the dtype of its weights."""
    sharing = _wrapped(module)
    for name, parameter in module.trained.items():
        expected = "the module itself: this optimizer shards its states, and with `zero` its weights"
        if name in sharing.in_main_grad:
            _refuse(module, "Megatron's DistributedDataParallel", expected)
        if is_sharded(parameter):
            _refuse(module, f"a DTensor ({name})", expected)
        if sharing.remaining[name].factor != 1.0:
            _refuse(module, "PyTorch's DistributedDataParallel", expected)
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            _refuse(module, f"{parameter.dtype} parameters ({name})", "float32 or bfloat16")


def _with_tied_names(module: TrainedModule) -> TrainedModule:
    """Give a copy of a tied parameter the stored name of the original."""
    if module.tied is None:
        return module
    names: list[Any] = [None] * module.ends.size()
    mine = None if module.tied_copy else [slices[0].name for slices in (of[module.tied] for of in module.maps)]
    dist.all_gather_object(names, mine, group=module.ends)
    first = next((each for each in names if each is not None), None)
    if module.tied_copy is None or first is None:
        return module
    maps = tuple(
        {**of, module.tied: tuple(replace(each, name=name) for each in of[module.tied])}
        for of, name in zip(module.maps, first, strict=True)
    )
    return replace(module, maps=maps)


@torch.no_grad()
def _broadcast_weights(module: TrainedModule) -> None:
    """Give all replicas of a module the weights of the first. Replicas of a `DTensor` differ along axes that its mesh
    does not have.
    """
    every = list(module.parameters.values())
    copy_from_first([p.data for p in every if not is_sharded(p)], module.replicas)
    for axis in module.view.sum_axes:
        group = module.topology.group(module.name, axis)
        beside = [p for p in every if is_sharded(p) and not spans(p, group)]
        copy_from_first([local(p.detach()) for p in beside], group)


def _config_of(config: Any, module: str) -> Config:
    """The configuration of a module. Raises `UserError` if it has none."""
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
    """The largest norm of all gradients, 0 for any. Raises `UserError` if configurations differ in it."""
    if clip_grad is None:
        found = {float(config.clip_grad) for config in configs if _is_megatrons(config)}
        if len(found) > 1:
            shown = " and ".join(map(str, sorted(found)))
            because, fix = "all modules are clipped by one norm", "give `clip_grad` to build_optimizers"
            raise UserError.at("clip_grad", found=shown, expected="one value", because=because, fix=fix)
        clip_grad = found.pop() if found else 0.0
    if not clip_grad >= 0:
        raise UserError.at("clip_grad", found=str(clip_grad), expected="0 or more", fix="use 0 not to clip")
    return float(clip_grad)


def _common_defaults(topology: Topology, optimizers: Mapping[str, ModuleOptimizer]) -> dict[str, Any]:
    """The defaults that all optimizers of all ranks have: schedulers such as `OneCycleLR` read there what they may
    change, also on ranks that train nothing.
    """
    of_ranks = on_every(topology.host, lambda: [_defaults_of(each) for each in optimizers.values()])
    everyone = [defaults for of_rank in of_ranks for defaults in of_rank if defaults]  # A share may have no elements.
    first = everyone[0] if everyone else {}
    return {name: value for name, value in first.items() if all(name in defaults for defaults in everyone)}


def _defaults_of(optimizer: Any) -> dict[str, Any]:
    """The defaults of PyTorch's optimizer, also inside Megatron's, or the settings of our groups."""
    if isinstance(optimizer, ShardOptimizer):
        return {k: v for group in optimizer.param_groups[:1] for k, v in group.items() if k not in ("params", "names")}
    while optimizer is not None and not isinstance(optimizer, Optimizer):
        chained = getattr(optimizer, "chained_optimizers", None)
        optimizer = chained[0] if chained else getattr(optimizer, "optimizer", None)
    return {} if optimizer is None else dict(optimizer.defaults)
