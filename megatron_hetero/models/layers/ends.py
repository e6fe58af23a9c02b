"""Ends of modules, described as values, and their torch modules: patch and token embeddings, mergers, heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_hetero.groups.megatron import tensor_parallel
from megatron_hetero.hf.weight_map import (
    Share,
    TensorShapes,
    WeightMap,
    columns,
    split_length,
    split_rows,
    stack,
    whole,
)
from megatron_hetero.hf.weight_map import share as share_of
from megatron_hetero.models.layers.dropout import TokenIds
from megatron_hetero.models.layers.low_rank import adapted
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.parts import Operations, Part, Site, Tokens, kinds, named


@dataclass(frozen=True)
class PatchEmbedding(Part):
    """A linear layer on the elements of a patch. `dims`: shape of a patch in the stored weight."""

    dims: tuple[int, ...]
    hidden: int
    bias: bool

    @property
    def elements(self) -> int:
        """Number of elements of a patch."""
        return torch.Size(self.dims).numel()

    def tensors(self) -> TensorShapes:
        """Return the shapes of the weight and of the bias, if any."""
        shapes: TensorShapes = {"proj.weight": (self.hidden, *self.dims)}
        return shapes | ({"proj.bias": (self.hidden,)} if self.bias else {})

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return the weight map, with the whole tensors on every rank."""
        return {kind: whole(f"{stored}proj.{kind}", self.hidden) for kind in kinds(self.bias)}

    def operations(self, tokens: Tokens) -> Operations:
        """Return the FLOPs of one product per patch."""
        return Operations(2 * tokens.total * self.elements * self.hidden)

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the linear layer. If activations are split, each rank embeds its local patches."""
        from megatron_hetero.models.layers.linear import WholeLinear

        options: dict[str, Any] = {"dtype": site.dtype, "device": site.platform.device}
        return site.mark(WholeLinear(self.elements, self.hidden, bias=self.bias, **options))


@dataclass(frozen=True)
class Merger(Part):
    """An MLP on the concatenated patches of each unit, after a norm of each patch or of each unit.

    Attributes:
        hidden: width of a patch.
        unit: patches per unit.
        out: width of an output row.
        norm: the norm, whose width is the width of a patch or of a unit.
        stored: names of the norm and of the two linear layers.
    """

    hidden: int
    unit: int
    out: int
    norm: Norm
    stored: tuple[str, str, str]

    @property
    def width(self) -> int:
        """Width of a unit."""
        return self.hidden * self.unit

    def tensors(self) -> TensorShapes:
        """Return the shapes of the norm and of both linear layers."""
        norm, fc1, fc2 = self.stored
        return {f"{norm}.{kind}": shape for kind, shape in self.norm.tensors().items()} | {
            f"{fc1}.weight": (self.width, self.width),
            f"{fc1}.bias": (self.width,),
            f"{fc2}.weight": (self.out, self.width),
            f"{fc2}.bias": (self.out,),
        }

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return the weight map of a rank: rows of the first layer and columns of the second."""
        norm, fc1, fc2 = (stored + name for name in self.stored)
        local, _ = share_of(self.width, *share)
        return {
            **named("norm", self.norm.slices(f"{norm}.", share)),
            "linear_fc1.weight": stack((f"{fc1}.weight", local)),
            "linear_fc1.bias": stack((f"{fc1}.bias", local)),
            "linear_fc2.weight": columns(f"{fc2}.weight", self.out, local),
            "linear_fc2.bias": whole(f"{fc2}.bias", self.out),
        }

    def operations(self, tokens: Tokens) -> Operations:
        """Return the FLOPs of two products per unit."""
        return Operations(2 * (tokens.total // self.unit) * (self.width * self.width + self.width * self.out))

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the torch module."""
        return PatchMerger(self, site, number)


class PatchMerger(torch.nn.Module):
    """Torch module of a `Merger`."""

    def __init__(self, merger: Merger, site: Site, number: int):
        super().__init__()
        self.unit, self.width, self.normed = merger.unit, merger.width, merger.norm.width
        self.norm = merger.norm.build(site, number)
        self.linear_fc1 = site.column_linear(self.width, self.width, bias=True)
        self.linear_fc2 = site.row_linear(self.width, merger.out, bias=True)

    def forward(self, patches: Tensor, ids: TokenIds | None = None) -> Tensor:
        """Merge `patches` [S, 1, hidden] into rows [S / unit, out]. `ids`: ids of patches, for dropout."""
        units = self.norm(patches.view(-1, 1, self.normed)).view(-1, 1, self.width)
        ids = ids and ids.of_units(self.unit)
        hidden, _ = adapted(self.linear_fc1, units, ids)
        return adapted(self.linear_fc2, torch.nn.functional.gelu(hidden), ids)[0].squeeze(1)


@dataclass(frozen=True)
class TokenEmbedding(Part):
    """An embedding table of `vocab` rows, which is split over tp."""

    vocab: int
    hidden: int

    parameter: ClassVar[str] = "word_embeddings.weight"

    def tensors(self) -> TensorShapes:
        """Return the shape of the embedding table."""
        return {"weight": (self.vocab, self.hidden)}

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return the weight map of a rank: its rows of the embedding table."""
        return {self.parameter: split_rows(f"{stored}weight", self.vocab, share)}

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the torch module."""
        return _TokenEmbedding(self, site)


class _TokenEmbedding(torch.nn.Module):
    def __init__(self, part: TokenEmbedding, site: Site):
        super().__init__()
        self.splits_activations = site.splits_activations
        self.word_embeddings: Any = tensor_parallel.VocabParallelEmbedding(
            num_embeddings=site.tp * split_length(part.vocab, site.tp),
            embedding_dim=part.hidden,
            init_method=None,  # pyright: ignore[reportArgumentType]
            reduce_scatter_embeddings=site.splits_activations,
            config=site.config,
            tp_group=site.groups.tp,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed `tokens` [S]. Return [S, 1, hidden], or [S / tp, 1, hidden] where activations are split over tp."""
        embedded = self.word_embeddings(tokens.unsqueeze(0))
        return embedded if self.splits_activations else embedded.transpose(0, 1).contiguous()


class Head(TokenEmbedding):
    """Output layer without bias, for the logits of `vocab` tokens. Its weight is stored like an embedding table."""

    parameter = "weight"

    def operations(self, tokens: Tokens) -> Operations:
        """Return the FLOPs of one product per supervised token."""
        return Operations(2 * tokens.supervised * self.hidden * self.vocab)

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the linear layer. The loss uses only its weight."""
        return site.column_linear(self.hidden, site.tp * split_length(self.vocab, site.tp), bias=False)
