"""What follows from the sizes of a language model, whatever its family."""

from __future__ import annotations

import math

from megatron_hetero.models.common.flops import TextFlopShape
from megatron_hetero.models.family import TextShape


def kv_copies(kv_heads: int, tp: int) -> int:
    """How often each key/value head is held under `tp`: once where tp divides their number, else until it does."""
    return math.lcm(kv_heads, tp) // kv_heads


def text_flop_shape(t: TextShape, layers: int, head: bool) -> TextFlopShape:
    """What the operations of some of the layers depend on; `head`: with the logits."""
    queries, keys = t.heads * t.head_dim, t.kv_heads * t.head_dim
    return TextFlopShape(layers, t.hidden, queries, keys, t.ffn, t.vocab if head else 0)
