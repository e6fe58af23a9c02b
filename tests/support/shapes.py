"""Shapes of models in folders, and how many parameters they have."""

from __future__ import annotations

from math import prod
from pathlib import Path

from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes


def shapes_of_folder(folder: Path) -> ModelShapes:
    """The shapes of the model in `folder`. Raises `UserError`."""
    return ModelShapes.of(ModelFolders.read(folder))


def parameter_count(shapes: ModelShapes) -> int:
    """Parameters of the whole model."""
    return sum(prod(shape) for shape in stored_shapes(shapes).values())
