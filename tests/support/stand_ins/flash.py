"""Flash attention over packed sequences, as PyTorch's operator and as the functions of flash-attn 2 and 3.

Signatures: `aten::_flash_attention_forward` of torch 2.11 (2.13 adds `block_table` and `num_splits` at the end);
`flash_attn_varlen_func` of flash-attn 2.8.0 to 2.8.3.post2, with the same flash_attn/flash_attn_interface.py; that
of FlashAttention-3, 3.0.0b1, hopper/flash_attn_interface.py in the same repository. Checks: those of `mha_varlen_fwd`
in PyTorch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, but for device and dtype. Causal
alignment: mask.h beside it, `col_idx_limit_right = row_idx + 1 + max_seqlen_k - max_seqlen_q`, and the docstring of
`flash_attn_varlen_func`, since 2.1.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def aten_flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(output, logsumexp, rng_state, unused, debug_attn_mask); only the first is filled here."""
    assert cum_seq_q is not None and cum_seq_k is not None and type(is_causal) is bool and not return_debug_mask
    unused = (window_size_left, window_size_right, seqused_k, alibi_slopes)
    assert dropout_p == 0.0 and unused == (None,) * 4, "not what this stands in for"
    assert query.shape[2] % 8 == 0, "head_size must be a multiple of 8, this is ensured by padding!"
    out = _attention(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, scale, is_causal)
    return out, *(query.new_empty(0) for _ in range(4))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Tensor:
    """The output, [total_q, heads, dim]. Heads of any width are padded inside."""
    unused = (dropout_p, window_size, softcap, alibi_slopes, return_attn_probs, block_table)
    assert unused == (0.0, (-1, -1), 0.0, None, False, None), "not what this stands in for"
    return _attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)


def flash_attn_3_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> Tensor:
    """The output, [total_q, heads, dim]."""
    assert (seqused_q, seqused_k, others) == (None, None, {}), "not what this stands in for"
    assert q.shape[2] % 8 == 0, "head_size should be a multiple of 8"
    return _attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    causal: bool,
) -> Tensor:
    assert cu_q.dtype == torch.int32, "cu_seqlens_q must have dtype int32"
    assert cu_k.dtype == torch.int32, "cu_seqlens_k must have dtype int32"
    assert cu_q.is_contiguous() and cu_k.is_contiguous()
    assert all(x.dim() == 3 and x.stride(-1) == 1 for x in (q, k, v)), (
        "Input tensor must have contiguous last dimension"
    )
    assert type(max_q) is int and type(max_k) is int
    assert q.shape[2] <= 256, "FlashAttention forward only supports head dimension at most 256"
    assert q.shape[1] % k.shape[1] == 0, "Number of heads in key/value must divide number of heads in query"
    assert len(cu_q) > 1, "batch size must be positive"
    assert cu_q.shape == cu_k.shape and k.shape == v.shape
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    assert bounds_q[-1] == len(q) and bounds_k[-1] == len(k), "rows that are in no sequence keep what was in memory"
    factor = q.shape[2] ** -0.5 if scale is None else scale
    outs = []
    for first_q, end_q, first_k, end_k in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        queries, keys = end_q - first_q, end_k - first_k
        assert queries <= max_q and keys <= max_k, "rows beyond the longest sequence are not computed"
        copies = q.shape[1] // k.shape[1]
        own_k, own_v = (x[first_k:end_k].repeat_interleave(copies, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first_q:end_q], own_k) * factor
        if causal:
            seen = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
            scores = scores.masked_fill(~seen, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), own_v))
    return torch.cat(outs)
