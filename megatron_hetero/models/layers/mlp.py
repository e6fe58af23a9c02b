"""MLPs: their description as values, and their torch module.

SwiGLU is SiLU of the gate times up (Shazeer 2020, arXiv 2002.05202). On GPUs with a compiler it is a single kernel per
pass (`swiglu_kernels`), otherwise several kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.groups.platform import Function, compiles_for
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
from megatron_hetero.models.layers.dropout import TokenIds, ids_of_chunks
from megatron_hetero.models.layers.low_rank import adapted
from megatron_hetero.models.layers.overlapped import ahead_of, gather_ahead
from megatron_hetero.models.layers.parts import LayerCall, MLPPart, Operations, Site, Tokens, kinds
from megatron_hetero.models.layers.recompute import not_saving, recompute


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU of `x` in its tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": gelu_tanh}
"""Activation functions by name."""


@dataclass(frozen=True)
class MLP(MLPPart):
    """Two linear layers with an activation between them, as a part of a layer.

    Attributes:
        hidden: width of a token.
        ffn: width between the two layers.
        stored: names of the stored linear layers: gate (if `gated`), up, down.
        activation: name of the activation function.
        gated: whether the activation is applied to a gate, whose result is multiplied by up.
        bias: whether the linear layers have a bias.
    """

    hidden: int
    ffn: int
    stored: tuple[str, ...]
    activation: Literal["silu", "gelu_tanh"] = "silu"
    gated: bool = True
    bias: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Width between the two layers, which is split over tp."""
        return (self.ffn,)

    @property
    def first_product(self) -> int:
        """FLOPs per token of the first linear layer."""
        return 2 * self.hidden * self.ffn * (1 + self.gated)

    def tensors(self) -> TensorShapes:
        """Return the shapes of stored tensors: each weight, followed by its bias if there is one."""
        *first, last = self.stored
        sizes = [(name, self.ffn, self.hidden) for name in first] + [(last, self.hidden, self.ffn)]
        return {
            f"{name}.{kind}": (rows, columns) if kind == "weight" else (rows,)
            for name, rows, columns in sizes
            for kind in kinds(self.bias)
        }

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return the weight map of a rank: rows of the first layer (gate above up) and columns of the second layer."""
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
        """Return the FLOPs of the products with all weights."""
        return Operations(tokens.total * (self.first_product + 2 * self.hidden * self.ffn))

    def build(self, site: Site, number: int) -> MLPModule:
        """Build the torch module of this MLP."""
        return MLPModule(self, site)


def _gate_and_up(names: Sequence[str], ffn: int, local: Share) -> tuple[TensorSlice, ...]:
    """Return the rows of gate, then of up, on one rank, each followed by padding."""
    gate, up = names
    rows, length = share(ffn, *local, ALIGNMENT)
    padding = length - (rows[1] - rows[0])
    return TensorSlice(gate, rows, padding=padding), TensorSlice(up, rows, at=length, padding=padding)


class MLPModule(torch.nn.Module):
    """Torch module of an `MLP`. `site.recompute` controls what is saved for the backward pass:

    selective   the product of gate and up (without a gate, the output of the activation) is recomputed
    chunk       more tokens than this pass in chunks, and the backward pass of each chunk recomputes gate and up:
                the first matrix product, including the all-gather over tp where activations are split

    If activations are split over tp, each rank contributes an equal share of each chunk. All ranks of a tp group have
    the same number of tokens, and so the same number of chunks.
    """

    def __init__(self, mlp: MLP, site: Site):
        super().__init__()
        self.recompute, self.compiled, self.has_gate = site.recompute, site.compile_layers, mlp.gated
        self.activation = ACTIVATIONS[mlp.activation]
        self.shards = site.tp if site.splits_activations else 1
        ffn = site.tp * split_length(mlp.ffn, site.tp)
        self.linear_fc1 = site.column_linear(mlp.hidden, ffn * (1 + mlp.gated), bias=mlp.bias, name="fc1")
        self.linear_fc2 = site.row_linear(ffn, mlp.hidden, bias=mlp.bias, leaves_bias=True, name="fc2")

    def forward(self, hidden: Tensor, call: LayerCall) -> tuple[Tensor, Tensor | None]:
        """Apply the MLP to `hidden` [S, 1, hidden], or [S / tp, 1, hidden] where activations are split. Return the
        output and a bias that the caller adds.
        """
        if not self.recompute.chunks(len(hidden) * self.shards):
            return self._at_once(hidden, call.ids)
        outs, bias = [], None
        chunks = hidden.split(max(1, self.recompute.chunk // self.shards))
        for chunk, ids in zip(chunks, ids_of_chunks(call.ids, chunks), strict=True):
            with not_saving(hidden):
                product = recompute(lambda x, ids=ids: self._product(adapted(self.linear_fc1, x, ids)[0]), chunk)
            with not_saving(product):
                out, bias = adapted(self.linear_fc2, product, ids)
            outs.append(out)
        return torch.cat(outs), bias

    def _at_once(self, hidden: Tensor, ids: TokenIds | None) -> tuple[Tensor, Tensor | None]:
        ahead = ahead_of(self.linear_fc1)
        with not_saving(hidden):
            wide, _ = adapted(self.linear_fc1, hidden, ids, ahead)
        product = inner = recompute(self._product, wide) if self.recompute.selective else self._product(wide)
        if ahead is not None:
            with not_saving(hidden):
                inner = gather_ahead(product, hidden, ahead)
        with not_saving(product):
            return adapted(self.linear_fc2, inner, ids)

    def _product(self, wide: Tensor) -> Tensor:
        """Return the activated gate times up, [..., ffn], from `wide` [..., 2 ffn]; without a gate, return the
        activation of `wide` [..., ffn].
        """
        if self.compiled:
            return run(activated, wide, self.activation, self.has_gate)
        if self.has_gate and self.activation is F.silu:
            return swiglu(wide)
        return activated(wide, self.activation, self.has_gate)


def swiglu(wide: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up [..., ffn] for gate and up in one tensor [..., 2 ffn]; only the inputs are saved. With
    `weights` [rows], each row of `wide` [rows, 2 ffn] is multiplied by its weight.
    """
    if weights is None or compiles_for(wide):
        return _SwiGLU.apply(wide, weights)  # pyright: ignore[reportReturnType]
    # Autograd saves the product for the gradient of the weights, which otherwise would take another pass.
    return _SwiGLU.apply(wide, None) * weights[:, None]  # pyright: ignore[reportOperatorIssue, reportReturnType]


def swiglu_forward(wide: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the forward pass of `swiglu` by PyTorch's operators."""
    gate, up = wide.chunk(2, dim=-1)
    product = F.silu(gate).mul_(up)
    return product if weights is None else product.mul_(weights[:, None])


def swiglu_backward(grad: Tensor, wide: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute the backward pass of `swiglu` by PyTorch's operators. The gradient of `wide` overwrites it."""
    (gate, up), grad_weights = wide.chunk(2, dim=-1), None
    if weights is not None:
        grad_weights, grad = (grad * swiglu_forward(wide)).sum(dim=-1), grad * weights[:, None]
    grad_gate = grad * up
    torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    torch.ops.aten.silu.out(gate, out=up).mul_(grad)
    gate.copy_(grad_gate)
    return wide.detach(), grad_weights


class _SwiGLU(Function):
    """Autograd function of `swiglu`. The backward pass overwrites its input, the largest tensor of a layer, so that
    another backward pass through the same graph is an error.
    """

    @staticmethod
    def forward(ctx: Any, wide: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(wide, weights)
        return _passes(wide)[0](wide, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide, weights = ctx.saved_tensors
        return _passes(wide)[1](grad, wide, weights)


def _passes(wide: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if not compiles_for(wide):
        return swiglu_forward, swiglu_backward
    if wide.is_meta:  # Memory is measured as that of compiled functions.
        return partial(run, swiglu_forward), partial(run, swiglu_backward)
    return _triton_passes()


def _triton_passes() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from megatron_hetero.models.layers import swiglu_kernels  # Triton comes with PyTorch for GPUs.

    return swiglu_kernels.forward, swiglu_kernels.backward
