"""Gated delta nets: linear attention by a state per head that forgets and corrects itself, under every axis.

Shape suffixes: n tokens of this rank without padding, S tokens with padding, N tokens of whole sequences, h key heads,
H value heads, K and V elements of either, c columns.

    hidden -> projections -> convolution -> gated delta rule -> norm, times SiLU of a gate -> projection
              q k v b a z     q k v          q k v, b a                          z

A value head j reads and writes a state S [K, V], zero at the start of each sequence, with the keys and queries of its
key head, which consecutive value heads share:

    S <- exp(g) S,  S <- S + k (beta (v - S^T k))^T,  out = S^T q
    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)

Tokens depend on all before them, so that ranks that share sequences (`sp`, then `cp`) exchange tokens for heads before
the convolution, and back after the rule. Heads need not divide: members have different numbers of them, or none. The
gate does not travel. `tp` splits value heads; key heads are copied where it does not divide them.

    own tokens, own heads    -- sp, cp: heads for tokens -->    whole sequences, some heads, in order
                             -- convolution, rule -->
                             -- cp, sp: tokens for heads -->    own tokens, own heads

Sources: Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464; the layer is that of Qwen3.5.
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
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.compiled import NormWeights, normed, run
from megatron_hetero.models.layers.delta_kernels import convolution_for, rule_for
from megatron_hetero.models.layers.exchange import Columns, even_ranges, gather_columns, scatter_columns
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.overlapped import (
    Ahead,
    Overlapping,
    first_in_parts,
    gather_ahead,
    parts_of,
    second_in_parts,
)
from megatron_hetero.models.layers.parts import AttentionPart, Operations, Site, Tokens, named
from megatron_hetero.models.layers.recompute import not_saving, recompute
from megatron_hetero.models.layers.rotary import Order


@dataclass(frozen=True)
class DeltaNet(AttentionPart):
    """A gated delta net, as a part of a layer. Sizes are in elements.

    `taps`: tokens that the convolution sees, the last of which is the token itself. `norm`: of each head of the output.
    `stored`: prefix of the stored tensors.
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
        """Heads of values, each with a state."""
        return self.value_heads

    @property
    def kv_heads(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Heads of keys, which tp ranks have copies of where it does not divide them."""
        return self.key_heads

    @property
    def limits(self) -> tuple[Limit, ...]:
        """tp divides the value heads; sp and cp are free."""
        return (Limit(("tp",), self.value_heads, "delta net", "value heads"),)

    def key_copies(self, tp: int) -> int:
        """Copies of each key head under `tp`: the least number with which tp divides the heads."""
        return math.lcm(self.key_heads, tp) // self.key_heads

    def heads_of(self, tp: int) -> Heads:
        """Return the heads of each of `tp` ranks."""
        keys = self.key_heads * self.key_copies(tp) // tp
        return Heads(
            (0, self.value_heads // tp), (0, keys), self.value_heads // tp // keys, self.key_dim, self.value_dim
        )

    def tensors(self) -> TensorShapes:
        """Return projections, convolution, gates of the state, norm and output projection."""
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
        """Split value heads, with (copies of) the key heads that they use. Projections are one parameter: queries,
        keys, values, b, a, z, and padding.
        """
        prefix, heads = stored + self.stored, self.value_heads // share.ranks
        own, values = (share.rank * heads, (share.rank + 1) * heads), self.value_dim
        of_values = own[0] * values, own[1] * values
        first = stack(
            *self._channels(f"{prefix}in_proj_qkv.weight", share),
            (f"{prefix}in_proj_b.weight", own),
            (f"{prefix}in_proj_a.weight", own),
        )
        at, rows = first[-1].at + heads, heads * values
        gate = TensorSlice(f"{prefix}in_proj_z.weight", of_values, at, padding=-(at + rows) % ALIGNMENT)
        return {
            "conv_weight": stack(*self._channels(f"{prefix}conv1d.weight", share)),
            "A_log": stack((f"{prefix}A_log", own)),
            "dt_bias": stack((f"{prefix}dt_bias", own)),
            "in_proj.weight": (*first, gate),
            "out_proj.weight": columns(f"{prefix}out_proj.weight", self.hidden, of_values),
            **named("norm", self.norm.slices(f"{prefix}norm.", share)),
        }

    def _channels(self, name: str, share: Share) -> list[tuple[str, Interval]]:
        """Return a rank's rows of a tensor of queries, keys and values, each key head by itself."""
        copies, width = self.key_copies(share.ranks), self.key_dim
        count = self.key_heads * copies // share.ranks
        keys = [at // copies for at in range(share.rank * count, (share.rank + 1) * count)]
        every = self.key_heads * width
        rows = [(first + k * width, first + (k + 1) * width) for first in (0, every) for k in keys]
        values = self.value_heads // share.ranks * self.value_dim
        rows.append((2 * every + share.rank * values, 2 * every + (share.rank + 1) * values))
        return [(name, each) for each in rows]

    def operations(self, tokens: Tokens) -> Operations:
        """Count projections, and for each token and value head the product with the key, the correction of the state,
        and the product with the query.
        """
        values = self.value_heads * self.value_dim
        projected = 2 * self.key_heads * self.key_dim + 2 * values + 2 * self.value_heads + values
        return Operations(2 * tokens.total * self.hidden * projected, 6 * tokens.total * values * self.key_dim)

    def build(self, site: Site, number: int) -> DeltaNetModule:
        """Build the torch module."""
        return DeltaNetModule(self, site, number)


class Heads(NamedTuple):
    """Ranges of value heads and of the key heads that they use, `ratio` value heads for each."""

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
        """Columns of queries, keys, values, b and a."""
        keys, values = self.key_count * self.key_dim, self.value_count
        return keys, keys, values * self.value_dim, values, values

    @property
    def of_keys(self) -> tuple[int, ...] | None:
        """The key head of each value head, among these; None if all have equally many consecutive value heads."""
        keys = tuple(value // self.ratio - self.keys[0] for value in range(*self.values))
        return None if len(set(Counter(keys).values())) < 2 else keys

    def over(self, members: int) -> tuple[Heads, ...]:
        """Return the heads of each of `members` that share these."""
        first = self.values[0]
        return tuple(self._some(first + start, first + stop) for start, stop in even_ranges(self.value_count, members))

    def _some(self, start: int, stop: int) -> Heads:
        keys = (start // self.ratio, -(-stop // self.ratio)) if stop > start else (self.keys[0], self.keys[0])
        return self._replace(values=(start, stop), keys=keys)

    def columns_in(self, whole: Heads) -> Columns:
        """Return the columns of queries, keys, values, b and a of these heads among those of `whole`."""
        keys, values = self.key_dim, self.value_dim
        own = [(self.keys, whole.keys, keys)] * 2 + [(self.values, whole.values, width) for width in (values, 1, 1)]
        result, at = list[Interval](), 0
        for (start, stop), (first, last), width in own:
            result.append((at + (start - first) * width, at + (stop - first) * width))
            at += (last - first) * width
        return tuple(result)


class DeltaNetModule(Overlapping):
    """Torch module of a `DeltaNet`."""

    def __init__(self, part: DeltaNet, site: Site, number: int):
        super().__init__()
        groups, options = site.groups, {"dtype": site.dtype, "device": site.platform.device}
        self.sp_group, self.context_group, self.tp_group = groups.sp, groups.context, groups.tp
        self.selective, self.compiled = site.recompute.selective, site.compile_layers
        self.rule_for: Callable[..., Any] = rule_for  # `--plan` replaces it by one that measures memory.
        self.heads = part.heads_of(site.tp)
        # The heads of each member along `sp`, and of each along `cp` with which this one shares its own.
        self.over_sp = self.heads.over(self.sp_group.size())
        own = self.over_sp[self.sp_group.rank()]
        self.over_cp = own.over(self.context_group.size())
        self.columns_over_sp = [each.columns_in(self.heads) for each in self.over_sp]
        self.columns_over_cp = [each.columns_in(own) for each in self.over_cp]
        channels, values = sum(self.heads.sizes[:3]), self.heads.sizes[2]
        rows = sum(self.heads.sizes) + values
        self.conv_weight = torch.nn.Parameter(torch.empty(channels, part.taps, **options))
        self.A_log = torch.nn.Parameter(torch.empty(self.heads.value_count, **options))
        self.dt_bias = torch.nn.Parameter(torch.empty(self.heads.value_count, **options))
        self.in_proj: Any = site.column_linear(
            part.hidden, (rows + -rows % ALIGNMENT) * site.tp, bias=False, name="qkv"
        )
        self.out_proj: Any = site.row_linear(values * site.tp, part.hidden, bias=False, leaves_bias=True, name="proj")
        # Each tp rank norms its own heads, so that gradients are summed over tp with whole activations too.
        self.norm: Any = site.mark(part.norm.build(site, number), split=site.tp > 1)

    def linears(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        """Return the projections before and after the rule."""
        return self.in_proj, self.out_proj

    @property
    def share(self) -> Heads:
        """The heads that this rank computes for whole sequences."""
        return self.over_cp[self.context_group.rank()]

    def forward(self, hidden: Tensor, table_2nD: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor | None]:
        """Compute `hidden` [S, 1, hidden] ([S / tp, 1, hidden] where activations are split over tp) to the same, and a
        bias to add. `table_2nD`: for its number of tokens.
        """
        parts, tokens = parts_of(self, len(hidden)), table_2nD.shape[1]
        order = ahead = None
        if len(parts) > 1:
            order = Order.of_parts(parts, self.tp_group.size(), tokens, hidden.device)
            if self.in_proj.weight.requires_grad:
                ahead = Ahead(parts, self.tp_group)
        with not_saving(hidden):
            wide, _ = first_in_parts(self.in_proj, hidden, parts, ahead, params.ids)
        padding = len(wide) - tokens
        wide = order.chosen(wide) if order else wide[:tokens] if padding else wide
        mixed, gate, _ = wide.squeeze(1).split(self._widths(wide.shape[-1]), dim=1)
        exchanges = self.sp_group.size() > 1 or self.context_group.size() > 1
        # A view would save all of the projection, which nothing else does after an exchange.
        gate = gate.contiguous() if exchanges else gate
        out = self._across(mixed, params)
        if ahead is not None:
            with not_saving(hidden):
                out = gather_ahead(out, hidden, ahead)
        # A few passes over memory, whose intermediate results are several times as large as their input.
        placed = recompute(partial(self._output, padding, order), out, gate)
        with not_saving(placed):
            return second_in_parts(self.out_proj, placed, parts, params.ids)

    def _widths(self, total: int) -> tuple[int, int, int]:
        mixed, values = sum(self.heads.sizes), self.heads.sizes[2]
        return mixed, values, total - mixed - values

    def _output(self, padding: int, order: Order | None, out: Tensor, gate: Tensor) -> Tensor:
        """Return what the output projection takes, [S, 1, H * V], from results of the rule and gates [n, H * V]."""
        by_head = -1, self.heads.value_count, self.heads.value_dim
        out, gate = out.view(by_head), gate.view(by_head)
        if self.compiled:
            out = run(normed_and_gated, out, gate, *NormWeights.of(self.norm))
        else:
            out = gated_by_silu(self.norm(out), gate)
        out = out.flatten(1)
        out = (F.pad(out, (0, 0, 0, padding)) if padding else out) if order is None else order.placed(out)
        return out.unsqueeze(1)

    def _across(self, mixed: Tensor, params: AttentionParams) -> Tensor:
        """Return [n, H * V] from columns of queries, keys, values, b and a [n, c] of own tokens and heads."""
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
        """Return [N, H * V] of this rank's share of heads, from its columns [N, c] for whole sequences."""
        share = self.share
        if not mixed.numel():
            # Gradients of zero flow, so that the backward pass takes part in all exchanges.
            nothing = sum(parameter[:0].sum() for parameter in (self.conv_weight, self.A_log, self.dt_bias))
            return mixed[:, : share.sizes[2]] + mixed.sum() + nothing
        inputs = partial(self._inputs, params)
        q, k, v, decay, beta = recompute(inputs, mixed) if self.selective else inputs(mixed)
        with not_saving(q, k, v, decay, beta):
            return self.rule_for(v.device, v.dtype)(q, k, v, decay, beta, params.sequences).flatten(1)

    def _inputs(self, params: AttentionParams, mixed: Tensor) -> tuple[Tensor, ...]:
        """Return what the rule takes, see `delta_rule`."""
        share = self.share
        channels = sum(share.sizes[:3])
        weight = self.conv_weight
        if channels < len(weight):
            weight = torch.cat([weight[start:stop] for start, stop in share.columns_in(self.heads)[:3]])
        convolved = convolution_for(mixed.device, mixed.dtype)(mixed[:, :channels], weight, params.sequences)
        q, k, v = convolved.split(share.sizes[:3], dim=1)
        q, k = (x.view(len(x), share.key_count, share.key_dim) for x in (q, k))
        if (of_keys := share.of_keys) is not None:
            index = _index(of_keys, mixed.device)
            q, k = q.index_select(1, index), k.index_select(1, index)
        b, a = mixed[:, channels:].split(share.sizes[3:], dim=1)
        of_decay = a, self.A_log, self.dt_bias, *share.values
        decay = run(log_decay, *of_decay) if self.compiled else log_decay(*of_decay)
        return q, k, v.view(len(v), share.value_count, share.value_dim), decay, b.sigmoid()


def _widths(shares: tuple[Heads, ...]) -> list[int]:
    return [share.sizes[2] for share in shares]


@lru_cache(maxsize=16)
def _index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # Later calls save it for the backward pass.
        return on_device(torch.tensor(heads), device)


def log_decay(a: Tensor, log_rate: Tensor, bias: Tensor, start: int, stop: int) -> Tensor:
    """Return the logarithm of what a state keeps at each token, fp32 [N, H], from `a` [N, H] of the heads from `start`
    to `stop`, of which `log_rate` and `bias` have more.
    """
    return -log_rate[start:stop].float().exp() * F.softplus(a.float() + bias[start:stop])


def gated_by_silu(out: Tensor, gate: Tensor) -> Tensor:
    """Multiply `out` by the SiLU of `gate` in fp32."""
    return (out.float() * F.silu(gate.float())).to(out.dtype)


def normed_and_gated(out: Tensor, gate: Tensor, *norm: Any) -> Tensor:
    """Norm `out` [n, H, V] head by head with `NormWeights`, and gate it, as one compiled function."""
    return gated_by_silu(normed(out, *norm), gate)
