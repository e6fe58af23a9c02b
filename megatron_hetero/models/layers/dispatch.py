"""Dispatch of a layer's tokens to the ranks of their experts, and of the results back. No token is dropped.

Each rank routes its local tokens. A *pair* is a token with one of its chosen experts. A *row* is a token at a rank that
has some of its experts; it is sent once, even if the rank has several of its experts:

    local tokens --take--> rows by rank --all-to-all--> rows --take--> pairs by expert --experts--> results of pairs
    local tokens <--sum--- rows by rank <--all-to-all-- rows <--sum--- results of pairs

`take` copies rows and `sum` adds copies up. Each is the adjoint of the other, so a backward pass reverses the
exchange. Rows arrive in the order of ranks: if ranks have consecutive tokens, an expert sees them in the same order as
in a single process.

With ep ranks and k experts per token, uniform routing sends ep (1 - (1 - 1/ep)^k) rows per token, of which one in ep
stays on its rank: never more than an all-gather, which sends each token to every rank.

The host needs the sizes of the exchange, which the router determines on the device. So the forward pass waits for the
device once, unless every rank has all experts; the backward pass and a recomputation reuse the sizes. It waits once
more for `Dispatch.host_ends` where chunks, or products one expert at a time, depend on the pairs of each expert.

Shapes: `tokens` are local tokens without padding, `k` experts per token, `width` elements of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.groups.platform import Function


def block(experts: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the experts [start, stop) of `rank`. The numbers of experts of any two ranks differ by at most one."""
    return experts * rank // ranks, experts * (rank + 1) // ranks


class Copies(NamedTuple):
    """The copies of each row, as index tensors (int64)."""

    rows: Tensor
    """Row of each copy, [copies]."""
    order: Tensor
    """Copies sorted by row, [copies]."""
    starts: Tensor
    """Position in `order` of each row's first copy, [rows]."""

    @classmethod
    def of(cls, rows: Tensor, order: Tensor, counts: Tensor) -> Copies:
        """Return the `Copies` of rows, where `counts` [rows] is the number of copies of each row."""
        return cls(rows, order, counts.cumsum(0) - counts)


def take(x: Tensor, copies: Copies) -> Tensor:
    """Copy rows of `x` [rows, width] and return the copies [copies, width]."""
    return _Moved.apply(x, copies, False)  # pyright: ignore[reportReturnType]


def add_up(x: Tensor, copies: Copies) -> Tensor:
    """Add up the copies `x` [copies, width] of each row and return the sums [rows, width]."""
    return _Moved.apply(x, copies, True)  # pyright: ignore[reportReturnType]


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies, adds: bool) -> Tensor:
        ctx.copies, ctx.adds = copies, adds
        return _moved(x, copies, adds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _moved(grad, ctx.copies, not ctx.adds), None, None


def _moved(x: Tensor, copies: Copies, adds: bool) -> Tensor:
    if not adds:
        return x.index_select(0, copies.rows)
    if not len(x):
        return x.new_zeros(len(copies.starts), x.shape[1])
    # `embedding_bag` adds in a fixed order and in fp32; `index_add_` on a GPU does neither.
    return F.embedding_bag(copies.order, x, copies.starts, mode="sum")


@dataclass(frozen=True, eq=False)
class RowExchange:
    """An all-to-all over `group`, with the number of rows that this rank sends to and receives from each member."""

    group: dist.ProcessGroup
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def back(self) -> RowExchange:
        """The same exchange in the opposite direction."""
        return RowExchange(self.group, self.received, self.sent)

    def __call__(self, x: Tensor) -> Tensor:
        """Send `x` [sent, width] and return the received rows [received, width]."""
        return _Exchanged.apply(x, self)  # pyright: ignore[reportReturnType]

    def run(self, x: Tensor) -> Tensor:
        """Send `x` [sent, width] and return the received rows [received, width], without autograd."""
        out = x.new_empty(sum(self.received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(self.received), list(self.sent), group=self.group)
        return out


class _Exchanged(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.back.run(grad), None


class Sizes(NamedTuple):
    """Sizes of a dispatch on one rank: rows sent to each rank, rows received from each rank, and pairs received."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    pairs: int

    @classmethod
    def expected(cls, tokens: int, top_k: int, ranks: int, imbalance: float) -> Sizes:
        """Return the sizes under uniform routing, on a rank whose experts receive `imbalance` times the mean."""
        to_each = round(tokens * (1 - (1 - 1 / ranks) ** top_k))
        received = min(tokens, round(to_each * imbalance))
        return cls((to_each,) * ranks, (received,) * ranks, round(tokens * top_k * imbalance))


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Dispatch of a rank's tokens in one layer and micro-batch.

    Attributes:
        chosen: int64 [tokens, k], the experts of each token.
        rows: the copies of tokens to send, sorted by rank; None if every rank has all experts.
        exchange: the exchange of these rows; None if every rank has all experts.
        pairs: the copies of received rows, sorted by expert.
        choice: int64 [pairs], the index of each pair in [received rows, k].
        ends: int32 [experts of this rank], where the pairs of each expert end.
    """

    chosen: Tensor
    rows: Copies | None
    exchange: RowExchange | None
    pairs: Copies
    choice: Tensor
    ends: Tensor

    @cached_property
    def host_ends(self) -> tuple[int, ...]:
        """`ends` on the host; the first access waits for the device."""
        return _read(self.ends, len(self.choice))

    @classmethod
    def of(cls, chosen: Tensor, experts: int, group: dist.ProcessGroup, imbalance: float = 1.0) -> Dispatch:
        """Return the dispatch of local tokens. This is a collective call if `group` has several ranks.

        Args:
            chosen: int64 [tokens, k], the experts of each token.
            experts: number of experts.
            group: the ranks over which experts are divided.
            imbalance: received pairs relative to the mean, used for tensors on the device `meta`.
        """
        ranks = group.size()
        local = block(experts, group.rank(), ranks)
        if ranks == 1:
            return cls(chosen, None, None, *_by_expert(chosen, local, experts, chosen.numel()))
        owner = (chosen * ranks + (ranks - 1)) // experts  # The owner is the inverse of `block`.
        to_rank = chosen.new_zeros(len(chosen), ranks, dtype=torch.bool).scatter_(1, owner, True)
        sizes = _sizes(owner, to_rank, group, imbalance)
        exchange = RowExchange(group, sizes.sent, sizes.received)
        # `contiguous` frees the other column of the result.
        tokens = torch.nonzero_static(to_rank.t(), size=sum(sizes.sent))[:, 1].contiguous()
        rows = Copies.of(tokens, tokens.argsort(stable=True), to_rank.sum(1))
        received = exchange.run(chosen.int().index_select(0, tokens)).long()
        return cls(chosen, rows, exchange, *_by_expert(received, local, experts, sizes.pairs))

    def send(self, x: Tensor) -> Tensor:
        """Send local tokens `x` [tokens, width] and return the received rows [received, width]."""
        if self.rows is None or self.exchange is None:
            return x
        return self.exchange(take(x, self.rows))

    def combine(self, x: Tensor) -> Tensor:
        """Send the results `x` [received, width] back, and return their sum for each local token, [tokens, width]."""
        if self.rows is None or self.exchange is None:
            return x
        return add_up(self.exchange.back(x), self.rows)


def _sizes(owner: Tensor, to_rank: Tensor, group: dist.ProcessGroup, imbalance: float) -> Sizes:
    """Exchange the sizes of a dispatch and wait for the result. `owner`: int64 [tokens, k], the rank of each chosen
    expert; `to_rank`: bool [tokens, ranks], whether a token is sent to each rank.
    """
    tokens, ranks = to_rank.shape
    if owner.is_meta:
        return Sizes.expected(tokens, owner.shape[1], ranks, imbalance)
    sizes = owner.new_zeros(2, ranks, 2)
    mine, theirs = sizes
    torch.sum(to_rank, dim=0, out=mine[:, 0])
    mine[:, 1].scatter_(0, owner.flatten(), 1, reduce="add")
    dist.all_to_all_single(theirs, mine, group=group)
    sent, received = sizes.tolist()
    return Sizes(tuple(n for n, _ in sent), tuple(n for n, _ in received), sum(n for _, n in received))


def _read(ends: Tensor, pairs: int) -> tuple[int, ...]:
    """Return `ends` on the host. On the device `meta`, assume that one expert has all `pairs`, the worst case for
    memory.
    """
    return (pairs,) * len(ends) if ends.is_meta else tuple(ends.tolist())


def _by_expert(chosen: Tensor, local: tuple[int, int], experts: int, pairs: int) -> tuple[Copies, Tensor, Tensor]:
    """Sort the pairs of this rank's experts by expert.

    Args:
        chosen: int64 [rows, k], the experts of each row.
        local: the experts [start, stop) of this rank.
        experts: number of experts on all ranks.
        pairs: number of pairs of this rank's experts.

    Returns:
        Copies of rows, the index of each pair in `chosen`, and where the pairs of each expert end.
    """
    start, stop = local
    expert = (chosen - start) % experts  # Local experts are numbered from 0; other experts follow.
    choice = expert.flatten().argsort(stable=True)[:pairs].clone()
    counts = chosen.new_zeros(experts).scatter_(0, expert.flatten(), 1, reduce="add")[: stop - start]
    copies = Copies.of(choice // chosen.shape[1], choice.argsort(), (expert < stop - start).sum(1))
    return copies, choice, counts.cumsum(0).int()
