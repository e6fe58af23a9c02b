"""What published folders of these families call tensors."""

from __future__ import annotations

ENCODER, TEXT = "visual.", "model."
"""What the names of an encoder's and of a language model's tensors begin with here, as in older folders."""
_NESTED = {ENCODER: f"model.{ENCODER}", TEXT: "model.language_model."}


def canonical_name(stored: str) -> str:
    """The name here of a tensor in a folder. Newer versions of transformers nest both modules under `model.`."""
    for flat, nested in _NESTED.items():
        if stored.startswith(nested):
            return flat + stored.removeprefix(nested)
    return stored


def nested_name(name: str) -> str:
    """The name of which `canonical_name` makes `name`, in folders that nest both modules."""
    for flat, nested in _NESTED.items():
        if name.startswith(flat):
            return nested + name.removeprefix(flat)
    return name
