"""Self-attention over packed sequences for every parallel axis: its description as a value, and its torch module.

Shape suffixes:
    n  tokens of this rank without padding
    S  tokens with padding; S / tp where activations are split over tp
    H  heads of this rank
    D  elements per head
    G  groups of heads of this rank: a key/value head with its query heads
    K  keys that this rank's queries see

Queries and keys are rotated by a table with one entry per token, which covers 2-D and multimodal positions of packed
samples. Padding never enters attention. `megatron_hetero.models.layers.segments` exchanges tokens over `sp` and `cp`.
A sequence is divided over the members of `cp` first, then the tokens of each member over `sp`:

    local tokens, local heads  -- sp: heads for tokens -->   the cp member's tokens, 1 / sp of the heads
                               -- cp: gather keys ------->   plus the keys and values that these tokens see
                               -- attention per segment -->
                               -- sp: tokens for heads -->   local tokens, local heads

The forward pass has two all-to-alls if sp > 1 and one all-gather if cp > 1, the backward pass two all-to-alls and one
reduce-scatter. Window attention needs no exchange.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.groups.megatron import AttnMaskType
from megatron_hetero.hf.weight_map import Share, TensorShapes, WeightMap, columns, stack, whole
from megatron_hetero.models.layers.compiled import NormWeights, gated, run
from megatron_hetero.models.layers.dropout import TokenIds
from megatron_hetero.models.layers.kernels import HALF, Kernel, kernel_for
from megatron_hetero.models.layers.low_rank import adapted
from megatron_hetero.models.layers.norms import Norm, RMSNorm
from megatron_hetero.models.layers.overlapped import ahead_of, gather_ahead
from megatron_hetero.models.layers.parts import AttentionPart, Operations, Site, Tokens, kinds, named
from megatron_hetero.models.layers.recompute import not_saving, recompute
from megatron_hetero.models.layers.rotary import in_one_pass, rotate, rotated_heads, split_heads
from megatron_hetero.models.layers.segments import (
    PackedSegments,
    gather_keys,
    ulysses_gather_heads,
    ulysses_scatter_heads,
)
from megatron_hetero.models.layers.sequences import Sequences


@dataclass(frozen=True)
class AttentionParams:
    """Segments in which attention is computed, and the token counts that the exchanges over `sp` and `cp` need.

    Attributes:
        full: segments for full attention of this rank's `cp` member.
        sp_lengths: number of tokens without padding of each `sp` member of this `cp` member.
        cp_lengths: number of tokens of each `cp` member.
        windows: windows of this rank's shard, for layers with window attention.
        lengths: number of tokens of each whole sequence; without cp, by default the lengths of `full`.
        ids: token ids of this rank's shard, for dropout; None without dropout.
    """

    full: PackedSegments
    sp_lengths: tuple[int, ...]
    cp_lengths: tuple[int, ...]
    windows: PackedSegments | None = None
    lengths: tuple[int, ...] = ()
    ids: TokenIds | None = None

    @cached_property
    def sequences(self) -> Sequences:
        """Whole sequences of the pack, for layers with a recurrence along each sequence."""
        members, segments = max(1, len(self.cp_lengths)), self.full.segments
        assert self.lengths or members == 1 or not sum(self.cp_lengths), "chunks of sequences of unknown lengths"
        return Sequences(self.lengths or segments.queries, self.full.cu_seqlens_q.device, members)


@dataclass(frozen=True)
class SelfAttention(AttentionPart):
    """Softmax attention with rotary embedding, as a part of a layer.

    Attributes:
        hidden: width of a token.
        heads: number of query heads.
        kv_heads: number of key/value heads.
        head_dim: number of elements of a head.
        stored: names of the stored projections: queries, keys and values (or one tensor of all three), then the output.
        causal: whether each token sees only itself and earlier tokens of its sequence, else the whole sequence.
        windowed: whether each token sees only the tokens of its window.
        qkv_bias: whether queries, keys and values have a bias.
        out_bias: whether the output has a bias.
        head_norm: norm of each head of queries and keys, if any.
        norm_names: stored names of the norms of queries and of keys.
        gated: whether the output is multiplied by the sigmoid of a gate, whose rows in the stored projection follow
            the rows of the query head by head (Qiu et al. 2025, arXiv 2505.06708).
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    stored: tuple[str, ...]
    causal: bool
    windowed: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: Norm | None = None
    norm_names: tuple[str, str] = ("", "")
    gated: bool = False

    def kv_copies(self, tp: int) -> int:
        """Return the copies per key/value head: the smallest number that makes their total divisible by `tp`."""
        return math.lcm(self.kv_heads, tp) // self.kv_heads

    def tensors(self) -> TensorShapes:
        """Return the shapes of stored tensors: input projections with biases, norms of heads, output projection."""
        keys = self.kv_heads * self.head_dim
        *first, out = self.stored
        sizes = (self._query_rows, keys, keys) if len(first) == 3 else (self._query_rows + 2 * keys,)
        result: TensorShapes = {}
        for name, rows in zip(first, sizes, strict=True):
            result[f"{name}.weight"] = (rows, self.hidden)
            if self.qkv_bias:
                result[f"{name}.bias"] = (rows,)
        for name, norm in self._head_norms():
            result |= {f"{name}.{kind}": shape for kind, shape in norm.tensors().items()}
        result[f"{out}.weight"] = (self.hidden, self.heads * self.head_dim)
        return result | ({f"{out}.bias": (self.hidden,)} if self.out_bias else {})

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return the weight map of a rank: its query heads, and the (copied) key/value heads that they use."""
        out, width = stored + self.stored[-1], self.heads // share.ranks * self.head_dim
        local = share.rank * width, (share.rank + 1) * width
        result: dict[str, Any] = {"linear_proj.weight": columns(f"{out}.weight", self.hidden, local)}
        if self.out_bias:
            result["linear_proj.bias"] = whole(f"{out}.bias", self.hidden)
        for kind in kinds(self.qkv_bias):
            result[f"linear_qkv.{kind}"] = stack(*self._groups(stored, kind, share))
        for parameter, (name, norm) in zip(("q_layernorm", "k_layernorm"), self._head_norms(), strict=False):
            result |= named(parameter, norm.slices(f"{stored}{name}.", share))
        return result

    @property
    def _query_rows(self) -> int:
        """Number of rows of the query projection, including gates."""
        return self.heads * self.head_dim * (1 + self.gated)

    def _head_norms(self) -> Sequence[tuple[str, Norm]]:
        return [] if self.head_norm is None else [(name, self.head_norm) for name in self.norm_names]

    def _groups(self, stored: str, kind: str, share: Share) -> list[tuple[str, tuple[int, int]]]:
        """Return a rank's rows of the stored projections, group by group: query heads, key, value, then gates.

        Each key/value head of the rank, or copy of one, forms a group with its query heads.
        """
        *names, _ = self.stored
        is_fused, dim = len(names) == 1, self.head_dim
        q, k, v = (f"{stored}{name}.{kind}" for name in (names * 3 if is_fused else names))
        first_k = self._query_rows // dim if is_fused else 0
        first_v = first_k + self.kv_heads if is_fused else 0

        def head(tensor: str, number: int) -> tuple[str, tuple[int, int]]:
            return tensor, (number * dim, (number + 1) * dim)

        copies = self.kv_copies(share.ranks)
        groups = self.kv_heads * copies
        heads, result = self.heads // groups, list[tuple[str, tuple[int, int]]]()
        for group in range(groups * share.rank // share.ranks, groups * (share.rank + 1) // share.ranks):
            kv, queries = group // copies, range(group * heads, (group + 1) * heads)
            if self.gated:  # In the stored tensor each query head is followed by its gate.
                result += [head(q, 2 * number) for number in queries]
            else:
                result.append((q, (queries.start * dim, queries.stop * dim)))
            result += [head(k, first_k + kv), head(v, first_v + kv)]
            if self.gated:
                result += [head(q, 2 * number + 1) for number in queries]
        return result

    def operations(self, tokens: Tokens) -> Operations:
        """Return the FLOPs of the projections, and of the scores and weighted values of all visible query-key pairs."""
        if self.windowed:
            within = sum(tokens.windows)
            assert within == tokens.total, f"sequences hold {tokens.total} tokens, windows {within}"
            pairs = sum(n * n for n in tokens.windows)
        else:
            pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in tokens.sequences)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projected = self._query_rows + 2 * keys + queries
        return Operations(2 * tokens.total * self.hidden * projected, 4 * queries * pairs)

    def build(self, site: Site, number: int) -> PackedSelfAttention:
        """Build the torch module of this attention."""
        return PackedSelfAttention(self, site, number)


class TorchAttention(torch.nn.Module):
    """Core attention with Megatron's interface. It calls `kernel`, by default the kernel of
    `megatron_hetero.models.layers.kernels` for the device and dtype of the queries, and accepts any number of heads.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        kernel: Kernel | None = None,
        **_: Any,
    ):
        super().__init__()
        self.causal = "causal" in attn_mask_type.name
        self.kernel, self.cudnn = kernel, True

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
        """Compute attention inside each segment of `packed_seq_params` and return [n, H * D]."""
        kernel = self.kernel or kernel_for(q_nHD.device, q_nHD.dtype, q_nHD.shape[2], self.cudnn)
        return kernel(q_nHD, k_KHD, v_KHD, packed_seq_params, causal=self.causal).flatten(1)


class TokenMixer(torch.nn.Module):
    """Base class of attention modules: an input projection, mixing of tokens, and an output projection."""

    def forward(self, hidden: Tensor, table_2nD: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor | None]:
        """Map `hidden` [S, 1, hidden] to an output of the same shape, and a bias that the caller adds.

        `table_2nD`: cosines and sines of the rotary embedding.
        """
        first, second = self.linears()
        ahead = ahead_of(first)
        with not_saving(hidden):
            projected, _ = adapted(first, hidden, params.ids, ahead)
        out, gate = self._mixed(projected, table_2nD, params)
        if ahead is not None:
            with not_saving(hidden):
                out = gather_ahead(out, hidden, ahead)
        padded = self._padded(out, gate, len(projected) - table_2nD.shape[1])
        with not_saving(padded):
            return adapted(second, padded, params.ids)

    def linears(self) -> tuple[Any, Any]:
        """Return the input projection and the output projection."""
        raise NotImplementedError

    def _mixed(self, projected: Tensor, table_2nD: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor | None]:
        """Mix the tokens of the input projection `projected` [S, 1, ...]. Return the result [n, H * D] and its gate, if
        any.
        """
        raise NotImplementedError

    def _padded(self, out: Tensor, gate: Tensor | None, padding: int) -> Tensor:
        """Return the input of the output projection, [S, 1, H * D], from the result and gate that `_mixed` returns."""
        raise NotImplementedError


class PackedSelfAttention(TokenMixer):
    """Torch module of a `SelfAttention`."""

    def __init__(self, part: SelfAttention, site: Site, number: int):
        super().__init__()
        groups = site.groups
        self.sp_group, self.context_group, self.tp_group = groups.sp, groups.context, groups.tp
        self.windowed, self.head_dim = part.windowed, part.head_dim
        self.exchanges = not part.windowed and (groups.sp.size() > 1 or groups.context.size() > 1)
        self.selective, self.compiled = site.recompute.selective, site.compile_layers
        kv_heads = part.kv_heads * part.kv_copies(site.tp)
        self.groups_on_rank = kv_heads // site.tp
        self.attn_mask_type = AttnMaskType.causal if part.causal else AttnMaskType.no_mask
        config = site.config_of(
            hidden_size=part.hidden,
            num_attention_heads=part.heads,
            num_query_groups=kv_heads,
            kv_channels=part.head_dim,
        )
        # Transformer Engine accepts only the number of heads that its module was built with (asserted in
        # `DotProductAttention.forward`), aligns causal masks at the first query and key when Megatron calls it on
        # packed sequences, and has no fused kernel for packed sequences in fp32.
        kind = site.backend.attention if site.dtype in HALF and not self.exchanges else TorchAttention
        self.core_attention: Any = kind(
            config=config,
            layer_number=number + 1,
            attn_mask_type=self.attn_mask_type,
            attention_type="self",
            cp_comm_type=None,
            softmax_scale=None,
            # Core attention receives all keys that its queries see, so it needs no context parallelism.
            pg_collection=_without_context(groups),
        )
        self.core_attention.cudnn = site.cudnn
        queries, keys = part.heads * part.head_dim, kv_heads * part.head_dim
        # Number of gate elements per group; they come last in the projection of the group.
        self.gates = queries // kv_heads if part.gated else 0
        rows = queries + 2 * keys + kv_heads * self.gates
        self.linear_proj: Any = site.row_linear(queries, part.hidden, bias=part.out_bias, leaves_bias=True, name="proj")
        self.linear_qkv: Any = site.column_linear(part.hidden, rows, bias=part.qkv_bias, name="qkv")
        # Each tp rank normalises only local heads, so gradients are summed over tp even if activations are not split.
        self.q_layernorm, self.k_layernorm = (
            None if part.head_norm is None else site.mark(part.head_norm.build(site, number), split=site.tp > 1)
            for _ in "qk"
        )

    def linears(self) -> tuple[Any, Any]:
        """Return the input projection and the output projection."""
        return self.linear_qkv, self.linear_proj

    def _mixed(self, projected: Tensor, table_2nD: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor | None]:
        """Compute attention from the input projection; see `TokenMixer._mixed`."""
        heads, gate = projected.view(*projected.shape[:-1], self.groups_on_rank, -1), None
        if self.gates:
            heads, gate = heads.split((heads.shape[-1] - self.gates, self.gates), dim=-1)
            if not self._norms_in_one_pass(heads, table_2nD):
                gate = gate.contiguous()  # A view would keep the whole projection alive.
        return self._attention(heads, table_2nD, params), gate

    def _padded(self, out: Tensor, gate: Tensor | None, padding: int) -> Tensor:
        """Gate and pad the result of attention; see `TokenMixer._padded`."""
        # With padding, the input of the output projection is a copy of what attention saves. A gate costs little to
        # apply again, and its results are as large as its inputs, which are saved anyway.
        again = gate is not None or (self.selective and padding > 0)
        inputs = (out,) if gate is None else (out, gate)
        return _computed(partial(self._output, padding), *inputs, again=again)

    def _output(self, padding: int, out: Tensor, gate: Tensor | None = None) -> Tensor:
        if padding:
            out = F.pad(out, (0, 0, 0, padding))
        out = out.unsqueeze(1)
        if gate is None:
            return out
        out = out.view(gate.shape)
        return (run(gated, out, gate) if self.compiled else out * gate.sigmoid()).flatten(-2)

    def _attention(self, mixed: Tensor, table_2nD: Tensor, params: AttentionParams) -> Tensor:
        """Compute attention [n, H * D] from a projection [S, 1, G, heads of a group * D]."""
        # Without norms of heads, recomputation saves nothing: q, k and v together are as large as the projection.
        again = self.selective and self.q_layernorm is not None
        q, k, v = _computed(partial(self._heads, table_2nD), mixed, again=again)
        with not_saving(q, k, v):
            if self.windowed:
                return self._attend(q, k, v, params.windows)
            return attend_across(self._attend, q, k, v, params, self.sp_group, self.context_group)

    def _heads(self, table_2nD: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normed and rotated queries and keys, and values, from the projection `mixed`, without padding: each
        [n, H, D], or [n, members, heads of a member, D] for an exchange of heads.
        """
        dim, q_norm, k_norm = self.head_dim, self.q_layernorm, self.k_layernorm
        if q_norm is None or self._norms_in_one_pass(mixed, table_2nD):
            norms = [NormWeights.of(norm) for norm in (q_norm, k_norm) if norm is not None]
            return rotated_heads(mixed, table_2nD, dim, members=self._members(mixed.shape[-2]), norms=norms)
        assert q_norm is not None and k_norm is not None, "families norm both or neither"
        q, k, v = (x.flatten(1, 2) for x in split_heads(mixed, table_2nD.shape[1], dim))
        q, k = (rotate(norm(x.contiguous()), table_2nD) for norm, x in ((q_norm, q), (k_norm, k)))
        # A view of the values would keep the whole projection alive until the backward pass.
        return q, k, v if self.exchanges else v.contiguous()

    def _norms_in_one_pass(self, mixed: Tensor, table_2nD: Tensor) -> bool:
        """Return whether heads are normed and rotated in one pass, which saves the projection `mixed`."""
        return isinstance(self.q_layernorm, RMSNorm) and in_one_pass(mixed, table_2nD)

    def _members(self, groups: int) -> int:
        """Return the number of ranks over which heads are scattered; 1 for windows or if heads must be repeated."""
        members = self.sp_group.size()
        return members if not self.windowed and groups % members == 0 else 1

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments | None) -> Tensor:
        if not len(q):
            # No kernel accepts empty inputs. Zero gradients still flow, so the backward pass joins all exchanges.
            return q.flatten(1) + (k[:0].sum() + v[:0].sum())
        return self.core_attention(
            q, k, v, None, attn_mask_type=self.attn_mask_type, packed_seq_params=segments
        ).flatten(1)  # fmt: skip


def _computed(function: Callable[..., Any], *inputs: Tensor, again: bool) -> Any:
    return recompute(function, *inputs) if again else function(*inputs)


def attend_across(
    attend: Callable[[Tensor, Tensor, Tensor, PackedSegments], Tensor],
    q_nHD: Tensor,
    k_nHD: Tensor,
    v_nHD: Tensor,
    params: AttentionParams,
    sp: dist.ProcessGroup,
    context: dist.ProcessGroup,
) -> Tensor:
    """Compute attention with `attend` on `params.full`, between exchanges over `sp` and `context`: [n, H * D].

    `sp`, `context`: this rank's groups along the axes `sp` and `cp`.
    """
    q, k, v = q_nHD, k_nHD, v_nHD
    if sp.size() > 1:
        q, k, v = ulysses_scatter_heads(q, k, v, params.sp_lengths, sp)
    if context.size() > 1:
        assert params.full.key_index is not None, "under cp, segments need the index of their keys"
        k, v = gather_keys(k, v, params.cp_lengths, params.full.key_index, context)
    out = attend(q, k, v, params.full)
    return ulysses_gather_heads(out, params.sp_lengths, sp) if sp.size() > 1 else out


def _without_context(groups: Any) -> Any:
    """Return a copy of `groups` whose `cp` and `sp` groups have a single rank."""
    alone = copy.copy(groups)
    alone.cp = alone.sp = alone.context = groups.ep
    return alone
