"""What the workers of the pool run for the tests of attention and loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from benchmarks.measuring.meter import CollectiveMeter
from megatron_hetero.groups.megatron import prepare_globals
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import ModuleGroups, Topology
from megatron_hetero.layout.context import contiguous_segments, zigzag_segments, zigzag_tokens
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.language import VocabularyShard, head_loss, vocab_parallel_hits
from megatron_hetero.models.layers.attention import (
    AttentionParams,
    PackedSelfAttention,
    SelfAttention,
    TorchAttention,
    attend_across,
)
from megatron_hetero.models.layers.backend import TORCH
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.layers.segments import (
    PackedSegments,
    gather_keys,
    padded_index,
    ulysses_gather_heads,
    ulysses_scatter_heads,
)
from tests.support.pool import world

PLATFORM = Platform(CPU, "gloo")


def naive(q_nHD: Tensor, k_nHD: Tensor, v_nHD: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
    """Softmax over a full matrix of scores with everything masked that is not to be seen: [n, H * D]."""
    copies = q_nHD.shape[1] // k_nHD.shape[1]
    k, v = (x.repeat_interleave(copies, dim=1) for x in (k_nHD, v_nHD))
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    seen = owner[:, None] == owner[None, :]
    if causal:
        seen &= torch.ones_like(seen).tril()
    scores = torch.einsum("qhd,khd->hqk", q_nHD, k) / q_nHD.shape[2] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


class Assigned(NamedTuple):
    """What a rank holds: the positions of its tokens in the pack, the plan, and how its groups' members are filled."""

    mine: np.ndarray
    plan: AttentionParams


def assign(lengths: tuple[int, ...], groups: ModuleGroups, causal: bool, how: str) -> Assigned:
    """Assign a pack to `cp` (zigzag where causal), then to `sp`; `how` as in `split`."""
    sp, cp, member = groups.sp.size(), groups.context.size(), groups.context.rank()
    if causal:
        tokens, segments = zigzag_tokens(lengths, cp), zigzag_segments(lengths, cp, member)
    else:
        shares = split(sum(lengths), cp, how)
        tokens = np.split(np.arange(sum(lengths)), np.cumsum(shares)[:-1])
        segments = contiguous_segments(lengths, shares, member)
    cp_lengths = tuple(len(part) for part in tokens)
    sp_lengths = split(cp_lengths[member], sp, how)
    mine = np.split(tokens[member], np.cumsum(sp_lengths)[:-1])[groups.sp.rank()]
    return Assigned(
        mine, AttentionParams(PackedSegments.of_segments(segments, CPU, cp_lengths), sp_lengths, cp_lengths)
    )


def split(total: int, members: int, how: str) -> tuple[int, ...]:
    """`total` as a sum of `members` terms: `even`, `ragged` (some are none), or `last` (all at the last member)."""
    weights = {"even": [1] * members, "ragged": [3, 0, 1, 2, 1, 0, 5, 1][:members], "last": [0] * (members - 1) + [1]}
    bounds = np.cumsum([0, *weights[how]]) * total // sum(weights[how])
    return tuple(int(n) for n in np.diff(bounds))


Case = tuple[tuple[int, ...], str, tuple[int, int]]
"""Lengths of the samples, how they are assigned (`split`), and query and key/value heads."""


def across(layout: str, causal: bool, cases: list[Case]) -> list[tuple[list[str], list[str], int]]:
    """Attention and its gradients under `sp` and `cp` against one process. For each case the names of the collectives
    each way, and the tokens of this rank.
    """
    groups = _groups(layout)
    return [_across(groups, causal, *case) for case in cases]


def _across(
    groups: ModuleGroups, causal: bool, lengths: tuple[int, ...], how: str, heads: tuple[int, int]
) -> tuple[list[str], list[str], int]:
    mine, plan = assign(lengths, groups, causal, how)
    total, dim = sum(lengths), 4
    generator = torch.Generator().manual_seed(total)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = (draw(total, h, dim).requires_grad_() for h in (heads[0], heads[1], heads[1]))
    cotangent = draw(total, heads[0] * dim)
    expected = naive(q, k, v, lengths, causal)
    gradients = torch.autograd.grad((expected * cotangent).sum(), (q, k, v))

    own_q, own_k, own_v = (x.detach()[mine].requires_grad_() for x in (q, k, v))
    meter = CollectiveMeter(phase="forward")
    with meter:
        out = attend_across(_layer(causal)._attend, own_q, own_k, own_v, plan, groups.sp, groups.context)
        meter.phase = "backward"
        (out * cotangent[mine]).sum().backward()
    torch.testing.assert_close(out, expected.detach()[mine])
    for x, gradient in zip((own_q, own_k, own_v), gradients, strict=True):
        torch.testing.assert_close(x.grad, gradient[mine])
    forward, backward = ([record.name for record in meter.of(phase)] for phase in ("forward", "backward"))
    return forward, backward, len(mine)


def _layer(causal: bool) -> Any:
    """A `PackedSelfAttention` that has only its core attention."""
    layer: Any = PackedSelfAttention.__new__(PackedSelfAttention)
    torch.nn.Module.__init__(layer)
    layer.attn_mask_type = AttnMaskType.causal if causal else AttnMaskType.no_mask
    layer.core_attention = TorchAttention(SimpleNamespace(), 1, layer.attn_mask_type, "self")  # pyright: ignore[reportArgumentType]
    return layer


def _groups(layout: str) -> ModuleGroups:
    world_size = dist.get_world_size()
    return Topology.build({"text": Layout.parse(layout, world_size)}, PLATFORM).collection("text")


def layer(layout: str, packs: list[tuple[int, ...]], kv_heads: int) -> None:
    """A whole `PackedSelfAttention` under `layout` against the same weights under `tp` alone: output, gradient of the
    input, and the sum of the gradients of the weights over `sp` and `cp`.
    """
    PLATFORM.prepare_megatron()
    prepare_globals(seed=0)
    tp = Layout.parse(layout, dist.get_world_size()).tp
    groups = _groups(layout)
    model = _self_attention(groups, kv_heads, sequence_parallel=tp > 1)
    reference = _self_attention(_groups(f"tp:{tp}"), kv_heads, sequence_parallel=False)
    for lengths in packs:
        _compare_layers(model, reference, lengths, groups)


def _compare_layers(model: Any, reference: Any, lengths: tuple[int, ...], groups: ModuleGroups) -> None:
    total, hidden, dim = sum(lengths), 32, 4
    generator = torch.Generator().manual_seed(1)
    x, c = (torch.randn(total, 1, hidden, generator=generator) for _ in "xc")
    angles = torch.randn(total, dim, generator=generator)
    table = torch.stack((angles.cos(), angles.sin()))
    x.requires_grad_()
    whole = AttentionParams(PackedSegments.of(lengths, CPU), (total,), (total,))
    expected, _ = reference(x, table, whole)
    expected.backward(c)

    mine, plan = assign(lengths, groups, True, "ragged")
    tp = groups.tp.size()
    share = max(1, -(-len(mine) // tp))  # rows of this shard on each tp rank, padding included
    rows = slice(share * groups.tp.rank(), share * groups.tp.rank() + share)
    own, own_c = (F.pad(full.detach()[mine], (0, 0, 0, 0, 0, share * tp - len(mine)))[rows] for full in (x, c))
    out, _ = model(own.requires_grad_(), table[:, mine], plan)
    out.backward(own_c)

    kept = mine[rows]
    assert own.grad is not None and x.grad is not None
    torch.testing.assert_close(out[: len(kept)], expected.detach()[kept], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.grad[: len(kept)], x.grad[kept], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(ours.grad, group=groups.cp)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        ours.grad = theirs.grad = None


class OtherAttention(TorchAttention):
    """A core attention that a backend might bring along."""


def core_attentions(layout: str, dtype: torch.dtype) -> dict[str, str]:
    """Which core attention layers get from a backend with `OtherAttention`: causal, in both directions, windowed."""
    PLATFORM.prepare_megatron()
    site = Site(_groups(layout), PLATFORM, TORCH._replace(attention=OtherAttention), dtype, sequence_parallel=False)
    layers = {"causal": (True, False), "full": (False, False), "windowed": (False, True)}
    return {
        name: type(attention(8, causal=causal, windowed=windowed).build(site, 0).core_attention).__name__
        for name, (causal, windowed) in layers.items()
    }


def attention(kv_heads: int, *, causal: bool = True, windowed: bool = False) -> SelfAttention:
    """Eight heads, with a bias of queries, keys and values."""
    return SelfAttention(32, 8, kv_heads, 4, ("qkv", "out"), causal, windowed, qkv_bias=True)


def _self_attention(groups: ModuleGroups, kv_heads: int, *, sequence_parallel: bool) -> Any:
    """Weights depend on the tp rank only."""
    site = Site(groups, PLATFORM, TORCH, torch.float32, sequence_parallel)
    model: Any = attention(kv_heads).build(site, 0)
    generator = torch.Generator().manual_seed(groups.tp.rank())
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


def gathered(lengths: tuple[int, ...]) -> None:
    """Keys and values of all members, each of them twice: values, and the adjoint, exactly on integers."""
    rank, group, total = dist.get_rank(), world(), sum(lengths)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randint(-9, 9, (total, 2, 3), generator=generator).double() for _ in "kv"]
    own = [part.split(lengths)[rank].clone().requires_grad_() for part in whole]
    order = np.tile(np.random.default_rng(rank).permutation(total), 2)
    index = torch.from_numpy(padded_index(order, lengths))
    ax = gather_keys(own[0], own[1], lengths, index, group)
    assert all(torch.equal(got, part[order]) for got, part in zip(ax, whole, strict=True))
    c = [torch.randint(-9, 9, part.shape, generator=torch.Generator().manual_seed(rank)).double() for part in ax]
    assert_adjoint(own, list(ax), c, total)


def assert_adjoint(x: list[Tensor], ax: list[Tensor], c: list[Tensor], total: int) -> None:
    """<A x, c> = <x, A^T c>, summed over the ranks."""
    products = torch.stack([(part * cotangent).sum() for part, cotangent in zip(ax, c, strict=True)])
    products.sum().backward()
    found = torch.stack([products.detach().sum(), sum((part * part.grad).sum() for part in x).detach()])  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
    dist.all_reduce(found)
    assert found[0] == found[1] and (total == 0 or found[0] != 0)


def ulysses(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> None:
    """Heads for tokens and back: values, inverse and adjoint."""
    rank, members, group = dist.get_rank(), dist.get_world_size(), world()
    total, start = sum(lengths), sum(lengths[:rank])
    mine = slice(start, start + lengths[rank])
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(total, h, dim, generator=generator, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]
    own = [x[mine].clone().requires_grad_() for x in whole]
    q, k, v = ulysses_scatter_heads(own[0], own[1], own[2], lengths, group)
    share = heads // members
    queries = range(rank * share, rank * share + share)
    assert torch.equal(q, whole[0][:, queries.start : queries.stop])
    # Each query head, paired as grouped-query attention pairs them, finds its own key/value head.
    ratio = share // k.shape[1]
    for local, head in enumerate(queries):
        for got, stored in ((k, whole[1]), (v, whole[2])):
            assert torch.equal(got[:, local // ratio], stored[:, head * kv_heads // heads])
    back = ulysses_gather_heads(q.flatten(1), lengths, group)
    assert torch.equal(back, whole[0][mine].flatten(1)), "not the inverse"

    # <A x, c> = <x, A^T c> over the group, exactly on integers.
    integers = [
        torch.randint(-9, 9, (total, h, dim), generator=generator).double() for h in (heads, kv_heads, kv_heads)
    ]
    x = [part[mine].clone().requires_grad_() for part in integers]
    ax = ulysses_scatter_heads(x[0], x[1], x[2], lengths, group)
    c = [torch.randint(-9, 9, part.shape, generator=torch.Generator().manual_seed(rank)).double() for part in ax]
    assert_adjoint(x, list(ax), c, total)


def head_losses(vocabulary: int, tokens: int, chunk: int | None, dtype: torch.dtype) -> list[float]:
    """The errors of loss and gradients against `F.cross_entropy`, in a vocabulary padded to the group, relative to the
    largest element.
    """
    return _head_losses(vocabulary, tokens, chunk, dtype, dist.get_rank(), dist.get_world_size(), world())


def head_losses_alone(vocabulary: int, tokens: int, chunk: int | None, dtype: torch.dtype) -> list[float]:
    """The same over a group of one rank."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return _head_losses(vocabulary, tokens, chunk, dtype, 0, 1, alone)


def _head_losses(
    vocabulary: int, tokens: int, chunk: int | None, dtype: torch.dtype, rank: int, members: int, group: Any
) -> list[float]:
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


def head_loss_of_frozen_parts() -> list[bool]:
    """Whether hidden states and weights get gradients where only one of them, or none, requires them."""
    shard, found = VocabularyShard(0, 6, world()), []
    for hidden_trains, weight_trains in ((True, False), (False, True), (False, False)):
        hidden, weight = torch.randn(4, 8, requires_grad=hidden_trains), torch.randn(6, 8, requires_grad=weight_trains)
        loss = head_loss(hidden, weight, torch.arange(4), shard, chunk=3)
        if loss.requires_grad:
            loss.backward()
            with pytest.raises(RuntimeError, match="second time|inplace"):
                loss.backward()
        found += [hidden.grad is not None, weight.grad is not None]
    return found


def hits(vocabulary: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Which tokens are predicted right, where many logits are equal; checked against the whole vocabulary."""
    rank, members, generator = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(vocabulary)
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
    return found
