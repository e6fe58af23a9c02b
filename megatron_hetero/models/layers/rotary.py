"""Rotary embedding of queries and keys (Su et al. 2021, arXiv 2104.09864), in the half-split form of GPT-NeoX, computed
in fp32 and rounded once. In one pass each way where a GPU compiles it, few elsewhere.

Shape suffixes: n tokens without padding, S tokens with padding, G groups of heads of this rank, H heads, D elements per
head. A table [2, n, D] has the cosines and sines of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.groups.platform import compiles_for, on_device
from megatron_hetero.models.layers.compiled import run


@lru_cache(maxsize=16)
def rotary_frequencies(theta: float, dim: int, device: torch.device) -> Tensor:
    """theta^(-2i / dim) for i below dim / 2, fp32. Computed on the host as `transformers` does, and moved once."""
    return on_device(1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), device)


def axial_table(positions_2n: Tensor, theta: float, head_dim: int) -> Tensor:
    """Cosines and sines of the 2-D rotary embedding, fp32 [2, n, head_dim]: half of the angles by row, half by
    column.
    """
    frequencies = rotary_frequencies(theta, head_dim // 2, positions_2n.device)
    angles = (positions_2n[..., None].float() * frequencies).transpose(0, 1).flatten(1)
    return _cosines_and_sines(angles)


def multimodal_table(positions_3n: Tensor, theta: float, head_dim: int, turns: tuple[int, ...]) -> Tensor:
    """Cosines and sines of the multimodal rotary embedding, fp32 [2, n, head_dim].

    `turns`: for each frequency the position that it turns with: 0 time, 1 height, 2 width (Wang et al. 2024,
    arXiv 2409.12191).
    """
    device = positions_3n.device
    frequencies = rotary_frequencies(theta, head_dim, device)
    return _cosines_and_sines(positions_3n[_index(turns, device)].transpose(0, 1).float() * frequencies)


class Rotary(Protocol):
    """How positions turn queries and keys."""

    def table(self, positions: Tensor) -> Tensor:
        """Cosines and sines, fp32 [2, n, head_dim], of `positions` [dims, n]."""
        ...


@dataclass(frozen=True)
class AxialRotary:
    """2-D rotary embedding, see `axial_table`."""

    theta: float
    head_dim: int

    def table(self, positions: Tensor) -> Tensor:
        """Of rows and columns, the first two dims of `positions`."""
        return axial_table(positions[:2], self.theta, self.head_dim)


@dataclass(frozen=True)
class MultimodalRotary:
    """Rotary embedding of time, height and width, see `multimodal_table`."""

    theta: float
    head_dim: int
    turns: tuple[int, ...]

    def table(self, positions: Tensor) -> Tensor:
        """Of all three dims of `positions`."""
        return multimodal_table(positions, self.theta, self.head_dim, self.turns)


def _cosines_and_sines(angles: Tensor) -> Tensor:
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


@lru_cache(maxsize=16)
def _index(turns: tuple[int, ...], device: torch.device) -> Tensor:
    """Moved to the device once."""
    return on_device(torch.tensor(turns), device)


class Order(NamedTuple):
    """How n tokens of a sequence lie in S rows. `rows`: int64 [n], the row of each token; `tokens`: int64 [S], the
    token of each row, n or more where that has none.
    """

    rows: Tensor
    tokens: Tensor

    @classmethod
    def of_parts(cls, parts: tuple[int, ...], ranks: int, tokens: int, device: torch.device) -> Self:
        """Part after part the tokens that each of the ranks has in it, as many as `parts` say: those of the first rank
        are the first in the sequence. `tokens`: of the sequence, which padding follows.
        """
        rows, of_rows = _both_ways(parts, ranks, device)
        return cls(rows[:tokens], of_rows)

    def chosen(self, x: Tensor) -> Tensor:
        """[n, ...], the tokens of `x` [S, ...] in order."""
        return _Chosen.apply(x, self)  # pyright: ignore[reportReturnType]

    def placed(self, x: Tensor) -> Tensor:
        """[S, ...], the tokens `x` [n, ...] in their rows, and zeros elsewhere."""
        return _Placed.apply(x, self)  # pyright: ignore[reportReturnType]


@lru_cache(maxsize=16)
def _both_ways(parts: tuple[int, ...], ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row of each token, and the token of each row; padding, too."""
    by_part = torch.arange(sum(parts) * ranks).split([ranks * tokens for tokens in parts])
    by_rank = [rows.view(ranks, tokens) for rows, tokens in zip(by_part, parts, strict=True)]
    rows = torch.cat(by_rank, dim=1).flatten()
    return on_device(rows, device), on_device(rows.argsort(), device)


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _place(grad, ctx.order), None


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return _place(x, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.order.rows), None


def _place(x: Tensor, order: Order) -> Tensor:
    length = len(order.tokens)
    make = x.new_empty if length == len(x) else x.new_zeros
    return make(length, *x.shape[1:]).index_copy_(0, order.rows, x)


def rotate(x_nHD: Tensor, table_2nD: Tensor) -> Tensor:
    """`x` with each pair of elements turned by its angle."""
    return _Rotate.apply(x_nHD, table_2nD)  # pyright: ignore[reportReturnType]


def rotated_heads(
    mixed: Tensor, table_2nD: Tensor, dim: int, order: Order | None = None, *, members: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, rotated, and values, [n, H, D] each, of a projection [S, 1, G, heads of a group * D]: a group's
    queries, its key and its value. `dim`: D. `order`: of the projection's tokens, where they are not in order.

    `members`: of a group that exchanges heads for tokens; where there are several, [n, members, H / members, D] each.
    Their gradients come as views of what has been exchanged, which have that shape alone.
    """
    if order is not None and not _in_one_pass(mixed, table_2nD):
        mixed, order = order.chosen(mixed), None
    return _RotatedHeads.apply(mixed, table_2nD, dim, order, members)  # pyright: ignore[reportReturnType]


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


def _in_one_pass(x: Tensor, table_2nD: Tensor) -> bool:
    """Whether it is compiled, which of one token, or none, is not worth it."""
    return compiles_for(x) and table_2nD.shape[1] > 1


def _by_heads(part_nD: Tensor, x: Tensor) -> Tensor:
    return part_nD.view(len(x), *[1] * (x.dim() - 2), x.shape[-1])


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table_2nD: Tensor) -> Tensor:
        ctx.save_for_backward(table_2nD)
        if _in_one_pass(x, table_2nD):
            return run(turned, x, *table_2nD.unbind())
        out = torch.empty_like(x)
        _turn(x, table_2nD, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (table_2nD,) = ctx.saved_tensors
        if _in_one_pass(grad, table_2nD):
            return run(turned_back, grad, *table_2nD.unbind()), None
        out = torch.empty_like(grad)
        _turn(grad, table_2nD, out, back=True)
        return out, None


class _RotatedHeads(torch.autograd.Function):
    """No output is a view of the projection, all of which it would keep for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, table_2nD: Tensor, dim: int, order: Order | None, members: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(table_2nD)
        ctx.shape, ctx.dim, ctx.order = mixed.shape, dim, order
        if _in_one_pass(mixed, table_2nD):
            made = run(heads_turned, mixed, *table_2nD.unbind(), dim, None if order is None else order.rows)
        else:
            made = _heads_turned_by_parts(mixed, table_2nD, dim)
        return made if members == 1 else tuple(x.unflatten(1, (members, -1)) for x in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (table_2nD,) = ctx.saved_tensors
        one_pass = _in_one_pass(grads[0], table_2nD)
        back = _heads_turned_back if one_pass else _heads_turned_back_by_parts
        return back(ctx, table_2nD, grads), None, None, None, None


def _heads_turned_by_parts(mixed: Tensor, table_2nD: Tensor, dim: int) -> tuple[Tensor, ...]:
    heads = _of_tokens(mixed, table_2nD.shape[1], dim)
    # Queries and keys lie side by side.
    parts = (heads.shape[2] - 2, 1)
    alongs = _along(heads[:, :, :-1], table_2nD).split(parts, dim=2)
    outs = tuple(heads.new_empty(*heads.shape[:2], part, dim) for part in parts)
    for x, along, out in zip(heads[:, :, :-1].split(parts, dim=2), alongs, outs, strict=True):
        _turn(x, table_2nD, out, along=along)
    return *(out.flatten(1, 2) for out in outs), heads[:, :, -1].contiguous()


def _heads_turned_back(ctx: Any, table_2nD: Tensor, grads: Sequence[Tensor]) -> Tensor:
    # Without memory: it is as long as the projection.
    tokens = grads[0].new_empty(ctx.shape[0], 0) if ctx.order is None else ctx.order.tokens
    return run(heads_turned_back, *grads, *table_2nD.unbind(), tokens).view(ctx.shape)


def _heads_turned_back_by_parts(ctx: Any, table_2nD: Tensor, grads: Sequence[Tensor]) -> Tensor:
    of_mixed, tokens = grads[0].new_empty(ctx.shape), table_2nD.shape[1]
    if tokens < len(of_mixed):
        of_mixed[tokens:].zero_()
    places = split_heads(of_mixed, tokens, ctx.dim)
    (of_q, q), (of_k, k), (of_v, v) = (_alike(grad, place) for grad, place in zip(grads, places, strict=True))
    _turn(of_q, table_2nD, q, back=True)
    _turn(of_k, table_2nD, k, back=True)
    v.copy_(of_v)
    return of_mixed


def _alike(grad: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient [n, H, D] or [n, members, H / members, D], and its place [n, G, heads, D], by group and, where there
    are members, by member: views, as no gradient by member is one by head.
    """
    groups, heads = place.shape[1:3]
    if grad.dim() == 3:
        return grad.reshape(place.shape), place
    members = grad.shape[1]
    return grad.unflatten(2, (groups // members, heads)), place.unflatten(1, (members, -1))


# ------------------------------------------------------------------------------------- as a compiler joins it


def turned(x: Tensor, cosines_nD: Tensor, sines_nD: Tensor) -> Tensor:
    """As `rotate`."""
    return _turned_by(x, cosines_nD, _signed(sines_nD))


def turned_back(grad: Tensor, cosines_nD: Tensor, sines_nD: Tensor) -> Tensor:
    """The adjoint of `turned`."""
    return _turned_by(grad, cosines_nD, _signed(sines_nD).flip(1))


def heads_turned(
    mixed: Tensor, cosines_nD: Tensor, sines_nD: Tensor, dim: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rotated_heads`. `rows`: those of the tokens."""
    heads = mixed.view(len(mixed), mixed.shape[-2], mixed.shape[-1] // dim, dim)
    parts = heads.split((heads.shape[2] - 2, 1, 1), dim=2)
    q, k, v = (x[: len(cosines_nD)] if rows is None else x[rows] for x in parts)
    q, k = (turned(x, cosines_nD, sines_nD) for x in (q, k))
    return q.flatten(1, 2), k.flatten(1, 2), v.clone(memory_format=torch.contiguous_format).flatten(1, 2)


def heads_turned_back(
    of_q: Tensor, of_k: Tensor, of_v: Tensor, cosines_nD: Tensor, sines_nD: Tensor, tokens: Tensor
) -> Tensor:
    """The adjoint of `heads_turned`: [S, G, heads of a group, D]. `tokens`: that of each row, n or more where there is
    none, [S]; or, where they are in order, something that is as long, [S, 0].
    """
    count = len(of_v)
    groups, dim = of_v.shape[1:-1].numel(), of_v.shape[-1]
    inputs = *(x.reshape(count, groups, -1, dim) for x in (of_q, of_k, of_v)), cosines_nD, sines_nD
    if tokens.dim() == 1:
        inputs = tuple(x[tokens.clamp(max=count - 1)] for x in inputs)
    q, k, v, cosines, sines = inputs
    out = torch.cat((*(turned_back(x, cosines, sines) for x in (q, k)), v), dim=2)
    if tokens.dim() == 1:
        return out.where((tokens < count)[:, None, None, None], 0)
    return F.pad(out, (0, 0, 0, 0, 0, 0, 0, len(tokens) - count)) if len(tokens) > count else out


def _turned_by(x: Tensor, cosines_nD: Tensor, sines_n2h: Tensor) -> Tensor:
    """Each half of `x` [n, ..., D] times the cosines, and the other half times the sines."""
    halves = x.unflatten(-1, (2, -1)).float()
    cosines, sines = (part.view(len(x), *[1] * (x.dim() - 2), *halves.shape[-2:]) for part in (cosines_nD, sines_n2h))
    return (halves * cosines + halves.flip(-2) * sines).flatten(-2).to(x.dtype)


def _signed(sines_nD: Tensor) -> Tensor:
    """[n, 2, D / 2], of the first half the negative."""
    signs = 2 * torch.arange(2, device=sines_nD.device) - 1
    return sines_nD.unflatten(-1, (2, -1)) * signs[:, None]
