"""Modules as ranks run them, and their parts: what is measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from megatron_hetero.models.common.recompute.policy import Recompute
from megatron_hetero.names import ROWS, TEXT


class Part(NamedTuple):
    """A part of a module; a merger is that of a layer before the last."""

    kind: Literal["first", "layer", "merger", "last"]
    layer: int = 0


FIRST, LAST = Part("first"), Part("last")


@dataclass(frozen=True)
class MeasuredModule:
    """A module as a rank runs it. `tp`, `sp`, `cp`: its degrees. `freeze`: the groups of parameters that do not train.
    `parts`: in which linear layers exchange over tp. `gpu`: whether a GPU computes it, where attention takes segments
    in any order, in half precision.
    """

    name: str
    shape: Any
    tp: int
    sp: int
    cp: int
    sequence_parallel: bool
    dtype: torch.dtype
    freeze: frozenset[str]
    recompute: Recompute
    parts: int = 1
    compiled: bool = False
    gpu: bool = True

    @property
    def is_text(self) -> bool:
        """Whether it is the text module."""
        return self.name == TEXT

    @property
    def trains(self) -> bool:
        """Whether layers pass gradients on: always in the text module, for the modules before it."""
        return self.is_text or self.name not in self.freeze


def is_merged(module: MeasuredModule, layer: int) -> bool:
    """Whether a merger follows a layer, other than that behind the last."""
    return not module.is_text and layer in (at for output, at in module.shape.outputs.items() if output != ROWS)


def is_windowed(module: MeasuredModule, layer: int) -> bool:
    """Whether a layer attends inside windows."""
    return not module.is_text and layer not in module.shape.full_layers


def first_alike(module: MeasuredModule, layer: int) -> int:
    """The first layer that is like it."""
    of_shape = [(is_windowed(module, n), is_merged(module, n)) for n in range(layer + 1)]
    return of_shape.index(of_shape[layer])
