"""Settings of the optimizers of this package, and the learning rates of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.optimizers import OPTIMIZERS, OptimizerKind


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The settings that all optimizers have, see `AdamW`."""

    lr: float | Callable[[str], float] = 1e-3
    master: Literal["float32", "split", "none"] = "float32"
    gradients: Literal["float32", "bfloat16"] = "float32"
    zero: Literal[1, 2, 3] = 1
    offload: bool = False
    seed: int = 0

    def __post_init__(self: Any) -> None:
        """Check the values. Raises `UserError`."""
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
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with states that are sharded over the ranks of a module.

    Attributes:
        lr: learning rate, or a function from the name of a parameter to it.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: for parameters of two or more dims; biases and norms are exempt.
        master: masters of bfloat16 weights: fp32 copies; "split", the same in a 16-bit remainder; "none", stochastic
            rounding.
        moments: format of the moments; "8bit" has a scale per 256 elements.
        gradients: dtype in which gradients are accumulated over micro-batches and summed over ranks.
        zero: ZeRO stage: 1, or with `units()` of the model (docs/library.md) 2 or 3.
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
    """Plain SGD, w -= lr * g, replicated. For the attributes see `AdamW`."""

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
    """The learning rate of a step, counted from 1.

    It rises linearly from ``peak / warmup`` at step 1 to `peak` at step `warmup`, which may be 0. Then it is constant,
    or falls along a line or half a cosine wave (SGDR, arXiv 1608.03983, without restarts) to `minimum` at step `total`
    and stays there.
    """
    assert step >= 1, f"steps count from 1, not {step}"
    if step <= warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    # Without warm-up, step 0 would be the peak: the first step already falls, and the last reaches the minimum.
    progress = min(1.0, (step - warmup) / (total - warmup)) if total > warmup else 1.0
    share = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return minimum + (peak - minimum) * share
