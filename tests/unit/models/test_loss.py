"""The loss of a head whose vocabulary is split over ranks, against cross entropy in one piece."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_hetero.groups.platform import MAX_GRAPHS
from megatron_hetero.models import language
from megatron_hetero.models.language import VocabularyShard, head_loss, vocab_parallel_hits
from tests.support.matrix import thinned
from tests.support.pool import world
from tests.support.ranks import on_ranks

TOLERANCES: dict[Any, Any] = {torch.float32: {}, torch.bfloat16: {"rtol": 0.05, "atol": 0.2}}
PIECES = [(7, None), (7, 3), (7, 1), (1, None), (0, 3), (40, None), (40, 13)]
# 21 over 4 ranks leaves padding on the last; 5 over 4 leaves one rank without a valid column; 9 over 4 part of one.


def errors(
    vocabulary: int, tokens: int, chunk: int | None, dtype: torch.dtype, group: dist.ProcessGroup
) -> list[float]:
    """Errors of loss and gradients against `F.cross_entropy`, relative to the largest element. The vocabulary is padded
    to the group.
    """
    rank, members = group.rank(), group.size()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, 16, generator=generator).to(dtype).float().requires_grad_()
    weight = torch.randn(vocabulary, 16, generator=generator).to(dtype).float().requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    expected = 3 * F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    expected.backward()

    columns = -(-vocabulary // members)
    shard = VocabularyShard(rank * columns, max(0, min(columns, vocabulary - rank * columns)), group)
    own = torch.full((columns, 16), 100.0)  # what pads must not matter, however large
    mine = slice(shard.first, shard.first + shard.valid)
    own[: shard.valid] = weight.detach()[mine]
    own, given = own.to(dtype).requires_grad_(), hidden.detach().to(dtype).requires_grad_()
    hits = torch.zeros(tokens, dtype=torch.bool)
    got = 3 * head_loss(given, own, targets, shard, hits=hits, chunk=chunk)
    got.backward()
    assert got.dtype == torch.float32 and own.grad is not None and given.grad is not None
    assert own.grad.dtype == given.grad.dtype == dtype
    assert not own.grad[shard.valid :].any(), "padding has a gradient"
    if dtype == torch.float32:
        assert torch.equal(hits, (hidden @ weight.t()).argmax(dim=1) == targets)
    of_hidden = given.grad.float()
    dist.all_reduce(of_hidden, group=group)
    assert hidden.grad is not None and weight.grad is not None
    pairs = (got, expected), (of_hidden, hidden.grad), (own.grad[: shard.valid].float(), weight.grad[mine])
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) if b.numel() else 0.0 for a, b in pairs]


@pytest.mark.parametrize("pieces, vocabulary", thinned(product(PIECES, [24, 21, 9, 5, 2]), 3), ids=str)
@on_ranks(4)
def test_head_loss(pieces: tuple[int, int | None], vocabulary: int) -> None:
    tokens, chunk = pieces
    assert max(errors(vocabulary, tokens, chunk, torch.float32, world())) < 3e-6


@on_ranks(2)
def test_head_loss_over_one_rank() -> None:
    alone: Any = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for (tokens, chunk), vocabulary in product(PIECES[:3], [24, 21, 9, 5, 2]):
        assert max(errors(vocabulary, tokens, chunk, torch.float32, alone)) < 3e-6


@on_ranks(2)
def test_head_loss_in_kernels() -> None:
    """The functions that a GPU compiles, as they are."""
    with mock.patch.multiple(language, compiles_for=lambda _: True, run=lambda function, *inputs: function(*inputs)):
        for (tokens, chunk), vocabulary in product(PIECES, [24, 21, 9, 5, 2]):
            assert max(errors(vocabulary, tokens, chunk, torch.float32, world())) < 3e-6
        assert max(errors(24, 512, 100, torch.bfloat16, world())) < 1e-2


@pytest.mark.long  # The compiler takes long.
@on_ranks(1, timeout_s=240)
def test_compiled_head_loss() -> None:
    """With few graphs for any number of tokens and columns, and gradients in the memory of slices of logits."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(language, "compiles_for", return_value=True):
        for (tokens, chunk), vocabulary in product([(7, None), (7, 3), (1, None), (40, 13)], [24, 21, 5]):
            assert max(errors(vocabulary, tokens, chunk, torch.float32, world())) < 3e-6
        assert max(errors(24, 512, 100, torch.bfloat16, world())) < 1e-2
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] < MAX_GRAPHS // 2


@on_ranks(2)
def test_chunks_do_not_add_rounding_errors() -> None:
    """Gradients of narrow weights are summed in fp32 over chunks."""
    whole, chunks = (errors(24, 512, chunk, torch.bfloat16, world()) for chunk in (None, 4))
    assert max(whole) < 1e-2 and chunks[2] < 1.5 * whole[2] and chunks[1] < 1.01 * whole[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@on_ranks(2)
def test_the_gradient_of_a_head_meets_those_of_other_micro_batches(shared: bool, dtype: torch.dtype) -> None:
    """Of tokens that are fewer than the head is wide, and more, in turn; beside that of an embedding that shares its
    weight. What is not added at once is passed on, and Megatron adds it.
    """
    shard, rng = VocabularyShard(6 * dist.get_rank(), 6, world()), torch.Generator().manual_seed(0)
    plain = nn.Parameter(torch.randn(6, 16, generator=rng))
    added: Any = nn.Parameter(plain.detach().to(dtype))
    added.main_grad, added.grad_added_to_main_grad, added.zero_out_wgrad = torch.zeros(6, 16), False, shared
    for tokens in (7, 40, 7, 40):
        hidden, targets = torch.randn(tokens, 16, generator=rng), torch.arange(tokens) % 12
        for weight in (plain, added):
            loss = 2 * head_loss(hidden.to(weight.dtype), weight, targets, shard, chunk=5)
            (loss + shared * weight[:3].sum()).backward()
        passed_on, added.grad = added.grad, None
        assert passed_on is not None
        if shared or not added.grad_added_to_main_grad:
            added.main_grad.add_(passed_on)
    assert plain.grad is not None
    torch.testing.assert_close(added.main_grad, plain.grad, **TOLERANCES[dtype])


@pytest.mark.parametrize("hidden_trains, weight_trains", [(True, False), (False, True), (False, False)])
@on_ranks(2)
def test_head_loss_of_frozen_parts(hidden_trains: bool, weight_trains: bool) -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=hidden_trains), torch.randn(6, 8, requires_grad=weight_trains)
    loss = head_loss(hidden, weight, torch.arange(4), VocabularyShard(0, 6, world()), chunk=3)
    if loss.requires_grad:
        loss.backward()
        with pytest.raises(RuntimeError, match="second time|inplace"):
            loss.backward()
    assert (hidden.grad is not None, weight.grad is not None) == (hidden_trains, weight_trains)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [24, 21, 9, 5, 2])
@on_ranks(4)
def test_vocab_parallel_hits(vocabulary: int, dtype: torch.dtype) -> None:
    """Ties go to the lowest id, over ranks too; padding is never chosen."""
    rank, members, generator = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(vocabulary)
    for tokens in (200, 0):
        logits = torch.randint(-2, 2, (tokens, vocabulary), generator=generator).to(dtype)
        best = torch.stack([row.eq(row.max()).nonzero()[0, 0] for row in logits]) if tokens else torch.zeros(0).long()
        off = torch.randint(0, 2, (tokens,), generator=generator)
        targets = (best + off) % vocabulary
        local = -(-vocabulary // members)
        first = rank * local
        valid = max(0, min(local, vocabulary - first))
        own = torch.full((tokens, local), 1e4, dtype=dtype)  # what pads must not matter, however large
        own[:, :valid] = logits[:, first : first + valid]
        found = vocab_parallel_hits(own, targets, VocabularyShard(first, valid, world()))
        assert found.dtype == torch.bool
        torch.testing.assert_close(found, targets == best)
        assert not tokens or 0 < found.sum() < tokens
