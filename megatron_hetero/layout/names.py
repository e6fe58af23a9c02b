"""Names of modules, of their parts, and of what leaves their stages."""

from __future__ import annotations

TEXT = "text"
"""The module of the language model. Encoders have the names that their family, or the user, gives them."""
VISION = "vision"

ROWS, HIDDEN = "rows", "hidden"
"""Outputs of pipeline stages with several outputs: rows that replace embeddings, and hidden states."""


def parts_of(module: str) -> tuple[str, ...]:
    """The parts of a module that can be frozen: the module, and the projector of an encoder."""
    if module == TEXT:
        return (TEXT,)
    return module, "projector" if module == VISION else f"{module}_projector"
