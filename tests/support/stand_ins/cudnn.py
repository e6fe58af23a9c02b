"""cuDNN's attention as PyTorch's operators `_cudnn_attention_forward` and `_cudnn_attention_backward` compute it.

Signatures: those of torch 2.11 (2.15 adds `seqused_k` and `block_table` at the end of the first). What they do:
`_cudnn_attention_forward` in aten/src/ATen/native/transformers/cuda/attention.cu, `_cudnn_attention_backward` in
attention_backward.cu beside it, and aten/src/ATen/native/cudnn/MHA.cpp: with offsets tensors are [T, H, D], rows that
are in no segment are not written, and numbers of heads may differ; without, they are [B, H, S, D]. Results have the
layout of the queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

UNWRITTEN = torch.nan


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset, debug_attn_mask)"""
    assert (attn_bias, dropout_p, return_debug_mask) == (None, 0.0, False) and compute_log_sumexp
    out, parts = torch.full_like(query, UNWRITTEN), list(_segments(query, key, cum_seq_q, cum_seq_k, max_q, max_k))
    lse = query.new_full(query.shape[:-1], UNWRITTEN, dtype=_wide(query))
    for rows in parts:
        q, k, v = (x[rows].to(_wide(x)) for x in (query, *_repeated(query, key, value)))
        scores = _scores(q, k, is_causal, scale)
        lse[rows] = scores.logsumexp(-1) if cum_seq_q is None else scores.logsumexp(-1).transpose(0, 1)
        mixed = scores.softmax(-1) @ _heads_first(v)
        out[rows] = (mixed if cum_seq_q is None else mixed.transpose(0, 1)).to(out.dtype)
    seed = torch.empty((), dtype=torch.int64)
    return out, lse, cum_seq_q, cum_seq_k, max_q, max_k, seed, seed.clone(), None


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    assert (attn_bias, dropout_p, philox_seed.dim(), philox_offset.dim()) == (None, 0.0, 0, 0)
    assert grad_out.stride(-1) == 1 and grad_out.shape == out.shape
    grads = tuple(torch.full_like(x, UNWRITTEN) for x in (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for rows in _segments(query, key, cum_seq_q, cum_seq_k, max_q, max_k):
        dout, q, k, v, o = (
            _heads_first(x[rows].to(_wide(x))) for x in (grad_out, query, *_repeated(query, key, value), out)
        )
        ends = logsumexp[rows] if cum_seq_q is None else logsumexp[rows].transpose(0, 1)
        weights = (_masked(q @ k.mT * factor, is_causal) - ends[..., None]).exp()
        dscores = weights * (dout @ v.mT - (dout * o).sum(-1, keepdim=True)) * factor
        for grad, of_heads in zip(grads, (dscores @ k, dscores.mT @ q, weights.mT @ dout), strict=True):
            heads = grad.shape[1]
            summed = of_heads.unflatten(-3, (heads, -1)).sum(-3)
            grad[rows] = (summed if cum_seq_q is None else summed.transpose(0, 1)).to(grad.dtype)
    return grads  # pyright: ignore[reportReturnType]


def _segments(
    query: Tensor, key: Tensor, cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int
) -> Iterator[slice]:
    """The rows of each segment; all of a batch at once."""
    assert type(max_q) is int and query.dtype == key.dtype and query.stride(-1) == key.stride(-1) == 1
    if cum_q is None:
        assert cum_k is None and query.dim() == 4 and (max_q, max_k) == (query.shape[2], key.shape[2])
        yield slice(None)
        return
    assert cum_q is cum_k and query.dim() == 3 and cum_q.dtype == torch.int32 and cum_q.is_contiguous()
    bounds = cum_q.tolist()
    for first, end in pairwise(bounds):
        assert end - first <= max_q == max_k, "rows beyond the longest segment are not computed"
        if end > first:
            yield slice(first, end)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    copies = query.shape[1] // key.shape[1]
    return key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)


def _heads_first(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.transpose(0, 1)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return _masked(_heads_first(q) @ _heads_first(k).mT * factor, causal)


def _masked(scores: Tensor, causal: bool) -> Tensor:
    """Causal masks are aligned at the first query and key."""
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf) if causal else scores


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
