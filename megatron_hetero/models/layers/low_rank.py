"""Adapters that add the product of two low-rank matrices to a linear layer (LoRA, Hu et al. 2021, arXiv 2106.09685).

    out = W x + scale * B A x        A [r, in], B [out, r]

A weight parameter may consist of several stored projections, such as queries, keys and values, each with its own A and
B. The A's are stacked into one matrix, so that a single product computes the low-rank activations of all projections.

Only low-rank activations are exchanged over tp, for S tokens and k projections:

    column-parallel   local tokens, A -> [S / tp, k r] -- all-gather -> [S, k r], local rows of B -> local outputs
    row-parallel      local inputs, local columns of A -> [S, r] -- reduce-scatter, B             -> local tokens

If activations are not split over tp, the column-parallel layer exchanges nothing in the forward pass, and sums its
low-rank gradient in the backward pass, so that the gradient of A is complete on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.groups.megatron import tensor_parallel
from megatron_hetero.groups.platform import Function, on_device
from megatron_hetero.hf.weight_map import Interval
from megatron_hetero.models.layers.dropout import Dropout, TokenIds
from megatron_hetero.models.layers.linear import add_product, gradient_of_weight, product
from megatron_hetero.models.layers.overlapped import Ahead
from megatron_hetero.models.layers.parts import Site


@dataclass(frozen=True)
class BRows:
    """Consecutive rows of B for projection number `projection`, which add to rows `interval` of the layer's output."""

    interval: Interval
    projection: int


@dataclass(frozen=True)
class LowRankShape:
    """Sizes of a `LowRank` on one rank.

    Attributes:
        inputs: input width of the linear layer on this rank.
        outputs: output width of the linear layer on this rank.
        r: largest rank of a projection.
        scales: scale of each projection.
        rows: adapted rows of the output, in the order of B.
        by_input: whether the layer is row-parallel.
        dropout: dropout of the input, if any.
    """

    inputs: int
    outputs: int
    r: int
    scales: tuple[float, ...]
    rows: tuple[BRows, ...]
    by_input: bool
    dropout: Dropout | None = None

    @property
    def rows_of_b(self) -> int:
        """Number of rows of B on this rank."""
        return sum(rows.interval[1] - rows.interval[0] for rows in self.rows)

    @property
    def is_dense(self) -> bool:
        """Whether B has all rows of the layer's output in order."""
        return len(self.scales) == 1 and self.rows_of_b == self.outputs


class LowRank(torch.nn.Module):
    """Low-rank adapter of a linear layer, stored as the submodule `lora` of the layer."""

    def __init__(self, shape: LowRankShape, site: Site):
        super().__init__()
        self.shape, self.tp_group, self.splits = shape, site.groups.tp, site.splits_activations
        options: dict[str, Any] = {"dtype": site.dtype, "device": site.platform.device}
        self.A = torch.nn.Parameter(torch.empty(len(shape.scales) * shape.r, shape.inputs, **options))
        self.B = torch.nn.Parameter(torch.empty(shape.rows_of_b, shape.r, **options))
        # Gradients are summed over tp where ranks share the values but use them on different tokens or outputs: A of a
        # column-parallel layer with split activations, and rows of B that are copied to several ranks.
        self.A.sequence_parallel = self.splits and not shape.by_input  # pyright: ignore[reportAttributeAccessIssue]
        self.B.sequence_parallel = self.splits if shape.by_input else site.tp > 1  # pyright: ignore[reportAttributeAccessIssue]

    def add(self, out: Tensor, x: Tensor, ids: TokenIds | None = None) -> Tensor:
        """Add the low-rank product to `out`, the output of the linear layer for `x`. `ids`: ids of all tokens; None for
        no dropout.
        """
        low: Any
        drops = None if ids is None else self.shape.dropout
        if ids is None or drops is None:
            low = _Low.apply(x, self.A)
        else:
            is_local = self.splits and not self.shape.by_input
            low = drops.linear(x, self.A, ids.local(self.tp_group.rank()) if is_local else ids.values.flatten())
        low = self._scaled(self._exchanged(low), 1 if drops is None else drops.scale)
        return _Added.apply(out.clone() if out._is_view() else out, low, self.B, self.shape)  # pyright: ignore[reportReturnType]

    def _exchanged(self, low: Tensor) -> Tensor:
        """Exchange the low-rank activations of local tokens or local inputs over tp, in one collective."""
        group: Any = self.tp_group
        if group.size() == 1:
            return low
        if not self.splits and self.shape.by_input:
            return tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=group)
        if not self.splits:
            return tensor_parallel.copy_to_tensor_model_parallel_region(low, group=group)
        if self.shape.by_input:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=group)
        return tensor_parallel.gather_from_sequence_parallel_region(low, group=group)

    def _scaled(self, low: Tensor, factor: float) -> Tensor:
        scales = tuple(factor * scale for scale in self.shape.scales)
        if len(set(scales)) == 1:
            return low if scales[0] == 1 else low * scales[0]
        return low * _repeated(scales, self.shape.r, low.device, low.dtype)


class ExpertsLowRank(torch.nn.Module):
    """Low-rank adapters of a parameter of experts (`grouped.Matrices`), with the experts' matrices stacked in order.

    `r`: rank with padding; `inputs`, `outputs`: widths of an expert's matrix.
    """

    def __init__(self, experts: int, r: int, inputs: int, outputs: int, scale: float, site: Site):
        super().__init__()
        self.scale, options = scale, {"dtype": site.dtype, "device": site.platform.device}
        self.A = torch.nn.Parameter(torch.empty(experts * r, inputs, **options))
        self.B = torch.nn.Parameter(torch.empty(experts * outputs, r, **options))


class _Low(Function):
    """Autograd function of the product with A."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(x, a)
        ctx.parameter = a  # Keep the parameter itself, for its `main_grad`.
        return product(x, a.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, a = ctx.saved_tensors
        grad_x = product(grad, a) if ctx.needs_input_grad[0] else None
        return grad_x, gradient_of_weight(ctx.parameter, grad.flatten(0, -2).t(), x.flatten(0, -2))


class _Added(Function):
    """Autograd function that adds the product with B in place. The small matrix of `_spread` is recomputed."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, low: Tensor, b: Tensor, shape: LowRankShape) -> Tensor:
        ctx.save_for_backward(low, b)
        ctx.parameter, ctx.shape = b, shape
        add_product(out.flatten(0, -2), low.flatten(0, -2), _spread(b, shape).t())
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (low, b), shape = ctx.saved_tensors, ctx.shape
        grad_low = product(grad, _spread(b, shape))
        left, right = grad.flatten(0, -2).t(), low.flatten(0, -2)
        if shape.is_dense:
            return grad, grad_low, gradient_of_weight(ctx.parameter, left, right), None
        grad_spread = product(left, right).view(shape.outputs, len(shape.scales), shape.r)
        return grad, grad_low, grad_spread[_indices(shape.rows, b.device)], None


def _spread(b: Tensor, shape: LowRankShape) -> Tensor:
    """Return B as a matrix [out, k r], in which each row is zero outside the columns of its projection."""
    if shape.is_dense:
        return b
    spread = b.new_zeros(shape.outputs, len(shape.scales), shape.r)
    return spread.index_put_(_indices(shape.rows, b.device), b).flatten(1)


@lru_cache(maxsize=64)
def _indices(rows: tuple[BRows, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the output row and the projection of each row of B, int64."""
    with torch.inference_mode(False):  # Later calls reuse the tensors, and autograd cannot save inference tensors.
        output_rows = torch.cat([torch.arange(*each.interval) for each in rows])
        counts = torch.tensor([each.interval[1] - each.interval[0] for each in rows])
        projections = torch.tensor([each.projection for each in rows]).repeat_interleave(counts)
        return on_device(output_rows, device), on_device(projections, device)


@lru_cache(maxsize=64)
def _repeated(scales: tuple[float, ...], r: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return on_device(torch.tensor(scales).repeat_interleave(r), device).to(dtype)


def adapted(
    layer: Any, x: Tensor, ids: TokenIds | None = None, ahead: Ahead | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the output of a linear layer for `x`, with the product of its adapters added, and a bias that the caller
    adds. `ids`: see `LowRank.add`. `ahead`: early gather of `x` in the backward pass.
    """
    out, bias = layer(x) if ahead is None else layer(x, ahead=ahead)
    lora: LowRank | None = getattr(layer, "lora", None)
    return out if lora is None else lora.add(out, x, ids), bias
