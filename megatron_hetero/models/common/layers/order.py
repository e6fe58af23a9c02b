"""Tokens that do not lie in their order in the sequence."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.distributed.platform import on_device


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
