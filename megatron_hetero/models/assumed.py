"""The sample that a plan assumes, which is all that is known of the data before any is read.

A sample is the rows of its items, encoder by encoder, then its text, of which the last tokens are supervised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_hetero.config.schema import PlanConfig
from megatron_hetero.models.family import EncoderShape
from megatron_hetero.models.items.types import ItemType, Size
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes


@dataclass(frozen=True)
class AssumedSample:
    """By encoder, `sizes` of the pieces of the sample's items and their `rows`. `tokens`: of the sample, those of rows
    included; `supervised`: tokens that the loss counts.
    """

    sizes: Mapping[str, tuple[Size, ...]]
    rows: Mapping[str, int]
    tokens: int
    supervised: int

    @property
    def text(self) -> int:
        """Tokens of the sample, those of rows excluded."""
        return self.tokens - sum(self.rows.values())

    def positions(self, encoder: str) -> np.ndarray:
        """Where the encoder's rows go in the sample, int64."""
        names = list(self.rows)
        first = sum(self.rows[name] for name in names[: names.index(encoder)])
        return np.arange(first, first + self.rows[encoder])

    def fitting(self, tokens: int, patches: int | None, shapes: ModelShapes) -> int:
        """How many such samples make a micro-batch of so many tokens, and patches for each encoder (None: any number);
        at least 1.
        """
        most = [tokens // self.tokens]
        if patches is not None:
            most += [patches // (rows * shapes.encoders[name].unit) for name, rows in self.rows.items() if rows]
        return max(1, min(most))


def assumed_sizes(plan: PlanConfig, shapes: ModelShapes) -> dict[str, Size]:
    """By encoder the size of its pieces."""
    return {name: item_type(shape).assumed(shape, plan) for name, shape in shapes.encoders.items()}


def item_type(shape: EncoderShape) -> ItemType:
    """The type of the items that section `plan` describes."""
    return family_of(shape.family).items[0]


def assumed_sample(plan: PlanConfig, shapes: ModelShapes) -> AssumedSample:
    """The sample that section `plan` describes, for a model of these shapes."""
    of_piece = assumed_sizes(plan, shapes)
    sizes = {name: (size,) * plan.images for name, size in of_piece.items()}
    rows = {name: shapes.encoders[name].rows(size) * plan.images for name, size in of_piece.items()}
    tokens = plan.tokens + sum(rows.values())
    return AssumedSample(sizes, rows, tokens, min(tokens - 1, round(plan.supervised * plan.tokens)))


def lengthened(plan: PlanConfig, tokens: int, shapes: ModelShapes) -> PlanConfig:
    """`plan` with as much more text that its sample has `tokens`, if it has fewer."""
    missing = tokens - assumed_sample(plan, shapes).tokens
    return replace(plan, tokens=plan.tokens + missing) if missing > 0 else plan
