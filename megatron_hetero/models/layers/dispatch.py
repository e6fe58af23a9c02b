"""Moves tokens of a layer to the ranks of their experts, and results back. No token is dropped.

Each rank routes its own tokens. A *pair* is a token with one of its chosen experts; a *row* is a token at a rank that
has some of its experts, sent once however many these are:

    own tokens --take--> rows by rank --all-to-all--> rows --take--> pairs by expert --experts--> results of pairs
    own tokens <--sum--- rows by rank <--all-to-all-- rows <--sum--- results of pairs

`take` copies and `sum` adds up; each is the other's adjoint, so that backward passes are the same moves in reverse.
Tokens arrive in the order of ranks: where these have consecutive tokens, an expert sees them in the order of one
process.

A row to each rank with one of k experts is, under uniform routing, ep (1 - (1 - 1/ep)^k) rows for a token, one in ep of
which stays. That is never more than an all-gather of tokens, which sends each token everywhere.

The host has to know the sizes of an exchange, which the router determines on the device. So a forward pass waits for
the device once, unless all experts are on each rank; a backward pass and a recomputation know them. It waits once more
for `Dispatch.host_ends`, where chunks or products one by one depend on the pairs of each expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def block(experts: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the experts [start, stop) of a rank; blocks differ by one expert at most."""
    return experts * rank // ranks, experts * (rank + 1) // ranks


class Copies(NamedTuple):
    """Copies of rows: `rows` [copies] the row of each copy; `order` [copies] the copies in the order of rows; `starts`
    [rows] the first of each row in it. int64.
    """

    rows: Tensor
    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, rows: Tensor, order: Tensor, counts: Tensor) -> Copies:
        """Return copies of rows that have `counts` [rows] of them."""
        return cls(rows, order, counts.cumsum(0) - counts)


def take(x: Tensor, copies: Copies) -> Tensor:
    """Return copies [copies, width] of rows `x` [rows, width]."""
    return _Moved.apply(x, copies, False)  # pyright: ignore[reportReturnType]


def add_up(x: Tensor, copies: Copies) -> Tensor:
    """Return the sums [rows, width] of copies `x` [copies, width]."""
    return _Moved.apply(x, copies, True)  # pyright: ignore[reportReturnType]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies, adds: bool) -> Tensor:
        ctx.copies, ctx.adds = copies, adds
        return _moved(x, copies, adds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _moved(grad, ctx.copies, not ctx.adds), None, None


def _moved(x: Tensor, copies: Copies, adds: bool) -> Tensor:
    if not adds:
        return x.index_select(0, copies.rows)
    if not len(x):
        return x.new_zeros(len(copies.starts), x.shape[1])
    # Sums in one order, and in fp32, which `index_add_` does not on a GPU.
    return F.embedding_bag(copies.order, x, copies.starts, mode="sum")


@dataclass(frozen=True, eq=False)
class RowExchange:
    """An all-to-all over `group`: rows that this rank sends to each, and receives from each."""

    group: dist.ProcessGroup
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def back(self) -> RowExchange:
        """The exchange in the other direction."""
        return RowExchange(self.group, self.received, self.sent)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the received rows [received, width] for `x` [sent, width]."""
        return _Exchanged.apply(x, self)  # pyright: ignore[reportReturnType]

    def run(self, x: Tensor) -> Tensor:
        """Do the same, which autograd does not see."""
        out = x.new_empty(sum(self.received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(self.received), list(self.sent), group=self.group)
        return out


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.back.run(grad), None


class Sizes(NamedTuple):
    """Sizes of a dispatch on one rank: rows that it sends to each rank and receives from each, and pairs received."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    pairs: int

    @classmethod
    def expected(cls, tokens: int, top_k: int, ranks: int, imbalance: float) -> Sizes:
        """Return the sizes under uniform routing, on a rank whose experts get `imbalance` times as much as the mean."""
        to_each = round(tokens * (1 - (1 - 1 / ranks) ** top_k))
        received = min(tokens, round(to_each * imbalance))
        return cls((to_each,) * ranks, (received,) * ranks, round(tokens * top_k * imbalance))


@dataclass(frozen=True, eq=False)
class Dispatch:
    """The moves of the tokens of a rank in one layer and micro-batch.

    Attributes:
        chosen: int64 [tokens, k], the experts of each token.
        rows: copies of tokens that are sent, by rank; None if no rank has other experts.
        exchange: the exchange of these rows, likewise.
        pairs: copies of received rows, by expert.
        choice: int64 [pairs], the place of each pair in [received rows, k].
        ends: int32 [experts of this rank], where the pairs of each end.
    """

    chosen: Tensor
    rows: Copies | None
    exchange: RowExchange | None
    pairs: Copies
    choice: Tensor
    ends: Tensor

    @cached_property
    def host_ends(self) -> tuple[int, ...]:
        """`ends`, for which the host waits once."""
        return _read(self.ends, len(self.choice))

    @classmethod
    def of(cls, chosen: Tensor, experts: int, group: dist.ProcessGroup, imbalance: float = 1.0) -> Dispatch:
        """Return the moves for `chosen` int64 [tokens, k]. Collective if `group` has several ranks.

        Args:
            chosen: the experts of each token.
            experts: their number.
            group: ranks that have them.
            imbalance: see `Sizes.expected`, for tensors without values.
        """
        ranks = group.size()
        own = block(experts, group.rank(), ranks)
        if ranks == 1:
            return cls(chosen, None, None, *_by_expert(chosen, own, experts, chosen.numel()))
        owner = (chosen * ranks + (ranks - 1)) // experts  # The inverse of `block`.
        to_rank = chosen.new_zeros(len(chosen), ranks, dtype=torch.bool).scatter_(1, owner, True)
        sizes = _sizes(owner, to_rank, group, imbalance)
        exchange = RowExchange(group, sizes.sent, sizes.received)
        # Without the rest of what they are views of.
        tokens = torch.nonzero_static(to_rank.t(), size=sum(sizes.sent))[:, 1].contiguous()
        rows = Copies.of(tokens, tokens.argsort(stable=True), to_rank.sum(1))
        received = exchange.run(chosen.int().index_select(0, tokens)).long()
        return cls(chosen, rows, exchange, *_by_expert(received, own, experts, sizes.pairs))

    def send(self, x: Tensor) -> Tensor:
        """Return the rows [received, width] that come for `x` [tokens, width]."""
        if self.rows is None or self.exchange is None:
            return x
        return self.exchange(take(x, self.rows))

    def bring_back(self, x: Tensor) -> Tensor:
        """Return the sums [tokens, width] of results `x` [received, width] of rows."""
        if self.rows is None or self.exchange is None:
            return x
        return add_up(self.exchange.back(x), self.rows)


def _sizes(owner: Tensor, to_rank: Tensor, group: dist.ProcessGroup, imbalance: float) -> Sizes:
    """Exchange sizes, and wait for them. `owner` int64 [tokens, k] and `to_rank` bool [tokens, ranks]: the ranks of the
    experts of each token.
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
    """Return `ends` on the host. Those of tensors without values have all `pairs` of one expert, which need most."""
    return (pairs,) * len(ends) if ends.is_meta else tuple(ends.tolist())


def _by_expert(chosen: Tensor, own: tuple[int, int], experts: int, pairs: int) -> tuple[Copies, Tensor, Tensor]:
    """Return copies of rows by expert of this rank, the place of each in `chosen` [rows, k], and where the copies of
    each expert end. `own`: those of all `experts` that are this rank's; `pairs`: number of copies.
    """
    start, stop = own
    expert = (chosen - start) % experts  # From 0 on its own, others behind.
    choice = expert.flatten().argsort(stable=True)[:pairs].clone()
    counts = chosen.new_zeros(experts).scatter_(0, expert.flatten(), 1, reduce="add")[: stop - start]
    copies = Copies.of(choice // chosen.shape[1], choice.argsort(), (expert < stop - start).sum(1))
    return copies, choice, counts.cumsum(0).int()
