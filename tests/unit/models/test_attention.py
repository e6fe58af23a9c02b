"""Attention over packed sequences against a naive masked softmax; the exchange of heads for tokens on real groups."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from benchmarks.measuring.meter import CollectiveMeter
from megatron_hetero.groups.megatron import ModuleGroups, prepare, prepare_globals
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.context import AttentionSegments, zigzag_segments, zigzag_tokens
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.families.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.models.layers.attention import (
    AttentionParams,
    PackedSelfAttention,
    SelfAttention,
    TorchAttention,
    attend_across,
)
from megatron_hetero.models.layers.backend import TORCH
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.layers.rotary import AxialRotary, rotate
from megatron_hetero.models.layers.segments import (
    PackedSegments,
    gather_keys,
    padded_index,
    ulysses_gather_heads,
    ulysses_scatter_heads,
)
from tests.support.matrix import thinned
from tests.support.pool import world
from tests.support.ranks import on_ranks
from tests.unit.models.packs import assign, naive

CPU = torch.device("cpu")
PLATFORM = Platform(CPU, "gloo")
prepare(PLATFORM)
DIM = 4


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any),
    st.booleans(),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.integers(0, 2**32 - 1),
)
def test_torch_attention_equals_a_masked_softmax(
    lengths: list[int], causal: bool, heads: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    shapes = [(total, heads[0], DIM), (total, heads[1], DIM), (total, heads[1], DIM)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    cotangent = torch.randn(total, heads[0] * DIM, generator=generator, dtype=torch.float64)
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    attention = TorchAttention(SimpleNamespace(), 1, mask, "self")  # pyright: ignore[reportArgumentType]
    q, k, v = inputs
    got = attention(q, k, v, None, packed_seq_params=PackedSegments.of(lengths, CPU))
    expected = naive(q, k, v, tuple(lengths), causal)
    torch.testing.assert_close(got, expected)
    gradients = torch.autograd.grad((got * cotangent).sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * cotangent).sum(), inputs))


SEGMENTS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=8)
"""Queries, and how many keys there are more."""


@settings(max_examples=60)
@given(SEGMENTS.filter(bool), st.booleans(), st.integers(0, 2**32 - 1))
def test_segments_end_with_their_last_query(shapes: list[tuple[int, int]], causal: bool, seed: int) -> None:
    """The last queries of a sequence get what they would get if all of it attended."""
    generator = torch.Generator().manual_seed(seed)
    segments = AttentionSegments(tuple(q for q, _ in shapes), tuple(q + more for q, more in shapes))
    draw = {"generator": generator, "dtype": torch.float64}
    whole = [torch.randn(sum(segments.keys), heads, DIM, **draw).requires_grad_() for heads in (4, 2, 2)]
    ends = torch.tensor(segments.keys).cumsum(0).tolist()
    asked = torch.cat([torch.arange(end - q, end) for end, q in zip(ends, segments.queries, strict=True)])
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    attention = TorchAttention(SimpleNamespace(), 1, mask, "self")  # pyright: ignore[reportArgumentType]
    q, k, v = whole
    got = attention(q[asked], k, v, None, packed_seq_params=PackedSegments.of_segments(segments, CPU))
    expected = naive(q, k, v, segments.keys, causal)[asked]
    torch.testing.assert_close(got, expected)
    cotangent = torch.randn(got.shape, **draw)
    gradients = torch.autograd.grad((got * cotangent).sum(), whole)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * cotangent).sum(), whole))


@settings(max_examples=60)
@given(SEGMENTS)
def test_segments(shapes: list[tuple[int, int]]) -> None:
    queries, keys = [q for q, _ in shapes], [q + more for q, more in shapes]
    segments = PackedSegments.of_segments(AttentionSegments(tuple(queries), tuple(keys)), CPU)
    for lengths, found, longest in (
        (queries, segments.cu_seqlens_q, segments.max_seqlen_q),
        (keys, segments.cu_seqlens_kv, segments.max_seqlen_kv),
    ):
        assert found.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        assert found.dtype == torch.int32 and longest == max(lengths, default=0)
    # The order of the buckets brings together whole segments of the shape that the bucket says.
    expected = sorted(range(len(shapes)), key=lambda i: [b[:2] for b in segments.buckets].index((queries[i], keys[i])))
    in_order = [segment for bucket in segments.buckets for segment in [bucket[:2]] * bucket.segments]
    assert in_order == [(queries[i], keys[i]) for i in expected]
    for lengths, order in ((queries, segments.order), (keys, segments.key_order)):
        tokens = torch.arange(sum(lengths))
        moved = [t for i in expected for t in range(sum(lengths[:i]), sum(lengths[: i + 1]))]
        assert (tokens if order is None else order).tolist() == moved


def test_segments_of_whole_sequences_drop_empty_ones() -> None:
    segments = PackedSegments.of([3, 0, 2], CPU)
    assert segments.cu_seqlens_q.tolist() == [0, 3, 5] and segments.cu_seqlens_kv is segments.cu_seqlens_q
    assert segments.key_index is None


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 5, 2], [2, 2, 7]])
def test_sequences_in_the_order_of_their_buckets_are_not_moved(lengths: list[int]) -> None:
    segments = PackedSegments.of(lengths, CPU)
    assert segments.order is None and segments.key_order is None


def test_scattered_sequences_of_one_length_share_a_bucket() -> None:
    assert PackedSegments.of([4, 2, 4], CPU).buckets == ((4, 4, 2), (2, 2, 1))


def test_keys_are_found_in_the_padded_gather() -> None:
    lengths, cp = (8, 5, 1), 2
    tokens = zigzag_tokens(lengths, cp)
    cp_lengths = tuple(len(part) for part in tokens)
    padded = [t for part in tokens for t in [*part.tolist(), *[-1] * (max(cp_lengths) - len(part))]]
    seen = ([[0, 1], range(8), [8], range(8, 13)], [range(6), range(8, 12), [13]])
    for member, keys in enumerate(seen):
        segments = PackedSegments.of_segments(zigzag_segments(lengths, cp, member), CPU, cp_lengths)
        assert segments.key_index is not None
        assert [padded[i] for i in segments.key_index.tolist()] == [key for of_segment in keys for key in of_segment]


def test_a_mask_is_made_once() -> None:
    segments = PackedSegments.of_segments(AttentionSegments((2, 3, 2), (4, 3, 4)), CPU)
    (rectangle, _), seen = segments.buckets, [[True, True, True, False], [True, True, True, True]]
    assert segments.causal_mask(rectangle).tolist() == seen
    assert segments.causal_mask(rectangle) is segments.causal_mask(rectangle)


def test_rotary_embedding_is_that_of_transformers() -> None:
    positions = torch.randint(0, 50, (2, 11))
    shape = VisionShape(1, 32, 4, 8, 3, 14, 2, 2, 8, 10000.0, window=4, full_layers=frozenset())
    table = AxialRotary(shape.rope_theta, shape.head_dim).table(positions)
    assert table.shape == (2, 11, shape.head_dim) and table.dtype == torch.float32
    frequencies = 10000.0 ** -(torch.arange(0, 4, 2).float() / 4)
    angles = (positions.T[..., None] * frequencies).flatten(1)
    angles = torch.cat([angles, angles], dim=-1)
    torch.testing.assert_close(table, torch.stack([angles.cos(), angles.sin()]))
    q = torch.randn(11, 4, shape.head_dim)
    expected, _ = apply_rotary_pos_emb_vision(q, q, table[0], table[1])
    torch.testing.assert_close(rotate(q, table), expected)
    half = rotate(q.bfloat16(), table)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, apply_rotary_pos_emb_vision(q.bfloat16(), q, table[0], table[1])[0])


RAGGED = {"even": (3, 3, 3, 3), "ragged": (5, 1, 0, 2), "one": (0, 0, 7, 0), "empty": (0, 0, 0, 0)}


@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 4), (8, 2), (12, 6), (4, 1)])
@on_ranks(4)
def test_heads_for_tokens_and_back(lengths: tuple[int, ...], heads: int, kv_heads: int) -> None:
    """Values, inverse and adjoint."""
    dim = 3
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


@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@on_ranks(4)
def test_gathered_keys_and_their_gradients(lengths: tuple[int, ...]) -> None:
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


# Ranks, layout.
LAYOUTS = [
    (4, "sp:2,dp:2"),
    (4, "cp:2,dp:2"),
    (4, "cp:4"),
    (4, "sp:2,cp:2"),
    (8, "sp:4,cp:2"),
    (8, "sp:2,cp:4"),
]
# With cp:4 a sample of 5 has chunks without tokens, and a single token leaves all members but one without any.
LENGTHS = [(16, 7, 1, 3), (5, 9, 9), (1,), (2, 0, 23), ()]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("ranks, layout", thinned(LAYOUTS, 5))
@on_ranks("ranks")
def test_attention_across_ranks_is_that_of_one(ranks: int, layout: str, causal: bool) -> None:
    """Outputs, gradients and collectives under `sp` and `cp`."""
    sp, cp, groups = "sp" in layout, "cp" in layout, groups_of(layout)
    exchange, gather, scatter = ["alltoall_base"], ["allgather_base"], ["reduce_scatter_base"]
    tokens = []
    for case in product(LENGTHS, ("even", "ragged", "last"), ((8, 2), (8, 8), (4, 1))):
        forward, backward, own = attend_and_compare(groups, causal, *case)
        assert forward == exchange * sp + gather * cp + exchange * sp
        assert backward == exchange * sp + scatter * cp + exchange * sp
        tokens.append(own)
    of_ranks = [None] * ranks
    dist.all_gather_object(of_ranks, tokens)
    by_case: Any = list(zip(*of_ranks, strict=True))
    assert any(min(each) == 0 < max(each) for each in by_case), "a case is to leave some ranks without tokens"
    assert any(min(each) > 0 for each in by_case), "a case is to leave none without"


def attend_and_compare(
    groups: ModuleGroups, causal: bool, lengths: tuple[int, ...], how: str, heads: tuple[int, int]
) -> tuple[list[str], list[str], int]:
    """Attend across ranks and in one process. Returns the collectives each way, and the number of own tokens."""
    mine, params = assign(lengths, groups, causal, how)
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
        out = attend_across(layer_of(causal)._attend, own_q, own_k, own_v, params, groups.sp, groups.context)
        meter.phase = "backward"
        (out * cotangent[mine]).sum().backward()
    torch.testing.assert_close(out, expected.detach()[mine])
    for x, gradient in zip((own_q, own_k, own_v), gradients, strict=True):
        torch.testing.assert_close(x.grad, gradient[mine])
    forward, backward = ([record.name for record in meter.of(phase)] for phase in ("forward", "backward"))
    return forward, backward, len(mine)


def layer_of(causal: bool) -> Any:
    """A `PackedSelfAttention` that has only its core attention."""
    layer: Any = PackedSelfAttention.__new__(PackedSelfAttention)
    torch.nn.Module.__init__(layer)
    layer.attn_mask_type = AttnMaskType.causal if causal else AttnMaskType.no_mask
    layer.core_attention = TorchAttention(SimpleNamespace(), 1, layer.attn_mask_type, "self")  # pyright: ignore[reportArgumentType]
    return layer


def groups_of(layout: str) -> ModuleGroups:
    world_size = dist.get_world_size()
    return Topology.build({"text": Layout.parse(layout, world_size)}, PLATFORM).collection("text")


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("layout", ["tp:2,sp:2,cp:2", "tp:2,cp:4", "tp:2,sp:4", "sp:4,cp:2"])
@on_ranks(8)
def test_a_layer_across_ranks_is_that_of_tp(layout: str, kv_heads: int) -> None:
    """Output, gradient of the input, and the sum of the gradients of the weights over `sp` and `cp`."""
    prepare_globals(seed=0)
    tp = Layout.parse(layout, dist.get_world_size()).tp
    groups = groups_of(layout)
    model = self_attention(groups, kv_heads, sequence_parallel=tp > 1)
    reference = self_attention(groups_of(f"tp:{tp}"), kv_heads, sequence_parallel=False)
    for lengths in ((16, 7, 1, 3), (3, 2), (1,)):
        compare_layers(model, reference, lengths, groups)


def compare_layers(model: Any, reference: Any, lengths: tuple[int, ...], groups: ModuleGroups) -> None:
    total, hidden, dim = sum(lengths), 32, 4
    generator = torch.Generator().manual_seed(1)
    x, c = (torch.randn(total, 1, hidden, generator=generator) for _ in "xc")
    angles = torch.randn(total, dim, generator=generator)
    table = torch.stack((angles.cos(), angles.sin()))
    x.requires_grad_()
    whole = AttentionParams(PackedSegments.of(lengths, CPU), (total,), (total,))
    expected, _ = reference(x, table, whole)
    expected.backward(c)

    mine, params = assign(lengths, groups, True, "ragged")
    tp = groups.tp.size()
    share = max(1, -(-len(mine) // tp))  # rows of this shard on each tp rank, padding included
    rows = slice(share * groups.tp.rank(), share * groups.tp.rank() + share)
    own, own_c = (F.pad(full.detach()[mine], (0, 0, 0, 0, 0, share * tp - len(mine)))[rows] for full in (x, c))
    out, _ = model(own.requires_grad_(), table[:, mine], params)
    out.backward(own_c)

    own_tokens = mine[rows]
    assert own.grad is not None and x.grad is not None
    torch.testing.assert_close(out[: len(own_tokens)], expected.detach()[own_tokens], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.grad[: len(own_tokens)], x.grad[own_tokens], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(ours.grad, group=groups.cp)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        ours.grad = theirs.grad = None


def attention(kv_heads: int, *, causal: bool = True, windowed: bool = False) -> SelfAttention:
    """Eight heads, with a bias of queries, keys and values."""
    return SelfAttention(32, 8, kv_heads, 4, ("qkv", "out"), causal, windowed, qkv_bias=True)


def self_attention(groups: ModuleGroups, kv_heads: int, *, sequence_parallel: bool) -> Any:
    """Weights depend on the tp rank only."""
    site = Site(groups, PLATFORM, TORCH, torch.float32, sequence_parallel)
    model: Any = attention(kv_heads).build(site, 0)
    generator = torch.Generator().manual_seed(groups.tp.rank())
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


class OtherAttention(TorchAttention):
    """A core attention of another backend."""


@on_ranks(4)
def test_a_backends_attention_is_used_where_nothing_is_exchanged() -> None:
    ours, other = "TorchAttention", "OtherAttention"
    for layout, of_full_layers in (("tp:2,dp:2", other), ("sp:4", ours), ("cp:2,tp:2", ours), ("sp:2,cp:2", ours)):
        assert core_attentions(layout, torch.bfloat16) == [of_full_layers, of_full_layers, other]
    # It has no kernel for packed sequences in fp32.
    assert core_attentions("dp:4", torch.float32) == [ours] * 3


def core_attentions(layout: str, dtype: torch.dtype) -> list[str]:
    """Core attention of layers with `OtherAttention` in the backend: causal, in both directions, windowed."""
    backend = TORCH._replace(attention=OtherAttention)
    site = Site(groups_of(layout), PLATFORM, backend, dtype, sequence_parallel=False)
    kinds = (True, False), (False, False), (False, True)
    modules: list[Any] = [attention(8, causal=causal, windowed=windowed).build(site, 0) for causal, windowed in kinds]
    return [type(module.core_attention).__name__ for module in modules]
