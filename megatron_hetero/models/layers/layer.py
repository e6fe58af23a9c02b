"""Transformer layers: an attention part and an MLP part, each behind a norm.

A new kind of attention or of MLP is a subclass of `AttentionPart` or `MLPPart` whose torch module computes

    attention   (hidden [S, 1, hidden], table [2, n, D], params) -> (out [S, 1, hidden], bias to add)
    MLP         (hidden [S, 1, hidden], `LayerCall`) -> the same
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_hetero.groups.megatron import tensor_parallel
from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, WeightMap
from megatron_hetero.models.layers.compiled import NormWeights, added_and_normed, normed, run
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.parts import AttentionPart, LayerCall, MLPPart, Operations, Site, Tokens, named
from megatron_hetero.models.layers.recompute import recompute

if TYPE_CHECKING:
    from megatron_hetero.models.layers.balance_loss import Balance


@dataclass(frozen=True)
class Layer:
    """A pre-norm transformer layer: norm, attention, norm, MLP. `norm_names`: names of the stored norms."""

    attention: AttentionPart
    mlp: MLPPart
    norms: tuple[Norm, Norm]
    norm_names: tuple[str, str]

    @property
    def views(self) -> tuple[str, ...]:
        """Views that its parameters belong to."""
        return tuple(dict.fromkeys((*self.attention.views, *self.mlp.views)))

    def tensors(self) -> TensorShapes:
        """Return the stored tensors by their names in the layer."""
        norms = zip(self.norm_names, self.norms, strict=True)
        of_norms = {f"{name}.{kind}": shape for name, norm in norms for kind, shape in norm.tensors().items()}
        return of_norms | self.attention.tensors() | self.mlp.tensors()

    def weight_map(self, stored: str, share: Share, view: str = MAIN) -> WeightMap:
        """Return the parameters, see `Part.weight_map`."""
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
        """Return the operations of the forward pass; norms count for none."""
        parts = [part.operations(tokens) for part in (self.attention, self.mlp)]
        return Operations(*map(sum, zip(*parts, strict=True)))

    def build(self, site: Site, number: int, *, whole: bool = False) -> LayerModule:
        """Build the torch module. `number`: in the whole module, from 0. `whole`: the backward pass recomputes all of
        it from its input.
        """
        return LayerModule(self, site, number, whole=whole)


class LayerModule(torch.nn.Module):
    """Torch module of a `Layer`, with the arguments of `Layer.build`."""

    def __init__(self, layer: Layer, site: Site, number: int, *, whole: bool):
        super().__init__()
        self.number = number
        self.whole, self.selective, self.compiled = whole, site.recompute.selective, site.compile_layers
        self.input_layernorm: Any = layer.norms[0].build(site, number)
        self.self_attention: Any = layer.attention.build(site, number)
        self.pre_mlp_layernorm: Any = layer.norms[1].build(site, number)
        self.mlp: Any = layer.mlp.build(site, number)

    def forward(self, hidden: Tensor, table_2nD: Tensor, plan: Any, balance: Balance | None = None) -> Tensor:
        """Compute `hidden` [S, 1, hidden] ([S / tp, 1, hidden] where activations are split over tp) to the same.

        Recomputation is inside the layer, so that a wrapper gathers its weights once for both passes.
        """
        call = LayerCall(table_2nD.shape[1], balance, torch.is_grad_enabled(), plan.ids)
        if not (self.whole and self.training):
            return self._once(table_2nD, plan, call, hidden)
        if not hidden.requires_grad and any(p.requires_grad for p in self.parameters()):
            # Behind frozen layers: without a gradient of its input the layer would compute none.
            hidden = hidden.detach().requires_grad_(torch.is_grad_enabled())
        again: Any = tensor_parallel.checkpoint(partial(self._once, table_2nD, plan, call), False, hidden)
        return again

    def _once(self, table_2nD: Tensor, plan: Any, call: LayerCall, hidden: Tensor) -> Tensor:
        part = self.self_attention(self._normed(self.input_layernorm, hidden), table_2nD, plan)
        if self.compiled and not self.selective:
            norm = NormWeights.of(self.pre_mlp_layernorm)
            hidden, for_mlp = run(added_and_normed, part[0], part[1], hidden, *norm)
        else:
            hidden = _added(part, hidden)
            for_mlp = self._normed(self.pre_mlp_layernorm, hidden)
        return _added(self.mlp(for_mlp, call), hidden)

    def _normed(self, norm: Any, hidden: Tensor) -> Tensor:
        function = (lambda x: run(normed, x, *NormWeights.of(norm))) if self.compiled else norm
        return recompute(function, hidden) if self.selective else function(hidden)


def _added(part: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
    out, bias = part
    if out._is_view():  # Autograd refuses in-place operations on a view that a function returns.
        return residual + (out if bias is None else out + bias)
    return (out if bias is None else out.add_(bias)).add_(residual)
