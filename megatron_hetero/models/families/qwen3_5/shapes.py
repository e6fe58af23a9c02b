"""The shape of the language model of Qwen3.5. Its encoder is Qwen3-VL's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_hetero.models.language import LanguageModelShape
from megatron_hetero.models.layers.attention import SelfAttention
from megatron_hetero.models.layers.delta_net import DeltaNet
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.parts import FORWARD, AttentionPart, Tokens


@dataclass(frozen=True)
class TextShape(LanguageModelShape):
    """Shape of the language model, whose layers have gated delta nets or, in `full` layers, gated softmax attention.
    Weights of norms are centred at zero.
    """

    family = "qwen3_5"
    qkv_bias, head_norms = False, True

    full: tuple[bool, ...]
    """Whether each layer has softmax attention."""
    key_heads: int
    """Number of key heads of a delta net, a divisor of the number of value heads."""
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Width of the convolution of a delta net in tokens."""

    @property
    def turns(self) -> tuple[int, ...]:
        """Axis of each rotary frequency: time, height and width in turn while their sections last, then time."""
        section = self.mrope_section
        return tuple(i % 3 if i % 3 and i < 3 * section[i % 3] else 0 for i in range(sum(section)))

    def norm(self, number: int) -> Norm:
        """Return the norm before each part of layer `number`, or the final norm if `number` is the number of layers."""
        return replace(super().norm(number), offset=1)

    def attention(self, number: int) -> AttentionPart:
        """Return the delta net or the softmax attention of layer `number`."""
        if not self.full[number]:
            heads, dims = (self.key_heads, self.value_heads), (self.key_dim, self.value_dim)
            return DeltaNet(self.hidden, *heads, *dims, self.taps, Norm(self.value_dim, self.norm_eps))
        attention = super().attention(number)
        assert isinstance(attention, SelfAttention)
        return replace(attention, gated=True, head_norm=Norm(self.head_dim, self.norm_eps, offset=1))

    def layer_costs(self, tokens: int) -> Sequence[float] | None:
        """Return the FLOPs of each layer on a sequence of `tokens` tokens, which grow quadratically only for softmax
        attention; None if all layers have equal FLOPs.
        """
        costs = [layer.operations(Tokens([tokens])).of(FORWARD) for layer in self.architecture.layers]
        return costs if len(set(costs)) > 1 else None
