"""Sparse MLPs: a router chooses some experts for each token. A value and its torch module.

    hidden -> router -> softmax -> the k likeliest, which share their probability -> dispatch -> experts -> back, summed

Experts are divided over the ranks of the view `EXPERTS` in blocks, each with its whole matrices, which one grouped
product multiplies. Where tp ranks have copies of the hidden states each routes its own part of the tokens; padding is
never routed. A weight is multiplied into an expert's hidden activations, before its last matrix, so that the results of
pairs need not be saved; and of what goes into experts only the rows that arrived are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.groups.megatron import tensor_parallel
from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, TensorSlice, WeightMap, split_length, whole
from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.models.layers.compiled import activated, run
from megatron_hetero.models.layers.dispatch import Dispatch, block, take
from megatron_hetero.models.layers.dispatch import add_up as added_up
from megatron_hetero.models.layers.grouped import Ends, Matrices, grouped_linear, is_grouped
from megatron_hetero.models.layers.low_rank import ExpertsLowRank
from megatron_hetero.models.layers.mlp import MLP, swiglu
from megatron_hetero.models.layers.parts import LayerCall, MLPPart, Operations, Site, Tokens, named
from megatron_hetero.models.layers.recompute import not_saving, recompute


@dataclass(frozen=True)
class ExpertMLP(MLPPart):
    """A router and experts, as a part of a layer. `ffn`: width of an expert; `top_k`: experts of a token; `stored`:
    prefix of the stored tensors. `shared`: an MLP for all tokens beside them, times the sigmoid of a gate.
    """

    hidden: int
    ffn: int
    experts: int
    top_k: int
    stored: str
    shared: MLP | None = None
    views = (MAIN, EXPERTS.name)

    @property
    def padded(self) -> int:
        """Width of an expert with padding, for aligned products."""
        return split_length(self.ffn, 1)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that are split over tp."""
        return () if self.shared is None else self.shared.widths

    @property
    def first_product(self) -> int:
        """Operations per token of the experts' first matrices."""
        return 2 * self.top_k * 2 * self.hidden * self.ffn + (0 if self.shared is None else self.shared.first_product)

    def tensors(self) -> TensorShapes:
        """Return the router's weight, and the matrices of each expert."""
        wide = (self.ffn, self.hidden)
        kinds = {"gate_proj": wide, "up_proj": wide, "down_proj": wide[::-1]}
        result = {f"{self.stored}gate.weight": (self.experts, self.hidden)}
        for number in range(self.experts):
            result |= {self._name(number, kind): shape for kind, shape in kinds.items()}
        if self.shared is not None:
            result |= {**self.shared.tensors(), f"{self.stored}shared_expert_gate.weight": (1, self.hidden)}
        return result

    def _name(self, expert: int, kind: str) -> str:
        return f"{self.stored}experts.{expert}.{kind}.weight"

    def weight_map(self, stored: str, share: Share, view: str = MAIN) -> WeightMap:
        """Return the router and what all tokens use, or the matrices of this share's experts: gate above up, and down,
        one expert below the other.
        """
        if view == EXPERTS.name:
            return named("experts", self._of_experts(stored, range(*block(self.experts, *share))))
        if view != MAIN:
            return {}
        result: dict[str, Any] = {"router": whole(f"{stored}{self.stored}gate.weight", self.experts)}
        if self.shared is not None:
            result["shared_gate"] = whole(f"{stored}{self.stored}shared_expert_gate.weight", 1)
            result |= named("shared", self.shared.weight_map(stored, share, view))
        return result

    def _of_experts(self, stored: str, own: Sequence[int]) -> WeightMap:
        first, second, wide, padding = [], [], self.padded, self.padded - self.ffn
        for place, expert in enumerate(own):
            for half, kind in enumerate(("gate_proj", "up_proj")):
                at = (2 * place + half) * wide
                first.append(TensorSlice(stored + self._name(expert, kind), (0, self.ffn), at, padding=padding))
            down, at = stored + self._name(expert, "down_proj"), place * self.hidden
            second.append(TensorSlice(down, (0, self.hidden), at, columns=(0, self.ffn), padding=padding))
        return {"first": tuple(first), "second": tuple(second)}

    def operations(self, tokens: Tokens) -> Operations:
        """Count products with the router's weight and with those of the chosen experts."""
        of_token = 2 * (self.experts + self.top_k * 3 * self.ffn) * self.hidden
        found = Operations(tokens.total * of_token)
        if self.shared is None:
            return found
        return Operations(found.linear + self.shared.operations(tokens).linear + 2 * tokens.total * self.hidden)

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the torch module."""
        return ExpertMLPModule(self, site, number)


class ExpertMLPModule(torch.nn.Module):
    """Torch module of an `ExpertMLP`.

    `imbalance`: see `Sizes.expected`.
    """

    imbalance = 1.0
    # On the device of what comes, as modules may be built on PyTorch's device `meta`.
    _loads: Tensor | None = None

    def __init__(self, part: ExpertMLP, site: Site, number: int):
        super().__init__()
        self.part, self.tp = part, site.groups.tp
        self.group = site.groups.along(*EXPERTS.shard_axes)
        self.splits = site.splits_activations
        start, stop = block(part.experts, self.group.rank(), self.group.size())
        options: Any = {"dtype": site.dtype, "device": site.platform.device}
        self.router = torch.nn.Parameter(torch.empty(part.experts, part.hidden, **options))
        site.mark(self, split=site.tp > 1)
        if part.shared is not None:
            self.shared: Any = part.shared.build(site, number)
            self.shared_gate = torch.nn.Parameter(torch.empty(1, part.hidden, **options))
            self.shared_gate.sequence_parallel = site.splits_activations  # pyright: ignore[reportAttributeAccessIssue]
        self.experts = _Experts(part, stop - start, site, options)

    def forward(self, hidden: Tensor, call: LayerCall) -> tuple[Tensor, Tensor | None]:
        """Compute `hidden` [S, 1, hidden] ([S / tp, 1, hidden] where activations are split) to the same."""
        out = self._routed(hidden, call)
        if self.part.shared is not None:
            shared, _ = self.shared(hidden, call)
            out = out + shared * F.linear(hidden, self.shared_gate).sigmoid()
        return out, None

    def take_loads(self) -> Tensor:
        """Return the tokens of each expert that this rank has routed while training since the last call, int64
        [experts].
        """
        found, self._loads = self._loads, None
        return torch.zeros(self.part.experts, dtype=torch.int64, device=self.router.device) if found is None else found

    def _routed(self, hidden: Tensor, call: LayerCall) -> Tensor:
        if self.splits or self.tp.size() == 1:
            return self._of_own(hidden, call)
        padded = F.pad(hidden, (0, 0, 0, 0, 0, -len(hidden) % self.tp.size()))
        own = tensor_parallel.scatter_to_sequence_parallel_region(padded, group=self.tp)
        gather = tensor_parallel.gather_from_sequence_parallel_region
        out = gather(self._of_own(own, call), tensor_parallel_output_grad=False, group=self.tp)
        return out[: len(hidden)]

    def _of_own(self, hidden: Tensor, call: LayerCall) -> Tensor:
        """Compute this rank's part of the tokens, of which padding comes out as zero."""
        first = len(hidden) * self.tp.rank()
        count = max(0, min(call.tokens - first, len(hidden)))
        tokens = (hidden[:count] if count < len(hidden) else hidden).squeeze(1)  # A slice's gradient is a copy.
        dispatch, weights = self._route(tokens, call, first)
        rows, weights = dispatch.send(tokens), dispatch.send(weights)
        weights = weights.flatten().index_select(0, dispatch.choice)
        out = dispatch.bring_back(added_up(self.experts(rows, weights, dispatch), dispatch.pairs))
        padding = len(hidden) - len(out)
        return F.pad(out.unsqueeze(1), (0, 0, 0, 0, 0, padding)) if padding else out.unsqueeze(1)

    def _route(self, tokens: Tensor, call: LayerCall, first: int) -> tuple[Dispatch, Tensor]:
        """Choose experts for `tokens` [tokens, hidden], the first of which is the shard's token `first`; when a layer
        is recomputed, those that were chosen the first time. Returns the moves, and weights [tokens, k] of experts.
        """
        logits = F.linear(tokens, self.router)
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        dispatch: Dispatch | None = call.memo.get("dispatch")
        if dispatch is None:
            chosen = probabilities.detach().topk(self.part.top_k, dim=-1).indices
            dispatch = Dispatch.of(chosen, self.part.experts, self.group, self.imbalance)
            call.memo["dispatch"] = dispatch
            if call.trains:
                self._count(chosen)
            if call.balance is not None:
                call.balance.count(call.balance.of(first, len(tokens)), chosen, probabilities)
        if call.balance is not None:
            probabilities = call.balance.balanced(call.balance.of(first, len(tokens)), probabilities)
        weights = probabilities.gather(1, dispatch.chosen)
        return dispatch, (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype)

    def _count(self, chosen: Tensor) -> None:
        if self._loads is None:
            self._loads = chosen.new_zeros(self.part.experts)
        self._loads.scatter_(0, chosen.flatten(), 1, reduce="add")


class _Experts(torch.nn.Module):
    """The experts of this rank: a module of its own, since ZeRO 2 and 3 share the weights of a view by modules."""

    def __init__(self, part: ExpertMLP, experts: int, site: Site, options: dict[str, Any]):
        super().__init__()
        self.experts, self.limit, self.compiled = experts, site.recompute.chunk * part.top_k, site.compile_layers
        self.first = torch.nn.Parameter(torch.empty(experts * 2 * part.padded, part.hidden, **options))
        self.second = torch.nn.Parameter(torch.empty(experts * part.hidden, part.padded, **options))

    def forward(self, rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        """Compute the pairs of `rows` [rows, hidden], times their `weights` [pairs], to [pairs, hidden]."""
        # Here, since `not_saving` does not know tensors that FSDP2 has passed on.
        x = recompute(lambda rows: take(rows, dispatch.pairs), rows)
        first, second = self._matrices("first"), self._matrices("second")
        widths = (*first.weight.shape[1:], second.weight.shape[2])
        ends = dispatch.ends if is_grouped(x, *widths) else dispatch.host_ends
        if 0 < self.limit < len(x):
            given = chunks(dispatch.host_ends, self.limit), ends, self._inner, (first.scale, second.scale)
            with not_saving(x):
                return _Chunked.apply(x, weights, given, *first[:3], *second[:3])  # pyright: ignore[reportReturnType]
        with not_saving(x):
            wide = grouped_linear(x, first, ends)
        inner = recompute(self._inner, wide, weights)
        with not_saving(inner):
            return grouped_linear(inner, second, ends)

    def _matrices(self, name: str) -> Matrices:
        """Return those of all experts in the parameter of that name, with those of adapters beside it."""
        weight, lora = getattr(self, name), cast(ExpertsLowRank | None, getattr(self, f"{name}_lora", None))
        if lora is None:
            return Matrices(self._by_expert(weight))
        return Matrices(*map(self._by_expert, (weight, lora.A, lora.B)), scale=lora.scale)

    def _by_expert(self, matrices: Tensor) -> Tensor:
        return matrices.view(self.experts, -1, matrices.shape[1])

    def _inner(self, wide: Tensor, weights: Tensor) -> Tensor:
        """Compute gate and up [pairs, 2 ffn] to [pairs, ffn], times `weights` [pairs]."""
        inner = run(activated, wide, F.silu, True) if self.compiled else swiglu(wide)
        return inner * weights[:, None]


def chunks(ends: Sequence[int], limit: int) -> list[tuple[slice, slice, bool]]:
    """Divide experts, whose rows end at `ends`, into chunks of at most `limit` rows: experts with all of their rows, or
    one expert with some of its rows, and whether these continue those of the chunk before.
    """
    found, first, start = list[tuple[slice, slice, bool]](), 0, 0
    while first < len(ends):
        last = max(first + 1, bisect_right(ends, start + limit))
        stop = ends[last - 1]
        for at in range(start, max(stop, start + 1), limit):
            found.append((slice(first, last), slice(at, min(at + limit, stop)), at > start))
        first, start = last, stop
    return found


def _inside(ends: Ends, experts: slice, rows: slice) -> Ends:
    """Return where in a chunk the rows of each of its experts end."""
    if isinstance(ends, Tensor):
        return ends[experts].clamp(max=rows.stop) - rows.start
    return [min(end, rows.stop) - rows.start for end in ends[experts]]


class _Chunked(torch.autograd.Function):
    """Experts chunk by chunk, of which only inputs are saved. The gradient of an expert's weights is one product, or
    the sum in fp32 of those of its chunks. `matrices`: those of the first `Matrices`, then those of the second.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, given: Any, *matrices: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights, *matrices)
        ctx.given = cuts, ends, activate, scales = given
        out, layers = torch.empty_like(x), _layers(matrices, scales)
        for experts, rows, _ in cuts:
            (first, second), inside = (layer.of(experts) for layer in layers), _inside(ends, experts, rows)
            wide, _ = first.forward(x[rows], inside)
            out[rows], _ = second.forward(activate(wide, weights[rows]), inside)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weights, *matrices), (cuts, ends, activate, scales) = ctx.saved_tensors, ctx.given
        layers, needed = _layers(matrices, scales), ctx.needs_input_grad[3:]
        grad_x, grad_weights, grad = torch.empty_like(x), torch.empty_like(weights), grad.contiguous()
        grads = {at: torch.empty_like(matrices[at]) for at, need in enumerate(needed) if need}
        sums, sum_type = dict[int, Tensor](), torch.promote_types(x.dtype, torch.float32)
        for experts, rows, continues in cuts:
            (first, second), inside = (layer.of(experts) for layer in layers), _inside(ends, experts, rows)
            (wide, low), factors = first.forward(x[rows], inside), weights[rows].detach()
            with torch.enable_grad():
                inner = activate(wide.requires_grad_(), factors.requires_grad_())
            grad_inner, of_low = second.backward(grad[rows], inside)
            grad_wide, grad_weights[rows] = torch.autograd.grad(inner, (wide, factors), grad_inner)
            inner, low_inner = inner.detach(), second.low(inner.detach(), inside) if any(needed[3:]) else None
            of_second = second.gradients(grad[rows], inner, low_inner, of_low, inside, needed[3:])
            grad_x[rows], of_low = first.backward(grad_wide, inside)
            of_first = first.gradients(grad_wide, x[rows], low, of_low, inside, needed[:3])
            for at, product in enumerate((*of_first, *of_second)):
                if product is not None:
                    sums[at] = product + sums[at].to(sum_type) if continues else product
                    grads[at][experts] = sums[at]
        return grad_x, grad_weights, None, *map(grads.get, range(len(matrices)))


def _layers(matrices: Sequence[Any], scales: tuple[float, float]) -> list[Matrices]:
    of_layers = zip((matrices[:3], matrices[3:]), scales, strict=True)
    return [Matrices(weight, a, b, scale) for (weight, a, b), scale in of_layers]
