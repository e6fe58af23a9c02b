"""Weights that no folder of a model has: of new projectors, and of tensors beside stored ones, such as adapters."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_hetero.hf.weight_map import TensorShapes, WeightMap
from megatron_hetero.models.layers.parts import Site

STD = 0.02
"""Standard deviation of new weights, the `initializer_range` of the families."""


class Added(Protocol):
    """Tensors beside those that a module's folder has, and their parameters. A hashable value."""

    def tensors(self, stored: TensorShapes) -> TensorShapes:
        """Return the tensors beside `stored` ones. Names are those of the module's architecture."""
        ...

    def weight_map(self, weights: WeightMap, prefix: str) -> WeightMap:
        """Return the parameters of a stage in a view with those beside them, in the order of the torch module, given
        the former. `prefix`: of all tensors.
        """
        ...

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the first values of a whole added tensor, fp32."""
        ...

    def attach(self, model: Any, site: Site) -> None:
        """Add the parameters to the `ModuleStage` `model`."""
        ...


def initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return the first values of a part of a projector, fp32: normal weights, biases of 0, a norm of ones."""
    if len(shape) > 1:
        return torch.empty(shape).normal_(std=STD, generator=generator)
    return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the generator of a tensor of this name, the same on every rank and in every layout."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
