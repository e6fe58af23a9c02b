"""Transformer layers: an attention part and an MLP part, each after a norm.

A new kind of attention or MLP is a subclass of `AttentionPart` or `MLPPart` whose torch module computes

    attention   (hidden [S, 1, hidden], table [2, n, D], params) -> (out [S, 1, hidden], bias to add)
    MLP         (hidden [S, 1, hidden], `LayerCall`) -> (out [S, 1, hidden], bias to add)
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
    """A pre-norm transformer layer: norm, attention, norm, MLP. `norm_names`: stored names of the norms."""

    attention: AttentionPart
    mlp: MLPPart
    norms: tuple[Norm, Norm]
    norm_names: tuple[str, str]

    @property
    def views(self) -> tuple[str, ...]:
        """Views to which the parameters of the layer belong."""
        return tuple(dict.fromkeys((*self.attention.views, *self.mlp.views)))

    def tensors(self) -> TensorShapes:
        """Return the shapes of stored tensors by their names in the layer."""
        norms = zip(self.norm_names, self.norms, strict=True)
        tensors = {f"{name}.{kind}": shape for name, norm in norms for kind, shape in norm.tensors().items()}
        return tensors | self.attention.tensors() | self.mlp.tensors()

    def weight_map(self, stored: str, share: Share, view: str = MAIN) -> WeightMap:
        """Return the parameters of `view` as slices of stored tensors; see `Part.weight_map`."""
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
        """Return the FLOPs of a forward pass, not counting norms."""
        parts = [part.operations(tokens) for part in (self.attention, self.mlp)]
        return Operations(*map(sum, zip(*parts, strict=True)))

    def build(self, site: Site, number: int, *, whole: bool = False) -> LayerModule:
        """Build the torch module. `number`: index of the layer in the whole module, from 0. `whole`: whether the
        backward pass recomputes the whole layer from its input.
        """
        return LayerModule(self, site, number, whole=whole)


class LayerModule(torch.nn.Module):
    """Torch module of a `Layer`; see `Layer.build` for the arguments."""

    def __init__(self, layer: Layer, site: Site, number: int, *, whole: bool):
        super().__init__()
        self.number = number
        self.whole, self.selective, self.compiled = whole, site.recompute.selective, site.compile_layers
        self.input_layernorm: Any = layer.norms[0].build(site, number)
        self.self_attention: Any = layer.attention.build(site, number)
        self.pre_mlp_layernorm: Any = layer.norms[1].build(site, number)
        self.mlp: Any = layer.mlp.build(site, number)

    def forward(self, hidden: Tensor, table_2nD: Tensor, plan: Any, balance: Balance | None = None) -> Tensor:
        """Apply the layer to `hidden` [S, 1, hidden], or [S / tp, 1, hidden] where activations are split over tp.

        Recomputation happens inside the layer, so that a wrapper gathers the weights only once for recomputation and
        backward pass.
        """
        call = LayerCall(table_2nD.shape[1], balance, torch.is_grad_enabled(), plan.ids)
        if not (self.whole and self.training):
            return self._once(table_2nD, plan, call, hidden)
        if not hidden.requires_grad and any(p.requires_grad for p in self.parameters()):
            # After frozen layers the input needs no gradient, but `checkpoint` requires one to compute gradients.
            hidden = hidden.detach().requires_grad_(torch.is_grad_enabled())
        function: Any = partial(self._once, table_2nD, plan, call)
        return tensor_parallel.checkpoint(function, False, hidden)  # pyright: ignore[reportReturnType]

    def _once(self, table_2nD: Tensor, plan: Any, call: LayerCall, hidden: Tensor) -> Tensor:
        out, bias = self.self_attention(self._normed(self.input_layernorm, hidden), table_2nD, plan)
        if self.compiled and not self.selective:
            norm = NormWeights.of(self.pre_mlp_layernorm)
            hidden, normed_hidden = run(added_and_normed, out, bias, hidden, *norm)
        else:
            hidden = _added(out, bias, hidden)
            normed_hidden = self._normed(self.pre_mlp_layernorm, hidden)
        out, bias = self.mlp(normed_hidden, call)
        return _added(out, bias, hidden)

    def _normed(self, norm: Any, hidden: Tensor) -> Tensor:
        function = (lambda x: run(normed, x, *NormWeights.of(norm))) if self.compiled else norm
        return recompute(function, hidden) if self.selective else function(hidden)


def _added(out: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    if out._is_view():  # Autograd refuses in-place operations on a view that an autograd function has returned.
        return residual + (out if bias is None else out + bias)
    return (out if bias is None else out.add_(bias)).add_(residual)
