"""What modules and their parts are called: in flags, records, layouts and messages."""

from __future__ import annotations

import re

VISION, TEXT = "vision", "text"
"""The modules of a vision-language model's own folder. Further encoders have names of their own."""

ROWS, HIDDEN = "rows", "hidden"
"""What pipeline stages give, where they give several things: the rows that replace embeddings, and hidden states."""

ENCODER_NAME = re.compile(r"[a-z][a-z0-9_]*")
TAKEN = frozenset(
    {VISION, TEXT, "projector", "image", "images", "video", "videos", "conversations", "id", "boundary", "pipeline"}
    | {"model", "visual", "lm_head"}
)
"""What no further encoder can be called: it means something else in flags, records, metrics or tensors' names."""


def parts_of(module: str) -> tuple[str, ...]:
    """The parts of a module that can be frozen: of an encoder itself and its projector."""
    if module == TEXT:
        return (TEXT,)
    return module, "projector" if module == VISION else f"{module}_projector"


def is_pattern(entry: str) -> bool:
    """Whether an entry of `model.freeze` is a pattern over names of stored tensors, and not a part."""
    return any(mark in entry for mark in ".*?[")
