"""Sizes of images as arrays, as `transformers` takes them, and rows of a plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_hetero.boundary.routes import DirectionPlan
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.models.items.pictures import ImageSize


def grids(source: TokenizedSample) -> np.ndarray:
    """Frames, rows and columns of patches of each image: int64 [images, 3]."""
    assert all(isinstance(size, ImageSize) for size in source.sizes)
    images: Any = source.sizes
    return np.array(images, np.int64).reshape(-1, 3)


def sent_rows(plan: DirectionPlan[Any]) -> int:
    """Rows sent to other ranks."""
    return sum(sum(exchange.send_counts) for exchange in plan.exchanges)


def received_rows(plan: DirectionPlan[Any]) -> int:
    """Rows received from other ranks."""
    return sum(sum(exchange.receive_counts) for exchange in plan.exchanges)
