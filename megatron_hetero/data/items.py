"""What records show in addition to text: items of a modality, of sizes that only the encoder's family can read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

Modality = Literal["image", "video", "audio"]
"""What the items of an encoder are."""

Size = Hashable
"""The size of an item: a value whose type is its encoder family's, such as rows and columns of an image."""
