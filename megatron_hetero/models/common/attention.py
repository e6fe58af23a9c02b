"""Self-attention over packed sequences, for every module and axis.

Shape suffixes: n tokens of this rank without padding, S tokens with padding, H heads of this rank, D elements per head,
K keys that this rank's queries see.

`PackedSelfAttention` is Megatron's `SelfAttention` with a `forward` of its own: rotary embedding by a table with one
entry per token (Megatron's own handles neither 2-D nor multimodal positions of packed samples), padding that never
enters attention, and the exchanges of `megatron_hetero.models.common.exchange` under `sp` and `cp`. A sequence is
assigned to the members of `cp` first, the tokens of each of them to the members of `sp`:

    own tokens, own heads    -- sp: heads for tokens -->    the cp member's tokens, 1 / sp of the heads
                             -- cp: gather keys ------->    and the keys and values that these tokens see
                             -- attention, on segments -->
                             -- sp: tokens for heads -->    own tokens, own heads

A forward pass takes two all-to-alls where sp > 1 and one all-gather where cp > 1; the backward pass two all-to-alls and
one reduce-scatter. Layers that attend inside windows take none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_hetero.distributed.module_groups import ModuleGroups
from megatron_hetero.distributed.platform import on_device
from megatron_hetero.models.common.exchange import gather_keys, ulysses_gather_heads, ulysses_scatter_heads
from megatron_hetero.models.common.kernels import HALF, Kernel, kernel_for
from megatron_hetero.models.common.layers import compiled
from megatron_hetero.models.common.layers.compiled import Norm
from megatron_hetero.models.common.layers.order import Order
from megatron_hetero.models.common.layers.overlapped import (
    Ahead,
    first_in_parts,
    kept_ahead,
    parts_of,
    second_in_parts,
)
from megatron_hetero.models.common.layers.rotary import rotate, rotated_heads, split_heads
from megatron_hetero.models.common.recompute.remake import not_keeping, remake
from megatron_hetero.models.common.segments import PackedSegments

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


@dataclass(frozen=True)
class AttentionPlan:
    """What Megatron's layers carry as `packed_seq_params` to `PackedSelfAttention`.

    `full` are the segments of this rank's context-parallel member. `sp_lengths`: tokens without padding of each `sp`
    member of that one, `cp_lengths`: tokens of each `cp` member. `windows` are the sequences of this rank's own shard,
    for layers that attend locally.
    """

    full: PackedSegments
    sp_lengths: tuple[int, ...]
    cp_lengths: tuple[int, ...]
    windows: PackedSegments | None = None


@lru_cache(maxsize=16)
def rotary_frequencies(theta: float, dim: int, device: torch.device) -> Tensor:
    """theta^(-2i / dim) for i below dim / 2, fp32. Computed on the host as `transformers` does, and moved once."""
    return on_device(1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), device)


class TorchAttention(torch.nn.Module):
    """Core attention by one of `megatron_hetero.models.common.kernels`, a Megatron `core_attention`.

    It takes any number of heads, so it can stand behind an exchange of heads for tokens. `kernel`: which one; None
    takes the one for the device and dtype of the queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        kernel: Kernel | None = None,
        **_: Any,
    ):
        super().__init__()
        self.causal = attn_mask_type in CAUSAL
        self.scale = softmax_scale
        self.kernel = kernel

    def forward(
        self,
        q_nHD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedSegments,
        **_: Any,
    ) -> Tensor:
        """Attention inside each segment of `packed_seq_params`; returns [n, H * D]."""
        kernel = self.kernel or kernel_for(q_nHD.device, q_nHD.dtype, q_nHD.shape[2])
        return kernel(q_nHD, k_KHD, v_KHD, packed_seq_params, causal=self.causal, scale=self.scale).flatten(1)


def core_attention(offered: Any, dtype: torch.dtype, *, exchanges: bool) -> Any:
    """`offered` (Transformer Engine's attention, say) where it computes what a layer asks for, else `TorchAttention`.

    `exchanges`: whether heads or keys come from other ranks. Transformer Engine wants the number of heads that its
    module was built for (`DotProductAttention.forward` asserts it), and aligns causal masks at the first query and key
    as Megatron calls it on packed sequences. Nor has it a kernel for packed sequences in fp32.
    """
    return offered if dtype in HALF and not exchanges else TorchAttention


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention with the `forward` described at the head of this file.

    `windowed`: attend inside `AttentionPlan.windows` of this member's own shard, without communication. `selective`:
    what pads the output is not kept, nor norms of heads and what rotates them. `compile_layers`: what makes heads of
    the projection is compiled.
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
        selective: bool = False,
        compile_layers: bool = False,
    ):
        assert pg_collection is not None, "Megatron passes the groups of its layer specification"
        sp, context = pg_collection.sp, pg_collection.context
        exchanges = not windowed and (sp.size() > 1 or context.size() > 1)
        submodules = replace(
            submodules,
            core_attention=core_attention(submodules.core_attention, config.params_dtype, exchanges=exchanges),
        )
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            # The exchanges are ours: core attention sees its queries with all their keys, without context parallelism.
            pg_collection=_without_context(pg_collection),
        )
        self.windowed, self.exchanges, self.selective = windowed, exchanges, selective
        self.compile_layers = compile_layers
        self.sp_group, self.context_group = sp, context

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
        parts = parts_of(self, len(hidden_states))
        if len(parts) > 1:
            return self._in_parts(hidden_states, parts, table_2nD, plan)
        with not_keeping(hidden_states):
            mixed: Any = self.get_query_key_value_tensors(hidden_states, split_qkv=False)[0]
        out = self._attention(mixed, table_2nD, plan)
        padding = self._padded_length(hidden_states) - len(out)
        padded = (remake if self.selective and padding else _made)(partial(_padded, padding), out)
        with not_keeping(padded):
            return self.linear_proj(padded)

    def _in_parts(
        self, hidden: Tensor, parts: tuple[int, ...], table_2nD: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward`, with exchanges over tp beside products, see `layers.overlapped`."""
        group: Any = self.tp_group
        length, tokens = self._padded_length(hidden), table_2nD.shape[1]
        order = Order.of_parts(parts, group.size(), tokens, hidden.device)
        first: Any = self.linear_qkv
        ahead = Ahead(parts, group) if first.weight.requires_grad else None
        with not_keeping(hidden):
            wide = first_in_parts(first, hidden, parts, ahead)
            mixed = wide.view(length, 1, self.num_query_groups_per_partition, -1)
        out = self._attention(mixed, table_2nD, plan, order)
        if ahead is not None:
            with not_keeping(hidden):
                out = kept_ahead(out, hidden, ahead)
        # Tokens in another order are a copy of what attention keeps, and soon made again.
        again = self.selective or tokens == length
        padded = (remake if again else _made)(lambda out: order.placed(out).unsqueeze(1), out)
        with not_keeping(padded):
            return second_in_parts(self.linear_proj, padded, parts)

    def _attention(self, mixed: Tensor, table_2nD: Tensor, plan: AttentionPlan, order: Order | None = None) -> Tensor:
        """[n, H * D], of the projection [S, 1, groups, heads of a group * D]. `order`: of the tokens in that, where
        they are not in order.
        """
        # Without norms of heads nothing is kept but what attention takes, which is as large as the projection.
        make = remake if self.selective and self.q_layernorm is not None else _made
        q, k, v = make(partial(self._heads, table_2nD, order), mixed)
        with not_keeping(q, k, v):
            if self.windowed:
                return self._attend(q, k, v, plan.windows)
            return attend_across(self._attend, q, k, v, plan, self.sp_group, self.context_group)

    def _heads(self, table_2nD: Tensor, order: Order | None, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The projection, see `_attention`, to queries, keys and values [n, heads, D] without padding, normed where the
        model does so, and rotated; or [n, members, heads of a member, D], as an exchange of heads takes them, too.
        """
        dim, q_norm, k_norm = self.hidden_size_per_attention_head, self.q_layernorm, self.k_layernorm
        if q_norm is None and not self.compile_layers:
            return rotated_heads(mixed, table_2nD, dim, order, members=self._members(mixed.shape[-2]))
        mixed = mixed if order is None else order.chosen(mixed)
        if self.compile_layers:
            norms = None if q_norm is None else (Norm.of(q_norm), Norm.of(k_norm))
            return compiled.heads(mixed, table_2nD, dim, norms)
        assert q_norm is not None and k_norm is not None, "families norm both or neither"
        q, k, v = (x.flatten(1, 2) for x in split_heads(mixed, table_2nD.shape[1], dim))
        q, k = (rotate(norm(x.contiguous()), table_2nD) for norm, x in ((q_norm, q), (k_norm, k)))
        # A view of the projection would keep all of it for the backward pass.
        return q, k, v if self.exchanges else v.contiguous()

    def _members(self, groups: int) -> int:
        """Of how many ranks each gets some of the heads; one where groups of heads are to be repeated for that."""
        members = self.sp_group.size()
        return members if not self.windowed and groups % members == 0 else 1

    def _padded_length(self, hidden_states: Tensor) -> int:
        return hidden_states.shape[0] * (self.tp_group.size() if self.config.sequence_parallel else 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments | None) -> Tensor:
        if not len(q):
            # No kernel accepts that. Gradients (of zero) flow, so that the backward pass takes part in all exchanges.
            return q.flatten(1) + (k[:0].sum() + v[:0].sum())
        return self.core_attention(  # pyright: ignore[reportCallIssue]
            q, k, v, None, attn_mask_type=self.attn_mask_type, packed_seq_params=segments
        ).flatten(1)  # fmt: skip


def _padded(padding: int, out: Tensor) -> Tensor:
    return (F.pad(out, (0, 0, 0, padding)) if padding else out).unsqueeze(1)


def _made(make: Callable[..., Any], *inputs: Tensor) -> Any:
    return make(*inputs)


def attend_across(
    attend: Callable[[Tensor, Tensor, Tensor, PackedSegments], Tensor],
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
        q, k, v = ulysses_scatter_heads(q, k, v, plan.sp_lengths, sp)
    if context.size() > 1:
        assert plan.full.key_index is not None, "segments of one member alone, under cp"
        k, v = gather_keys(k, v, plan.cp_lengths, plan.full.key_index, context)
    out = attend(q, k, v, plan.full)
    return ulysses_gather_heads(out, plan.sp_lengths, sp) if sp.size() > 1 else out


def _without_context(groups: ModuleGroups) -> ProcessGroupCollection:
    alone = copy.copy(groups)
    alone.cp = alone.sp = alone.context = groups.ep
    return alone
