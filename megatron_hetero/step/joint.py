"""Which ranks share what of a module that a library user has built, by the ZeRO stage of its optimizer.

One optimizer for the modules of a topology: gradients summed by one rule, one norm over all modules, one clip.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.collective import all_or_none, on_every, require_equal
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.communicators import GRADIENT_AXES
from megatron_hetero.schedule.semantics import shares_weights
from megatron_hetero.step.data_parallel import DataParallel, Replicated
from megatron_hetero.step.fully_sharded import FullySharded, shard_stage
from megatron_hetero.step.gradients import (
    GradientTable,
    Tokens,
    add_up,
    factor_of,
    finish,
    forget_finished,
    note_applied,
    note_finished,
    require_equal_tokens,
    require_ready,
    start_sums,
    sum_gradients,
)
from megatron_hetero.step.held import Chunks, held_modules, require_replicas, reshard
from megatron_hetero.step.megatron import build_with_megatrons_settings, in_megatrons_ddp, is_megatron_config, refuse
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.optimizer import SGD, AdamW, Algorithm, ShardOptimizer, build_shard_optimizer
from megatron_hetero.step.torch_optimizer import TorchOptimizer
from megatron_hetero.step.wrapped import Wrapped, copy_from_first, is_sharded, local


def shared_by_zero(module: TrainedModule, algorithm: Algorithm) -> TrainedModule:
    """The module with gradients in buffers, and what its ranks share. Raises `UserError` for one that is wrapped."""
    _require_plain(module)
    group, platform = module.replicas, module.topology.platform
    gradients = getattr(torch, algorithm.gradients)
    if not shares_weights(algorithm.zero, group.size(), bool(module.trained)):
        sharing: DataParallel = Replicated.of(
            *(module.name, module.parameters, module.chunks, group),
            in_one_bucket=False,
            prefers_all_reduce=platform.prefers_all_reduce,
            sharded=algorithm.kind.sharded,
            gradients=gradients,
            adds_up=False,
        )
        return module.shared_by(sharing)
    if len(dtypes := {str(p.dtype) for p in module.trained.values()}) > 1:
        found = f"{' and '.join(sorted(dtypes))} parameters with zero={algorithm.zero}"
        refuse(module, found, "one dtype, which FSDP2 asks for, or zero=1")
    trained, names = frozenset(module.trained), {id(p): name for name, p in module.parameters.items()}
    places = [{path: names[id(p)] for path, p in chunk.named_parameters()} for chunk in module.chunks]
    stages = [
        stage
        for chunk, place in zip(module.chunks, places, strict=True)
        for stage in shard_stage(
            *(chunk, place.__getitem__, group, platform.device, _filled, trained),
            gradients=gradients,
            zero=algorithm.zero,
            adds_up=False,
        )
    ]
    for stage in stages:
        stage.before_run(algorithm.zero == 2)  # Also where no interpreter says it.
    named = {
        place[path]: p
        for chunk, place in zip(module.chunks, places, strict=True)
        for path, p in chunk.named_parameters()
    }
    return module.shared_by(FullySharded(named, group, tuple(stages)))


def _filled(name: str, _: Tensor) -> None:
    raise AssertionError(f"{name} has values")


def _require_plain(module: TrainedModule) -> None:
    """Check that no wrapper shares the module already, and that weights are in a dtype that there are masters for."""
    sharing = module.data_parallel
    assert isinstance(sharing, Wrapped), "a module of a library user"
    for name, parameter in module.trained.items():
        expected = "the module itself: this optimizer shares its states, and with `zero` its weights"
        if name in sharing.in_main_grad:
            refuse(module, "Megatron's DistributedDataParallel", expected)
        if is_sharded(parameter):
            refuse(module, f"a DTensor ({name})", expected)
        if sharing.done[name].factor != 1.0:
            refuse(module, "PyTorch's DistributedDataParallel", expected)
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            refuse(module, f"{parameter.dtype} parameters ({name})", "float32 or bfloat16")


Config = Any  # A union with a function would hide the fields of the others.
"""`AdamW` or `SGD`, Megatron's `OptimizerConfig`, or a function that makes an optimizer of PyTorch from a list of
parameters.
"""


class ModuleOptimizer(Protocol):
    """The optimizer of a module on this rank, whose gradients are summed."""

    @property
    def module(self) -> TrainedModule:
        """What it updates."""
        ...

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups as those of PyTorch's optimizers."""
        ...

    def squares(self) -> Tensor:
        """What this rank adds to the square of the norm of the module's gradients, fp64 []."""
        ...

    def update(self, scale: float | Tensor, step: int | None) -> None:
        """Update the weights with the gradients times `scale`. `step`: a number that no other update has, None for how
        many there were.
        """
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
        """Take what `state_dict` gave."""
        ...


class JointOptimizer(Optimizer):
    """The optimizers of this rank's modules as one, made by `build_optimizers`. They are named by `TrainedModule.key`.

    It is an optimizer of PyTorch to learning-rate schedulers: `param_groups` are those of all its parts. `norms`: after
    a step, the gradient norm of each module of the topology, fp32 [modules] on the device, before clipping.
    """

    def __init__(
        self,
        topology: Topology,
        modules: Sequence[TrainedModule],
        optimizers: Mapping[str, ModuleOptimizer],
        clip_grad: float = 0.0,
        defaults: Mapping[str, Any] | None = None,
        *,
        check: bool = True,
    ):
        # Not that of PyTorch's class, which refuses to have no parameters.
        self.topology, self._check, self.clip_grad = topology, check, clip_grad
        self.modules, self.optimizers = tuple(modules), dict(optimizers)
        self.defaults, self._started = dict(defaults or {}), dict[str, Tensor]()
        self.norms = torch.zeros(len(topology.layouts), device=topology.platform.device)

    @property
    def parts(self) -> Mapping[str, Any]:
        """The optimizer of each module: ours, PyTorch's or Megatron's; none where nothing of a module trains here."""
        return {name: getattr(each, "optimizer", each) for name, each in self.optimizers.items()}

    @property
    def sharded(self) -> Mapping[str, ShardOptimizer]:
        """The optimizers that keep shares of states in flat tensors, by module: those of `AdamW` and `SGD`."""
        return {name: each for name, each in self.optimizers.items() if isinstance(each, ShardOptimizer)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of all parts, in the order of the topology."""
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The states of parts that are optimizers of PyTorch."""
        return {
            key: value
            for part in self.parts.values()
            for key, value in getattr(part, "state", {}).items()
            if isinstance(getattr(part, "state", None), Mapping)
        }

    # ------------------------------------------------------------------------------------------ within a step

    def expect(self, module: str, stage: int) -> None:
        """Know that the next backward pass of that pipeline stage is its last in the step: sums of gradients may begin
        within it.
        """
        for found in self._overlapping(module):
            found.expect(stage)

    def start_sums(self, module: str) -> None:
        """Begin the sums of a module's gradients behind its last backward pass of the step, on all its ranks. Nothing
        waits for them before `reduce` or `step`.
        """
        self._started |= start_sums(self._overlapping(module))

    def require_unsummed(self) -> None:
        """Check that further backward passes may add to the gradients of the step. Raises `UserError`."""
        for module in self.modules:
            module.data_parallel.require_unsummed()

    def _overlapping(self, name: str) -> list[TrainedModule]:
        return [each for each in self.modules if each.name == name and each.overlaps_sums]

    # -------------------------------------------------------------------------------------- the end of a step

    @torch.no_grad()
    def reduce(self, loss_sum: Tensor, *, loss_counts_here: bool) -> GradientTable:
        """Sum the gradients over ranks (steps 1 to 4 of the rule), which are not scaled yet. All ranks call it.

        Args:
            loss_sum: fp32 [], the sum of this rank's losses.
            loss_counts_here: whether it is one of those that add up to the whole.
        """
        finite, self._started = sum_gradients(self.modules, self._started), {}
        return self._add_up(finite, loss_sum, loss_counts_here=loss_counts_here)

    def _add_up(self, finite: Mapping[str, Tensor], loss_sum: Tensor, *, loss_counts_here: bool) -> GradientTable:
        squares = dict[str, Tensor]()
        for each in self.optimizers.values():
            name, own = each.module.name, each.squares()
            squares[name] = squares[name] + own if name in squares else own
        return add_up(squares, finite, loss_sum, self.topology, loss_counts_here=loss_counts_here)

    @torch.no_grad()
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        """Step 5: update all weights with the gradients times `scale`. `step`: see `ModuleOptimizer.update`."""
        for each in self.optimizers.values():
            each.update(scale, step)

    @torch.no_grad()
    def step(self, closure: None = None, *, tokens: Tokens | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Finish the gradients, clip them and update. All ranks call it, also those with nothing to train.

        Args:
            closure: none; it is there because PyTorch's optimizers have one.
            tokens: as for `finish_gradients`, which need not be called. None, to be given, where it has been.

        Returns:
            The norm of the gradients of all modules together before clipping, fp32 [] on the device; no host has
            waited for it. It is NaN or infinite where a gradient is, and so are then the weights.

        Raises:
            UserError: on all ranks. There is a closure; `zero_grad` was not called since the step before; or
                `finish_gradients` would refuse `tokens` or the gradients.
        """
        if closure is not None:
            raise UserError.at("JointOptimizer.step", found="a closure", expected="none", fix="call backward before")
        device = self.topology.platform.device
        for module in self.modules:
            reshard(module.chunks)
        if self._check:
            all_or_none(self.topology.host, lambda: require_ready(self.modules, finished=tokens is None))
            require_equal_tokens(self.topology, tokens)
        nothing, ones = torch.zeros((), device=device), torch.ones((), device=device)
        finite = {each.module.name: ones for each in self.optimizers.values()}
        if tokens is None:
            factor = 1.0
            table = self._add_up({n: each.double() for n, each in finite.items()}, nothing, loss_counts_here=False)
        else:
            factor = factor_of(tokens, device)
            table = self.reduce(nothing, loss_counts_here=False)
            note_finished(self.modules)
        squares = table.squares
        self.norms = squares.sqrt().mul(factor).float()
        norm = squares.sum().sqrt().mul(factor).float()
        scale: float | Tensor = factor
        if self.clip_grad > 0:
            scale = (self.clip_grad / (norm + 1e-6)).clamp(max=1.0) * factor
        self.update(scale)
        note_applied(self.modules)
        return norm

    def finish_gradients(self, tokens: Tokens) -> None:
        """What the function of that name does, for the modules of this optimizer; `step(tokens=None)` applies them."""
        if self._check:
            all_or_none(self.topology.host, lambda: require_ready(self.modules, finished=False))
            require_equal_tokens(self.topology, tokens)
        finish(self.modules, factor_of(tokens, self.topology.platform.device))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: raises `UserError`."""
        because, fix = "all ranks of a module reduce the same parameters", "build the optimizers again"
        problem = "parameters cannot be added"
        raise UserError.at("JointOptimizer.add_param_group", problem=problem, because=because, fix=fix)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Take the weights from the models, after some were loaded into them: what the optimizers keep of them in fp32
        would else overwrite these in the next step. The name is that of Megatron's optimizers.
        """
        for each in self.optimizers.values():
            each.reload_model_params()

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Before the first backward pass of a step."""
        forget_finished(self.modules)
        self._started = {}
        for module in self.modules:
            module.data_parallel.zero_gradients(set_to_none=set_to_none)
        for each in self.optimizers.values():
            each.zero()

    def wait_for_weights(self) -> None:
        """Wait for weights that are being gathered, before they are read other than by a run of their module."""
        for module in self.modules:
            module.data_parallel.wait_for_weights()

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The state of each part by module, as this rank has it. What several ranks share, and what Megatron's
        distributed optimizer leaves out, is the business of `parts` and of the checkpoint's format.
        """
        return {name: each.state_dict() for name, each in self.optimizers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What `state_dict` gave on this rank, in the same layouts. Raises `UserError` for other modules."""
        if state_dict.keys() != self.optimizers.keys():
            found, expected = ", ".join(state_dict) or "no modules", ", ".join(self.optimizers) or "none"
            fix = "load what the same rank saved, in the same layouts"
            raise UserError.at("JointOptimizer.load_state_dict", found=found, expected=expected, fix=fix)
        for name, each in self.optimizers.items():
            each.load_state_dict(state_dict[name])

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(f'{name}: {type(part).__name__}' for name, part in self.parts.items())})"


def build_optimizers(
    topology: Topology,
    modules: Mapping[str, Chunks | None],
    config: Config | Mapping[str, Config],
    *,
    clip_grad: float | None = None,
    check: bool = True,
) -> JointOptimizer:
    """One optimizer for all modules. All ranks call it, after the models are built, wrapped and frozen. Where weights
    are loaded into them later, see `JointOptimizer.reload_model_params`.

    Replicas of a module are given the weights of the first. With `AdamW` or `SGD` of this package, gradients are
    accumulated in flat buffers (`main_grad`), which a `Runner` that knows the optimizer sums within the last backward
    pass, and the ranks that have the same parameters share the states. For modules in Megatron's
    `DistributedDataParallel` the optimizer is Megatron's, also its distributed one. For others it is PyTorch's, with
    Megatron's settings; weights in bfloat16 then have fp32 copies, which it updates.

    Args:
        topology: of all modules.
        modules: as for `finish_gradients`. Where all parameters of a module are frozen it has no optimizer.
        config: `AdamW` or `SGD`; Megatron's `OptimizerConfig`; or a function that makes an optimizer of PyTorch from a
            list of parameters, such as ``partial(torch.optim.AdamW, lr=1e-4)``; or one of these for each module, by
            name.
        clip_grad: the largest norm of all gradients together; 0 for any. Where left out, that of Megatron's `config`,
            or 0.
        check: whether ranks share errors of each `step`, and compare its `tokens`: two small messages between hosts.
            The same on all ranks.

    Raises:
        UserError: on all ranks. `modules` are not those of the rank, replicas have different parameters, ranks have
            different settings, or a setting cannot be had for a module.
    """

    def read() -> tuple[tuple[TrainedModule, ...], dict[str, Config], float]:
        held = held_modules(topology, modules)
        configs = {name: _config_of(config, name) for name in topology.layouts}
        return held, configs, _clip_of(configs.values(), clip_grad)

    held, configs, clip = all_or_none(topology.host, read)
    facts = {"check": str(check), "clip_grad": str(clip)}
    for name, each in configs.items():
        own = {setting.name: getattr(each, setting.name, None) for setting in fields(AdamW)}
        facts |= {f"{setting} of `{name}`": "a function" if callable(of) else str(of) for setting, of in own.items()}
    require_equal(topology.host, "build_optimizers", facts, "call it alike on all ranks")
    all_or_none(topology.host, lambda: require_replicas(held))
    held = tuple(map(_with_tied_names, held))
    for module in held:
        _equal_replicas(module)
    streams = topology.platform.side_streams(2) if any(getattr(c, "offload", False) for c in configs.values()) else ()

    def build() -> tuple[list[TrainedModule], dict[str, ModuleOptimizer]]:
        found, optimizers = list[TrainedModule](), dict[str, ModuleOptimizer]()
        for module in held:
            own, optimizer = _build_one(module, configs[module.name], streams)
            found.append(own)
            if optimizer is not None:
                optimizers[own.key] = optimizer
        return found, optimizers

    found, optimizers = all_or_none(topology.host, build)
    return JointOptimizer(topology, found, optimizers, clip, _common_defaults(topology, optimizers), check=check)


def _build_one(
    module: TrainedModule, config: Config, streams: Sequence[torch.cuda.Stream]
) -> tuple[TrainedModule, ModuleOptimizer | None]:
    """A module and its optimizer, None where nothing of it trains. Raises `UserError`."""
    if not module.trained:
        return module, None
    if isinstance(config, AdamW | SGD):
        own = shared_by_zero(module, config)
        return own, build_shard_optimizer(own, config, streams)
    if is_megatron_config(config):
        return module, build_with_megatrons_settings(module, config)
    if in_megatrons_ddp(module):
        refuse(module, "Megatron's DistributedDataParallel", "an OptimizerConfig of Megatron for it")
    return module, TorchOptimizer(module, config)


def _with_tied_names(module: TrainedModule) -> TrainedModule:
    """The module whose copy of a tied parameter is stored as the parameter that it is a copy of."""
    if module.tied is None:
        return module
    names: list[Any] = [None] * module.ends.size()
    mine = None if module.tied_copy else [slices[0].name for slices in (of[module.tied] for of in module.maps)]
    torch.distributed.all_gather_object(names, mine, group=module.ends)
    first = next((each for each in names if each is not None), None)
    if module.tied_copy is None or first is None:
        return module
    maps = tuple(
        {**of, module.tied: tuple(replace(each, name=name) for each in of[module.tied])}
        for of, name in zip(module.maps, first, strict=True)
    )
    return replace(module, maps=maps)


@torch.no_grad()
def _equal_replicas(module: TrainedModule) -> None:
    """Give all replicas of a module the weights of the first. Of what PyTorch shards, these are those along axes that
    its mesh does not have.
    """
    every = [p for chunk in module.chunks for p in chunk.parameters()]
    copy_from_first([p.data for p in every if not is_sharded(p)], module.replicas)
    for axis in GRADIENT_AXES:
        group = module.topology.group(module.name, axis)
        beside = [p for p in every if is_sharded(p) and not _spans(p, group)]
        copy_from_first([local(p.detach()) for p in beside], group)


def _spans(parameter: Any, group: Any) -> bool:
    """Whether the mesh of a `DTensor` has ranks of the group other than this one."""
    ranks = parameter.device_mesh.mesh.flatten().tolist()
    return len(set(ranks).intersection(torch.distributed.get_process_group_ranks(group))) > 1


def _config_of(config: Any, module: str) -> Config:
    """The configuration of a module. Raises `UserError` if there is none."""
    where = f"build_optimizers: config of `{module}`"
    if isinstance(config, Mapping):
        if module not in config:
            found, fix = f"configurations of {', '.join(config) or 'nothing'}", "give one for each module"
            raise UserError.at(where, found=found, expected=f"one of `{module}`", fix=fix)
        config = config[module]
    if not callable(config) and not isinstance(config, AdamW | SGD) and not is_megatron_config(config):
        expected = "AdamW or SGD of this package, Megatron's OptimizerConfig, or a function of parameters"
        raise UserError.at(where, found=type(config).__name__, expected=expected, fix="give one of these")
    return config


def _clip_of(configs: Collection[Config], clip_grad: float | None) -> float:
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


def _common_defaults(topology: Topology, optimizers: Mapping[str, ModuleOptimizer]) -> dict[str, Any]:
    """The defaults that the optimizers of all modules have: by them schedulers such as `OneCycleLR` know what they may
    change, also on ranks that train nothing.
    """
    of_ranks = on_every(topology.host, lambda: [_defaults_of(each) for each in optimizers.values()])
    everyone = [defaults for of_rank in of_ranks for defaults in of_rank if defaults]  # A share may have no elements.
    common = set[str].intersection(*(set(defaults) for defaults in everyone)) if everyone else set[str]()
    return {name: everyone[0][name] for name in sorted(common)}


def _defaults_of(optimizer: Any) -> dict[str, Any]:
    """Defaults of an optimizer of PyTorch, also inside one of Megatron's; settings of groups of ours."""
    if hasattr(optimizer, "algorithm"):
        return {k: v for group in optimizer.param_groups[:1] for k, v in group.items() if k not in ("params", "names")}
    while optimizer is not None and not isinstance(optimizer, Optimizer):
        chained = getattr(optimizer, "chained_optimizers", None)
        optimizer = chained[0] if chained else getattr(optimizer, "optimizer", None)
    return {} if optimizer is None else dict(optimizer.defaults)
