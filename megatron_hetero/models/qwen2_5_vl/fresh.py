"""Opens the weights of a model's own modules, from one folder or two, with a projector that no folder gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.models.qwen2_5_vl.folders import ModelFolders
from megatron_hetero.models.qwen2_5_vl.shapes import Qwen25VLShapes, VisionShape
from megatron_hetero.models.qwen2_5_vl.weights import (
    TIED_COPIES,
    canonical_name,
    canonical_name_of,
    encoder_shapes,
    folder_shapes,
    prefix_of,
)
from megatron_hetero.names import TEXT, VISION

ENCODER, PROJECTOR = "visual.", "visual.merger."
"""What names of the encoder's tensors begin with, and of those its projector's."""
STD = 0.02
"""Of weights: `initializer_range` of Qwen2.5-VL."""


def fresh_projector(shape: VisionShape, seed: int) -> dict[str, Tensor]:
    """A new projector by stored name, fp32: normal weights, biases of 0, a norm of ones.

    Whole tensors, drawn by a generator of their own, so that they are the same for every rank and layout.
    """
    generator = torch.Generator().manual_seed(seed)
    return {name: _drawn(name, size, generator) for name, size in _projector_shapes(shape).items()}


def _projector_shapes(shape: VisionShape) -> dict[str, tuple[int, ...]]:
    return {name: size for name, size in encoder_shapes(VISION, shape).items() if name.startswith(PROJECTOR)}


def _drawn(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(size) > 1:
        return torch.empty(size).normal_(std=STD, generator=generator)
    return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)


def open_modules(folders: ModelFolders, shapes: Qwen25VLShapes, seed: int) -> dict[str, StoredWeights]:
    """The stored weights of `vision` and `text`, opened and checked. Raises `UserError`."""
    expected = folder_shapes(shapes)
    of_vision = {name: shape for name, shape in expected.items() if name.startswith(ENCODER)}
    of_text = {name: shape for name, shape in expected.items() if name not in of_vision}
    anew = frozenset(_projector_shapes(shapes.vision) if folders.fresh_projector else ())
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


def open_encoders(further: Mapping[str, Path], shapes: Qwen25VLShapes) -> dict[str, StoredWeights]:
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
