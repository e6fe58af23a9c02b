"""Two kinds of MLP: one of tensors of its own, split over tp, and one whose slots are split over a further view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.hf.weight_map import (
    MAIN,
    Share,
    TensorShapes,
    WeightMap,
    split_columns,
    split_length,
    split_rows,
    stack,
    whole,
)
from megatron_hetero.layout.axes import Axis, View
from megatron_hetero.models.layers.parts import LayerCall, MLPPart, Operations, Site, Tokens

SLOTS = View("slots", (Axis("xp", "experts"), Axis("xdp", "samples")))
"""Slots are divided over neighbouring ranks, whatever those are in the main view."""


@dataclass(frozen=True)
class Pairs(MLPPart):
    """The product of two linear layers, and a third."""

    hidden: int
    ffn: int

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.ffn,)

    def tensors(self) -> TensorShapes:
        wide = (self.ffn, self.hidden)
        return {"pairs.left.weight": wide, "pairs.right.weight": wide, "pairs.out.weight": wide[::-1]}

    def slices(self, stored: str, share: Share) -> WeightMap:
        return {
            "left.weight": split_rows(f"{stored}pairs.left.weight", self.ffn, share),
            "right.weight": split_rows(f"{stored}pairs.right.weight", self.ffn, share),
            "out.weight": split_columns(f"{stored}pairs.out.weight", self.hidden, self.ffn, share),
        }

    def operations(self, tokens: Tokens) -> Operations:
        return Operations(2 * tokens.total * 3 * self.hidden * self.ffn)

    def build(self, site: Site, number: int) -> torch.nn.Module:
        return _Pairs(self, site)


class _Pairs(torch.nn.Module):
    def __init__(self, part: Pairs, site: Site):
        super().__init__()
        ffn = site.tp * split_length(part.ffn, site.tp)
        self.left = site.column_linear(part.hidden, ffn, bias=False)
        self.right = site.column_linear(part.hidden, ffn, bias=False)
        self.out = site.row_linear(ffn, part.hidden, bias=False)

    def forward(self, hidden: Tensor, call: LayerCall) -> tuple[Tensor, None]:
        return self.out(self.left(hidden)[0] * self.right(hidden)[0])[0], None


@dataclass(frozen=True)
class Slots(MLPPart):
    """A sum of small MLPs, weighted by a router's softmax. Each rank of `xp` has some of them."""

    hidden: int
    slots: int
    width: int
    views = (MAIN, SLOTS.name)

    def tensors(self) -> TensorShapes:
        return {
            "slots.router.weight": (self.slots, self.hidden),
            "slots.first": (self.slots, self.width, self.hidden),
            "slots.second": (self.slots, self.hidden, self.width),
        }

    def weight_map(self, stored: str, share: Share, view: str = MAIN) -> WeightMap:
        if view == MAIN:
            return {"router": whole(f"{stored}slots.router.weight", self.slots)}
        own = self.slots * share.rank // share.ranks, self.slots * (share.rank + 1) // share.ranks
        return {f"own.{name}": stack((f"{stored}slots.{name}", own)) for name in ("first", "second")}

    def operations(self, tokens: Tokens) -> Operations:
        return Operations(2 * tokens.total * self.slots * self.hidden * (1 + 2 * self.width))

    def build(self, site: Site, number: int) -> torch.nn.Module:
        return _Slots(self, site)


class _Slots(torch.nn.Module):
    """Gathers tokens over the ranks that have other slots, and adds up what their slots give."""

    def __init__(self, part: Slots, site: Site):
        super().__init__()
        assert site.tp == 1 or site.splits_activations, "each rank has other tokens"
        self.part, self.group = part, site.groups.along(*SLOTS.shard_axes)
        options: Any = {"dtype": site.dtype, "device": site.platform.device}
        self.router = torch.nn.Parameter(torch.empty(part.slots, part.hidden, **options))
        site.mark(self)
        self.own = _OwnSlots(part, part.slots // self.group.size(), options)

    def forward(self, hidden: Tensor, call: LayerCall) -> tuple[Tensor, None]:
        tokens, part = hidden.squeeze(1), self.part
        scores = torch.softmax(tokens @ self.router.t(), dim=-1)
        most = len(tokens)
        if not tokens.is_meta and self.group.size() > 1:
            longest = torch.tensor(most, device=tokens.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
            most = int(longest)
        padded = torch.nn.functional.pad(torch.cat([tokens, scores], 1), (0, 0, 0, most - len(tokens)))
        tokens_of_all, scores = _Gathered.apply(padded, self.group).split([part.hidden, part.slots], dim=1)
        start = self.group.rank() * self.own.slots
        out = self.own(tokens_of_all, scores[:, start : start + self.own.slots])
        return _Summed.apply(out, self.group)[: len(tokens)].unsqueeze(1), None


class _OwnSlots(torch.nn.Module):
    """The slots of this rank: a module of its own, as ZeRO 2 and 3 share the weights of a view by modules."""

    def __init__(self, part: Slots, slots: int, options: Any):
        super().__init__()
        self.part, self.slots = part, slots
        self.first = torch.nn.Parameter(torch.empty(slots, part.width * part.hidden, **options))
        self.second = torch.nn.Parameter(torch.empty(slots, part.hidden * part.width, **options))

    def forward(self, tokens: Tensor, scores: Tensor) -> Tensor:
        part = self.part
        inner = torch.einsum("th,swh->tsw", tokens, self.first.view(self.slots, part.width, part.hidden))
        inner = torch.nn.functional.silu(inner) * scores[:, :, None]
        return torch.einsum("tsw,shw->th", inner, self.second.view(self.slots, part.hidden, part.width))


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(len(x) * group.size(), x.shape[1])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(len(x) // group.size(), x.shape[1])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gathered(grad, ctx.group), None
