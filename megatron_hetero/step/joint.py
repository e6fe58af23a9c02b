"""One optimizer for all modules of a topology, which sums all gradients by one rule and clips them by one norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.collective import all_or_none
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import watched
from megatron_hetero.step.gradient_state import Phase
from megatron_hetero.step.gradients import (
    GradientTable,
    Tokens,
    add_up,
    factor_of,
    finish,
    require_finite_sums,
    require_ready,
    sum_gradients,
)
from megatron_hetero.step.library_modules import dcp_key, described, require_unchanged
from megatron_hetero.step.module import ModuleOptimizer, TrainedModule
from megatron_hetero.step.optimizer import ShardOptimizer
from megatron_hetero.step.torch_optimizer import MegatronOptimizer
from megatron_hetero.step.wrapped import differ, is_sharded


class JointOptimizer(Optimizer):
    """An `Optimizer` that combines the optimizers of this rank's modules; `build_optimizers` builds it.

    Learning-rate schedulers of PyTorch accept it: `param_groups` are the groups of all modules. `norms`: the gradient
    norm of each module of the topology in the last step, before clipping, fp32 [modules] on the device.
    """

    def __init__(
        self,
        topology: Topology,
        modules: Sequence[TrainedModule],
        optimizers: Mapping[str, ModuleOptimizer],
        clip_grad: float = 0.0,
        error_if_nonfinite: bool = True,
    ):
        # Do not call PyTorch's constructor, which refuses an empty list of parameters.
        self.topology, self.clip_grad, self.error_if_nonfinite = topology, clip_grad, error_if_nonfinite
        self.modules, self.optimizers = tuple(modules), dict(optimizers)
        self.defaults = dict[str, Any]()
        self.norms = torch.zeros(len(topology.layouts), device=topology.platform.device)
        self._views = {name: tuple(views) for name, views in groupby(self.modules, lambda module: module.name)}
        self._built = {name: described(views[0]) for name, views in self._views.items()}

    @property
    def by_module(self) -> Mapping[str, Any]:
        """The optimizer of each module with trained parameters, from this package, PyTorch or Megatron, by module."""
        return {name: getattr(each, "optimizer", each) for name, each in self.optimizers.items()}

    @property
    def sharded(self) -> Mapping[str, ShardOptimizer]:
        """The optimizers for this package's `AdamW` and `SGD`, whose states are in flat tensors, by module."""
        return {name: each for name, each in self.optimizers.items() if isinstance(each, ShardOptimizer)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The parameter groups of all modules, in the order of the topology."""
        return [group for optimizer in self.by_module.values() for group in optimizer.param_groups]

    # ------------------------------------------------------------------------------------------ within a step

    def expect(self, module: str, stage: int) -> None:
        """Announce that the next backward pass of a pipeline stage is its last one in the step, so that its gradient
        sums may begin during this backward pass.
        """
        for view in self._overlapping(module):
            view.expect(stage)

    def start_sums(self, module: str) -> None:
        """Begin to sum a module's gradients over ranks, after its last backward pass of the step. All ranks of the
        module call this method; only `reduce` and `step` wait for the sums.
        """
        for view in self._overlapping(module):
            view.gradients.start()

    def require_unsummed(self) -> None:
        """Check that backward passes may still add to the gradients of the step. Raises `UserError`."""
        for module in self.modules:
            module.gradients.require_unsummed()

    def require_unchanged(self) -> None:
        """Raise `UserError` if parameters were replaced, frozen or unfrozen since this optimizer was built."""
        fix = "call `build_optimizers` again, and wrap a DistributedDataParallel anew before; moments start anew"
        if self.sharded:
            fix = "build the module anew, change it before `build_optimizers`, and load a checkpoint of its states"
        for name, views in self._views.items():
            require_unchanged(views[0], self._built[name], fix)

    def _require_ready(self, *, finished: bool) -> None:
        self.require_unchanged()
        require_ready(self.modules, finished=finished)
        for name, each in self.optimizers.items():
            if self.error_if_nonfinite and differ(each.masters()):
                problem, because = "its weights have changed since the last update", "fp32 masters would overwrite them"
                fix = "call `reload_model_params()` of this optimizer after the change"
                raise UserError.at(f"module `{name}`", problem=problem, because=because, fix=fix)

    def _overlapping(self, name: str) -> list[TrainedModule]:
        """Return the trained views of a module whose gradients are not already reduced in each backward pass."""
        views = (module for module in self.modules if module.name == name and module.trained)
        return [view for view in views if not view.gradients.reduces_early]

    # -------------------------------------------------------------------------------------- the end of a step

    @torch.no_grad()
    def reduce(self, loss_sum: Tensor | None = None, *, loss_counts_here: bool = False) -> GradientTable:
        """Sum the gradients over ranks without scaling, and return the losses and norms. All ranks call this method.
        `loss_sum`: the fp32 sum of this rank's token losses. `loss_counts_here`: whether the loss of the step includes
        `loss_sum`. Raises `UserError` for gradients that have already been summed.
        """
        finite = sum_gradients(self.modules)
        return add_up(self.topology, self._squares(), finite, loss_sum, loss_counts_here=loss_counts_here)

    def _squares(self) -> list[tuple[str, Tensor]]:
        return [(each.module.name, each.squares()) for each in self.optimizers.values()]

    @torch.no_grad()
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        """Update all weights with the summed gradients times `scale`. `step`: a unique number of this update; None for
        the number of updates. Raises `UserError` for gradients that have not been summed.
        """
        self._begin_update()
        for each in self.optimizers.values():
            each.update(scale, step)

    @torch.no_grad()
    def update_unless_nan(self, scale: Tensor, step: int | None = None) -> None:
        """Like `update`, for `AdamW` and `SGD` only, but leave all weights and states unchanged if `scale` is NaN; then
        call `uncount`. The host waits for `scale`, once, unless all updates are fused.
        """
        self._begin_update()
        optimizers = list(self.sharded.values())
        assert len(optimizers) == len(self.optimizers), "other optimizers cannot skip an update"
        given = scale if all(each.is_fused for each in optimizers) else scale.item()
        for each in optimizers:
            each.update_unless_nan(given, step)

    def uncount(self, skipped: int) -> None:
        """Subtract `skipped` updates, which `update_unless_nan` has left out, from the counts of updates."""
        for state in (state for each in self.sharded.values() for state in each.states):
            state.updates.sub_(skipped)

    def _begin_update(self) -> None:
        # Advance the phase before the update, since an optimizer may free gradients in its update.
        for module in self.modules:
            if module.trained:
                module.gradients.advance(Phase.APPLIED)

    @watched
    @torch.no_grad()
    def step(self, closure: None = None, *, tokens: Tokens | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Finish and clip the gradients, and update the weights. All ranks call this, even ranks that train nothing.

        Args:
            closure: must be None; the argument exists for compatibility with PyTorch's optimizers.
            tokens: number of tokens of the whole step; None if `finish_gradients` has been called.

        Returns:
            The gradient norm over all modules before clipping, an fp32 scalar on the device.

        Raises:
            NotFiniteError: on all ranks, with `error_if_nonfinite`. A gradient is NaN or infinite. Weights and states
                are unchanged, and training can continue after `zero_grad`.
            UserError: on all ranks. `closure` is given; `zero_grad` was not called since the previous step; parameters
                were replaced, frozen or unfrozen; weights were changed but not their masters; or `finish_gradients`
                would refuse `tokens` or the gradients.
        """
        if closure is not None:
            raise UserError.at("JointOptimizer.step", found="a closure", expected="none", fix="call backward before")
        all_or_none(self.topology.host, lambda: self._require_ready(finished=tokens is None))
        factor = factor_of(self.topology, tokens)
        table = add_up(self.topology, self._squares(), None) if tokens is None else self.reduce()
        if self.error_if_nonfinite:
            require_finite_sums(self.topology, self.modules, table)
        squares = table.squares
        self.norms = squares.sqrt().mul(factor).float()
        norm = squares.sum().sqrt().mul(factor).float()
        scale: float | Tensor = factor
        if self.clip_grad > 0:
            scale = (self.clip_grad / (norm + 1e-6)).clamp(max=1.0) * factor
        self.update(scale)
        return norm

    @watched
    def finish_gradients(self, tokens: Tokens) -> None:
        """Turn all gradients into gradients of the mean loss over `tokens`; `step(tokens=None)` then applies them."""
        all_or_none(self.topology.host, lambda: self._require_ready(finished=False))
        checked = self.topology if self.error_if_nonfinite else None
        finish(self.modules, factor_of(self.topology, tokens), checked)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `UserError`: parameters cannot be added to this optimizer."""
        because, fix = "all ranks of a module reduce the same parameters", "build the optimizers again"
        problem = "parameters cannot be added"
        raise UserError.at("JointOptimizer.add_param_group", problem=problem, because=because, fix=fix)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copy the weights of the models to the fp32 masters. Call this method after loading weights: the next step
        would otherwise overwrite the weights or, if they are on the masters' device, raise `UserError`.
        """
        for each in self.optimizers.values():
            each.reload_model_params()

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of all modules. Call this method before the first backward pass of each step."""
        for module in self.modules:
            module.gradients.zero(set_to_none=set_to_none)
        for each in self.optimizers.values():
            each.zero()

    def wait_for_weights(self) -> None:
        """Wait for weights that are being gathered. Call this method before reading weights outside a forward pass."""
        for module in self.modules:
            module.weights.wait()

    @watched
    def state_for_dcp(self) -> dict[str, Any]:
        """Return weights, persistent buffers and optimizer states of this rank for `torch.distributed.checkpoint`. To
        resume, load a checkpoint into this result and call `load_from_dcp`. All ranks call this method.

        Replicated values and shards of a `DTensor` (FSDP2, PyTorch's tensor parallelism) have one key, and can be
        loaded in any layout. Other shards (pipeline stages, Megatron's tensor and expert parallelism, states of `AdamW`
        and `SGD`) have a key for each shard, and can be loaded only with the same parallel degrees.

        Raises:
            UserError: on all ranks. A module has Megatron's optimizer, or a `DTensor` would be pickled.
        """
        return all_or_none(self.topology.host, self._state_for_dcp)

    def _state_for_dcp(self) -> dict[str, Any]:
        for name in (name for name, each in self.optimizers.items() if isinstance(each, MegatronOptimizer)):
            found, expected = "Megatron's optimizer", "one of PyTorch or of this package"
            fix = f"save `optimizer.by_module['{name}']` by Megatron's `dist_checkpointing`, or leave its wrapper out"
            raise UserError.at(f"state of module `{name}`", found=found, expected=expected, fix=fix)
        self.wait_for_weights()
        models = {
            key: {number: chunk.state_dict() for number, chunk in stages.items()}
            for key, stages in self._models.items()
        }
        state = {"models": models, "optimizers": self.state_dict()}
        _require_visible(state)
        return state

    @watched
    def load_from_dcp(self, state: Mapping[str, Any]) -> None:
        """Load `state`, a result of `state_for_dcp` into which a checkpoint has been loaded. All ranks call this."""
        self.wait_for_weights()
        for key, stages in self._models.items():
            for number, chunk in stages.items():
                chunk.load_state_dict(state["models"][key][number])
        self.load_state_dict(state["optimizers"])

    @property
    def _models(self) -> dict[str, dict[str, Any]]:
        """The models of this rank: for each module's checkpoint key, the models by stage number."""
        return {
            dcp_key(*views): dict(zip(map(str, views[0].stages), views[0].chunks, strict=True))
            for views in self._views.values()
        }

    @property
    def _keys(self) -> dict[str, str]:
        """The key of each optimizer in `state_dict`. Sharded states have a separate key on each rank."""
        keys = dict[str, str]()
        for name, optimizer in self.optimizers.items():
            keys[name] = dcp_key(optimizer.module)
            if name in self.sharded and optimizer.module.weights.sharded:
                keys[name] += f".dp{optimizer.module.replicas.rank()}"
        return keys

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the state of each module's optimizer on this rank, with different keys for different shards. The state
        of Megatron's distributed optimizer does not include its shards.
        """
        return {key: self.optimizers[name].state_dict() for name, key in self._keys.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load a `state_dict` of this rank in the same layouts. Raises `UserError` for a state of other modules."""
        if state_dict.keys() != set(self._keys.values()):
            found, expected = ", ".join(state_dict) or "no modules", ", ".join(self._keys.values()) or "none"
            fix = "load what the same rank saved, in the same layouts"
            raise UserError.at("JointOptimizer.load_state_dict", found=found, expected=expected, fix=fix)
        for name, key in self._keys.items():
            self.optimizers[name].load_state_dict(state_dict[key])

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(f'{name}: {type(each).__name__}' for name, each in self.by_module.items())})"


def _require_visible(value: Any, path: str = "state", *, pickled: bool = False) -> None:
    """Check that `value` has no `DTensor` in a place that `torch.distributed.checkpoint` pickles: only one rank's shard
    would be saved. Raises `UserError`.
    """
    if pickled and is_sharded(value):
        because, fix = "it is pickled, and one rank's is loaded by all", "put it in dicts and lists only"
        raise UserError.at(path, found="a DTensor in a tuple or object", expected="a dict", because=because, fix=fix)
    inside = value if isinstance(value, Mapping) else {}
    if isinstance(value, list | tuple | set):
        inside = dict(enumerate(value))
    elif not pickled and not isinstance(value, Mapping | Tensor | type):
        inside = getattr(value, "__dict__", {})
    for key, each in inside.items():
        _require_visible(each, f"{path}.{key}", pickled=pickled or not isinstance(value, Mapping | list))
