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
more for `Dispatch.host_ends` where chunks, or products one expert at a time, depend on the pairs of each expert. After
a wait the device is idle until the host issues more. So all that does not depend on sizes is issued before, and indices
for sums after the experts' products.

Shapes: `tokens` are local tokens without padding, `k` experts per token, `width` elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
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

    order: Tensor
    """Copies sorted by row, [copies]."""
    starts: Tensor
    """Position in `order` of each row's first copy, [rows]."""

    @classmethod
    def of(cls, order: Tensor, counts: Tensor) -> Copies:
        """Return the `Copies` of rows, where `counts` [rows] is the number of copies of each row."""
        return cls(order, counts.cumsum(0) - counts)


class Move(NamedTuple):
    """A local move of rows: `take`, or the sum of copies if `adds`. Without `rows`, nothing moves."""

    rows: Tensor | None = None
    """Row of each copy, [copies]."""
    copies: Callable[[], Copies] | None = None
    """Return the copies of each row; called only to add up."""
    adds: bool = False

    @property
    def adjoint(self) -> Move:
        """The move of gradients."""
        return self._replace(adds=not self.adds)

    def __call__(self, x: Tensor) -> Tensor:
        """Move `x`."""
        if self.rows is None or self.copies is None:
            return x
        if not self.adds:
            return x.index_select(0, self.rows)
        order, starts = self.copies()
        if not len(x):
            return x.new_zeros(len(starts), x.shape[1])
        # `embedding_bag` adds in a fixed order and in fp32; `index_add_` on a GPU does neither.
        return F.embedding_bag(order, x, starts, mode="sum")


def move(x: Tensor, by: Move) -> Tensor:
    """Move `x` [rows, width] to copies [copies, width], or back if `by` adds."""
    return _Moved.apply(x, by)  # pyright: ignore[reportReturnType]


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Move) -> Tensor:
        ctx.by = by
        return by(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.by.adjoint(grad), None


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


class _Started(Function):
    """Autograd function that moves rows and starts their exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing, move: Move) -> Tensor:
        ctx.crossing, ctx.move = crossing, move
        return crossing.start(move(x))

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.crossing.beside()
        return ctx.move.adjoint(ctx.crossing.finish()), None, None


class _Finished(Function):
    """Autograd function that finishes the exchange of rows and moves them."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, crossing: Crossing, move: Move) -> Tensor:
        ctx.crossing, ctx.move = crossing, move
        return move(crossing.finish())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.crossing.start(ctx.move.adjoint(grad), back=True), None, None


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
        exchange: the exchange of rows; None if every rank has all experts.
        tokens: the token of each row to send, sorted by rank; None if every rank has all experts.
        to_rank: bool [tokens, ranks], whether a token is sent to each rank; None if every rank has all experts.
        packed: [tokens * ranks or k, 2 k], the experts and weights of each row to send, until they are sent.
        by_expert: the row of each pair, `choice` and `ends`, once the experts of received rows are known.
        expert: [received rows, k], the experts of received rows, until `pairs` needs them.
        weights: [pairs], the routing weights of the first forward pass, once they are known, if they are exchanged.
    """

    chosen: Tensor
    experts: int
    local: tuple[int, int]
    pairs_here: int
    exchange: RowExchange | None = None
    tokens: Tensor | None = None
    to_rank: Tensor | None = None
    packed: Tensor | None = None
    by_expert: tuple[Tensor, Tensor, Tensor] | None = None
    expert: Tensor | None = None
    weights: Tensor | None = None

    def _sorted(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.by_expert is not None, "`finish_weights` comes first"
        return self.by_expert

    @cached_property
    def rows(self) -> Copies:
        """The copies of tokens that are sent, sorted by rank."""
        assert self.tokens is not None and self.to_rank is not None, "experts are on several ranks"
        return Copies.of(self.tokens.argsort(stable=True), self.to_rank.sum(1))

    @cached_property
    def pairs(self) -> Copies:
        """The copies of received rows, sorted by expert."""
        expert, self.expert = self.expert, None
        assert expert is not None, "as long as there are no pairs"
        return Copies.of(self.choice.argsort(), (expert < len(self.ends)).sum(1))

    @property
    def to_rows(self) -> Move:
        """The move of local tokens to rows that are sent."""
        return Move(self.tokens, lambda: self.rows)

    @property
    def to_pairs(self) -> Move:
        """The move of received rows to pairs."""
        return Move(self._sorted()[0], lambda: self.pairs)

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
    def of(
        cls, chosen: Tensor, weights: Tensor, experts: int, group: dist.ProcessGroup, imbalance: float = 1.0
    ) -> Dispatch:
        """Return the dispatch of local tokens. This is a collective call if `group` has several ranks.

        Args:
            chosen: int64 [tokens, k], the experts of each token.
            weights: [tokens, k], their routing weights.
            experts: number of experts.
            group: the ranks over which experts are divided.
            imbalance: received pairs relative to the mean, used for tensors on the device `meta`.
        """
        ranks = group.size()
        local = block(experts, group.rank(), ranks)
        if ranks == 1:
            found = cls(chosen, experts, local, chosen.numel())
            found.sort(chosen)
            return found
        # The owner is the inverse of `block`.
        owner = (chosen * ranks + (ranks - 1)) // experts if experts % ranks else chosen // (experts // ranks)
        to_rank = chosen.new_zeros(len(chosen), ranks, dtype=torch.bool).scatter_(1, owner, True)
        # `contiguous` frees the other column of the result. The rows beyond those to send are tokens 0.
        most = len(chosen) * min(ranks, chosen.shape[1])
        tokens = torch.nonzero_static(to_rank.t(), size=most, fill_value=0)[:, 1].contiguous()
        # Experts travel as the bits of the weights' dtype.
        bits = chosen.to(_INTEGERS[weights.itemsize]).view(weights.dtype)
        packed = torch.cat((bits, weights.detach()), dim=1).index_select(0, tokens)
        sizes = _sizes(owner, to_rank, group, imbalance)
        exchange = RowExchange(group, sizes.sent, sizes.received)
        return cls(chosen, experts, local, sizes.pairs, exchange, tokens[: sum(sizes.sent)], to_rank, packed)

    def sort(self, chosen: Tensor) -> None:
        """Sort the pairs of this rank's experts by expert. `chosen`: integers [received rows, k], the experts of each
        received row.
        """
        start, stop = self.local
        # Local experts are numbered from 0; others follow.
        self.expert = expert = (chosen - start) % self.experts if start else chosen
        in_order, choice = expert.flatten().sort(stable=True)
        if len(choice) > self.pairs_here:
            choice = choice[: self.pairs_here].clone()  # A slice would keep the others alive.
        ends = torch.searchsorted(in_order, _numbers(stop - start, chosen.dtype, chosen.device), out_int32=True)
        self.by_expert = choice // chosen.shape[1], choice, ends

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
        ctx.move, ctx.crossing = dispatch.to_rows, crossing
        packed, dispatch.packed = dispatch.packed, None
        return weights.new_empty(0) if packed is None else crossing.start(packed[: sum(crossing.exchange.sent)])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.move.adjoint(ctx.crossing.finish()), None, None


class _WeightsFinished(Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, dispatch: Dispatch, crossing: Crossing) -> Tensor:
        ctx.dispatch, ctx.crossing = dispatch, crossing
        if dispatch.weights is None:
            experts, weights = crossing.finish().chunk(2, dim=1)
            dispatch.sort(experts.view(_INTEGERS[weights.itemsize]))
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


@lru_cache(maxsize=16)
def _numbers(last: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers from 1 to `last`."""
    with torch.inference_mode(False):  # Later calls reuse the tensor, and autograd cannot save inference tensors.
        return torch.arange(1, last + 1, dtype=dtype, device=device)
