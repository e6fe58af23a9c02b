"""The optimizers that a configuration can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer by its name in `optimizer.name`.

    Attributes:
        name: in the configuration.
        moments: names of its tensors per parameter, as in the state of PyTorch's optimizer; with any, it counts
            updates too.
        sharded: whether each rank keeps the state of a share of the elements.
        unused: settings that mean nothing to it.
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
"""Of weights that were trained in no step."""


def optimizer_kind(name: str) -> OptimizerKind:
    """The optimizer of that name, as the configuration or a checkpoint says it. Raises `ValueError`."""
    if name not in (NONE.name, *OPTIMIZERS):
        raise ValueError(f"optimizer.name cannot be {name!r:.80}")
    return NONE if name == NONE.name else OPTIMIZERS[name]
