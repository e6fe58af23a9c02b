"""The rule for gradients (`gradients`) as calls of a training loop: tokens and losses of a step, gradients finished
once and applied once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.distributed.collective import require_equal, together
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.errors import UserError
from megatron_hetero.execution.contract import StepResult
from megatron_hetero.step.gradients import scale_gradients, sum_gradients
from megatron_hetero.step.held import Chunks, held_modules, unreduced
from megatron_hetero.step.module import TrainedModule

Tokens = int | float | Tensor


def finish_gradients(topology: Topology, modules: Mapping[str, Chunks | None], tokens: Tokens) -> None:
    """Make of each rank's gradients those of the mean loss over the tokens of the step, in place. All ranks call it
    once, after the last backward pass of the step and before any optimizer's.

    A parameter without a gradient on this rank counts as zeros there; one that is frozen is left out. Gradients of
    Megatron's `DistributedDataParallel` are in `main_grad`, with its distributed optimizer each rank's own share only.
    The means that FSDP2 and PyTorch's DDP form are corrected to sums. Custom communication hooks are not known here.

    Along `tp` a gradient is summed if its parameter has the attribute `sequence_parallel`, as Megatron's have that are
    used on sharded activations, or is a norm of queries or keys; averaged if it has
    `average_gradients_across_tp_domain`. Copies of an embedding on the first and last stage have `shared_embedding`.

    Args:
        topology: of all modules.
        modules: by name what this rank holds, as it is called: wrapped, if it is. A list for virtual stages.
        tokens: of the whole step over all ranks, the same on all of them: a number, or a tensor [] on the device; with
            zero tokens in it gradients become zero. For what `count_tokens` returns no host waits. In place of tokens,
            whatever losses were summed over.

    Raises:
        UserError: on all ranks. `modules` are not those of a rank, gradients are finished already, `tokens` is a number
            that is not positive or not the same on all ranks, a wrapper reduced over ranks that do not lie along axes
            of the layout, or PyTorch's DDP or FSDP2 did not reduce in the last backward pass.
    """

    def check() -> tuple[tuple[TrainedModule, ...], float | Tensor]:
        held = held_modules(topology, modules)
        require_ready(held, finished=False)
        return held, factor_of(tokens, topology.platform.device)

    held, factor = together(topology.host, check)
    require_equal_tokens(topology, tokens)
    finish(held, factor)


def count_tokens(topology: Topology, module: str, mine: int | Tensor) -> Tensor:
    """The tokens of the whole step from those of each rank, int64 [] on the device. All ranks call it.

    Args:
        topology: of all modules.
        module: whose loss is summed over tokens.
        mine: tokens in this rank's part of the losses. Ranks along `tp` have the same: those of the first count. Of
            stages the last counts; what other ranks, and those without the module, say does not matter.
    """
    number = torch.as_tensor(mine)
    if number.dim() or number.is_floating_point():
        found = f"{number.dtype} of shape {tuple(number.shape)}"
        raise UserError.at("count_tokens", found=found, expected="one integer", fix="give the sum of this rank")
    total: Any = _total(topology, "count_tokens", module, number.long())
    total.counted_version = total._version
    return total


def total_loss(topology: Topology, module: str, mine: float | Tensor | StepResult) -> Tensor:
    """The loss of the whole step from the sums of each rank, fp32 [] on the device. All ranks call it.

    Args:
        topology: of all modules.
        module: whose loss it is.
        mine: what a `Runner` returned, or this rank's sum of that module's losses alone, or of another number. Which
            ranks count is as for `count_tokens`.
    """
    if isinstance(mine, StepResult):
        mine = mine.losses.get(module, 0.0)
    return _total(topology, "total_loss", module, torch.as_tensor(mine, dtype=torch.float32).detach())


def _total(topology: Topology, function: str, module: str, mine: Tensor) -> Tensor:
    """Summed over the ranks of the last stage that are first along `tp`."""
    if module not in topology.layouts:
        known = ", ".join(topology.layouts)
        raise UserError.at(function, found=f"no module `{module}`", expected=f"one of {known}", fix="correct it")
    layout = topology.layouts[module]
    summed = mine.to(topology.platform.device, non_blocking=True).clone()
    place = layout.coordinate(topology.rank) if topology.has(module) else None
    if place is None or place.tp or place.pp != layout.pp - 1:
        summed.zero_()
    dist.all_reduce(summed, group=topology.world)
    return summed


# ------------------------------------------------------------------------------------------ for optimizers


def finish(modules: Iterable[TrainedModule], factor: float | Tensor) -> None:
    """As `finish_gradients`, with the factor for all gradients."""
    sum_gradients(modules)
    scale_gradients(modules, factor)
    note_finished(modules)


@torch.no_grad()
def note_finished(modules: Iterable[TrainedModule]) -> None:
    """Note that gradients are those of the step."""
    for module in modules:
        if (gradient := module.data_parallel.marked) is not None:
            gradient.finished_version, gradient.is_applied = gradient._version, False


@torch.no_grad()
def require_ready(modules: Iterable[TrainedModule], *, finished: bool) -> None:
    """Check that gradients are of this step, and finished or not. Raises `UserError`."""
    for module in modules:
        gradient, problem, because, fix = _finished_gradient(module), "", "", ""
        if gradient is not None and gradient.is_applied:
            problem = "they are those of the step before, which has applied them"
            because = "gradients of this step are added to them"
            fix = "call `zero_grad()` of this optimizer after each step; zeros that others write are not seen"
        elif finished and module.trained and gradient is None:
            problem, because = "they are not finished", "each rank has those of its own tokens"
            fix = "give `tokens`, or call `finish_gradients` before"
        # Buffers live on, and may have been zeroed since.
        elif (
            not finished
            and gradient is not None
            and not (module.data_parallel.lives_on and gradient._version != gradient.finished_version)
        ):
            problem, because = "they are finished already", "they would be summed and divided again"
            fix = (
                "call `finish_gradients` and then `step(tokens=None)`, or `step(tokens=...)` alone, once after the "
                "last backward pass of a step; set gradients to None before the next"
            )
        elif not finished and (wrapper := unreduced(module)):
            problem = (
                f"{wrapper} has not averaged them: its last pass was inside `no_sync()`, `no_grad()` or "
                "`set_requires_gradient_sync(False)`"
            )
            because = "they are taken to be means over its ranks"
            fix = "leave the last micro-batch of each step out of these, and evaluate after the step"
        if problem:
            raise UserError.at(f"gradients of `{module.name}`", problem=problem, because=because, fix=fix)


@torch.no_grad()
def note_applied(modules: Iterable[TrainedModule]) -> None:
    """Note that an optimizer has applied the gradients."""
    for module in modules:
        if (gradient := _finished_gradient(module)) is not None:
            gradient.is_applied = True


@torch.no_grad()
def forget_finished(modules: Iterable[TrainedModule]) -> None:
    """Forget that gradients were finished, as they are zeroed."""
    for module in modules:
        if (gradient := _finished_gradient(module)) is not None:
            del gradient.finished_version


def require_equal_tokens(topology: Topology, tokens: Tokens | None) -> None:
    """Check that they are the same on all ranks. The host waits for a tensor that is not as `count_tokens` returned it.
    Raises `UserError` on all ranks.
    """
    counted = isinstance(tokens, Tensor) and getattr(tokens, "counted_version", None) == tokens._version
    number = None if counted or tokens is None else float(tokens)
    shown = "counted" if counted else "None" if number is None else f"{number:.17g}"
    fix = "give the tokens of the whole step, which `count_tokens` adds up"
    require_equal(topology.host, "gradients", {"tokens": shown}, fix)
    if number is not None and not 0 <= number < math.inf:
        raise UserError.at("gradients: tokens", found=shown, expected="a finite number", fix=fix)


def _finished_gradient(module: TrainedModule) -> Any:
    """The gradient that has `finished_version`; None if the gradients have not been finished."""
    gradient = module.data_parallel.marked
    return gradient if hasattr(gradient, "finished_version") else None


def factor_of(tokens: Tokens, device: torch.device) -> float | Tensor:
    """What sums over tokens are multiplied by. Raises `UserError` if a number is not positive."""
    if isinstance(tokens, Tensor):
        # Without tokens all gradients are zero, and stay so.
        number = tokens.detach().to(device, torch.float32, non_blocking=True).reshape(())
        return torch.where(number > 0, number.reciprocal(), torch.zeros_like(number))
    if not tokens > 0:
        fix = "skip the step, or count the tokens of all ranks"
        raise UserError.at("tokens", found=str(tokens), expected="those of the whole step, 1 or more", fix=fix)
    return 1.0 / tokens
