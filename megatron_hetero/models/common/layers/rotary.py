"""Rotary embedding of queries and keys (Su et al. 2021, arXiv 2104.09864), in the half-split form of GPT-NeoX, computed
in fp32 and rounded once.

Shape suffixes: n tokens without padding, S tokens with padding, G groups of heads of this rank, H heads, D elements per
head. A table [2, n, D] has the cosines and sines of each token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(x_nHD: Tensor, table_2nD: Tensor) -> Tensor:
    """`x` with each pair of elements turned by its angle."""
    return _Rotate.apply(x_nHD, table_2nD)  # pyright: ignore[reportReturnType]


def rotated_heads(mixed: Tensor, table_2nD: Tensor, dim: int, *, members: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, rotated, and values, [n, H, D] each, of a projection [S, 1, G, heads of a group * D]: a group's
    queries, its key and its value. `dim`: D.

    `members`: of a group that exchanges heads for tokens; where there are several, [n, members, H / members, D] each.
    Their gradients come as views of what has been exchanged, which have that shape alone.
    """
    return _RotatedHeads.apply(mixed, table_2nD, dim, members)  # pyright: ignore[reportReturnType]


def split_heads(mixed: Tensor, tokens: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views [n, G, heads of a group, D] of a projection's queries, keys and values, see `rotated_heads`."""
    heads = _of_tokens(mixed, tokens, dim)
    q, k, v = heads.split((heads.shape[2] - 2, 1, 1), dim=2)
    return q, k, v


def _of_tokens(mixed: Tensor, tokens: int, dim: int) -> Tensor:
    heads = mixed.view(len(mixed), mixed.shape[-2], mixed.shape[-1] // dim, dim)
    return heads if tokens == len(mixed) else heads[:tokens]


def _turn(x: Tensor, table_2nD: Tensor, out: Tensor, *, along: Tensor | None = None, back: bool = False) -> None:
    """`x` [n, ..., D] into `out`: halves (a, b) to (a cos - b sin, b cos + a sin); with `back` the adjoint of that.
    `along`: `_along` of it, where it is known.
    """
    along = _along(x, table_2nD) if along is None else along
    sines = _by_heads(table_2nD[1], x).chunk(2, dim=-1)
    parts = zip(along.chunk(2, dim=-1), x.chunk(2, dim=-1)[::-1], sines[:: -1 if back else 1], strict=True)
    for (kept, other, sin), to, sign in zip(parts, out.chunk(2, dim=-1), (1, -1) if back else (-1, 1), strict=True):
        torch.addcmul(kept, other, sin, value=sign, out=to)


def _along(x: Tensor, table_2nD: Tensor) -> Tensor:
    """What stays of each element where it is, fp32."""
    return x * _by_heads(table_2nD[0], x)


def _by_heads(part_nD: Tensor, x: Tensor) -> Tensor:
    return part_nD.view(len(x), *[1] * (x.dim() - 2), x.shape[-1])


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table_2nD: Tensor) -> Tensor:
        ctx.save_for_backward(table_2nD)
        out = torch.empty_like(x)
        _turn(x, table_2nD, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (table_2nD,), out = ctx.saved_tensors, torch.empty_like(grad)
        _turn(grad, table_2nD, out, back=True)
        return out, None


class _RotatedHeads(torch.autograd.Function):
    """No output is a view of the projection, all of which it would keep for the backward pass."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, table_2nD: Tensor, dim: int, members: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(table_2nD)
        ctx.shape, ctx.dim = mixed.shape, dim
        heads = _of_tokens(mixed, table_2nD.shape[1], dim)
        # Queries and keys lie side by side.
        parts = (heads.shape[2] - 2, 1)
        alongs = _along(heads[:, :, :-1], table_2nD).split(parts, dim=2)
        outs = tuple(heads.new_empty(*heads.shape[:2], part, dim) for part in parts)
        for x, along, out in zip(heads[:, :, :-1].split(parts, dim=2), alongs, outs, strict=True):
            _turn(x, table_2nD, out, along=along)
        made = *(out.flatten(1, 2) for out in outs), heads[:, :, -1].contiguous()
        return made if members == 1 else tuple(x.unflatten(1, (members, -1)) for x in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (table_2nD,) = ctx.saved_tensors
        of_mixed, tokens = grads[0].new_empty(ctx.shape), table_2nD.shape[1]
        if tokens < len(of_mixed):
            of_mixed[tokens:].zero_()
        places = split_heads(of_mixed, tokens, ctx.dim)
        (of_q, q), (of_k, k), (of_v, v) = (_alike(grad, place) for grad, place in zip(grads, places, strict=True))
        _turn(of_q, table_2nD, q, back=True)
        _turn(of_k, table_2nD, k, back=True)
        v.copy_(of_v)
        return of_mixed, None, None, None


def _alike(grad: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient [n, H, D] or [n, members, H / members, D], and its place [n, G, heads, D], by group and, where there
    are members, by member: views, as no gradient by member is one by head.
    """
    groups, heads = place.shape[1:3]
    if grad.dim() == 3:
        return grad.reshape(place.shape), place
    members = grad.shape[1]
    return grad.unflatten(2, (groups // members, heads)), place.unflatten(1, (members, -1))
