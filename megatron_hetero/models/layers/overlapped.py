"""Linear layers of an MLP or of attention, computed in chunks for sequence-parallel activations: the exchange of one
chunk over tp overlaps with the product of another (docs/training.md, "Exchanges beside matrix products").

A *chunk* is a range of each rank's tokens. Between the two layers the tokens are ordered chunk by chunk and within a
chunk rank by rank, so that each product has contiguous rows, and the gradient of a weight is a single product. An MLP
does not depend on the order; attention reorders its inputs and outputs. Where the product for the input's gradient is
too short to hide an exchange, the weight's gradient is computed chunk by chunk too.

In shapes, S is the number of tokens of all tp ranks, padding included.

The decomposition follows Wang et al. 2023 (ASPLOS, "Overlap Communication with Dependent Computation via
Decomposition"), with collectives in place of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hetero.groups.platform import Function
from megatron_hetero.models.layers.dropout import TokenIds
from megatron_hetero.models.layers.linear import adds_to_main_grad, gradient_of_weight
from megatron_hetero.models.layers.low_rank import with_added

TILE = 64
"""Number of tokens per rank that fill whole tiles of a matrix product, a multiple of 128 rows, under any tp > 1."""


class Overlapping(nn.Module):
    """A module with two linear layers whose exchanges over tp can be divided into chunks."""

    exchange_chunks = 1

    def linears(self) -> tuple[Any, Any]:
        """Return the layer that gathers tokens and the layer that reduces them."""
        raise NotImplementedError


def overlap_exchanges(model: nn.Module, chunks: int) -> None:
    """Make the MLPs and the attention of `model` exchange tokens over tp in `chunks` chunks.

    Raises:
        TypeError: a module has linear layers other than `ColumnLinear` and `RowLinear`.
    """
    for module in model.modules():
        if isinstance(module, Overlapping):
            first, second = module.linears()
            if not (hasattr(first, "exchanges_in_chunks") and hasattr(second, "exchanges_in_chunks")):
                raise TypeError(f"{type(module).__name__} of {type(first).__name__} exchanges by itself")
            module.exchange_chunks = chunks


def chunk_sizes(module: Overlapping, tokens: int) -> tuple[int, ...]:
    """Return the size of each chunk of a rank's `tokens`; a single chunk if the exchanges of `module` do not overlap.
    Long chunks except the last have whole tiles, so that their products need no more tiles than a single product.
    """
    count = min(module.exchange_chunks, max(1, tokens))
    if count == 1:
        return (tokens,)
    if tokens >= TILE * count * count:
        long = TILE * round(tokens / count / TILE)
        return *(long,) * (count - 1), tokens - long * (count - 1)
    return tuple(tokens // count + (chunk < tokens % count) for chunk in range(count))


class Ahead:
    """Gather of a column-parallel layer's input for the gradient of its weight. `gather_ahead` starts it in the
    backward pass, before the layer needs the result.
    """

    def __init__(self, chunks: Sequence[int], group: dist.ProcessGroup) -> None:
        self._chunks, self._group = chunks, group
        self._gathered: tuple[Tensor, list[dist.Work]] | None = None

    def gather(self, x: Tensor) -> None:
        """Start the all-gather of `x` [S / tp, 1, in]."""
        self._gathered = _gather(x, self._chunks, self._group)

    def take(self) -> tuple[Tensor, list[dist.Work]]:
        """Return the gathered input [S, 1, in], and the works after which it is valid."""
        assert self._gathered is not None, "`gather_ahead` comes first in the backward pass"
        gathered, self._gathered = self._gathered, None
        return gathered


def ahead_of(layer: Any, chunks: Sequence[int]) -> Ahead | None:
    """Return an early gather of a column-parallel layer's input, for `first_in_chunks` and `gather_ahead`; None if the
    layer gathers no input in its backward pass, or exchanges by itself.
    """
    gathers = getattr(layer, "exchanges_in_chunks", False) and layer.sequence_parallel and layer.weight.requires_grad
    return Ahead(chunks, layer.tp_group) if gathers and torch.is_grad_enabled() else None


def gather_ahead(out: Tensor, x: Tensor, ahead: Ahead) -> Tensor:
    """Return `out` unchanged. When its gradient arrives, start to gather `x` [S / tp, 1, in], which overlaps with the
    backward pass of everything between the layer of `ahead` and `out`: attention or an activation, which release
    multiprocessors earlier than a matrix product.
    """
    return _GatherAhead.apply(out, x, ahead)  # pyright: ignore[reportReturnType]


def first_in_chunks(
    layer: Any, x: Tensor, chunks: Sequence[int], ahead: Ahead | None = None, ids: TokenIds | None = None
) -> tuple[Tensor, Tensor | None]:
    """Apply a column-parallel layer to `x` [S / tp, 1, in]. Return [S, 1, out / tp] and a bias that the caller adds.

    Args:
        layer: the layer, which is called directly if there is a single chunk.
        x: this rank's tokens.
        chunks: size of each chunk.
        ahead: early gather of `x` in the backward pass, for which this function need not save `x`.
        ids: token ids for dropout.
    """
    if len(chunks) == 1:
        out, bias = layer(x) if ahead is None else layer(x, ahead=ahead)
    else:
        out, bias = _First.apply(x, layer.weight, layer.bias, chunks, layer.tp_group, ahead), None
    return with_added(layer, out, x, chunks, ids), bias  # pyright: ignore[reportArgumentType]


def second_in_chunks(
    layer: Any, x: Tensor, chunks: Sequence[int], ids: TokenIds | None = None
) -> tuple[Tensor, Tensor | None]:
    """Apply a row-parallel layer to `x` [S, 1, in / tp]. Return [S / tp, 1, out] and a bias. See `first_in_chunks`."""
    if len(chunks) == 1:
        out, bias = layer(x)
    else:
        out, bias = _Second.apply(x, layer.weight, chunks, layer.tp_group), layer.bias
        if bias is not None and not layer.skip_bias_add:
            out, bias = out + bias, None
    return with_added(layer, out, x, chunks, ids), bias


class _GatherAhead(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, ahead: Ahead) -> Tensor:
        ctx.save_for_backward(x)
        ctx.ahead = ahead
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ahead.gather(*ctx.saved_tensors)
        return grad, None, None


class _First(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, chunks: Sequence[int], group: dist.ProcessGroup,
        ahead: Ahead | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x if ctx.needs_input_grad[1] and ahead is None else None, weight)
        ctx.parameter, ctx.chunks, ctx.group, ctx.ahead = weight, chunks, group, ahead
        whole, works = _gather(x, chunks, group)
        out = x.new_empty(len(whole), *x.shape[1:-1], len(weight))
        for rows, work in zip(_rows(chunks, group.size()), works, strict=True):
            work.wait()
            product = out[rows].flatten(0, -2)
            if bias is None:
                torch.mm(whole[rows].flatten(0, -2), weight.t(), out=product)
            else:
                torch.addmm(bias, whole[rows].flatten(0, -2), weight.t(), out=product)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        whole = grad_x = grad_weight = None
        gathering: list[dist.Work] = []
        # Keep the tensors that are sent alive until their works are done.
        reducing: list[tuple[dist.Work, Tensor]] = []
        if ctx.needs_input_grad[1]:
            whole, gathering = ctx.ahead.take() if ctx.ahead else _gather(x, ctx.chunks, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = grad.new_empty(sum(ctx.chunks), *grad.shape[1:-1], weight.shape[1])
            reducing = list(_reduced(grad_x, grad, weight, ctx.chunks, ctx.group))
        for work in gathering:
            work.wait()
        rows = grad.flatten(0, -2)
        if whole is not None:
            grad_weight = gradient_of_weight(ctx.parameter, rows.t(), whole.flatten(0, -2))
        grad_bias = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        for work, _ in reducing:
            work.wait()
        return grad_x, grad_weight, grad_bias, None, None, None


class _Second(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.parameter, ctx.chunks, ctx.group = weight, chunks, group
        out = x.new_empty(sum(chunks), *x.shape[1:-1], len(weight))
        for work, _ in list(_reduced(out, x, weight.t(), chunks, group)):
            work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        whole, gathering = _gather(grad, ctx.chunks, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x = grad.new_empty(len(whole), *grad.shape[1:-1], weight.shape[1])
        by_chunk = ctx.needs_input_grad[1] and _is_narrow(weight) and adds_to_main_grad(ctx.parameter, grad.dtype)
        for rows, work in zip(_rows(ctx.chunks, ctx.group.size()), gathering, strict=True):
            work.wait()
            if grad_x is not None:
                torch.mm(whole[rows].flatten(0, -2), weight, out=grad_x[rows].flatten(0, -2))
            if by_chunk:
                grad_weight = gradient_of_weight(ctx.parameter, whole[rows].flatten(0, -2).t(), x[rows].flatten(0, -2))
        if ctx.needs_input_grad[1] and not by_chunk:
            grad_weight = gradient_of_weight(ctx.parameter, whole.flatten(0, -2).t(), x.flatten(0, -2))
        return grad_x, grad_weight, None, None


def _is_narrow(weight: Tensor) -> bool:
    """Return whether the product for the input's gradient is too short to hide the gather of the next chunk."""
    out, inputs = weight.shape
    return 2 * inputs < out


def _gather(x: Tensor, chunks: Sequence[int], group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Gather `x` of all ranks chunk by chunk. Return the result, and the works after which its chunks are valid."""
    whole = x.new_empty(len(x) * group.size(), *x.shape[1:])
    pairs = zip(x.contiguous().split(chunks), _rows(chunks, group.size()), strict=True)
    works = [dist.all_gather_into_tensor(whole[rows], local, group=group, async_op=True) for local, rows in pairs]
    return whole, works  # pyright: ignore[reportReturnType]


def _reduced(
    out: Tensor, x: Tensor, weight: Tensor, chunks: Sequence[int], group: dist.ProcessGroup
) -> Iterator[tuple[dist.Work, Tensor]]:
    """Reduce-scatter the product of `x` and `weight` chunk by chunk into `out`; yield each work and its input."""
    for local, rows in zip(out.split(chunks), _rows(chunks, group.size()), strict=True):
        product = x[rows] @ weight
        work: Any = dist.reduce_scatter_tensor(local, product, group=group, async_op=True)
        yield work, product


def _rows(chunks: Sequence[int], ranks: int) -> list[slice]:
    """Return the range of rows of each chunk in the tensors between the two layers."""
    ends = [ranks * end for end in accumulate(chunks, initial=0)]
    return [slice(*bounds) for bounds in pairwise(ends)]
