"""MLPs, as values and as their torch module.

SwiGLU is SiLU of the gate times the rest (Shazeer 2020, arXiv 2002.05202): one pass forward and one backward on a GPU
with a compiler, a few elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.groups.platform import compiled, compiles_for
from megatron_hetero.hf.weight_map import (
    ALIGNMENT,
    Share,
    TensorShapes,
    TensorSlice,
    WeightMap,
    share,
    split_columns,
    split_length,
    split_rows,
    whole,
)
from megatron_hetero.models.layers.compiled import activated, run
from megatron_hetero.models.layers.dropout import TokenIds, ids_of_pieces
from megatron_hetero.models.layers.overlapped import Overlapping, first_in_parts, parts_of, second_in_parts
from megatron_hetero.models.layers.parts import LayerCall, MLPPart, Operations, Site, Tokens, kinds
from megatron_hetero.models.layers.recompute import not_saving, recompute


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": gelu_tanh}
"""Activation functions by name."""


@dataclass(frozen=True)
class MLP(MLPPart):
    """Two linear layers with an activation between them, as a part of a layer. `gated`: the activation of a gate is
    multiplied by the rest. `stored`: names of the stored linear layers: (gate,) up, down.
    """

    hidden: int
    ffn: int
    stored: tuple[str, ...]
    activation: Literal["silu", "gelu_tanh"] = "silu"
    gated: bool = True
    bias: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Width between the two layers."""
        return (self.ffn,)

    @property
    def first_product(self) -> int:
        """Operations per token of the first linear layer."""
        return 2 * self.hidden * self.ffn * (1 + self.gated)

    def tensors(self) -> TensorShapes:
        """Return the weights, each with its bias if there are any."""
        *first, last = self.stored
        sizes = [(name, self.ffn, self.hidden) for name in first] + [(last, self.hidden, self.ffn)]
        return {
            f"{name}.{kind}": (rows, columns) if kind == "weight" else (rows,)
            for name, rows, columns in sizes
            for kind in kinds(self.bias)
        }

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Split the first layer by rows, the gate above the rest; the second by columns."""
        *first, last = (stored + name for name in self.stored)
        result: dict[str, tuple[TensorSlice, ...]] = {}
        for kind in kinds(self.bias):
            names = [f"{name}.{kind}" for name in first]
            rows = _gate_and_up(names, self.ffn, share) if self.gated else split_rows(names[0], self.ffn, share)
            result[f"linear_fc1.{kind}"] = rows
        result["linear_fc2.weight"] = split_columns(f"{last}.weight", self.hidden, self.ffn, share)
        if self.bias:
            result["linear_fc2.bias"] = whole(f"{last}.bias", self.hidden)
        return result

    def operations(self, tokens: Tokens) -> Operations:
        """Count products with all weights."""
        return Operations(tokens.total * (self.first_product + 2 * self.hidden * self.ffn))

    def build(self, site: Site, number: int) -> MLPModule:
        """Build the torch module."""
        return MLPModule(self, site)


def _gate_and_up(names: Sequence[str], ffn: int, part: Share) -> tuple[TensorSlice, ...]:
    """Return gate above up, each with its own padding below."""
    gate, up = names
    rows, length = share(ffn, *part, ALIGNMENT)
    padding = length - (rows[1] - rows[0])
    return TensorSlice(gate, rows, padding=padding), TensorSlice(up, rows, at=length, padding=padding)


class MLPModule(Overlapping):
    """Torch module of an `MLP`. `site.recompute` controls what it saves:

    selective   the product of gate and up (without a gate, the output of the activation) is recomputed
    chunk       more tokens than that on this rank pass in chunks, and the backward pass of each recomputes gate and up:
                the first matrix product, with the all-gather over tp where activations are split

    With activations that are split over tp, each rank contributes an equal share of each chunk. All ranks of a tp group
    have equally many tokens, and so equally many chunks.
    """

    def __init__(self, mlp: MLP, site: Site):
        super().__init__()
        self.recompute, self.compiled, self.has_gate = site.recompute, site.compile_layers, mlp.gated
        self.activation = ACTIVATIONS[mlp.activation]
        self.shards = site.tp if site.splits_activations else 1
        ffn = site.tp * split_length(mlp.ffn, site.tp)
        self.linear_fc1 = site.column_linear(mlp.hidden, ffn * (1 + mlp.gated), bias=mlp.bias, name="fc1")
        self.linear_fc2 = site.row_linear(ffn, mlp.hidden, bias=mlp.bias, leaves_bias=True, name="fc2")

    def linears(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        """Return the two linear layers."""
        return self.linear_fc1, self.linear_fc2

    def forward(self, hidden: Tensor, call: LayerCall) -> tuple[Tensor, Tensor | None]:
        """Compute `hidden` [S, 1, hidden] ([S / tp, 1, hidden] where activations are split) to the same and a bias to
        add.
        """
        if not self.recompute.chunks(len(hidden) * self.shards):
            return self._at_once(hidden, call.ids)
        outs, bias = [], None
        pieces = hidden.split(max(1, self.recompute.chunk // self.shards))
        for piece, ids in zip(pieces, ids_of_pieces(call.ids, pieces), strict=True):
            first = partial(first_in_parts, self.linear_fc1, parts=(len(piece),), ids=ids)
            with not_saving(hidden):
                product = recompute(lambda x, first=first: self._product(first(x)[0]), piece)
            with not_saving(product):
                out, bias = second_in_parts(self.linear_fc2, product, (len(piece),), ids)
            outs.append(out)
        return torch.cat(outs), bias

    def _at_once(self, hidden: Tensor, ids: TokenIds | None) -> tuple[Tensor, Tensor | None]:
        parts = parts_of(self, len(hidden))
        with not_saving(hidden):
            wide, _ = first_in_parts(self.linear_fc1, hidden, parts, ids=ids)
        product = recompute(self._product, wide) if self.recompute.selective else self._product(wide)
        with not_saving(product):
            return second_in_parts(self.linear_fc2, product, parts, ids)

    def _product(self, wide: Tensor) -> Tensor:
        """Compute gate and up [..., 2 ffn] to [..., ffn]; without a gate [..., ffn] to the same."""
        if self.compiled:
            return run(activated, wide, self.activation, self.has_gate)
        if self.has_gate and self.activation is F.silu:
            return swiglu(wide)
        return activated(wide, self.activation, self.has_gate)


def swiglu(wide: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., ffn], of gate and up in one tensor [..., 2 ffn], which alone is saved."""
    return _SwiGLU.apply(wide)  # pyright: ignore[reportReturnType]


def swiglu_forward(wide: Tensor) -> Tensor:
    """Forward pass of `swiglu`."""
    gate, up = wide.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(grad: Tensor, wide: Tensor) -> Tensor:
    """Backward pass of `swiglu`, for a compiler."""
    gate, up = wide.chunk(2, dim=-1)
    of_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return torch.cat((of_gate, grad * F.silu(gate)), dim=-1)


def swiglu_backward_in_place(grad: Tensor, wide: Tensor) -> Tensor:
    """Backward pass of `swiglu`, without intermediate copies."""
    (gate, up), of_wide = wide.chunk(2, dim=-1), torch.empty_like(wide)
    of_gate, of_up = of_wide.chunk(2, dim=-1)
    activated = F.silu(gate)
    torch.mul(grad, activated, out=of_up)
    of_activated = torch.mul(grad, up, out=activated)
    torch.ops.aten.silu_backward.grad_input(of_activated, gate, grad_input=of_gate)
    return of_wide


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        return compiled(swiglu_forward)(wide) if compiles_for(wide) else swiglu_forward(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (wide,) = ctx.saved_tensors
        back = compiled(swiglu_backward) if compiles_for(wide) else swiglu_backward_in_place
        return back(grad, wide)
