"""Tensors that are added to those in the folders of a model, such as adapters."""

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

# Imported where modules are built, as it takes seconds.
if TYPE_CHECKING:
    from megatron_hetero.models.layers.layer import Layer


class Added(Protocol):
    """Tensors that are added to those in a module's folder, and their parameters. A hashable value."""

    @property
    def freezes(self) -> frozenset[str]:
        """Tensors of folders that do not train beside the added ones unless `model.train` names them."""
        ...

    @property
    def replaces(self) -> frozenset[str]:
        """Tensors of folders whose initial values come from elsewhere."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder that provides initial values, if any."""
        ...

    def tensors(self, stored: TensorShapes) -> TensorShapes:
        """Return the tensors to add to the `stored` ones, with the names of the module's architecture."""
        ...

    def weight_map(self, weights: WeightMap, prefix: str) -> WeightMap:
        """Return the parameters of a stage in a view including the added ones, in the order of the torch module.
        `weights`: the others; `prefix`: prefix of all stored tensors.
        """
        ...

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the initial values of a whole tensor, added or replaced. `name`: with the module's prefix."""
        ...

    def elements(self, stored: str, part: Part | Layer) -> int:
        """Return the elements of added matrices that each token in a layer or end is multiplied by. `stored`: prefix of
        its tensors.
        """
        ...

    def attach(self, module: torch.nn.Module, name: str, weights: WeightMap, site: Site) -> None:
        """Add the parameters to the torch module of the layer or end `name`. `weights`: its parameters on this rank,
        with their names in the whole module and in the architecture.
        """
        ...


class FirstValues(Mapping[str, Tensor]):
    """Initial values of tensors of these `shapes`, computed when a rank reads them."""

    def __init__(self, added: Added, shapes: TensorShapes, seed: int):
        self._shapes = shapes
        # Slices of the tensors of one parameter are read in turn.
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
    """Return the generator of a tensor of this name, the same on every rank and in every layout."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
