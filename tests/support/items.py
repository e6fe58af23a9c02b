"""Pictures as records have them."""

from __future__ import annotations

from megatron_hetero.data.validation import IMAGES, ItemRef
from megatron_hetero.models.items.types import Piece, Size

[IMAGE] = IMAGES
"""The field of pictures for the encoder `vision`."""


def pictures(*files: str) -> tuple[ItemRef, ...]:
    """Items of a record."""
    return tuple(ItemRef(IMAGE, file) for file in files)


def whole(size: Size) -> list[Piece]:
    """The pieces of a picture of that size."""
    return [Piece(0, size)]
