"""Opens the weights of a model's own modules, from one folder or two, with a projector that no folder gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.models.common.drawn import STD
from megatron_hetero.models.common.parameters import TIED_COPIES
from megatron_hetero.models.family import EncoderShape
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    ENCODER,
    canonical_name,
    canonical_name_of,
    encoder_shapes,
    folder_shapes,
    prefix_of,
    projector_shapes,
)
from megatron_hetero.names import TEXT, VISION


def fresh_projector(shape: EncoderShape, seed: int) -> dict[str, Tensor]:
    """A new projector by stored name, fp32: normal weights, biases of 0, a norm of ones.

    Whole tensors, drawn by a generator of their own, so that they are the same for every rank and layout.
    """
    generator = torch.Generator().manual_seed(seed)
    return {name: _drawn(name, size, generator) for name, size in projector_shapes(VISION, shape).items()}


def _drawn(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(size) > 1:
        return torch.empty(size).normal_(std=STD, generator=generator)
    return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)


def open_modules(folders: ModelFolders, shapes: ModelShapes, seed: int) -> dict[str, StoredWeights]:
    """The stored weights of `vision` and `text`, opened and checked. Raises `UserError`."""
    expected = folder_shapes(shapes)
    of_vision = {name: shape for name, shape in expected.items() if name.startswith(ENCODER)}
    of_text = {name: shape for name, shape in expected.items() if name not in of_vision}
    anew = frozenset(projector_shapes(VISION, shapes.vision) if folders.fresh_projector else ())
    stored = {name: shape for name, shape in of_vision.items() if name not in anew}
    text = StoredWeights.open(folders.text, canonical_name)
    vision = text if folders.vision == folders.text else StoredWeights.open(folders.vision, canonical_name)
    copies = frozenset(TIED_COPIES) if shapes.text.tied else frozenset()
    if vision is text:
        text.require(stored | of_text, copies | anew)
    else:  # Each folder may hold a whole model: what the other one gives is not wanted.
        text.require(of_text, copies | _beginning(text, ENCODER))
        vision.require(stored, frozenset(vision.shapes) - _beginning(vision, ENCODER) | anew)
    # Last: by now what is stored has shown that the sizes are those of a model.
    fresh = fresh_projector(shapes.vision, seed) if anew else {}
    return {VISION: replace(vision, fresh=fresh), TEXT: text}


def open_encoders(further: Mapping[str, Path], shapes: ModelShapes) -> dict[str, StoredWeights]:
    """The stored weights of `further` encoders, opened and checked. Raises `UserError`."""
    opened = {}
    for name, folder in further.items():
        weights = opened[name] = StoredWeights.open(folder, partial(canonical_name_of, name))
        # The folder may hold a whole model: its language model is not wanted.
        weights.require(
            encoder_shapes(name, shapes.encoders[name]),
            frozenset(weights.shapes) - _beginning(weights, prefix_of(name)),
        )
    return opened


def _beginning(weights: StoredWeights, prefix: str) -> frozenset[str]:
    return frozenset(name for name in weights.shapes if name.startswith(prefix))
