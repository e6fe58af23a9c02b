"""Dispatch of a layer's tokens to the ranks of their experts, and of the results back. No token is dropped.

Each rank routes its local tokens. A *pair* is a token with one of its chosen experts. A *row* is a token at a rank that
has some of its experts; it is sent once, even if the rank has several of its experts:

    local tokens --take--> rows by rank --all-to-all--> rows --take--> pairs by expert --experts--> results of pairs
    local tokens <--sum--- rows by rank <--all-to-all-- rows <--sum--- results of pairs

`take` copies rows and `sum` adds copies up. Each is the adjoint of the other, so a backward pass reverses the
exchange. Rows arrive in the order of ranks: if ranks have consecutive tokens, an expert sees them in the same order as
in a single process.

An exchange of rows is started and finished by two autograd functions, in both passes. What the program does between
them runs beside the exchange: the sort by expert beside the rows, and, in the backward pass, the recomputation of
hidden activations (`Crossing.beside`). The order in which exchanges are issued is that of the program and its reverse,
whatever the data are.

With ep ranks and k experts per token, uniform routing sends ep (1 - (1 - 1/ep)^k) rows per token, of which one in ep
stays on its rank: never more than an all-gather, which sends each token to every rank.

The host needs the sizes of the exchange, which the router determines on the device. So the forward pass waits for the
device once, unless every rank has all experts; the backward pass and a recomputation reuse the sizes. It waits once
more for `Dispatch.host_ends` where chunks, or products one expert at a time, depend on the pairs of each expert.

Shapes: `tokens` are local tokens without padding, `k` experts per token, `width` elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable
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


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


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

    def run(self, x: Tensor) -> tuple[Tensor, Any]:
        """Start to send `x` [sent, width]. Return a tensor for the received rows [received, width], and the work after
        which it has them.
        """
        out = x.new_empty(sum(self.received), *x.shape[1:])
        splits = list(self.received), list(self.sent)
        return out, dist.all_to_all_single(out, x, *splits, group=self.group, async_op=True)


@dataclass(eq=False)
class Crossing:
    """An exchange of rows in the forward pass, and of their gradients in the backward pass, each of which one autograd
    function starts and another one finishes. `beside`: work to do beside the exchange of the backward pass.
    """

    exchange: RowExchange
    beside: Callable[[], None] = lambda: None
    # The work, its result, and the tensor that is sent, which must live until the work is done.
    _flying: tuple[Any, Tensor, Tensor] | None = None

    def start(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Start to send `x`. Return an empty tensor, which stands for the result in the graph of autograd."""
        out, work = (self.exchange.back if back else self.exchange).run(x := x.contiguous())
        self._flying = work, out, x
        return x.new_empty(0)

    def finish(self) -> Tensor:
        """Wait for the exchange that was started, and return its result."""
        assert self._flying is not None, "the exchange has been started"
        (work, out, _), self._flying = self._flying, None
        work.wait()
        return out


class Move(NamedTuple):
    """A local move before or after an exchange: `take`, or `add_up` if `adds`; none without `copies`."""

    copies: Copies | None = None
    adds: bool = False

    def __call__(self, x: Tensor, *, adjoint: bool = False) -> Tensor:
        """Move `x`, or its gradient."""
        return x if self.copies is None else _moved(x, self.copies, self.adds != adjoint)


class _Started(Function):
    """Autograd function that moves rows and starts their exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing, move: Move) -> Tensor:
        ctx.crossing, ctx.move = crossing, move
        return crossing.start(move(x))

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.crossing.beside()
        return ctx.move(ctx.crossing.finish(), adjoint=True), None, None


class _Finished(Function):
    """Autograd function that finishes the exchange of rows and moves them."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, crossing: Crossing, move: Move) -> Tensor:
        ctx.crossing, ctx.move = crossing, move
        return move(crossing.finish())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.crossing.start(ctx.move(grad, adjoint=True), back=True), None, None


def start(x: Tensor, crossing: Crossing, move: Move) -> Tensor:
    """Move `x` and start `crossing`. Return a tensor that stands for the received rows until `finish`."""
    return _Started.apply(x, crossing, move)  # pyright: ignore[reportReturnType]


def finish(x: Tensor, crossing: Crossing, move: Move) -> Tensor:
    """Finish `crossing`, whose `start` has returned `x`, and move the received rows."""
    return _Finished.apply(x, crossing, move)  # pyright: ignore[reportReturnType]


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


@dataclass(eq=False)
class Dispatch:
    """Dispatch of a rank's tokens in one layer and micro-batch.

    Attributes:
        chosen: int64 [tokens, k], the experts of each token.
        experts: number of experts on all ranks.
        local: the experts [start, stop) of this rank.
        pairs_here: number of pairs of this rank's experts.
        rows: the copies of tokens to send, sorted by rank; None if every rank has all experts.
        exchange: the exchange of these rows; None if every rank has all experts.
        by_expert: `pairs`, `choice` and `ends`, once the experts of received rows are known.
        weights: [pairs], the routing weights of the first forward pass, once they are known, if they are exchanged.
    """

    chosen: Tensor
    experts: int
    local: tuple[int, int]
    pairs_here: int
    rows: Copies | None = None
    exchange: RowExchange | None = None
    by_expert: tuple[Copies, Tensor, Tensor] | None = None
    weights: Tensor | None = None

    def _sorted(self) -> tuple[Copies, Tensor, Tensor]:
        assert self.by_expert is not None, "`finish_weights` comes first"
        return self.by_expert

    @property
    def pairs(self) -> Copies:
        """The copies of received rows, sorted by expert."""
        return self._sorted()[0]

    @property
    def choice(self) -> Tensor:
        """The index of each pair in [received rows, k]: int64 [pairs]."""
        return self._sorted()[1]

    @property
    def ends(self) -> Tensor:
        """Where the pairs of each expert of this rank end: int32 [experts of this rank]."""
        return self._sorted()[2]

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
            by_expert = _by_expert(chosen, local, experts, chosen.numel())
            return cls(chosen, experts, local, chosen.numel(), by_expert=by_expert)
        # The owner is the inverse of `block`.
        owner = (chosen * ranks + (ranks - 1)) // experts if experts % ranks else chosen // (experts // ranks)
        to_rank = chosen.new_zeros(len(chosen), ranks, dtype=torch.bool).scatter_(1, owner, True)
        sizes = _sizes(owner, to_rank, group, imbalance)
        # `contiguous` frees the other column of the result.
        tokens = torch.nonzero_static(to_rank.t(), size=sum(sizes.sent))[:, 1].contiguous()
        rows = Copies.of(tokens, tokens.argsort(stable=True), to_rank.sum(1))
        return cls(chosen, experts, local, sizes.pairs, rows, RowExchange(group, sizes.sent, sizes.received))

    def start_weights(self, weights: Tensor, crossing: Crossing) -> Tensor:
        """Start to send chosen experts and routing `weights` [tokens, k] in one exchange, which a recomputation does
        not repeat. Return a tensor that stands for the weights of pairs until `finish_weights`.
        """
        return _WeightsStarted.apply(weights, self, crossing)  # pyright: ignore[reportReturnType]

    def finish_weights(self, x: Tensor, crossing: Crossing) -> Tensor:
        """Finish the exchange of `start_weights`, whose result is `x`. Return the routing weights of pairs, [pairs]."""
        return _WeightsFinished.apply(x, self, crossing)  # pyright: ignore[reportReturnType]


class _WeightsStarted(Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, dispatch: Dispatch, crossing: Crossing) -> Tensor:
        assert dispatch.rows is not None, "experts are on several ranks"
        ctx.rows, ctx.crossing = dispatch.rows, crossing
        if dispatch.weights is not None:
            return weights.new_empty(0)
        # Experts travel as the bits of the weights' dtype.
        experts = dispatch.chosen.to(_INTEGERS[weights.itemsize]).view(weights.dtype)
        return crossing.start(torch.cat((experts, weights), dim=1).index_select(0, dispatch.rows.rows))

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _moved(ctx.crossing.finish(), ctx.rows, True), None, None


class _WeightsFinished(Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, dispatch: Dispatch, crossing: Crossing) -> Tensor:
        ctx.dispatch, ctx.crossing = dispatch, crossing
        if dispatch.weights is None:
            experts, weights = crossing.finish().chunk(2, dim=1)
            experts = experts.view(_INTEGERS[weights.itemsize]).long()
            dispatch.by_expert = _by_expert(experts, dispatch.local, dispatch.experts, dispatch.pairs_here)
            dispatch.weights = weights.reshape(-1).index_select(0, dispatch.choice)
        return dispatch.weights.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        shape = sum(ctx.crossing.exchange.received), ctx.dispatch.chosen.shape[1]
        of_rows = grad.new_zeros(shape)
        of_rows.view(-1).scatter_(0, ctx.dispatch.choice, grad)
        return ctx.crossing.start(of_rows, back=True), None, None


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
    expert = (chosen - start) % experts if start else chosen  # Local experts are numbered from 0; others follow.
    in_order, choice = expert.flatten().sort(stable=True)
    if len(choice) > pairs:
        choice = choice[:pairs].clone()  # A slice would keep the others alive.
    ends = torch.searchsorted(in_order, torch.arange(1, stop - start + 1, device=chosen.device), out_int32=True)
    copies = Copies.of(choice // chosen.shape[1], choice.argsort(), (expert < stop - start).sum(1))
    return copies, choice, ends
