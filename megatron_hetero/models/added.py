"""Interface of tensors, such as adapters, that a module has in addition to the tensors of its folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatron_hetero.hf.weight_map import TensorShapes, WeightMap
from megatron_hetero.models.layers.parts import Part, Site

# Importing layers takes seconds, so they are imported only where modules are built.
if TYPE_CHECKING:
    from megatron_hetero.models.layers.layer import Layer


class Added(Protocol):
    """Protocol of hashable values that describe a module's tensors in addition to the tensors of its folder."""

    @property
    def freezes(self) -> frozenset[str]:
        """Tensors of folders that the added tensors freeze, unless `model.train` names them."""
        ...

    @property
    def replaces(self) -> frozenset[str]:
        """Tensors of the model's folder whose initial values come from `folder` instead."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder that provides initial values, if any."""
        ...

    def tensors(self, stored: TensorShapes) -> TensorShapes:
        """Return the shapes of the added tensors of a module whose folder has `stored`, by name in its architecture."""
        ...

    def weight_map(self, weights: WeightMap, prefix: str) -> WeightMap:
        """Return the parameters of a stage in a view, including added ones, in the order of the torch module.
        `weights`: the parameters without added ones; `prefix`: prefix of all stored tensors.
        """
        ...

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the initial values of a whole added or replaced tensor. `name`: its name with the module's prefix."""
        ...

    def elements(self, stored: str, part: Part | Layer) -> int:
        """Return the number of elements of added matrices by which each token in the layer or end `part` is multiplied.
        `stored`: prefix of the tensors of `part`.
        """
        ...

    def attach(self, module: torch.nn.Module, name: str, weights: WeightMap, site: Site) -> None:
        """Add the parameters to `module`, the torch module of the layer or end `name`. `weights`: its parameters on
        this rank by name in the whole module, as slices of tensors of the architecture.
        """
        ...


class FirstValues(Mapping[str, Tensor]):
    """Mapping from names to initial values of tensors with these `shapes`, computed when a rank reads them."""

    def __init__(self, added: Added, shapes: TensorShapes, seed: int):
        self._shapes = shapes
        # Slices of one parameter are read from several tensors in turn, so several tensors are cached.
        self._values = lru_cache(8)(lambda name: added.initial(name, shapes[name], generator_of(seed, name)))

    def __getitem__(self, name: str) -> Tensor:
        return self._values(name)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return a random generator for the tensor `name`, seeded equally on every rank and in every layout."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
