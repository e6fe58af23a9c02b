"""The two linear layers of an MLP, in parts: the exchange of one part over tp runs beside the product of another.

For sequence-parallel activations. A *part* is a range of each rank's tokens. Between the two layers the tokens of a
part are together, rank after rank, and not in their order in the sequence, which an MLP need not know. So each product
takes rows that lie side by side, and the gradient of a weight is one product of all of them.

    forward    first    all parts are gathered; the product of each follows its own
               second   each part is reduced to its ranks as soon as it is computed
    backward   second   gradients are gathered by part; the product of each follows its own
               first    gradients are reduced by part, inputs are gathered beside

The decomposition is that of Wang et al. 2023 (ASPLOS, "Overlap Communication with Dependent Computation via
Decomposition"), with collectives in place of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_hetero.models.common.layers.linear import ColumnLinear, RowLinear, gradient_of_weight

PARTS = "exchanged_in_parts"


def overlap_exchanges(model: nn.Module, parts: int) -> None:
    """Let the MLPs of `model` exchange their tokens over tp in so many parts.

    Raises:
        TypeError: one is not made of our linear layers.
    """
    for mlp in model.modules():
        if isinstance(mlp, MLP):
            if not (isinstance(mlp.linear_fc1, ColumnLinear) and isinstance(mlp.linear_fc2, RowLinear)):
                raise TypeError(f"an MLP of {type(mlp.linear_fc1).__name__} exchanges by itself")
            setattr(mlp, PARTS, parts)


def parts_of(mlp: MLP, tokens: int) -> list[int]:
    """Tokens of each part, of a rank that has so many; one part where exchanges are not to overlap."""
    parts = min(getattr(mlp, PARTS, 1), max(1, tokens))
    return [tokens // parts + (part < tokens % parts) for part in range(parts)]


def first_in_parts(layer: Any, x: Tensor, parts: Sequence[int]) -> Tensor:
    """[S / tp, 1, in] to [S, 1, out / tp], in parts."""
    return _First.apply(x, layer.weight, layer.bias, parts, layer.tp_group)  # pyright: ignore[reportReturnType]


def second_in_parts(layer: Any, x: Tensor, parts: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """[S, 1, in / tp], in parts, to [S / tp, 1, out], and the bias that the layer leaves to its caller."""
    out: Any = _Second.apply(x, layer.weight, parts, layer.tp_group)
    return (out, layer.bias) if layer.skip_bias_add or layer.bias is None else (out + layer.bias, None)


class _First(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.parameter, ctx.parts, ctx.group = weight, parts, group
        whole, works = _gather(x, parts, group)
        out = x.new_empty(len(whole), *x.shape[1:-1], len(weight))
        for rows, work in zip(_rows(parts, group.size()), works, strict=True):
            work.wait()
            product = out[rows].flatten(0, -2)
            if bias is None:
                torch.mm(whole[rows].flatten(0, -2), weight.t(), out=product)
            else:
                torch.addmm(bias, whole[rows].flatten(0, -2), weight.t(), out=product)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        whole = of_x = of_weight = None
        gathering: list[dist.Work] = []
        # What is sent lives until its work is done.
        reducing: list[tuple[dist.Work, Tensor]] = []
        if ctx.needs_input_grad[1]:
            whole, gathering = _gather(x, ctx.parts, ctx.group)
        if ctx.needs_input_grad[0]:
            of_x = grad.new_empty(sum(ctx.parts), *grad.shape[1:-1], weight.shape[1])
            reducing = list(_reduced(of_x, grad, weight, ctx.parts, ctx.group))
        for work in gathering:
            work.wait()
        rows = grad.flatten(0, -2)
        if whole is not None:
            of_weight = gradient_of_weight(ctx.parameter, rows.t(), whole.flatten(0, -2))
        of_bias = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        for work, _ in reducing:
            work.wait()
        return of_x, of_weight, of_bias, None, None


class _Second(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.parameter, ctx.parts, ctx.group = weight, parts, group
        own = x.new_empty(sum(parts), *x.shape[1:-1], len(weight))
        reducing = list(_reduced(own, x, weight.t(), parts, group))
        for work, _ in reducing:
            work.wait()
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        whole, gathering = _gather(grad, ctx.parts, ctx.group)
        if ctx.needs_input_grad[0]:
            of_x = grad.new_empty(len(whole), *grad.shape[1:-1], weight.shape[1])
        for rows, work in zip(_rows(ctx.parts, ctx.group.size()), gathering, strict=True):
            work.wait()
            if of_x is not None:
                torch.mm(whole[rows].flatten(0, -2), weight, out=of_x[rows].flatten(0, -2))
        if ctx.needs_input_grad[1]:
            of_weight = gradient_of_weight(ctx.parameter, whole.flatten(0, -2).t(), x.flatten(0, -2))
        return of_x, of_weight, None, None


def _gather(x: Tensor, parts: Sequence[int], group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """All ranks' `x`, part by part, when the works are done."""
    whole = x.new_empty(len(x) * group.size(), *x.shape[1:])
    pieces = zip(x.contiguous().split(parts), _rows(parts, group.size()), strict=True)
    works = [dist.all_gather_into_tensor(whole[rows], piece, group=group, async_op=True) for piece, rows in pieces]
    return whole, works  # pyright: ignore[reportReturnType]


def _reduced(
    own: Tensor, x: Tensor, weight: Tensor, parts: Sequence[int], group: dist.ProcessGroup
) -> Iterator[tuple[dist.Work, Tensor]]:
    """Reduce the product of `x` and `weight` over the ranks, each of which gets its tokens of each part in `own`."""
    for mine, rows in zip(own.split(parts), _rows(parts, group.size()), strict=True):
        product = x[rows] @ weight
        work: Any = dist.reduce_scatter_tensor(mine, product, group=group, async_op=True)
        yield work, product


def _rows(parts: Sequence[int], ranks: int) -> list[slice]:
    """The rows of each part between the layers."""
    ends = [0]
    for tokens in parts:
        ends.append(ends[-1] + tokens * ranks)
    return [slice(*bounds) for bounds in pairwise(ends)]
