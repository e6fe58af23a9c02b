"""Attention over packed sequences against a naive masked softmax; the exchange of heads for tokens on real groups."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from megatron_hetero.models.attention import Segments, TorchAttention, rotate
from megatron_hetero.models.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.models.qwen2_5_vl.vision import rotary_table
from tests.support.pool import Pool
from tests.unit.models import jobs_attention as jobs

CPU = torch.device("cpu")
DIM = 4


def naive(q_nHD: Tensor, k_nHD: Tensor, v_nHD: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """Softmax over a full matrix of scores with everything masked that is not to be seen."""
    copies = q_nHD.shape[1] // k_nHD.shape[1]
    k, v = (x.repeat_interleave(copies, dim=1) for x in (k_nHD, v_nHD))
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = owner[:, None] == owner[None, :]
    if causal:
        seen &= torch.ones_like(seen).tril()
    scores = torch.einsum("qhd,khd->hqk", q_nHD, k) / DIM**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@settings(max_examples=60, deadline=None)
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
    got = attention(q, k, v, None, packed_seq_params=Segments.of(lengths, CPU))
    expected = naive(q, k, v, lengths, causal)
    torch.testing.assert_close(got, expected)
    gradients = torch.autograd.grad((got * cotangent).sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * cotangent).sum(), inputs))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=10))
def test_segments(lengths: list[int]) -> None:
    segments = Segments.of(lengths, CPU)
    kept = [n for n in lengths if n]
    assert segments.lengths == tuple(kept) and segments.total == sum(lengths)
    assert segments.cu_seqlens_q.tolist() == [sum(kept[:i]) for i in range(len(kept) + 1)]
    assert segments.cu_seqlens_q.dtype == torch.int32
    assert segments.max_seqlen_q == segments.max_seqlen_kv == max(kept, default=0)
    tokens = torch.arange(segments.total)
    ordered = tokens if segments.order is None else tokens[segments.order]
    selected = ordered.split([size for _, size in segments.buckets])
    assert sorted(int(t) for part in selected for t in part) == tokens.tolist()
    starts = {sum(kept[:i]): n for i, n in enumerate(kept)}
    for (length, _), part in zip(segments.buckets, selected, strict=True):
        for sequence in part.view(-1, length):
            assert starts[int(sequence[0])] == length and sequence.tolist() == list(
                range(int(sequence[0]), int(sequence[0]) + length)
            )


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 5, 2], [2, 2, 7]])
def test_sequences_in_the_order_of_their_buckets_are_not_moved(lengths: list[int]) -> None:
    assert Segments.of(lengths, CPU).order is None


def test_scattered_sequences_of_one_length_share_a_bucket() -> None:
    assert Segments.of([4, 2, 4], CPU).buckets == ((4, 8), (2, 2))


def test_rotary_embedding_is_that_of_transformers() -> None:
    positions = torch.randint(0, 50, (2, 11))
    shape = VisionShape(1, 32, 4, 8, 3, 14, 2, 2, 4, frozenset(), 8, 10000.0)
    table = rotary_table(positions, shape)
    assert table.shape == (2, 11, shape.head_dim) and table.dtype == torch.float32
    frequencies = 10000.0 ** -(torch.arange(0, 4, 2).float() / 4)
    angles = (positions.T[..., None] * frequencies).flatten(1)
    angles = torch.cat([angles, angles], dim=-1)
    torch.testing.assert_close(table, torch.stack([angles.cos(), angles.sin()]))
    q = torch.randn(11, 4, shape.head_dim)
    expected, _ = apply_rotary_pos_emb_vision(q, q, table[0], table[1])
    torch.testing.assert_close(rotate(q, table), expected, rtol=0, atol=0)
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


# 21 over 4 ranks leaves padding on the last; 5 over 4 leaves one rank without a valid column; 9 over 4 part of one.
@pytest.mark.parametrize("vocabulary", [24, 21, 9, 5, 2])
@pytest.mark.parametrize("tokens", [6, 1, 0])
def test_vocab_parallel_cross_entropy(vocabulary: int, tokens: int, pools: Callable[[int], Pool]) -> None:
    for job in (jobs.cross_entropy, jobs.cross_entropy_alone) if tokens == 6 else (jobs.cross_entropy,):
        for value_error, gradient_error in pools(4).run(job, vocabulary, tokens):
            assert value_error < 2e-6 * 20 and gradient_error < 1e-6
