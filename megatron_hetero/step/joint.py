"""One optimizer for the modules of a topology: gradients summed by one rule, one norm over all modules, one clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.collective import all_or_none
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import watched
from megatron_hetero.step.gradients import (
    GradientTable,
    Tokens,
    add_up,
    factor_of,
    finish,
    forget_finished,
    mark,
    require_ready,
    start_sums,
    sum_gradients,
)
from megatron_hetero.step.library_modules import reshard
from megatron_hetero.step.module import ModuleOptimizer, TrainedModule
from megatron_hetero.step.optimizer import ShardOptimizer


class JointOptimizer(Optimizer):
    """The optimizers of this rank's modules as one, built by `build_optimizers`. They are named by `TrainedModule.key`.

    Learning-rate schedulers see an optimizer of PyTorch: `param_groups` are those of all its parts. `norms`: after a
    step, the gradient norm of each module of the topology, fp32 [modules] on the device, before clipping.
    """

    def __init__(
        self,
        topology: Topology,
        modules: Sequence[TrainedModule],
        optimizers: Mapping[str, ModuleOptimizer],
        clip_grad: float = 0.0,
        defaults: Mapping[str, Any] | None = None,
    ):
        # PyTorch's constructor refuses to have no parameters.
        self.topology, self.clip_grad = topology, clip_grad
        self.modules, self.optimizers = tuple(modules), dict(optimizers)
        self.defaults, self._started = dict(defaults or {}), dict[str, Tensor]()
        self.norms = torch.zeros(len(topology.layouts), device=topology.platform.device)

    @property
    def parts(self) -> Mapping[str, Any]:
        """The optimizer of each module of which something trains: ours, PyTorch's or Megatron's."""
        return {name: getattr(each, "optimizer", each) for name, each in self.optimizers.items()}

    @property
    def sharded(self) -> Mapping[str, ShardOptimizer]:
        """The optimizers of `AdamW` and `SGD`, whose states are in flat tensors, by module."""
        return {name: each for name, each in self.optimizers.items() if isinstance(each, ShardOptimizer)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of all parts, in the order of the topology."""
        return [group for each in self.optimizers.values() for group in each.param_groups]

    # ------------------------------------------------------------------------------------------ within a step

    def expect(self, module: str, stage: int) -> None:
        """Note that the next backward pass of that pipeline stage is its last in the step: sums of gradients may begin
        within it.
        """
        for each in self._overlapping(module):
            each.expect(stage)

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
        """The views of a module whose gradients are not summed in each backward pass."""
        return [
            each for each in self.modules if each.name == name and each.trained and not each.data_parallel.reduces_early
        ]

    # -------------------------------------------------------------------------------------- the end of a step

    @torch.no_grad()
    def reduce(self, loss_sum: Tensor, *, loss_counts_here: bool) -> GradientTable:
        """Sum the gradients over ranks (steps 1 to 4 of the rule) without scaling them. All ranks call it.

        Args:
            loss_sum: fp32 [], the sum of this rank's losses.
            loss_counts_here: whether the losses of the step include it.
        """
        finite, self._started = sum_gradients(self.modules, self._started), {}
        return add_up(self.topology, self._squares(), finite, loss_sum, loss_counts_here=loss_counts_here)

    def _squares(self) -> list[tuple[str, Tensor]]:
        return [(each.module.name, each.squares()) for each in self.optimizers.values()]

    @torch.no_grad()
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        """Step 5: update all weights with the gradients times `scale`. `step`: see `ModuleOptimizer.update`."""
        for each in self.optimizers.values():
            each.update(scale, step)

    @watched
    @torch.no_grad()
    def step(self, closure: None = None, *, tokens: Tokens | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Finish the gradients, clip them and update. All ranks call it, also those with nothing to train.

        Args:
            closure: must be None; PyTorch's optimizers have one.
            tokens: as for `finish_gradients`, which need not be called; None if it has been.

        Returns:
            The norm over the gradients of all modules before clipping, fp32 [] on the device, without waiting. It is
            NaN or infinite if a gradient is, and so are then the weights.

        Raises:
            UserError: on all ranks. There is a closure; `zero_grad` was not called since the step before; or
                `finish_gradients` would refuse `tokens` or the gradients.
        """
        if closure is not None:
            raise UserError.at("JointOptimizer.step", found="a closure", expected="none", fix="call backward before")
        for module in self.modules:
            reshard(module.chunks)
        all_or_none(self.topology.host, lambda: require_ready(self.modules, finished=tokens is None))
        factor, no_loss = factor_of(self.topology, tokens), torch.zeros((), device=self.topology.platform.device)
        if tokens is None:
            table = add_up(self.topology, self._squares(), None, no_loss, loss_counts_here=False)
        else:
            table = self.reduce(no_loss, loss_counts_here=False)
        squares = table.squares
        self.norms = squares.sqrt().mul(factor).float()
        norm = squares.sum().sqrt().mul(factor).float()
        scale: float | Tensor = factor
        if self.clip_grad > 0:
            scale = (self.clip_grad / (norm + 1e-6)).clamp(max=1.0) * factor
        self.update(scale)
        mark(self.modules, applied=True)
        return norm

    @watched
    def finish_gradients(self, tokens: Tokens) -> None:
        """Finish the gradients of the modules of this optimizer; `step(tokens=None)` applies them."""
        all_or_none(self.topology.host, lambda: require_ready(self.modules, finished=False))
        finish(self.modules, factor_of(self.topology, tokens))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `UserError`: parameters cannot be added."""
        because, fix = "all ranks of a module reduce the same parameters", "build the optimizers again"
        problem = "parameters cannot be added"
        raise UserError.at("JointOptimizer.add_param_group", problem=problem, because=because, fix=fix)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copy the weights of the models to the fp32 masters, which would otherwise overwrite loaded weights in the
        next step. The name is that of Megatron's optimizers.
        """
        for each in self.optimizers.values():
            each.reload_model_params()

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, before the first backward pass of a step."""
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
        """The state of each part on this rank, by module. Megatron's distributed optimizer leaves out its shards."""
        return {name: each.state_dict() for name, each in self.optimizers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load what `state_dict` returned on this rank, in the same layouts. Raises `UserError` for other modules."""
        if state_dict.keys() != self.optimizers.keys():
            found, expected = ", ".join(state_dict) or "no modules", ", ".join(self.optimizers) or "none"
            fix = "load what the same rank saved, in the same layouts"
            raise UserError.at("JointOptimizer.load_state_dict", found=found, expected=expected, fix=fix)
        for name, each in self.optimizers.items():
            each.load_state_dict(state_dict[name])

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(f'{name}: {type(part).__name__}' for name, part in self.parts.items())})"
