"""Attention over packed sequences against a naive masked softmax; the exchange of heads for tokens on real groups."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from megatron_hetero.layout.context import AttentionSegments, zigzag_segments, zigzag_tokens
from megatron_hetero.models.families.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.models.language import VocabularyShard, head_loss
from megatron_hetero.models.layers.attention import TorchAttention
from megatron_hetero.models.layers.rotary import AxialRotary, rotate
from megatron_hetero.models.layers.segments import PackedSegments
from tests.support.matrix import thinned
from tests.support.pool import Pool, world
from tests.support.ranks import on_ranks
from tests.unit.models import jobs_attention as jobs

CPU = torch.device("cpu")
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
    expected = jobs.naive(q, k, v, tuple(lengths), causal)
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
    expected = jobs.naive(q, k, v, segments.keys, causal)[asked]
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


@pytest.mark.parametrize(
    "lengths", [(3, 3, 3, 3), (5, 1, 0, 2), (0, 0, 7, 0), (0, 0, 0, 0)], ids=["even", "ragged", "one", "empty"]
)
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 4), (8, 2), (12, 6), (4, 1)])
def test_heads_for_tokens_and_back(
    lengths: tuple[int, ...], heads: int, kv_heads: int, pools: Callable[[int], Pool]
) -> None:
    pools(4).run(jobs.ulysses, lengths, heads, kv_heads, 3)


@pytest.mark.parametrize(
    "lengths", [(3, 3, 3, 3), (5, 1, 0, 2), (0, 0, 7, 0), (0, 0, 0, 0)], ids=["even", "ragged", "one", "empty"]
)
def test_gathered_keys_and_their_gradients(lengths: tuple[int, ...], pools: Callable[[int], Pool]) -> None:
    pools(4).run(jobs.gathered, lengths)


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
@pytest.mark.parametrize("ranks, layout", thinned(LAYOUTS, 3))
def test_attention_across_ranks_is_that_of_one(
    ranks: int, layout: str, causal: bool, pools: Callable[[int], Pool]
) -> None:
    sp, cp = "sp" in layout, "cp" in layout
    exchange, gather, scatter = ["alltoall_base"], ["allgather_base"], ["reduce_scatter_base"]
    cases = list(product(LENGTHS, ("even", "ragged", "last"), ((8, 2), (8, 8), (4, 1))))
    tokens = []
    for of_rank in zip(*pools(ranks).run(jobs.across, layout, causal, cases), strict=True):
        for forward, backward, _ in of_rank:
            assert forward == exchange * sp + gather * cp + exchange * sp
            assert backward == exchange * sp + scatter * cp + exchange * sp
        tokens.append([held for *_, held in of_rank])
    assert len(tokens) == len(cases)
    assert any(min(held) == 0 < max(held) for held in tokens), "a case is to leave some ranks without tokens"
    assert any(min(held) > 0 for held in tokens), "a case is to leave none without"


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("layout", ["tp:2,sp:2,cp:2", "tp:2,cp:4", "tp:2,sp:4", "sp:4,cp:2"])
def test_a_layer_across_ranks_is_that_of_tp(layout: str, kv_heads: int, pools: Callable[[int], Pool]) -> None:
    pools(8).run(jobs.layer, layout, [(16, 7, 1, 3), (3, 2), (1,)], kv_heads)


def test_a_backends_attention_is_used_where_nothing_is_exchanged(pools: Callable[[int], Pool]) -> None:
    ours, other = "TorchAttention", "OtherAttention"
    for layout, of_full_layers in (("tp:2,dp:2", other), ("sp:4", ours), ("cp:2,tp:2", ours), ("sp:2,cp:2", ours)):
        expected = {"causal": of_full_layers, "full": of_full_layers, "windowed": other}
        assert pools(4).run(jobs.core_attentions, layout, torch.bfloat16) == [expected] * 4
    # It has no kernel for packed sequences in fp32.
    assert pools(4).run(jobs.core_attentions, "dp:4", torch.float32) == [dict.fromkeys(expected, ours)] * 4


# 21 over 4 ranks leaves padding on the last; 5 over 4 leaves one rank without a valid column; 9 over 4 part of one.
TOLERANCES: dict[Any, Any] = {torch.float32: {}, torch.bfloat16: {"rtol": 0.05, "atol": 0.2}}
PIECES = [(7, None), (7, 3), (7, 1), (1, None), (0, 3), (40, None), (40, 13)]


@pytest.mark.parametrize("pieces, vocabulary", thinned(product(PIECES, [24, 21, 9, 5, 2]), 3), ids=str)
def test_head_loss(pieces: tuple[int, int | None], vocabulary: int, pools: Callable[[int], Pool]) -> None:
    tokens, chunk = pieces
    for job in (jobs.head_losses, jobs.head_losses_alone) if tokens == 7 else (jobs.head_losses,):
        for errors in pools(4).run(job, vocabulary, tokens, chunk, torch.float32):
            assert max(errors) < 3e-6


def test_chunks_do_not_add_rounding_errors(pools: Callable[[int], Pool]) -> None:
    """Gradients of narrow weights are summed in fp32 over chunks."""
    [whole, *_], [chunks, *_] = (pools(2).run(jobs.head_losses, 24, 512, chunk, torch.bfloat16) for chunk in (None, 4))
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


def test_head_loss_of_frozen_parts(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(jobs.head_loss_of_frozen_parts) == [[True, False, False, True, False, False]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [24, 21, 9, 5, 2])
def test_vocab_parallel_hits(vocabulary: int, dtype: torch.dtype, pools: Callable[[int], Pool]) -> None:
    """Ties go to the lowest id, over ranks too; padding is never chosen."""
    right, *others = pools(4).run(jobs.hits, vocabulary, 200, dtype)
    assert 0 < right.sum() < 200
    assert all(torch.equal(other, right) for other in others)
    assert all(len(found) == 0 for found in pools(4).run(jobs.hits, vocabulary, 0, dtype))
