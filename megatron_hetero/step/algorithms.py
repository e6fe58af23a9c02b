"""Settings of the optimizers of this package, and the learning-rate schedule of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.optimizers import OPTIMIZERS, OptimizerKind


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The settings that all optimizers of this package share. `AdamW` documents each of them."""

    lr: float | Callable[[str], float] = 1e-3
    master: Literal["float32", "split", "none"] = "float32"
    gradients: Literal["float32", "bfloat16"] = "float32"
    zero: Literal[1, 2, 3] = 1
    offload: bool = False
    seed: int = 0

    def __post_init__(self: Any) -> None:
        """Check the values of all settings. Raises `UserError`."""
        kinds, lr = get_type_hints(type(self)), 0.0 if callable(self.lr) else self.lr
        expected = {name: get_args(kind) for name, kind in kinds.items() if get_origin(kind) is Literal}
        problems = {
            name: f"one of {', '.join(map(repr, known))}"
            for name, known in expected.items()
            if getattr(self, name) not in known
        }
        for name, value in {"lr": lr, "eps": self.eps, "weight_decay": self.weight_decay}.items():
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                problems[name] = "a finite number of 0 or more"
        if not (len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)):
            problems["betas"] = "two numbers in [0, 1)"
        for name, possible in problems.items():
            where, found = f"{type(self).__name__}: {name}", repr(getattr(self, name))
            raise UserError.at(where, found=found, expected=possible, fix="correct it")


@dataclass(frozen=True, kw_only=True)
class AdamW(_Settings):
    """Settings of AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), with states sharded over a module's ranks.

    Attributes:
        lr: learning rate, or a function from a parameter's name to its learning rate.
        betas: decay rates of the first and second moment.
        eps: a number that is added to the root of the second moment.
        weight_decay: weight decay of parameters of two or more dimensions; biases and norms are exempt.
        master: format of the masters of bfloat16 weights: "float32", copies; "split", the lower 16 bits of the same
            fp32 masters; "none", no masters, but stochastic rounding.
        moments: format of the moments; "8bit" stores one scale for each 256 elements.
        gradients: dtype in which gradients are accumulated over micro-batches and summed over ranks.
        zero: ZeRO stage: 1, or 2 or 3 for a model with `units()` (docs/library.md).
        offload: whether masters and moments are in host memory.
        seed: seed of stochastic rounding.

    Raises:
        UserError: a setting is out of range.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    moments: Literal["float32", "bfloat16", "8bit"] = "float32"

    kind: ClassVar[OptimizerKind] = OPTIMIZERS["adamw"]


@dataclass(frozen=True, kw_only=True)
class SGD(_Settings):
    """Settings of plain SGD, w -= lr * g, replicated on all ranks of a module. `AdamW` documents the attributes."""

    kind: ClassVar[OptimizerKind] = OPTIMIZERS["sgd"]
    betas: ClassVar[tuple[float, float]] = (0.0, 0.0)
    eps: ClassVar[float] = 0.0
    weight_decay: ClassVar[float] = 0.0
    moments: ClassVar[Literal["float32"]] = "float32"


Algorithm = AdamW | SGD


def learning_rate(
    step: int,
    *,
    peak: float,
    minimum: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup: int,
    total: int,
) -> float:
    """Return the learning rate of a step, counted from 1.

    The rate rises linearly from ``peak / warmup`` at step 1 to `peak` at step `warmup`, which may be 0. Then it is
    constant, or decays linearly or along a half cosine (SGDR, arXiv 1608.03983, without restarts) to `minimum` at step
    `total`, and is constant from there on.
    """
    assert step >= 1, f"steps count from 1, not {step}"
    if step <= warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    # Without warm-up, the peak would be at step 0: step 1 is already lower, and step `total` reaches the minimum.
    progress = min(1.0, (step - warmup) / (total - warmup)) if total > warmup else 1.0
    share = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return minimum + (peak - minimum) * share
