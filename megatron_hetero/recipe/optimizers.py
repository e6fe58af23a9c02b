"""One optimizer for the modules of a topology: gradients finished by one rule, one norm over all modules, one clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from megatron_hetero.distributed.collective import on_every
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.errors import UserError
from megatron_hetero.recipe.agreement import require_alike, require_equal, shared
from megatron_hetero.recipe.gradients import (
    Tokens,
    factor_of,
    finish,
    forget_finished,
    note_applied,
    require_equal_tokens,
    require_ready,
)
from megatron_hetero.recipe.held import Chunks, HeldModule, held_modules
from megatron_hetero.recipe.parts import Config, Part, build_part, clip_of, config_of, equal_replicas


class JointOptimizer(Optimizer):
    """The optimizers of this rank's modules as one, made by `build_optimizers`.

    It is an optimizer of PyTorch to learning-rate schedulers: `param_groups` are those of all its parts. `parts`: the
    optimizers by module; none where nothing of a module trains here. `norms`: after a step, the gradient norm of each
    module of the topology, fp32 [modules] on the device, before clipping.
    """

    def __init__(
        self,
        topology: Topology,
        held: tuple[HeldModule, ...],
        parts: Mapping[str, Part],
        clip_grad: float,
        defaults: dict[str, Any],
        *,
        check: bool,
    ):
        self._check = check
        # Not that of PyTorch's class, which refuses to have no parameters.
        self._topology, self._held, self._parts, self.clip_grad = topology, held, dict(parts), clip_grad
        self.defaults = defaults
        self.norms = torch.zeros(len(topology.layouts), device=topology.platform.device)

    @property
    def parts(self) -> Mapping[str, Any]:
        """The optimizer of each module, PyTorch's or Megatron's."""
        return {name: part.optimizer for name, part in self._parts.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of all parts, in the order of the topology."""
        return [group for part in self._parts.values() for group in part.optimizer.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of all parts."""
        return {key: value for part in self._parts.values() for key, value in part.optimizer.state.items()}

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
        for module in self._held:
            module.reshard()
        if self._check:
            shared(self._topology, lambda: require_ready(self._held, finished=tokens is None))
            require_equal_tokens(self._topology, tokens)
        if tokens is not None:
            finish(self._held, factor_of(tokens, self._topology.platform.device))
        with self._topology.platform.megatron_scope():
            squares = {name: part.prepare() for name, part in self._parts.items()}
            norm = self._norm(squares)
            if self.clip_grad > 0:
                factor = (self.clip_grad / (norm + 1e-6)).clamp(max=1.0)
                for part in self._parts.values():
                    part.scale(factor)
            for part in self._parts.values():
                part.update()
        note_applied(self._held)
        return norm

    def _norm(self, squares: Mapping[str, Tensor]) -> Tensor:
        nothing = torch.zeros((), dtype=torch.float64, device=self._topology.platform.device)
        table = torch.stack([squares.get(name, nothing) for name in self._topology.layouts])
        dist.all_reduce(table, group=self._topology.world)
        self.norms = table.sqrt().float()
        return table.sum().sqrt().float()

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
        for part in self._parts.values():
            part.reload_model_params()

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Before the first backward pass of a step."""
        forget_finished(self._held)
        for module in self._held:
            for chunk in module.megatrons_ddps:
                chunk.zero_grad_buffer()
            for each in module.parameters:
                if set_to_none or each.parameter.grad is None:
                    each.parameter.grad = None
                else:
                    each.parameter.grad.zero_()
        for part in self._parts.values():
            part.zero()

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of each part by module, as this rank has it. What several ranks share, and what Megatron's distributed
        optimizer leaves out, is the business of `parts` and of the checkpoint's format.
        """
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What `state_dict` gave on this rank, in the same layouts. Raises `UserError` for other modules."""
        if state_dict.keys() != self._parts.keys():
            found, expected = ", ".join(state_dict) or "no modules", ", ".join(self._parts) or "none"
            fix = "load what the same rank saved, in the same layouts"
            raise UserError.at("JointOptimizer.load_state_dict", found=found, expected=expected, fix=fix)
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(f'{n}: {type(p.optimizer).__name__}' for n, p in self._parts.items())})"


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

    Replicas of a module are given the weights of the first. For modules in Megatron's `DistributedDataParallel` the
    optimizer is Megatron's, also its distributed one. For others it is PyTorch's, with Megatron's settings; weights in
    bfloat16 then have fp32 copies, which it updates.

    Args:
        topology: of all modules.
        modules: as for `finish_gradients`. Where all parameters of a module are frozen it has no optimizer.
        config: Megatron's `OptimizerConfig`, or a function that makes an optimizer of PyTorch from a list of
            parameters, such as ``partial(torch.optim.AdamW, lr=1e-4)``; or one of these for each module, by name.
        clip_grad: the largest norm of all gradients together; 0 for any. Where left out, that of Megatron's `config`,
            or 0.
        check: whether ranks share errors of each `step`, and compare its `tokens`: two small messages between hosts.
            The same on all ranks.

    Raises:
        UserError: on all ranks. `modules` are not those of the rank, replicas have different parameters, or a setting
            cannot be had for a module.
    """

    def read() -> tuple[tuple[HeldModule, ...], dict[str, Config], float]:
        held = held_modules(topology, modules)
        configs = {name: config_of(config, name) for name in topology.layouts}
        return held, configs, clip_of(configs.values(), clip_grad)

    held, configs, clip = shared(topology, read)
    facts = {"check": str(check), "clip_grad": str(clip)}
    require_equal(topology, "build_optimizers", facts, "call it alike on all ranks")
    shared(topology, lambda: require_alike(held))
    for module in held:
        equal_replicas(module)

    def build() -> dict[str, Part]:
        trained = (module for module in held if module.parameters)
        return {module.name: build_part(module, configs[module.name]) for module in trained}

    parts = shared(topology, build)
    return JointOptimizer(topology, held, parts, clip, _common_defaults(topology, parts), check=check)


def _common_defaults(topology: Topology, parts: Mapping[str, Part]) -> dict[str, Any]:
    """The defaults that the optimizers of all modules have: by them schedulers such as `OneCycleLR` know what they may
    change, also on ranks that train nothing.
    """
    of_ranks = on_every(topology.host, lambda: [_defaults_of(part.optimizer) for part in parts.values()])
    everyone = [defaults for of_rank in of_ranks for defaults in of_rank]
    common = set[str].intersection(*(set(defaults) for defaults in everyone)) if everyone else set[str]()
    return {name: everyone[0][name] for name in sorted(common)}


def _defaults_of(optimizer: Any) -> dict[str, Any]:
    """Defaults of an optimizer of PyTorch, also inside one of Megatron's."""
    while optimizer is not None and not isinstance(optimizer, Optimizer):
        chained = getattr(optimizer, "chained_optimizers", None)
        optimizer = chained[0] if chained else getattr(optimizer, "optimizer", None)
    return {} if optimizer is None else dict(optimizer.defaults)
