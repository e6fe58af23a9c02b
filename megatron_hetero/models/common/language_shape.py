"""What the shapes of language models have in common, whatever their family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron_hetero.layout.axes import Split
from megatron_hetero.layout.views import View
from megatron_hetero.models.common.flops import TextFlopShape

MOST_LOGITS = 1 << 26
"""Logits of a rank that exist at a time: 256 MiB in fp32."""


def tokens_at_a_time(columns: int) -> int:
    """For how many tokens logits of so many columns exist at a time."""
    return max(1, MOST_LOGITS // columns)


def keeps_logits(tokens: int, hidden: int) -> bool:
    """Whether there are gradients of so many tokens' logits, no larger than that of the weight that gives them."""
    return 0 < tokens <= hidden


@dataclass(frozen=True)
class LanguageModelShape:
    """Part of a `megatron_hetero.models.family.TextShape`. Sizes in elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """Whether the head shares the weight of the embedding."""
    rope_theta: float
    mrope_section: tuple[int, ...]
    """Rotary frequencies for time, height and width."""
    norm_eps: float
    max_positions: int

    @classmethod
    def of(cls, config: Any, head_dim: int, sections: Sequence[int]) -> Self:
        """Of the configuration of a whole model. `sections`: of rotary frequencies, where it gives none."""
        text, rope = config.text_config, config.text_config.rope_parameters
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=head_dim,
            ffn=text.intermediate_size,
            vocab=text.vocab_size,
            tied=bool(config.tie_word_embeddings),
            rope_theta=float(rope["rope_theta"]),
            mrope_section=tuple(rope.get("mrope_section", sections)),
            norm_eps=text.rms_norm_eps,
            max_positions=text.max_position_embeddings,
        )

    def flop_shape(self, layers: int, head: bool) -> TextFlopShape:
        """What the operations of some of the layers depend on; `head`: with the logits."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return TextFlopShape(layers, self.hidden, queries, keys, self.ffn, self.vocab if head else 0)

    def kv_copies(self, tp: int) -> int:
        """How often each key/value head is held under `tp`: once where tp divides their number, else until it does."""
        return math.lcm(self.kv_heads, tp) // self.kv_heads

    @property
    def views(self) -> tuple[View, ...]:
        """No further ones."""
        return ()

    @property
    def parts(self) -> Mapping[Split, int]:
        """None, without further views."""
        return {}
