"""A token goes once to each rank that has experts of its choice, whatever tokens choose."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.models.layers import dispatch as layers_dispatch
from megatron_hetero.models.layers.dispatch import Crossing, Dispatch, Move, RowExchange, block, finish, move, start
from tests.support.ranks import on_ranks

WIDTH, RANKS = 11, 4
TOKENS = {"some": (7, 0, 12, 5), "one rank's": (0, 0, 9, 0), "none": (0, 0, 0, 0)}
SIZES = [(4, 1), (5, 1), (6, 2), (7, 3), (16, 8), (4, 4)]
"""Experts, and those of a token."""
WANTED = {
    "any": lambda scores: scores,
    "the same": lambda scores: scores.new_tensor(range(scores.shape[1])).expand_as(scores),
    "those of the first rank": lambda scores: scores - scores.new_tensor(range(scores.shape[1])),
    "all but the first": lambda scores: torch.cat([scores[:, :1] - 9, scores[:, 1:]], dim=1),
}
"""What tokens prefer, of random scores [tokens, experts]."""


class Received:
    """Rows of `WIDTH` that a rank gets from others, of each exchange."""

    def __init__(self) -> None:
        self.rows, self._run = list[int](), RowExchange.run

    def __call__(self, exchange: RowExchange, x: Tensor) -> tuple[Tensor, Any]:
        out, work = self._run(exchange, x)
        if x.shape[1:] == (WIDTH,):
            self.rows.append(len(out) - exchange.received[exchange.group.rank()])
        return out, work


@pytest.mark.parametrize("experts, top_k", SIZES)
@on_ranks(RANKS)
def test_no_row_is_received_twice_or_in_vain(experts: int, top_k: int) -> None:
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(experts)
    blocks = [block(experts, each, RANKS) for each in range(RANKS)]
    for tokens in TOKENS.values():
        for wanted in WANTED.values():
            scores = [torch.rand(n, experts, generator=generator) for n in tokens]
            chosen = [wanted(each).topk(top_k, dim=1).indices for each in scores]
            given = [torch.randint(9, (n, WIDTH), generator=generator).double() for n in tokens]
            _compare(chosen, given, rank, blocks)


def _compare(chosen: list[Tensor], given: list[Tensor], rank: int, blocks: list[Any]) -> None:
    """Let expert e multiply by e + 1, all in whole numbers."""
    first, stop = blocks[rank]
    x, received = given[rank].clone().requires_grad_(), Received()
    with mock.patch.object(RowExchange, "run", lambda exchange, x: received(exchange, x)):
        weights = _weights_of(chosen[rank]).requires_grad_()
        dispatch = Dispatch.of(chosen[rank], weights, blocks[-1][1], dist.group.WORLD)  # pyright: ignore[reportArgumentType]
        assert dispatch.exchange is not None
        of_weights, there, back = (
            Crossing(each) for each in (dispatch.exchange, dispatch.exchange, dispatch.exchange.back)
        )
        waiting = dispatch.start_weights(weights, of_weights)
        rows = start(x, there, dispatch.to_rows)
        of_pairs = dispatch.finish_weights(waiting, of_weights)
        pairs = move(finish(rows, there, Move()), dispatch.to_pairs)
        sizes = dispatch.ends.diff(prepend=dispatch.ends.new_zeros(1))
        factors = torch.arange(first, stop).repeat_interleave(sizes.long()) + 1.0
        # Weights are those of experts: pairs have them in the order of their experts.
        assert torch.equal(of_pairs, factors.double() / 16)
        out = pairs * factors[:, None].double()
        out = finish(start(out, back, dispatch.to_pairs.adjoint), back, dispatch.to_rows.adjoint)
        torch.autograd.backward([out, of_pairs], [x.detach() + 1, of_pairs.detach()])
    with mock.patch.object(layers_dispatch, "_read", wraps=layers_dispatch._read) as read:
        assert list(dispatch.host_ends) == dispatch.ends.tolist() == list(dispatch.host_ends)
        assert read.call_count == 1, "for forward, backward and recomputation"
    assert weights.grad is not None and torch.equal(weights.grad, weights.detach()), "each came back to its place"
    of_token = (chosen[rank] + 1).sum(1, keepdim=True)
    assert torch.equal(out, x * of_token)
    assert x.grad is not None and torch.equal(x.grad, (x.detach() + 1) * of_token)
    for at, expert in enumerate(range(first, stop)):  # An expert gets its tokens in the order of ranks.
        own = [tokens[(choices == expert).any(1)] for tokens, choices in zip(given, chosen, strict=True)]
        assert torch.equal(pairs[dispatch.ends[at] - sizes[at] : dispatch.ends[at]], torch.cat(own))
    visits = [[_tokens_for(choices, block) for block in blocks] for choices in chosen]
    arriving = sum(of_rank[rank] for other, of_rank in enumerate(visits) if other != rank)
    returning = sum(number for other, number in enumerate(visits[rank]) if other != rank)
    assert received.rows == [arriving, returning, arriving, returning]


def _weights_of(chosen: Tensor) -> Tensor:
    """Routing weights that say of which expert they are."""
    return (chosen.double() + 1) / 16


def _tokens_for(chosen: Tensor, block: tuple[int, int]) -> int:
    """The tokens that have chosen an expert of a block."""
    return int(((chosen >= block[0]) & (chosen < block[1])).any(1).sum())
