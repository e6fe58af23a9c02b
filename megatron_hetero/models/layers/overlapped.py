"""The two linear layers of an MLP or of attention in parts, for sequence-parallel activations: the exchange of one part
over tp runs beside the product of another (docs/training.md, "Exchanges beside matrix products").

A *part* is a range of each rank's tokens. Between the two layers the tokens of a part are contiguous, rank after rank,
and not in the order of the sequence. An MLP does not depend on the order; attention reorders what it takes and gives.
So each product takes contiguous rows, and the gradient of a weight is one product. Short products of gradients are
exchanged beside the product that gives the weight's gradient.

The decomposition is that of Wang et al. 2023 (ASPLOS, "Overlap Communication with Dependent Computation via
Decomposition"), with collectives in place of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_hetero.models.layers.dropout import TokenIds
from megatron_hetero.models.layers.linear import adds_to_main_grad, gradient_of_weight
from megatron_hetero.models.layers.low_rank import with_added

TILE = 64
"""Tokens of a rank that fill tiles of a matrix product (a multiple of 128 rows) under any tp > 1."""


class Overlapping(nn.Module):
    """A module with two linear layers whose exchanges over tp can be in parts."""

    exchanged_in_parts = 1

    def linears(self) -> tuple[nn.Module, nn.Module]:
        """Return the layer that gathers tokens and the layer that reduces them."""
        raise NotImplementedError


def overlap_exchanges(model: nn.Module, parts: int) -> None:
    """Make the MLPs and the attention of `model` exchange their tokens over tp in so many parts.

    Raises:
        TypeError: one does not consist of our linear layers.
    """
    for module in model.modules():
        if isinstance(module, Overlapping):
            first, second = module.linears()
            if not (hasattr(first, "exchanges_in_parts") and hasattr(second, "exchanges_in_parts")):
                raise TypeError(f"{type(module).__name__} of {type(first).__name__} exchanges by itself")
            module.exchanged_in_parts = parts


def parts_of(module: Overlapping, tokens: int) -> tuple[int, ...]:
    """Return the tokens of each part on a rank with so many; one part if exchanges of `module` do not overlap. All long
    parts but the last are whole tiles, so that products in parts take no more tiles than a single one.
    """
    parts = min(module.exchanged_in_parts, max(1, tokens))
    if parts > 1 and tokens >= TILE * parts * parts:
        long = TILE * round(tokens / parts / TILE)
        return *(long,) * (parts - 1), tokens - long * (parts - 1)
    return tuple(tokens // parts + (part < tokens % parts) for part in range(parts))


class Ahead:
    """Input of a layer that is split by column, for the gradient of its weight: saved by `gather_ahead`, and gathered
    when the backward pass gets there.
    """

    def __init__(self, parts: Sequence[int], group: dist.ProcessGroup) -> None:
        self._parts, self._group = parts, group
        self._gathered: tuple[Tensor, list[dist.Work]] | None = None

    def gather(self, x: Tensor) -> None:
        """Begin to gather."""
        self._gathered = _gather(x, self._parts, self._group)

    def take(self) -> tuple[Tensor, list[dist.Work]]:
        """Return [S, 1, in], valid once the works are done."""
        assert self._gathered is not None, "what follows attention goes backward first"
        gathered, self._gathered = self._gathered, None
        return gathered


def gather_ahead(out: Tensor, x: Tensor, ahead: Ahead) -> Tensor:
    """Return `out` unchanged. When its gradient arrives, gathering `x` [S / tp, 1, in] begins, beside the backward pass
    of everything between `x` and `out`.
    """
    return _GatherAhead.apply(out, x, ahead)  # pyright: ignore[reportReturnType]


def first_in_parts(
    layer: Any, x: Tensor, parts: Sequence[int], ahead: Ahead | None = None, ids: TokenIds | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute [S / tp, 1, in] to [S, 1, out / tp] in parts, and return a bias that the layer leaves to its caller.
    `ahead`: saves `x`. A single part is computed by the layer itself. `ids`: of all tokens, for dropout.
    """
    if len(parts) == 1:
        out, bias = layer(x)
    else:
        out, bias = _First.apply(x, layer.weight, layer.bias, parts, layer.tp_group, ahead), None
    return with_added(layer, out, x, parts, ids), bias  # pyright: ignore[reportArgumentType]


def second_in_parts(
    layer: Any, x: Tensor, parts: Sequence[int], ids: TokenIds | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute [S, 1, in / tp] to [S / tp, 1, out], see `first_in_parts`."""
    if len(parts) == 1:
        out, bias = layer(x)
    else:
        out, bias = _Second.apply(x, layer.weight, parts, layer.tp_group), layer.bias
        if bias is not None and not layer.skip_bias_add:
            out, bias = out + bias, None
    return with_added(layer, out, x, parts, ids), bias


class _GatherAhead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, ahead: Ahead) -> Tensor:
        ctx.save_for_backward(x)
        ctx.ahead = ahead
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ahead.gather(*ctx.saved_tensors)
        return grad, None, None


class _First(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Sequence[int], group: dist.ProcessGroup,
        ahead: Ahead | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x if ctx.needs_input_grad[1] and ahead is None else None, weight)
        ctx.parameter, ctx.parts, ctx.group, ctx.ahead = weight, parts, group, ahead
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
        # Tensors that are sent live until their work is done.
        reducing: list[tuple[dist.Work, Tensor]] = []
        if ctx.needs_input_grad[1]:
            whole, gathering = ctx.ahead.take() if ctx.ahead else _gather(x, ctx.parts, ctx.group)
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
        return of_x, of_weight, of_bias, None, None, None


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
        by_part = ctx.needs_input_grad[1] and _is_narrow(weight) and adds_to_main_grad(ctx.parameter, grad.dtype)
        for rows, work in zip(_rows(ctx.parts, ctx.group.size()), gathering, strict=True):
            work.wait()
            if of_x is not None:
                torch.mm(whole[rows].flatten(0, -2), weight, out=of_x[rows].flatten(0, -2))
            if by_part:
                of_weight = gradient_of_weight(ctx.parameter, whole[rows].flatten(0, -2).t(), x[rows].flatten(0, -2))
        if ctx.needs_input_grad[1] and not by_part:
            of_weight = gradient_of_weight(ctx.parameter, whole.flatten(0, -2).t(), x.flatten(0, -2))
        return of_x, of_weight, None, None


def _is_narrow(weight: Tensor) -> bool:
    """Whether the gradient of the input takes too short a product to gather the next part beside it."""
    out, own = weight.shape
    return 2 * own < out


def _gather(x: Tensor, parts: Sequence[int], group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Gather all ranks' `x` part by part; valid once the works are done."""
    whole = x.new_empty(len(x) * group.size(), *x.shape[1:])
    pieces = zip(x.contiguous().split(parts), _rows(parts, group.size()), strict=True)
    works = [dist.all_gather_into_tensor(whole[rows], piece, group=group, async_op=True) for piece, rows in pieces]
    return whole, works  # pyright: ignore[reportReturnType]


def _reduced(
    own: Tensor, x: Tensor, weight: Tensor, parts: Sequence[int], group: dist.ProcessGroup
) -> Iterator[tuple[dist.Work, Tensor]]:
    """Reduce the product of `x` and `weight` over the ranks: each gets its tokens of each part in `own`."""
    for mine, rows in zip(own.split(parts), _rows(parts, group.size()), strict=True):
        product = x[rows] @ weight
        work: Any = dist.reduce_scatter_tensor(mine, product, group=group, async_op=True)
        yield work, product


def _rows(parts: Sequence[int], ranks: int) -> list[slice]:
    """Return the rows of each part between the layers."""
    ends = [ranks * end for end in accumulate(parts, initial=0)]
    return [slice(*bounds) for bounds in pairwise(ends)]
