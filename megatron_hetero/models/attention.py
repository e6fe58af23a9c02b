"""Self-attention over packed sequences, for every module and axis.

Shape suffixes: n tokens of this rank without padding, S tokens with padding, H heads of this rank, D elements per head,
K keys that this rank's queries see.

`PackedSelfAttention` is Megatron's `SelfAttention` with a `forward` of its own: rotary embedding by a table with one
entry per token (Megatron's own handles neither 2-D nor multimodal positions of packed samples), padding that never
enters attention, and the exchanges of `megatron_hetero.models.exchange` under `sp` and `cp`. A sequence is dealt to the
members of `cp` first, the tokens of each of them to the members of `sp`:

    own tokens, own heads    -- sp: heads for tokens -->    the cp member's tokens, 1 / sp of the heads
                             -- cp: gather keys ------->    and the keys and values that these tokens see
                             -- attention, on pieces -->
                             -- sp: tokens for heads -->    own tokens, own heads

A forward pass takes two all-to-alls where sp > 1 and one all-gather where cp > 1; the backward pass two all-to-alls and
one reduce-scatter. Layers that attend inside windows take none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_hetero.models.context import Pieces
from megatron_hetero.models.exchange import gather_keys, heads_for_tokens, padded_index, tokens_for_heads
from megatron_hetero.platform import on_device
from megatron_hetero.topology import ModuleGroups

try:  # optional: pip install megatron-hetero[gpu]
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
except ImportError:
    flash_attn_varlen_func = None

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
HALF = (torch.bfloat16, torch.float16)


class Bucket(NamedTuple):
    """All pieces of so many `queries` and `keys`, of which there are `pieces`."""

    queries: int
    keys: int
    pieces: int


@dataclass
class Segments(PackedSeqParams):
    """Pieces of attention in a pack (`megatron_hetero.models.context`): queries attend within their own piece only.

    A Megatron `PackedSeqParams` (what Transformer Engine and flash-attn read: queries and keys of each piece, causal
    ones aligned at the last query and key), with what plain PyTorch needs to run all pieces of one shape in one batch:
    `buckets`, and `order` and `key_order`, int64 indices that bring queries and keys into the order of the buckets,
    None where they are in it.

    `key_index`: int64 [K], where the keys of the pieces stand in the padded gather of all context-parallel members'
    tokens; None where they are this member's own tokens in their order.
    """

    buckets: tuple[Bucket, ...] = ()
    order: Tensor | None = None
    key_order: Tensor | None = None
    key_index: Tensor | None = None
    _masks: dict[Bucket, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        """Whole sequences of `lengths` tokens, one after the other. Empty ones are dropped."""
        return cls.of_pieces(Pieces.whole(lengths), device)

    @classmethod
    def of_pieces(cls, pieces: Pieces, device: torch.device, cp_lengths: Sequence[int] = ()) -> Segments:
        """What one context-parallel member attends to. `cp_lengths`, the tokens of each member, are needed where the
        pieces have a `key_index`.
        """
        index = None if pieces.key_index is None else padded_index(pieces.key_index, cp_lengths)
        number = {shape: i for i, shape in enumerate(dict.fromkeys(zip(pieces.queries, pieces.keys, strict=True)))}
        bucket = np.array([number[shape] for shape in zip(pieces.queries, pieces.keys, strict=True)], np.int64)
        counts = np.bincount(bucket, minlength=len(number))
        cu_queries = _cumulated(pieces.queries, device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_queries,
            cu_seqlens_kv=cu_queries if pieces.queries == pieces.keys else _cumulated(pieces.keys, device),
            max_seqlen_q=max(pieces.queries, default=0),
            max_seqlen_kv=max(pieces.keys, default=0),
            buckets=tuple(Bucket(*shape, int(counts[i])) for shape, i in number.items()),
            order=_bucket_order(bucket, pieces.queries, device),
            key_order=_bucket_order(bucket, pieces.keys, device),
            key_index=None if index is None else on_device(torch.from_numpy(index), device),
        )

    def causal_mask(self, bucket: Bucket) -> Tensor:
        """Boolean [queries, keys], True where a query sees a key: the last query sees every key, each query before it
        one less. Made at first use and kept for the other layers.
        """
        if bucket not in self._masks:
            everything = torch.ones(bucket.queries, bucket.keys, dtype=torch.bool, device=self.cu_seqlens_q.device)
            self._masks[bucket] = everything.tril_(bucket.keys - bucket.queries)
        return self._masks[bucket]


def _cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    return on_device(torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)), device)


def _bucket_order(bucket: np.ndarray, lengths: Sequence[int], device: torch.device) -> Tensor | None:
    if np.all(np.diff(bucket) >= 0):
        return None
    return on_device(torch.from_numpy(np.argsort(np.repeat(bucket, lengths), kind="stable")), device)


@dataclass(frozen=True)
class AttentionPlan:
    """What Megatron's layers carry as `packed_seq_params` to `PackedSelfAttention`.

    `full` are the pieces of this rank's context-parallel member. `sp_lengths`: tokens without padding of each `sp`
    member of that one, `cp_lengths`: tokens of each `cp` member. `windows` are the sequences of this rank's own shard,
    for layers that attend locally.
    """

    full: Segments
    sp_lengths: tuple[int, ...]
    cp_lengths: tuple[int, ...]
    windows: Segments | None = None


@lru_cache(maxsize=16)
def rotary_frequencies(theta: float, dim: int, device: torch.device) -> Tensor:
    """theta^(-2i / dim) for i below dim / 2, fp32. Computed on the host as `transformers` does, and moved once."""
    return on_device(1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), device)


def rotate(x_nHD: Tensor, table_2nD: Tensor) -> Tensor:
    """Rotary embedding with a table of cosines and sines per token, computed in fp32.

    Source: Su et al. 2021, arXiv 2104.09864, in the half-split form of GPT-NeoX.
    """
    cos, sin = table_2nD[0].unsqueeze(-2), table_2nD[1].unsqueeze(-2)
    x = x_nHD.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_nHD.dtype)


class TorchAttention(torch.nn.Module):
    """Core attention on plain PyTorch (or flash-attn where it is installed and applies), a Megatron
    `core_attention`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__()
        self.causal = attn_mask_type in CAUSAL
        self.scale = softmax_scale

    def forward(
        self, q_nHD: Tensor, k_KHD: Tensor, v_KHD: Tensor, attention_mask: None = None, *, packed_seq_params: Segments,
        **_: Any,
    ) -> Tensor:  # fmt: skip
        """Attention inside each piece of `packed_seq_params`; returns [n, H * D]."""
        segments = packed_seq_params
        if flash_attn_varlen_func is not None and q_nHD.is_cuda and q_nHD.dtype in HALF:
            return self._flash(q_nHD, k_KHD, v_KHD, segments).flatten(1)
        queries = [bucket.queries * bucket.pieces for bucket in segments.buckets]
        keys = [bucket.keys * bucket.pieces for bucket in segments.buckets]
        q_parts = _ordered(q_nHD, segments.order).split(queries)
        k_parts, v_parts = (_ordered(x, segments.key_order).split(keys) for x in (k_KHD, v_KHD))
        inputs = zip(q_parts, k_parts, v_parts, segments.buckets, strict=True)
        parts = [self._bucket(q, k, v, bucket, segments) for q, k, v, bucket in inputs]
        out, order = parts[0] if len(parts) == 1 else torch.cat(parts), segments.order
        return (out if order is None else torch.empty_like(out).index_copy(0, order, out)).flatten(1)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        # Causal pieces are aligned at the bottom right, as `Segments` has them (flash-attn 2.1 and later).
        return flash_attn_varlen_func(  # pyright: ignore[reportOptionalCall]
            q,
            k,
            v,
            segments.cu_seqlens_q,
            segments.cu_seqlens_kv,
            segments.max_seqlen_q,
            segments.max_seqlen_kv,
            softmax_scale=self.scale,
            causal=self.causal,
        )

    def _bucket(self, q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, segments: Segments) -> Tensor:
        q, k, v = (x.unflatten(0, (bucket.pieces, -1)).transpose(1, 2) for x in (q, k, v))
        square = bucket.queries == bucket.keys
        # The one query of a piece sees all its keys.
        masked = self.causal and 1 < bucket.queries < bucket.keys
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_lower_right(q, bucket, segments) if masked else None,
            is_causal=self.causal and square,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1)


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(0, order)


def _lower_right(q: Tensor, bucket: Bucket, segments: Segments) -> Tensor:
    # `is_causal` of PyTorch aligns at the upper left. Its flash kernel (half precision) needs no mask in memory.
    if q.is_cuda and q.dtype in HALF:
        return causal_lower_right(bucket.queries, bucket.keys)
    return segments.causal_mask(bucket)


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention with the `forward` described at the head of this file.

    `windowed`: attend inside `AttentionPlan.windows` of this member's own shard, without communication.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ModuleGroups | None = None,
        windowed: bool = False,
    ):
        assert pg_collection is not None
        if pg_collection.context.size() > 1 and attn_mask_type in CAUSAL:
            # Transformer Engine, as Megatron calls it on packed sequences, aligns causal masks at the upper left.
            submodules = replace(submodules, core_attention=TorchAttention)
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            # The exchanges are ours: core attention sees its queries with all their keys, without context parallelism.
            pg_collection=_without_context(pg_collection),
        )
        self.windowed = windowed
        self.sp_group, self.context_group = pg_collection.sp, pg_collection.context

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: AttentionPlan,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention on `hidden_states` [S, 1, hidden] ([S / tp, 1, hidden] with sequence-parallel activations).

        `rotary_pos_emb`: [2, n, D] cosines and sines. Returns the output in the shape of the input, and the bias that
        the layer adds.
        """
        plan, table_2nD = packed_seq_params, rotary_pos_emb
        tokens = table_2nD.shape[1]
        qkv: Any = self.get_query_key_value_tensors(hidden_states)
        q, k, v = (x.squeeze(1)[:tokens] for x in qkv)
        padding = self._padded_length(hidden_states) - tokens
        q, k = rotate(q, table_2nD), rotate(k, table_2nD)
        if self.windowed:
            out = self._attend(q, k, v, plan.windows)
        else:
            out = attend_across(self._attend, q, k, v, plan, self.sp_group, self.context_group)
        return self.linear_proj(F.pad(out, (0, 0, 0, padding)).unsqueeze(1))

    def _padded_length(self, hidden_states: Tensor) -> int:
        return hidden_states.shape[0] * (self.tp_group.size() if self.config.sequence_parallel else 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None) -> Tensor:
        if not len(q):
            # No kernel accepts that. Gradients (of zero) flow, so that the backward pass takes part in all exchanges.
            return q.flatten(1) + (k[:0].sum() + v[:0].sum())
        return self.core_attention(  # pyright: ignore[reportCallIssue]
            q, k, v, None, attn_mask_type=self.attn_mask_type, packed_seq_params=segments
        ).flatten(1)  # fmt: skip


def attend_across(
    attend: Callable[[Tensor, Tensor, Tensor, Segments], Tensor],
    q_nHD: Tensor,
    k_nHD: Tensor,
    v_nHD: Tensor,
    plan: AttentionPlan,
    sp: dist.ProcessGroup,
    context: dist.ProcessGroup,
) -> Tensor:
    """`attend` on `plan.full`, between the exchanges at the head of this file: [n, H * D].

    `sp`, `context`: this rank's groups along the axes `sp` and `cp`. A group of one exchanges nothing.
    """
    q, k, v = q_nHD, k_nHD, v_nHD
    if sp.size() > 1:
        q, k, v = heads_for_tokens(q, k, v, plan.sp_lengths, sp)
    if context.size() > 1:
        assert plan.full.key_index is not None, "pieces of one member alone, under cp"
        k, v = gather_keys(k, v, plan.cp_lengths, plan.full.key_index, context)
    out = attend(q, k, v, plan.full)
    return tokens_for_heads(out, plan.sp_lengths, sp) if sp.size() > 1 else out


def _without_context(groups: ModuleGroups) -> ProcessGroupCollection:
    alone = copy.copy(groups)
    alone.cp = alone.sp = alone.context = groups.ep
    return alone
