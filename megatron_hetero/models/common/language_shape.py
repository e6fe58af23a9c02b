"""What the shapes of language models have in common, whatever their family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self

from megatron_hetero.layout.axes import Split
from megatron_hetero.layout.views import View
from megatron_hetero.models.architecture import Architecture, End
from megatron_hetero.models.layers.attention import SelfAttention
from megatron_hetero.models.layers.ends import Head, TokenEmbedding
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.rotary import MultimodalRotary

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
    """Part of a `megatron_hetero.models.family.TextShape`, of language models whose tensors are named as those of Qwen2
    and Qwen3. Sizes in elements. Families say whether queries, keys and values have a bias (`qkv_bias`), and whether
    queries and keys are normed head by head (`head_norms`).
    """

    qkv_bias: ClassVar[bool]
    head_norms: ClassVar[bool]

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

    @property
    def turns(self) -> tuple[int, ...]:
        """For each rotary frequency the position that it turns with: 0 time, 1 height, 2 width."""
        raise NotImplementedError

    @property
    def rotary(self) -> MultimodalRotary:
        """How positions turn queries and keys."""
        return MultimodalRotary(self.rope_theta, self.head_dim, self.turns)

    @property
    def architecture(self) -> Architecture:
        """The layers, between the embedding, and the final norm and the head."""
        return _architecture(self)

    @property
    def views(self) -> tuple[View, ...]:
        """No further ones."""
        return ()

    @property
    def parts(self) -> Mapping[Split, int]:
        """None, without further views."""
        return {}


@lru_cache
def _architecture(t: LanguageModelShape) -> Architecture:
    norm = Norm(t.hidden, t.norm_eps)
    attention = SelfAttention(
        t.hidden,
        t.heads,
        t.kv_heads,
        t.head_dim,
        stored=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        causal=True,
        qkv_bias=t.qkv_bias,
        head_norm=Norm(t.head_dim, t.norm_eps) if t.head_norms else None,
        norm_names=("self_attn.q_norm", "self_attn.k_norm"),
    )
    mlp = MLP(t.hidden, t.ffn, stored=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
    layer = Layer(attention, mlp, (norm, norm), ("input_layernorm", "post_attention_layernorm"))
    table, head = "model.embed_tokens.", Head(t.vocab, t.hidden)
    return Architecture(
        entry=End("embedding", TokenEmbedding(t.vocab, t.hidden), table, "first"),
        layers=(layer,) * t.layers,
        ends=(
            End("final_layernorm", norm, "model.norm.", "last"),
            End("output_layer", head, table, "last", copies="embedding", copy="lm_head.")
            if t.tied
            else End("output_layer", head, "lm_head.", "last"),
        ),
        stored="model.layers.",
    )
