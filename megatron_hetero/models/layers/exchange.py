"""Exchange of heads for tokens between ranks that share sequences, which may have different numbers of heads.

Shape suffixes:
    n  tokens of this rank
    N  tokens of all members of the group
    c  columns of all members
    C  columns of one member

    scatter_columns   [n, c] -> [N, C]   each member gets its columns of all tokens; columns of members may overlap
    gather_columns    [N, C] -> [n, c]   each member gets all columns of its tokens, member after member

Each function is one all-to-all in each pass. Every member knows all lengths and columns, so that
members without tokens or columns join the same exchanges.

The method is Ulysses (Jacobs et al. 2023, arXiv 2309.14509), extended to uneven numbers of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.groups.platform import Function
from megatron_hetero.hf.weight_map import Interval

Columns = tuple[Interval, ...]
"""Ranges of columns, which are concatenated in this order."""


def width_of(columns: Columns) -> int:
    """Return the number of columns in `columns`."""
    return sum(stop - start for start, stop in columns)


def even_ranges(size: int, members: int) -> tuple[Interval, ...]:
    """Divide `size` into one range per member, as evenly as possible. No range is longer than the first one.

    >>> even_ranges(4, 3)
    ((0, 2), (2, 3), (3, 4))
    """
    starts = [-(-size * i // members) for i in range(members + 1)]
    return tuple(pairwise(starts))


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange a number between all members. On NCCL the first exchange connects the members and makes their hosts wait
    for each other, which must not happen inside a step. `Topology.build` calls this for modules in `exchanging`.
    """
    sent = torch.zeros(group.size(), device=device)
    dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def scatter_columns(
    x_nc: Tensor, columns: Sequence[Columns], lengths: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send each member its `columns`. Return [N, C] in the order of members. `lengths`: tokens of each member."""
    return _Scatter.apply(x_nc, columns, lengths, group)  # pyright: ignore[reportReturnType]


def gather_columns(x_NC: Tensor, widths: Sequence[int], lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send each member the columns of its tokens. Return [n, sum of `widths`]. `widths`: columns of each member."""
    return _Gather.apply(x_NC, widths, lengths, group)  # pyright: ignore[reportReturnType]


class _Scatter(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, columns: Sequence[Columns], lengths: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.columns, ctx.lengths, ctx.group, ctx.width = columns, lengths, group, x.shape[1]
        return _scattered(x, columns, lengths, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        by_member = _gathered(grad, list(map(width_of, ctx.columns)), ctx.lengths, ctx.group)
        grad_x = grad.new_zeros(ctx.lengths[ctx.group.rank()], ctx.width)
        for gathered, columns in zip(by_member, ctx.columns, strict=True):
            for values, (start, stop) in zip(_split(gathered, columns), columns, strict=True):
                grad_x[:, start:stop] += values
        return grad_x, None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: Sequence[int], lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.widths, ctx.lengths, ctx.group = widths, lengths, group
        return torch.cat(_gathered(x, widths, lengths, group), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        columns = [(bounds,) for bounds in pairwise(accumulate(ctx.widths, initial=0))]
        return _scattered(grad, columns, ctx.lengths, ctx.group), None, None, None


def _scattered(x: Tensor, columns: Sequence[Columns], lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send each member its `columns` of `x`, and return the received columns [N, C]."""
    widths, tokens = list(map(width_of, columns)), len(x)
    sent = x.new_empty(tokens * sum(widths))
    for buffer, each in zip(_by_width(sent, tokens, widths), columns, strict=True):
        for values, (start, stop) in zip(_split(buffer, each), each, strict=True):
            values.copy_(x[:, start:stop])
    width = widths[group.rank()]
    received = x.new_empty(sum(lengths) * width)
    sizes = [n * width for n in lengths], [tokens * each for each in widths]
    dist.all_to_all_single(received, sent, *sizes, group=group)
    return received.view(sum(lengths), width)


def _gathered(x: Tensor, widths: Sequence[int], lengths: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the columns of each member for this rank's tokens: [n, width] for each of `widths`."""
    tokens, width = lengths[group.rank()], widths[group.rank()]
    received = x.new_empty(tokens * sum(widths))
    sizes = [tokens * each for each in widths], [n * width for n in lengths]
    dist.all_to_all_single(received, x.contiguous().view(-1), *sizes, group=group)
    return _by_width(received, tokens, widths)


def _by_width(flat: Tensor, rows: int, widths: Sequence[int]) -> list[Tensor]:
    """View consecutive ranges of a flat tensor as matrices [rows, width]."""
    segments = flat.split([rows * width for width in widths])
    return [segment.view(rows, width) for segment, width in zip(segments, widths, strict=True)]


def _split(x: Tensor, columns: Columns) -> Sequence[Tensor]:
    return x.split([stop - start for start, stop in columns], dim=1)
