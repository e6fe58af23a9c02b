"""Shapes of models in folders, and how many parameters they have."""

from __future__ import annotations

from math import prod
from pathlib import Path

from megatron_hetero.models.families.qwen2_5_vl.shapes import TextShape, VisionShape
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes


def shapes_of_folder(folder: Path) -> ModelShapes:
    """The shapes of the model in `folder`. Raises `UserError`."""
    return ModelShapes.of(ModelFolders.read(folder))


def parameter_count(shapes: ModelShapes) -> int:
    """Parameters of the whole model."""
    return sum(prod(shape) for shape in stored_shapes(shapes).values())


VISION_7B = VisionShape(
    layers=32,
    hidden=1280,
    heads=16,
    ffn=3420,
    channels=3,
    patch=14,
    temporal_patch=2,
    merge=2,
    window=4,
    full_layers=frozenset({7, 15, 23, 31}),
    out_hidden=3584,
    rope_theta=10000.0,
)
"""Published, of Qwen2.5-VL 7B."""


def shapes_of(layers: int, tied: bool) -> ModelShapes:
    vision = VisionShape(layers, 8, 2, 6, 3, 2, 1, 2, 8, 1e4, window=4, full_layers=frozenset({0}))
    return ModelShapes({"vision": vision}, TextShape(layers, 8, 2, 1, 4, 6, 7, tied, 1e4, (1, 1), 1e-6))
