"""Self-attention over packed sequences, for every module and axis.

Shape suffixes: n tokens of this rank without padding, S tokens with padding, H heads of this rank, D elements per head.

`PackedSelfAttention` is Megatron's `SelfAttention` with a `forward` of its own: rotary embedding by a table with one
entry per token (Megatron's own handles neither 2-D nor multimodal positions of packed samples), padding that never
enters attention, and the exchange of heads for tokens under `sp` (Ulysses; Jacobs et al. 2023, arXiv 2309.14509).
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

try:  # optional: pip install megatron-hetero[gpu]
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
except ImportError:
    flash_attn_varlen_func = None


@dataclass
class Segments(PackedSeqParams):
    """Lengths of the sequences in a pack: tokens attend within their own only.

    A Megatron `PackedSeqParams` (what Transformer Engine and flash-attn read), with what plain PyTorch needs to run all
    sequences of one length in one batch: `buckets`, (length, tokens of all sequences of that length) for each distinct
    length, and `order`, int64 indices that bring tokens into the order of the buckets, None where they are in it.
    """

    lengths: tuple[int, ...] = ()
    buckets: tuple[tuple[int, int], ...] = ()
    order: Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        """Sequences of `lengths` tokens, one after the other. Empty ones are dropped."""
        lengths = tuple(int(n) for n in lengths if n)
        cu_seqlens = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)
        longest = max(lengths, default=0)
        counts = Counter(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
            buckets=tuple((length, length * count) for length, count in counts.items()),
            order=_bucket_order(lengths, tuple(counts), device),
        )

    @property
    def total(self) -> int:
        """Tokens in all sequences."""
        return sum(self.lengths)


def _bucket_order(lengths: tuple[int, ...], distinct: tuple[int, ...], device: torch.device) -> Tensor | None:
    bucket = {length: index for index, length in enumerate(distinct)}
    of_token = np.repeat([bucket[length] for length in lengths], lengths)
    if np.all(np.diff(of_token) >= 0):
        return None
    return torch.from_numpy(np.argsort(of_token, kind="stable")).to(device)


@dataclass(frozen=True)
class AttentionPlan:
    """What Megatron's layers carry as `packed_seq_params` to `PackedSelfAttention`.

    `full` are the sequences over the whole context-parallel group, `shard_lengths` the tokens without padding of each
    of its members, and `windows` the sequences of this member's shard for layers that attend locally.
    """

    full: Segments
    shard_lengths: tuple[int, ...]
    windows: Segments | None = None


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
        self.causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        self.scale = softmax_scale

    def forward(
        self, q_nHD: Tensor, k_nHD: Tensor, v_nHD: Tensor, attention_mask: None = None, *, packed_seq_params: Segments,
        **_: Any,
    ) -> Tensor:  # fmt: skip
        """Attention inside each sequence of `packed_seq_params`; returns [n, H * D]."""
        if flash_attn_varlen_func is not None and q_nHD.is_cuda and q_nHD.dtype in (torch.bfloat16, torch.float16):
            return self._flash(q_nHD, k_nHD, v_nHD, packed_seq_params).flatten(1)
        order, sizes = packed_seq_params.order, [tokens for _, tokens in packed_seq_params.buckets]
        qkv = (q_nHD, k_nHD, v_nHD) if order is None else (x.index_select(0, order) for x in (q_nHD, k_nHD, v_nHD))
        q_parts, k_parts, v_parts = (x.split(sizes) for x in qkv)
        lengths = [length for length, _ in packed_seq_params.buckets]
        parts = [self._bucket(*part) for part in zip(q_parts, k_parts, v_parts, lengths, strict=True)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (out if order is None else torch.empty_like(out).index_copy(0, order, out)).flatten(1)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        cu, longest = segments.cu_seqlens_q, segments.max_seqlen_q
        return flash_attn_varlen_func(  # pyright: ignore[reportOptionalCall]
            q, k, v, cu, cu, longest, longest, softmax_scale=self.scale, causal=self.causal
        )

    def _bucket(self, q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        q, k, v = (x.reshape(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).reshape(-1, q.shape[1], q.shape[3])


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
        pg_collection: ProcessGroupCollection | None = None,
        windowed: bool = False,
    ):
        context_group = pg_collection.cp  # pyright: ignore[reportOptionalMemberAccess]
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            # The exchange of heads is ours: core attention sees whole sequences, without context parallelism.
            pg_collection=_without_context(pg_collection),
        )
        self.windowed = windowed
        self.context_group = None if windowed or context_group.size() == 1 else context_group

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
        elif self.context_group is None:
            out = self._attend(q, k, v, plan.full)
        else:
            q, k, v = heads_for_tokens(q, k, v, plan.shard_lengths, self.context_group)
            out = self._attend(q, k, v, plan.full)
            out = tokens_for_heads(out, plan.shard_lengths, self.context_group)
        return self.linear_proj(F.pad(out, (0, 0, 0, padding)).unsqueeze(1))

    def _padded_length(self, hidden_states: Tensor) -> int:
        return hidden_states.shape[0] * (self.tp_group.size() if self.config.sequence_parallel else 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None) -> Tensor:
        if not len(q):  # an empty shard: no kernel accepts it, but gradients (of zero) flow
            return q.flatten(1)
        return self.core_attention(  # pyright: ignore[reportCallIssue]
            q, k, v, None, attn_mask_type=self.attn_mask_type, packed_seq_params=segments
        ).flatten(1)  # fmt: skip


def _without_context(groups: ProcessGroupCollection | None) -> ProcessGroupCollection:
    alone = copy.copy(groups)
    alone.cp = groups.ep  # pyright: ignore
    return alone  # pyright: ignore[reportReturnType]


# ---------------------------------------------------------------------------------------------------------
# Ulysses. A member of a group of m holds n_i tokens with all H heads; afterwards all N = sum n_i tokens with H / m
# heads.
# ---------------------------------------------------------------------------------------------------------


def heads_for_tokens(
    q_nHD: Tensor, k_nHD: Tensor, v_nHD: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Give away heads, receive tokens: [n, H, D] to [N, H / m, D] for each, in one all-to-all.

    Key/value heads fewer than m are repeated first, so that each member gets those that its query heads use.
    """
    members = group.size()
    k_nHD, v_nHD = (_repeat_heads(x, members) for x in (k_nHD, v_nHD))
    widths = [x.shape[1] // members for x in (q_nHD, k_nHD, v_nHD)]
    # One buffer, ordered by receiver: [m, n, (q | k | v heads of that receiver), D]
    packed = torch.cat([x.unflatten(1, (members, -1)) for x in (q_nHD, k_nHD, v_nHD)], dim=2).transpose(0, 1)
    mine = len(q_nHD)
    rows = packed.flatten(0, 1).flatten(1)  # [m * n, heads * D], also where n is 0
    received = _all_to_all(rows, [mine] * members, list(lengths), group)
    return received.unflatten(1, (sum(widths), q_nHD.shape[2])).split(widths, dim=1)  # pyright: ignore[reportReturnType]


def tokens_for_heads(x_Nc: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Give away tokens, receive heads: [N, H / m * D] to [n, H * D]."""
    members, mine = group.size(), lengths[group.rank()]
    received = _all_to_all(x_Nc, list(lengths), [mine] * members, group)
    return received.unflatten(0, (members, mine)).transpose(0, 1).flatten(1)


def _repeat_heads(x_nHD: Tensor, members: int) -> Tensor:
    copies = math.lcm(x_nHD.shape[1], members) // x_nHD.shape[1]
    return x_nHD if copies == 1 else x_nHD.repeat_interleave(copies, dim=1)


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows with uneven splits; the backward pass is the same with the splits exchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None  # pyright: ignore


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    return _AllToAll.apply(x, sent, received, group)  # pyright: ignore[reportReturnType]
