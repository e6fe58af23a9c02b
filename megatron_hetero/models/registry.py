"""Supported model families: built-in ones, and families of installed packages (see docs/extending.md)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from megatron_hetero.models.families.qwen2_5_vl.family import QWEN2_5_VL
from megatron_hetero.models.families.qwen3_5.family import QWEN3_5
from megatron_hetero.models.families.qwen3_5_moe.family import QWEN3_5_MOE
from megatron_hetero.models.families.qwen3_vl.family import QWEN3_VL
from megatron_hetero.models.families.qwen3_vl_moe.family import QWEN3_VL_MOE
from megatron_hetero.models.family import Family

ENTRY_POINTS = "megatron_hetero.families"
"""Entry-point group in which installed packages register families."""
_FURTHER: tuple[Family, ...] = tuple(each.load() for each in entry_points(group=ENTRY_POINTS))
_OWN = QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, QWEN3_5, QWEN3_5_MOE
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (*_OWN, *_FURTHER)}
"""Families by the `model_type` of a whole model."""


def family_of(model_type: str) -> Family:
    """Return the family of a whole model or of a language model alone. Raises `KeyError` for unknown types."""
    for family in FAMILIES.values():
        if model_type in (family.model_type, *family.language_models):
            return family
    raise KeyError(model_type)


def titles() -> str:
    """Return the titles of all families as one text for messages."""
    return " or ".join(family.title for family in FAMILIES.values())
