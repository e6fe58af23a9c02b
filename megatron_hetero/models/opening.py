"""Opens the weights of a model's own modules, from one folder or two, with a projector that no folder gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    canonical_name_of,
    drawn_tensors,
    encoder_shapes,
    folder_shapes,
    prefix_of,
    projector_shapes,
    stored_shapes,
)
from megatron_hetero.names import TEXT, VISION

STD = 0.02
"""Standard deviation of new weights: `initializer_range` of the families."""


def fresh_projector(shapes: ModelShapes, seed: int) -> dict[str, Tensor]:
    """A new projector by stored name, fp32: normal weights, biases of 0, a norm of ones.

    Whole tensors, drawn by a generator of their own, so that they are the same for every rank and layout.
    """
    generator = torch.Generator().manual_seed(seed)
    return {name: _drawn(name, size, generator) for name, size in projector_shapes(VISION, shapes).items()}


def _drawn(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(size) > 1:
        return torch.empty(size).normal_(std=STD, generator=generator)
    return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)


def open_modules(folders: ModelFolders, shapes: ModelShapes, seed: int) -> dict[str, StoredWeights]:
    """The stored weights of `vision` and `text`, opened and checked. Raises `UserError`."""
    values = {name: _first_values(name, shapes, seed) for name in (VISION, TEXT)}
    expected = {n: size for n, size in folder_shapes(shapes).items() if not any(n in of for of in values.values())}
    of_vision, namespace = encoder_shapes(VISION, shapes), prefix_of(VISION, shapes)
    of_text = {name: shape for name, shape in expected.items() if name not in of_vision}
    anew = frozenset(projector_shapes(VISION, shapes) if folders.fresh_projector else ())
    stored = {name: shape for name, shape in of_vision.items() if name in expected and name not in anew}
    text = StoredWeights.open(folders.text, family_of(shapes.text.family).canonical_name)
    own = folders.vision == folders.text
    vision = text if own else StoredWeights.open(folders.vision, family_of(shapes.vision.family).canonical_name)
    copies = frozenset(shapes.text.architecture.stored_twice)
    if vision is text:
        text.require(stored | of_text, copies | anew)
    else:  # Each folder may hold a whole model: what the other one gives is not wanted.
        text.require(of_text, copies | _beginning(text, namespace))
        vision.require(stored, frozenset(vision.shapes) - _beginning(vision, namespace) | anew)
    # Last: by now what is stored has shown that the sizes are those of a model.
    fresh = fresh_projector(shapes, seed) if anew else {}
    return {VISION: replace(vision, fresh=fresh | values[VISION]), TEXT: replace(text, fresh=values[TEXT])}


def _first_values(module: str, shapes: ModelShapes, seed: int) -> dict[str, Tensor]:
    """Whole tensors of a module that no folder stores: each by a generator of its own."""
    found, sizes = {}, stored_shapes(shapes)
    for name, each in drawn_tensors(module, shapes).items():
        key = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        found[name] = each.draw(sizes[name], torch.Generator().manual_seed(int.from_bytes(key, "little")))
    return found


def open_encoders(further: Mapping[str, Path], shapes: ModelShapes, seed: int) -> dict[str, StoredWeights]:
    """The stored weights of `further` encoders, opened and checked. Raises `UserError`."""
    opened = {}
    for name, folder in further.items():
        weights = StoredWeights.open(folder, partial(canonical_name_of, name, shapes))
        fresh = _first_values(name, shapes, seed)
        # The folder may hold a whole model: its language model is not wanted.
        weights.require(
            {each: size for each, size in encoder_shapes(name, shapes).items() if each not in fresh},
            frozenset(weights.shapes) - _beginning(weights, prefix_of(name, shapes)),
        )
        opened[name] = replace(weights, fresh=fresh)
    return opened


def _beginning(weights: StoredWeights, prefix: str) -> frozenset[str]:
    return frozenset(name for name in weights.shapes if name.startswith(prefix))
