"""Layers of transformers, made of an attention part and an MLP part behind a norm each.

To add a kind of attention or of MLP is to add a value that satisfies `AttentionPart` or `MLPPart`, whose torch module
takes what its neighbours take:

    attention   (hidden [S, 1, hidden], table [2, n, D], plan) -> (out [S, 1, hidden], bias that is not yet added)
    MLP         (hidden [S, 1, hidden]) -> the same
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, WeightMap
from megatron_hetero.models.layers import compiled
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.parts import AttentionPart, Drawn, MLPPart, Operations, Site, Tokens, named
from megatron_hetero.models.layers.recompute import remake


@dataclass(frozen=True)
class Layer:
    """A pre-norm transformer layer: norm, attention, norm, MLP. `norm_names`: of the norms' stored tensors."""

    attention: AttentionPart
    mlp: MLPPart
    norms: tuple[Norm, Norm]
    norm_names: tuple[str, str]

    @property
    def views(self) -> tuple[str, ...]:
        """The views that its parameters belong to."""
        return tuple(dict.fromkeys((*self.attention.views, *self.mlp.views)))

    def tensors(self) -> TensorShapes:
        """The stored tensors of a layer, by their names in it."""
        norms = zip(self.norm_names, self.norms, strict=True)
        of_norms = {f"{name}.{kind}": shape for name, norm in norms for kind, shape in norm.tensors().items()}
        return of_norms | self.attention.tensors() | self.mlp.tensors()

    def drawn(self) -> Mapping[str, Drawn]:
        """The tensors among them that no folder stores."""
        return {**self.attention.drawn(), **self.mlp.drawn()}

    def weight_map(self, stored: str, share: Share, view: str = MAIN) -> WeightMap:
        """The parameters of a layer, see `Part.weight_map`."""
        norms = [
            norm.weight_map(f"{stored}{name}.", share, view)
            for name, norm in zip(self.norm_names, self.norms, strict=True)
        ]
        return {
            **named("input_layernorm", norms[0]),
            **named("self_attention", self.attention.weight_map(stored, share, view)),
            **named("pre_mlp_layernorm", norms[1]),
            **named("mlp", self.mlp.weight_map(stored, share, view)),
        }

    def operations(self, tokens: Tokens) -> Operations:
        """Operations of the forward pass; norms count for none."""
        parts = [part.operations(tokens) for part in (self.attention, self.mlp)]
        return Operations(*map(sum, zip(*parts, strict=True)))

    def build(self, site: Site, number: int, *, whole: bool = False) -> LayerModule:
        """The torch module. `number`: in the whole module, from 0. `whole`: the backward pass computes all of it again
        from its input.
        """
        return LayerModule(self, site, number, whole=whole)


class LayerModule(torch.nn.Module):
    """The torch module of a `Layer`. `number`: in the whole module, from 0. `remade`: see `Layer.build`."""

    def __init__(self, layer: Layer, site: Site, number: int, *, whole: bool):
        super().__init__()
        self.number = number
        self.remade, self.selective, self.compiled = whole, site.recompute.selective, site.compile_layers
        self.input_layernorm: Any = layer.norms[0].build(site, number)
        self.self_attention: Any = layer.attention.build(site, number)
        self.pre_mlp_layernorm: Any = layer.norms[1].build(site, number)
        self.mlp: Any = layer.mlp.build(site, number)

    def forward(self, hidden: Tensor, table_2nD: Tensor, plan: Any) -> Tensor:
        """`hidden` [S, 1, hidden] ([S / tp, 1, hidden] where activations are split over tp), to the same.

        A layer that is computed again as a whole saves its input only. Here, and not around the layer, so that a
        wrapper gathers its weights once for both.
        """
        if not (self.remade and self.training):
            return self._once(table_2nD, plan, hidden)
        from megatron.core import tensor_parallel

        if not hidden.requires_grad and any(p.requires_grad for p in self.parameters()):
            # Behind frozen layers: without a gradient of its input the layer would get none.
            hidden = hidden.detach().requires_grad_(torch.is_grad_enabled())
        again: Any = tensor_parallel.checkpoint(partial(self._once, table_2nD, plan), False, hidden)
        return again

    def _once(self, table_2nD: Tensor, plan: Any, hidden: Tensor) -> Tensor:
        part = self.self_attention(self._normed(self.input_layernorm, hidden), table_2nD, plan)
        if self.compiled and not self.selective:
            norm = compiled.NormWeights.of(self.pre_mlp_layernorm)
            hidden, normed = compiled.added_and_normed(part[0], part[1], hidden, norm)
        else:
            hidden = _added(part, hidden)
            normed = self._normed(self.pre_mlp_layernorm, hidden)
        return _added(self.mlp(normed), hidden)

    def _normed(self, norm: Any, hidden: Tensor) -> Tensor:
        make: Callable[[Tensor], Tensor] = (
            partial(compiled.normed, norm=compiled.NormWeights.of(norm)) if self.compiled else norm
        )
        return remake(make, hidden) if self.selective else make(hidden)


def _added(part: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
    out, bias = part
    if out._is_view():  # Autograd lets nobody write into what a function passes on as it was given.
        return residual + (out if bias is None else out + bias)
    return (out if bias is None else out.add_(bias)).add_(residual)
