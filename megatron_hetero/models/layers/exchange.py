"""Exchange of tokens for heads over ranks that share sequences, with any number of heads on each of them.

Shape suffixes: n tokens of this rank, N of all members of the group, c columns, C those of one member.

    scatter_columns   [n, c] -> [N, C]   each member gets its columns of all tokens, which may overlap other members'
    gather_columns    [N, C] -> [n, c]   each member gets all columns of its own tokens, member after member

Each is one all-to-all forward, and one backward. Every member knows all lengths and all columns, so that members
without tokens or without columns take part in the same exchanges.

The method is that of Ulysses (Jacobs et al. 2023, arXiv 2309.14509); heads need not be as many on each member.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.hf.weight_map import Interval

Columns = tuple[Interval, ...]
"""Ranges of columns, one after the other."""


def width_of(columns: Columns) -> int:
    """Return the number of columns."""
    return sum(stop - start for start, stop in columns)


def even_ranges(size: int, members: int) -> tuple[Interval, ...]:
    """Return a range of `size` for each member, as even as possible; the first one is among the longest.

    >>> even_ranges(4, 3)
    ((0, 2), (2, 3), (3, 4))
    """
    starts = [-(-size * i // members) for i in range(members + 1)]
    return tuple(pairwise(starts))


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange a number between all members, which connects them on NCCL: their hosts wait for each other in the first
    exchange, which must not be amid a step. `Topology.build` does so for modules that are `exchanging`.
    """
    sent = torch.zeros(group.size(), device=device)
    dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def scatter_columns(
    x_nc: Tensor, columns: Sequence[Columns], lengths: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Give each member its `columns` of all tokens: [N, C], member after member. `lengths`: tokens of each member."""
    return _Scatter.apply(x_nc, columns, lengths, group)  # pyright: ignore[reportReturnType]


def gather_columns(x_NC: Tensor, widths: Sequence[int], lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Give each member all columns of its own tokens: [n, sum of `widths`], which are the columns of each member."""
    return _Gather.apply(x_NC, widths, lengths, group)  # pyright: ignore[reportReturnType]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, columns: Sequence[Columns], lengths: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.columns, ctx.lengths, ctx.group, ctx.width = columns, lengths, group, x.shape[1]
        return _scattered(x, columns, lengths, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = _gathered(grad, list(map(width_of, ctx.columns)), ctx.lengths, ctx.group)
        out = grad.new_zeros(ctx.lengths[ctx.group.rank()], ctx.width)
        for part, columns in zip(parts, ctx.columns, strict=True):
            for piece, (start, stop) in zip(_pieces(part, columns), columns, strict=True):
                out[:, start:stop] += piece
        return out, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: Sequence[int], lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.widths, ctx.lengths, ctx.group = widths, lengths, group
        return torch.cat(_gathered(x, widths, lengths, group), dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        columns = [(bounds,) for bounds in pairwise(accumulate(ctx.widths, initial=0))]
        return _scattered(grad, columns, ctx.lengths, ctx.group), None, None, None


def _scattered(x: Tensor, columns: Sequence[Columns], lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    widths, mine = list(map(width_of, columns)), len(x)
    sent = x.new_empty(mine * sum(widths))
    for part, own in zip(_by_width(sent, mine, widths), columns, strict=True):
        for piece, (start, stop) in zip(_pieces(part, own), own, strict=True):
            piece.copy_(x[:, start:stop])
    width = widths[group.rank()]
    received = x.new_empty(sum(lengths) * width)
    dist.all_to_all_single(received, sent, [n * width for n in lengths], [mine * each for each in widths], group=group)
    return received.view(sum(lengths), width)


def _gathered(x: Tensor, widths: Sequence[int], lengths: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Return [n, width] for each of `widths`."""
    mine, width = lengths[group.rank()], widths[group.rank()]
    received = x.new_empty(mine * sum(widths))
    sizes = [mine * each for each in widths], [n * width for n in lengths]
    dist.all_to_all_single(received, x.contiguous().view(-1), *sizes, group=group)
    return _by_width(received, mine, widths)


def _by_width(flat: Tensor, rows: int, widths: Sequence[int]) -> list[Tensor]:
    """Return matrices of so many rows that follow each other in memory."""
    parts = flat.split([rows * width for width in widths])
    return [part.view(rows, width) for part, width in zip(parts, widths, strict=True)]


def _pieces(part: Tensor, columns: Columns) -> Sequence[Tensor]:
    return part.split([stop - start for start, stop in columns], dim=1)
