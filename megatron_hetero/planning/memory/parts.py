"""Modules as ranks run them, and their parts: what is measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

from megatron_hetero.layout.views import Fold
from megatron_hetero.models.common.recompute.policy import Recompute
from megatron_hetero.names import ROWS, TEXT


class Part(NamedTuple):
    """A part of a module; a merger is that of a layer before the last."""

    kind: Literal["first", "layer", "merger", "last"]
    layer: int = 0


FIRST, LAST = Part("first"), Part("last")


@dataclass(frozen=True)
class MeasuredModule:
    """A module as a rank runs it.

    Attributes:
        name: of the module.
        shape: of the whole module, with its `architecture`.
        tp: degree.
        sp: degree.
        cp: degree.
        sequence_parallel: whether activations between layers are split over tp.
        dtype: of weights and activations.
        recompute: what is computed again.
        frozen: the stored tensors that do not train, as the architecture names them.
        trains: whether layers pass gradients on: always in the text module, for the modules before it.
        parts: in which linear layers exchange over tp.
        compiled: whether layers are.
        gpu: whether a GPU computes it, where attention takes segments in any order, in half precision.
        folds: the further views of its layout.
    """

    name: str
    shape: Any
    tp: int
    sp: int
    cp: int
    sequence_parallel: bool
    dtype: torch.dtype
    recompute: Recompute
    frozen: frozenset[str] = frozenset()
    trains: bool = True
    parts: int = 1
    compiled: bool = False
    gpu: bool = True
    folds: tuple[Fold, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether it is the text module."""
        return self.name == TEXT


def is_merged(module: MeasuredModule, layer: int) -> bool:
    """Whether a merger follows a layer, other than that behind the last."""
    return not module.is_text and layer in (at for output, at in module.shape.outputs.items() if output != ROWS)


def is_windowed(module: MeasuredModule, layer: int) -> bool:
    """Whether a layer attends inside windows."""
    return module.shape.architecture.layers[layer].attention.windowed


def first_alike(module: MeasuredModule, layer: int) -> int:
    """The first layer that is like it: of its kind, merged, and frozen in the same tensors."""
    return _first_alike(module)[layer]


@lru_cache(maxsize=256)
def _first_alike(module: MeasuredModule) -> tuple[int, ...]:
    architecture, first = module.shape.architecture, dict[Any, int]()
    found = []
    for n, layer in enumerate(architecture.layers):
        stored = f"{architecture.stored}{n}."
        frozen = frozenset(name for name in layer.tensors() if stored + name in module.frozen)
        found.append(first.setdefault((layer, is_merged(module, n), frozen), n))
    return tuple(found)
