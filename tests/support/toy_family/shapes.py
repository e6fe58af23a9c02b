"""The shapes of both modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_hetero.layout.axes import Split
from megatron_hetero.layout.names import ROWS
from megatron_hetero.models import family
from megatron_hetero.models.architecture import Architecture, End
from megatron_hetero.models.items.types import ItemOrder
from megatron_hetero.models.layers.attention import SelfAttention
from megatron_hetero.models.layers.ends import Head, Merger, PatchEmbedding, TokenEmbedding
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.parts import FORWARD, MLPPart, Tokens
from megatron_hetero.models.layers.rotary import MultimodalRotary
from tests.support.toy_family.layers import SLOTS, Pairs, Slots
from tests.support.toy_family.tones import Tone


@dataclass(frozen=True)
class _Shape(family.TransformerShape):
    heads: int
    ffn: int

    family = "toy"

    @property
    def rotary(self) -> MultimodalRotary:
        dim = self.hidden // self.heads
        return MultimodalRotary(100.0, dim, (0,) * (dim // 2))

    def layer(self, mlp: MLPPart, *, causal: bool) -> Layer:
        norm, dim = Norm(self.hidden, 1e-6), self.hidden // self.heads
        attention = SelfAttention(self.hidden, self.heads, self.heads, dim, ("mix.in", "mix.out"), causal=causal)
        return Layer(attention, mlp, (norm, norm), ("norm1", "norm2"))


@dataclass(frozen=True)
class EarShape(_Shape, family.EncoderShape):
    """The encoder, of patches of so many samples, `merged` of which become a row."""

    samples: int
    merged: int
    out_hidden: int

    @property
    def position_dims(self) -> int:
        return 1

    @property
    def unit(self) -> int:
        return self.merged

    @property
    def patch_elements(self) -> int:
        return self.samples

    @property
    def unit_width(self) -> int:
        return self.unit * self.samples

    @property
    def architecture(self) -> Architecture:
        return _ear(self)

    def rows(self, size: Tone) -> int:
        return size.patches // self.unit

    def order(self, size: Tone) -> ItemOrder:
        """From the beginning to the end; each unit is a window of its own."""
        rows = self.rows(size)
        return ItemOrder(np.arange(rows, dtype=np.int32), np.ones(rows, np.int32))

    def positions(self, size: Tone, units: np.ndarray) -> np.ndarray:
        """The number of each patch: int64 [1, patches]."""
        return (units.astype(np.int64)[:, None] * self.unit + np.arange(self.unit)).reshape(1, -1)

    def sequences(self, size: Tone) -> tuple[int, ...]:
        return (size.patches,)

    def tokens(self, sizes: Iterable[Tone]) -> Tokens:
        patches = [size.patches for size in sizes]
        return Tokens(patches, patches)

    def cost(self, size: Tone) -> float:
        return float(self.architecture.operations(self.tokens([size]), passes=FORWARD))

    def cost_per_patch(self, size: Tone) -> float:
        return self.cost(size) / size.patches


@lru_cache
def _ear(ear: EarShape) -> Architecture:
    merger = Merger(ear.hidden, ear.unit, ear.out_hidden, Norm(ear.hidden, 1e-6), ("norm", "fc1", "fc2"))
    return Architecture(
        entry=End("patch_embed", PatchEmbedding((ear.samples,), ear.hidden, bias=True), "embed.", "first"),
        layers=(ear.layer(Pairs(ear.hidden, ear.ffn), causal=False),) * ear.layers,
        ends=(End("merger", merger, "merger.", "last", output=ROWS, projector=True),),
        stored="layers.",
        namespace="ear.",
    )


@dataclass(frozen=True)
class TextShape(_Shape, family.TextShape):
    """The language model: layers of pairs and of slots in turn."""

    vocab: int
    slots: int
    tied = False
    views = (SLOTS,)

    @property
    def counts(self) -> Mapping[Split, int]:
        return {"experts": self.slots}

    @property
    def architecture(self) -> Architecture:
        return _text(self)


@lru_cache
def _text(t: TextShape) -> Architecture:
    mlps = Pairs(t.hidden, t.ffn), Slots(t.hidden, t.slots, t.ffn // t.slots)
    return Architecture(
        entry=End("embedding", TokenEmbedding(t.vocab, t.hidden), "text.table.", "first"),
        layers=tuple(t.layer(mlps[number % 2], causal=True) for number in range(t.layers)),
        ends=(
            End("final_layernorm", Norm(t.hidden, 1e-6), "text.norm.", "last"),
            End("output_layer", Head(t.vocab, t.hidden), "text.head.", "last"),
        ),
        stored="text.layers.",
    )


def ear_shape(config: Any) -> EarShape:
    """Encoder shape of a whole-model configuration."""
    return EarShape(**vars(config.vision_config), out_hidden=config.text_config.hidden)


def text_shape(config: Any) -> TextShape:
    """Language-model shape of a whole-model configuration."""
    of = vars(config.text_config)
    return TextShape(of["layers"], of["hidden"], of["heads"], of["ffn"], of["vocab_size"], of["slots"])
