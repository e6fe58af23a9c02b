"""transformer_engine/pytorch/__init__.py."""

from . import distributed, ops, optimizers
from .attention import DotProductAttention
from .module import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "ops",
    "optimizers",
]
