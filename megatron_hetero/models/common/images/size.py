"""The size of an image."""

from __future__ import annotations

from typing import NamedTuple


class ImageSize(NamedTuple):
    """In patches, before merging. An image has one frame."""

    frames: int
    rows: int
    columns: int
