"""Tensors beside those that folders of a model have, such as adapters."""

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
    """Tensors beside those that a module's folder has, and their parameters. A hashable value."""

    @property
    def freezes(self) -> frozenset[str]:
        """Tensors of folders that do not train beside these, unless `model.train` names them."""
        ...

    @property
    def replaces(self) -> frozenset[str]:
        """Tensors of folders that have other first values."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder that first values come from, if one does."""
        ...

    def tensors(self, stored: TensorShapes) -> TensorShapes:
        """Return the tensors beside `stored` ones. Names are those of the module's architecture."""
        ...

    def weight_map(self, weights: WeightMap, prefix: str) -> WeightMap:
        """Return the parameters of a stage in a view with those beside them, in the order of the torch module, given
        the former. `prefix`: of all tensors.
        """
        ...

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the first values of a whole tensor, added or replaced. `name`: with the module's prefix."""
        ...

    def elements(self, stored: str, part: Part | Layer) -> int:
        """Return the elements of added matrices that a token of a layer or end is multiplied with. `stored`: prefix of
        its tensors.
        """
        ...

    def attach(self, module: torch.nn.Module, name: str, weights: WeightMap, site: Site) -> None:
        """Add the parameters to the torch module of a layer or end of that `name`. `weights`: its own on this rank,
        with names in the whole module and in the architecture.
        """
        ...


class FirstValues(Mapping[str, Tensor]):
    """First values of tensors of these `shapes`, computed when they are read: a rank reads those of its parameters."""

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
