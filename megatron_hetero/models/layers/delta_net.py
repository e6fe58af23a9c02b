"""Gated delta nets for every parallel axis: linear attention with a state per head that each token decays and corrects.

Shape suffixes:
    n  tokens of this rank without padding
    S  tokens with padding; S / tp where activations are split over tp
    N  tokens of whole sequences
    h  key heads, each with K elements
    H  value heads, each with V elements
    c  columns of queries, keys, values, b and a

    hidden -> projections -> convolution -> gated delta rule -> norm, times SiLU of a gate -> projection
              q k v b a z     q k v          q k v, b a                          z

Each value head has a state [K, V], zero at the start of each sequence, which it reads and writes with the queries and
keys of its key head. Consecutive value heads share a key head:

    S <- exp(g) S,  S <- S + k (beta (v - S^T k))^T,  out = S^T q
    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)

A token depends on all earlier tokens, so ranks that share sequences (`sp`, then `cp`) exchange heads for tokens before
the convolution, and back after the rule. The number of heads need not be divisible: members may have different numbers
of heads, or none. Gates are not exchanged. `tp` splits value heads, and copies key heads if it does not divide them.

    local tokens, local heads  -- sp, cp: heads for tokens -->   whole sequences in order, some heads
                               -- convolution, rule -->
                               -- cp, sp: tokens for heads -->   local tokens, local heads

Sources: Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464; the layer follows Qwen3.5.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.groups.platform import on_device
from megatron_hetero.hf.weight_map import (
    ALIGNMENT,
    Interval,
    Share,
    TensorShapes,
    TensorSlice,
    WeightMap,
    columns,
    stack,
)
from megatron_hetero.layout.axes import Limit
from megatron_hetero.models.layers.attention import AttentionParams, TokenMixer
from megatron_hetero.models.layers.compiled import NormWeights, normed, run
from megatron_hetero.models.layers.delta_kernels import convolution_for, rule_for
from megatron_hetero.models.layers.exchange import Columns, even_ranges, gather_columns, scatter_columns
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.parts import AttentionPart, Operations, Site, Tokens, named
from megatron_hetero.models.layers.recompute import not_saving, recompute
from megatron_hetero.models.layers.sequences import Order


@dataclass(frozen=True)
class DeltaNet(AttentionPart):
    """A gated delta net, as a part of a layer.

    Attributes:
        hidden: width of a token.
        key_heads: number of heads of queries and keys.
        value_heads: number of heads of values, each with a state.
        key_dim: number of elements of a key head.
        value_dim: number of elements of a value head.
        taps: width of the convolution in tokens; the last tap multiplies the current token.
        norm: norm of each head of the output.
        stored: prefix of the stored tensors.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm: Norm
    stored: str = "linear_attn."
    windowed: bool = field(default=False, init=False)
    exchanges_over_cp: ClassVar[bool] = True

    @property
    def heads(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of value heads."""
        return self.value_heads

    @property
    def kv_heads(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of key heads, which are copied if tp does not divide their number."""
        return self.key_heads

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Limits on parallel degrees: tp must divide the number of value heads; sp and cp are not limited."""
        return (Limit(("tp",), self.value_heads, "delta net", "value heads"),)

    def key_copies(self, tp: int) -> int:
        """Return the copies per key head: the smallest number that makes their total divisible by `tp`."""
        return math.lcm(self.key_heads, tp) // self.key_heads

    def heads_of(self, tp: int) -> Heads:
        """Return the heads of one rank, numbered from 0, if heads are split over `tp` ranks."""
        keys = self.key_heads * self.key_copies(tp) // tp
        return Heads(
            (0, self.value_heads // tp), (0, keys), self.value_heads // tp // keys, self.key_dim, self.value_dim
        )

    def tensors(self) -> TensorShapes:
        """Return the shapes of stored tensors: input projections, convolution, decay, norm and output projection."""
        values = self.value_heads * self.value_dim
        mixed = 2 * self.key_heads * self.key_dim + values
        shapes = {
            "in_proj_qkv.weight": (mixed, self.hidden),
            "in_proj_z.weight": (values, self.hidden),
            "in_proj_b.weight": (self.value_heads, self.hidden),
            "in_proj_a.weight": (self.value_heads, self.hidden),
            "conv1d.weight": (mixed, 1, self.taps),
            "A_log": (self.value_heads,),
            "dt_bias": (self.value_heads,),
            **{f"norm.{name}": shape for name, shape in self.norm.tensors().items()},
            "out_proj.weight": (self.hidden, values),
        }
        return {self.stored + name: shape for name, shape in shapes.items()}

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return the weight map of a rank: its value heads, and the (copied) key heads that they use. The input
        projections are one parameter with the rows of queries, keys, values, b, a and z, then padding.
        """
        prefix, count = stored + self.stored, self.value_heads // share.ranks
        heads = share.rank * count, (share.rank + 1) * count
        elements = heads[0] * self.value_dim, heads[1] * self.value_dim
        projections = stack(
            *self._channels(f"{prefix}in_proj_qkv.weight", share),
            (f"{prefix}in_proj_b.weight", heads),
            (f"{prefix}in_proj_a.weight", heads),
        )
        at, rows = projections[-1].at + count, count * self.value_dim
        gate = TensorSlice(f"{prefix}in_proj_z.weight", elements, at, padding=-(at + rows) % ALIGNMENT)
        return {
            "conv_weight": stack(*self._channels(f"{prefix}conv1d.weight", share)),
            "A_log": stack((f"{prefix}A_log", heads)),
            "dt_bias": stack((f"{prefix}dt_bias", heads)),
            "in_proj.weight": (*projections, gate),
            "out_proj.weight": columns(f"{prefix}out_proj.weight", self.hidden, elements),
            **named("norm", self.norm.slices(f"{prefix}norm.", share)),
        }

    def _channels(self, name: str, share: Share) -> list[tuple[str, Interval]]:
        """Return a rank's rows of tensor `name`: queries and then keys, one range per key head, then values."""
        copies, width = self.key_copies(share.ranks), self.key_dim
        count = self.key_heads * copies // share.ranks
        keys = [at // copies for at in range(share.rank * count, (share.rank + 1) * count)]
        every = self.key_heads * width
        rows = [(first + k * width, first + (k + 1) * width) for first in (0, every) for k in keys]
        values = self.value_heads // share.ranks * self.value_dim
        rows.append((2 * every + share.rank * values, 2 * every + (share.rank + 1) * values))
        return [(name, each) for each in rows]

    def operations(self, tokens: Tokens) -> Operations:
        """Return the FLOPs of the projections and, for each token and value head, of the product with the key, the
        update of the state and the product with the query.
        """
        values = self.value_heads * self.value_dim
        projected = 2 * self.key_heads * self.key_dim + 2 * values + 2 * self.value_heads + values
        return Operations(2 * tokens.total * self.hidden * projected, 6 * tokens.total * values * self.key_dim)

    def build(self, site: Site, number: int) -> DeltaNetModule:
        """Build the torch module of this gated delta net."""
        return DeltaNetModule(self, site, number)


class Heads(NamedTuple):
    """A range of value heads and the range of key heads that they use, with `ratio` value heads per key head."""

    values: Interval
    keys: Interval
    ratio: int
    key_dim: int
    value_dim: int

    @property
    def value_count(self) -> int:
        """Number of value heads."""
        return self.values[1] - self.values[0]

    @property
    def key_count(self) -> int:
        """Number of key heads."""
        return self.keys[1] - self.keys[0]

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Number of columns of queries, keys, values, b and a."""
        keys, values = self.key_count * self.key_dim, self.value_count
        return keys, keys, values * self.value_dim, values, values

    @property
    def key_of_value(self) -> tuple[int, ...] | None:
        """Index among `keys` of each value head's key head; None if all key heads have equally many value heads."""
        keys = tuple(value // self.ratio - self.keys[0] for value in range(*self.values))
        return None if len(set(Counter(keys).values())) < 2 else keys

    def over(self, members: int) -> tuple[Heads, ...]:
        """Divide these heads over `members` ranks and return the heads of each rank."""
        first = self.values[0]
        return tuple(self._some(first + start, first + stop) for start, stop in even_ranges(self.value_count, members))

    def _some(self, start: int, stop: int) -> Heads:
        keys = (start // self.ratio, -(-stop // self.ratio)) if stop > start else (self.keys[0], self.keys[0])
        return self._replace(values=(start, stop), keys=keys)

    def columns_in(self, whole: Heads) -> Columns:
        """Return the positions of these heads' columns (queries, keys, values, b, a) among the columns of `whole`."""
        keys, values = self.key_dim, self.value_dim
        ranges = [(self.keys, whole.keys, keys)] * 2 + [(self.values, whole.values, width) for width in (values, 1, 1)]
        result, at = list[Interval](), 0
        for (start, stop), (first, last), width in ranges:
            result.append((at + (start - first) * width, at + (stop - first) * width))
            at += (last - first) * width
        return tuple(result)


class DeltaNetModule(TokenMixer):
    """Torch module of a `DeltaNet`."""

    def __init__(self, part: DeltaNet, site: Site, number: int):
        super().__init__()
        groups, options = site.groups, {"dtype": site.dtype, "device": site.platform.device}
        self.sp_group, self.context_group, self.tp_group = groups.sp, groups.context, groups.tp
        self.selective, self.compiled = site.recompute.selective, site.compile_layers
        self.rule_for: Callable[..., Any] = rule_for  # `--plan` replaces this by a function that measures memory.
        self.heads = part.heads_of(site.tp)
        # Heads are divided over the members of `sp`, then the heads of each `sp` member over the members of `cp`.
        self.over_sp = self.heads.over(self.sp_group.size())
        local = self.over_sp[self.sp_group.rank()]
        self.over_cp = local.over(self.context_group.size())
        self.columns_over_sp = [each.columns_in(self.heads) for each in self.over_sp]
        self.columns_over_cp = [each.columns_in(local) for each in self.over_cp]
        channels, values = sum(self.heads.sizes[:3]), self.heads.sizes[2]
        rows = sum(self.heads.sizes) + values
        self.conv_weight = torch.nn.Parameter(torch.empty(channels, part.taps, **options))
        self.A_log = torch.nn.Parameter(torch.empty(self.heads.value_count, **options))
        self.dt_bias = torch.nn.Parameter(torch.empty(self.heads.value_count, **options))
        self.in_proj: Any = site.column_linear(
            part.hidden, (rows + -rows % ALIGNMENT) * site.tp, bias=False, name="qkv"
        )
        self.out_proj: Any = site.row_linear(values * site.tp, part.hidden, bias=False, leaves_bias=True, name="proj")
        # Each tp rank normalises only local heads, so gradients are summed over tp even if activations are not split.
        self.norm: Any = site.mark(part.norm.build(site, number), split=site.tp > 1)

    def linears(self) -> tuple[Any, Any]:
        """Return the input projection and the output projection."""
        return self.in_proj, self.out_proj

    @property
    def share(self) -> Heads:
        """The heads that this rank computes for whole sequences."""
        return self.over_cp[self.context_group.rank()]

    def _mixed(self, projected: Tensor, table_2nD: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """Apply convolution and delta rule; see `TokenMixer._mixed`. `table_2nD` only gives the number of tokens."""
        tokens = table_2nD.shape[1]
        if len(projected) > tokens:
            projected = projected[:tokens]
        mixed_width, gate_width = sum(self.heads.sizes), self.heads.sizes[2]
        widths = mixed_width, gate_width, projected.shape[-1] - mixed_width - gate_width
        mixed_nc, gate, _ = projected.squeeze(1).split(widths, dim=1)
        if self.sp_group.size() > 1 or self.context_group.size() > 1:
            # A view would keep the whole projection alive, which is not needed after an exchange.
            gate = gate.contiguous()
        return self._across(mixed_nc, params), gate

    def _padded(self, out: Tensor, gate: Tensor | None, padding: int) -> Tensor:
        """Normalise, gate and pad the output of the rule; see `TokenMixer._padded`."""
        assert gate is not None, "delta nets have a gate"
        # Recompute these elementwise operations, whose intermediate results are several times as large as their input.
        return recompute(partial(self._output, padding), out, gate)

    def _output(self, padding: int, out: Tensor, gate: Tensor) -> Tensor:
        by_head = -1, self.heads.value_count, self.heads.value_dim
        out, gate = out.view(by_head), gate.view(by_head)
        if self.compiled:
            out = run(normed_and_gated, out, gate, *NormWeights.of(self.norm))
        else:
            out = gated_by_silu(self.norm(out), gate)
        out = out.flatten(1)
        if padding:
            out = F.pad(out, (0, 0, 0, padding))
        return out.unsqueeze(1)

    def _across(self, mixed: Tensor, params: AttentionParams) -> Tensor:
        """Apply convolution and rule to local columns `mixed` [n, c], between exchanges. Return [n, H * V]."""
        sp, context, sequences = self.sp_group, self.context_group, params.sequences
        order = None
        if sp.size() > 1:
            mixed = scatter_columns(mixed, self.columns_over_sp, params.sp_lengths, sp)
        if context.size() > 1:
            mixed = scatter_columns(mixed, self.columns_over_cp, params.cp_lengths, context)
            order = Order(sequences.in_order, sequences.by_member)
            mixed = order.chosen(mixed)
        out = self._along(mixed, params)
        if order is not None:
            out = gather_columns(order.placed(out), _widths(self.over_cp), params.cp_lengths, context)
        return gather_columns(out, _widths(self.over_sp), params.sp_lengths, sp) if sp.size() > 1 else out

    def _along(self, mixed: Tensor, params: AttentionParams) -> Tensor:
        """Apply convolution and rule to this rank's heads [N, c] of whole sequences. Return [N, H * V]."""
        share = self.share
        if not mixed.numel():
            # Zero gradients still flow, so the backward pass joins all exchanges.
            zero = sum(parameter[:0].sum() for parameter in (self.conv_weight, self.A_log, self.dt_bias))
            return mixed[:, : share.sizes[2]] + mixed.sum() + zero
        inputs = partial(self._inputs, params)
        q, k, v, decay, beta = recompute(inputs, mixed) if self.selective else inputs(mixed)
        with not_saving(q, k, v, decay, beta):
            return self.rule_for(v.device, v.dtype)(q, k, v, decay, beta, params.sequences).flatten(1)

    def _inputs(self, params: AttentionParams, mixed: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of `delta_rule`: convolved queries, keys and values, logarithms of decays, and beta."""
        share = self.share
        channels = sum(share.sizes[:3])
        weight = self.conv_weight
        if channels < len(weight):
            weight = torch.cat([weight[start:stop] for start, stop in share.columns_in(self.heads)[:3]])
        convolved = convolution_for(mixed.device, mixed.dtype)(mixed[:, :channels], weight, params.sequences)
        q, k, v = convolved.split(share.sizes[:3], dim=1)
        q, k = (x.view(len(x), share.key_count, share.key_dim) for x in (q, k))
        if (key_of_value := share.key_of_value) is not None:
            index = _index(key_of_value, mixed.device)
            q, k = q.index_select(1, index), k.index_select(1, index)
        b, a = mixed[:, channels:].split(share.sizes[3:], dim=1)
        inputs = a, self.A_log, self.dt_bias, *share.values
        decay = run(log_decay, *inputs) if self.compiled else log_decay(*inputs)
        return q, k, v.view(len(v), share.value_count, share.value_dim), decay, b.sigmoid()


def _widths(shares: tuple[Heads, ...]) -> list[int]:
    """Return the number of value columns of each share of heads."""
    return [share.sizes[2] for share in shares]


@lru_cache(maxsize=16)
def _index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # Later calls reuse the tensor, and autograd cannot save inference tensors.
        return on_device(torch.tensor(heads), device)


def log_decay(a: Tensor, log_rate: Tensor, bias: Tensor, start: int, stop: int) -> Tensor:
    """Return the logarithm of the decay of each state at each token, fp32 [N, H], from `a` [N, H]. The H heads are the
    heads from `start` to `stop` of `log_rate` and `bias`.
    """
    return -log_rate[start:stop].float().exp() * F.softplus(a.float() + bias[start:stop])


def gated_by_silu(out: Tensor, gate: Tensor) -> Tensor:
    """Multiply `out` by the SiLU of `gate` in fp32."""
    return (out.float() * F.silu(gate.float())).to(out.dtype)


def normed_and_gated(out: Tensor, gate: Tensor, *norm: Any) -> Tensor:
    """Normalise `out` [n, H, V] head by head with `NormWeights(*norm)` and gate it, in one compiled function."""
    return gated_by_silu(normed(out, *norm), gate)
