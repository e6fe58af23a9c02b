"""Settings of optimizers, of their states and of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from megatron_hetero.config.fields import Section, option, unused, wrong


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that `optimizer.name` can select.

    Attributes:
        name: name in the configuration.
        moments: names of the state tensors of each parameter, as in the state of PyTorch's optimizer; an
            optimizer with moments also counts updates.
        sharded: whether each rank stores only a shard of the state.
        unused: settings that have no effect on the optimizer.
    """

    name: str
    moments: tuple[str, ...] = ()
    sharded: bool = False
    unused: tuple[str, ...] = ()


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    kind.name: kind
    for kind in (
        OptimizerKind("adamw", moments=("exp_avg", "exp_avg_sq"), sharded=True),
        OptimizerKind("sgd", unused=("betas", "eps", "weight_decay")),
    )
}
NONE = OptimizerKind("none")
"""The kind recorded in checkpoints of weights that have not been trained."""


def optimizer_kind(name: str) -> OptimizerKind:
    """Return the optimizer called `name` in a configuration or checkpoint. Raises `ValueError` for other names."""
    if name not in (NONE.name, *OPTIMIZERS):
        raise ValueError(f"optimizer.name cannot be {name!r:.80}")
    return NONE if name == NONE.name else OPTIMIZERS[name]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Section `optimizer`: the optimizer, learning rates, weight decay and gradient clipping."""

    name: Literal["adamw", "sgd"] = option("adamw", "AdamW, or plain SGD without momentum and weight decay.")
    lr: float = option(1e-5, "Peak learning rate of modules without an `lr`.", above=0)
    min_lr: float = option(0.0, "Final learning rate of the linear and cosine schedules.", at_least=0)
    lr_projector: float | None = option(
        None, "Peak learning rate of the projectors; min_lr scales with it.", "lr", above=0
    )
    betas: tuple[float, float] = option((0.9, 0.999), "AdamW betas.")
    eps: float = option(1e-8, "AdamW epsilon.", above=0)
    weight_decay: float = option(0.0, "AdamW weight decay; biases and 1-D parameters are exempt.", at_least=0)
    clip_grad: float = option(1.0, "Maximum global gradient norm; 0 disables clipping.", at_least=0)
    schedule: Literal["constant", "linear", "cosine"] = option("cosine", "Learning-rate schedule after warm-up.")
    warmup_iters: int = option(0, "Warm-up steps.", at_least=0)

    def _check(self, section: str) -> None:
        for beta in self.betas:
            if not 0 <= beta < 1:
                fix = "try `--optimizer.betas 0.9 0.999`"
                raise wrong(f"{section}.betas", beta, "two numbers in [0, 1)", "", fix)
        if self.min_lr > self.lr:
            why, fix = "the learning rate decays to it", "lower it, or raise optimizer.lr"
            raise wrong(f"{section}.min_lr", self.min_lr, f"≤ optimizer.lr = {self.lr}", why, fix)
        without_effect = dict.fromkeys(OPTIMIZERS[self.name].unused, "name")
        if self.schedule == "constant":
            without_effect["min_lr"] = "schedule"
        for f in fields(self):
            value, other = getattr(self, f.name), without_effect.get(f.name)
            if other is not None and value != f.default:
                why = f"{section}.{other} is {getattr(self, other)}"
                raise unused(f"{section}.{f.name}", value, why, f"remove it, or change {section}.{other}")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """Section `modules.MODULE.precision`: dtypes of optimizer states and gradients, with bfloat16 weights."""

    master: Literal["float32", "split", "none"] = option(
        "float32",
        "Master weights: float32, split (equal results, 2 bytes less), or none (bfloat16 weights with "
        "stochastic rounding).",
    )
    moments: Literal["float32", "bfloat16", "8bit"] = option(
        "float32", "Moments: float32, bfloat16 with stochastic rounding, or 8 bits with a scale per 256 elements."
    )
    gradients: Literal["float32", "bfloat16"] = option("float32", "Dtype of accumulated and reduced gradients.")


FP32 = PrecisionConfig()
"""The default precision: all states and gradients in fp32."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(Section):
    """Section `modules.MODULE.offload`: what a module stores in host memory."""

    states: bool = option(False, "Keep master weights and moments in host memory; updates stream them.")
    activations: bool = option(
        False,
        "Keep activations in host memory between forward and backward pass; copies overlap with neighboring layers.",
    )
