"""What the workers of the pool run for the tests of attention and loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_hetero.models.attention import heads_for_tokens, tokens_for_heads
from megatron_hetero.models.loss import vocab_parallel_cross_entropy
from tests.support.pool import world


def ulysses(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> None:
    """Heads for tokens and back: values, inverse and adjoint."""
    rank, members, group = dist.get_rank(), dist.get_world_size(), world()
    total, start = sum(lengths), sum(lengths[:rank])
    mine = slice(start, start + lengths[rank])
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(total, h, dim, generator=generator, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]
    own = [x[mine].clone().requires_grad_() for x in whole]
    q, k, v = heads_for_tokens(own[0], own[1], own[2], lengths, group)
    share = heads // members
    queries = range(rank * share, rank * share + share)
    assert torch.equal(q, whole[0][:, queries.start : queries.stop])
    # Each query head, paired as grouped-query attention pairs them, finds its own key/value head.
    ratio = share // k.shape[1]
    for local, head in enumerate(queries):
        for got, stored in ((k, whole[1]), (v, whole[2])):
            assert torch.equal(got[:, local // ratio], stored[:, head * kv_heads // heads])
    back = tokens_for_heads(q.flatten(1), lengths, group)
    assert torch.equal(back, whole[0][mine].flatten(1)), "not the inverse"

    # <A x, c> = <x, A^T c> over the group, exactly on integers.
    integers = [
        torch.randint(-9, 9, (total, h, dim), generator=generator).double() for h in (heads, kv_heads, kv_heads)
    ]
    x = [part[mine].clone().requires_grad_() for part in integers]
    ax = heads_for_tokens(x[0], x[1], x[2], lengths, group)
    c = [torch.randint(-9, 9, part.shape, generator=torch.Generator().manual_seed(rank)).double() for part in ax]
    products = torch.stack([(part * cotangent).sum() for part, cotangent in zip(ax, c, strict=True)])
    products.sum().backward()
    found = torch.stack([products.detach().sum(), sum((part * part.grad).sum() for part in x).detach()])  # pyright: ignore
    dist.all_reduce(found)
    assert found[0] == found[1] and (total == 0 or found[0] != 0)


def cross_entropy(vocabulary: int, tokens: int) -> tuple[float, float]:
    """The largest errors of value and gradient against `F.cross_entropy`, in a vocabulary padded to the group."""
    rank, members = dist.get_rank(), dist.get_world_size()
    return _cross_entropy(vocabulary, tokens, rank, members, world())


def cross_entropy_alone(vocabulary: int, tokens: int) -> tuple[float, float]:
    """The same over a group of one rank."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return _cross_entropy(vocabulary, tokens, 0, 1, alone)


def _cross_entropy(vocabulary: int, tokens: int, rank: int, members: int, group: Any) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(1)
    logits = (5 * torch.randn(tokens, vocabulary, generator=generator)).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    weights = torch.randn(tokens, generator=generator)
    expected = F.cross_entropy(logits, targets, reduction="none")
    (expected * weights).sum().backward()

    local = -(-vocabulary // members)
    first = rank * local
    valid = max(0, min(local, vocabulary - first))
    padding = torch.full((tokens, local - valid), 1e4)  # what pads must not matter, however large
    own = torch.cat([logits.detach()[:, first : first + valid], padding], dim=1).requires_grad_()
    got = vocab_parallel_cross_entropy(own, targets, first, valid, group)
    (got * weights).sum().backward()
    assert got.dtype == torch.float32 and own.grad is not None and logits.grad is not None
    assert not own.grad[:, valid:].any(), "padding has a gradient"
    errors = (got - expected).abs(), (own.grad[:, :valid] - logits.grad[:, first : first + valid]).abs()
    return tuple(float(error.max()) if error.numel() else 0.0 for error in errors)  # pyright: ignore
