"""Mixture-of-experts MLPs, described as a value, and their torch module. A router chooses k experts for each token.

    hidden -> router -> softmax -> top k, normalised -> dispatch -> experts -> combine

Blocks of experts are divided over the ranks of the view `EXPERTS`. A rank stores whole matrices of its experts and
multiplies them in one grouped product. If hidden states are replicated over tp, each tp rank routes its share of the
tokens. Padding is never routed. The routing weight is applied to an expert's hidden activations before its last matrix,
so that the expert's output need not be saved. Of the experts' inputs, only the received rows are saved. With the level
`experts` of recomputation, gate and up are computed again from these rows, beside an exchange.

As in `dispatch`, a *pair* is a token with one of its experts, and a *row* is a token at a rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.groups.megatron import tensor_parallel
from megatron_hetero.groups.platform import Function
from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, TensorSlice, WeightMap, split_length, whole
from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.models.layers.compiled import activated, run
from megatron_hetero.models.layers.dispatch import Crossing, Dispatch, Move, block, finish, move, start
from megatron_hetero.models.layers.grouped import Ends, Matrices, grouped_linear, is_grouped
from megatron_hetero.models.layers.low_rank import ExpertsLowRank
from megatron_hetero.models.layers.mlp import MLP, swiglu
from megatron_hetero.models.layers.parts import LayerCall, MLPPart, Operations, Site, Tokens, named
from megatron_hetero.models.layers.recompute import ahead, not_saving, recompute


@dataclass(frozen=True)
class ExpertMLP(MLPPart):
    """A router and its experts, as a part of a layer.

    Attributes:
        hidden: width of a token.
        ffn: width of an expert.
        experts: number of experts.
        top_k: number of experts per token.
        stored: prefix of the stored tensors.
        shared: an MLP for all tokens, whose output is multiplied by the sigmoid of a gate, if any.
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
        """Width of an expert including padding, for aligned products."""
        return split_length(self.ffn, 1)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of matrices that are split over tp: only the width of the shared MLP, if any."""
        return () if self.shared is None else self.shared.widths

    @property
    def first_of_experts(self) -> int:
        """FLOPs per token of the first matrices of the chosen experts."""
        return 2 * self.top_k * 2 * self.hidden * self.ffn

    @property
    def first_product(self) -> int:
        """FLOPs per token of the first matrices of the chosen experts and of the shared MLP."""
        return self.first_of_experts + (0 if self.shared is None else self.shared.first_product)

    def tensors(self) -> TensorShapes:
        """Return the shapes of stored tensors: the router, the matrices of each expert, and the shared MLP."""
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
        """Return the weight map of `view`: in the main view, the router and the shared MLP; in the view of experts, the
        matrices of the experts of this share in order, with gate above up in one parameter and down in another.
        """
        if view == EXPERTS.name:
            return named("experts", self._expert_slices(stored, range(*block(self.experts, *share))))
        if view != MAIN:
            return {}
        result: dict[str, Any] = {"router": whole(f"{stored}{self.stored}gate.weight", self.experts)}
        if self.shared is not None:
            result["shared_gate"] = whole(f"{stored}{self.stored}shared_expert_gate.weight", 1)
            result |= named("shared", self.shared.weight_map(stored, share, view))
        return result

    def _expert_slices(self, stored: str, experts: Sequence[int]) -> WeightMap:
        first, second, padding = list[TensorSlice](), list[TensorSlice](), self.padded - self.ffn
        for place, expert in enumerate(experts):
            for half, kind in enumerate(("gate_proj", "up_proj")):
                at = (2 * place + half) * self.padded
                first.append(TensorSlice(stored + self._name(expert, kind), (0, self.ffn), at, padding=padding))
            down, at = stored + self._name(expert, "down_proj"), place * self.hidden
            second.append(TensorSlice(down, (0, self.hidden), at, columns=(0, self.ffn), padding=padding))
        return {"first": tuple(first), "second": tuple(second)}

    def operations(self, tokens: Tokens) -> Operations:
        """Return the FLOPs of the products with the weights of the router, the chosen experts, and the shared MLP."""
        linear = tokens.total * 2 * (self.experts + self.top_k * 3 * self.ffn) * self.hidden
        if self.shared is not None:
            linear += self.shared.operations(tokens).linear + 2 * tokens.total * self.hidden
        return Operations(linear)

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the torch module of this MLP."""
        return ExpertMLPModule(self, site, number)


class ExpertMLPModule(torch.nn.Module):
    """Torch module of an `ExpertMLP`.

    `imbalance`: load of this rank's experts relative to the mean, which is assumed on the device `meta`.
    """

    imbalance = 1.0
    # Loads are allocated on the device of the first input, since modules may be built on PyTorch's device `meta`.
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
        """Apply the MLP to `hidden` [S, 1, hidden], or [S / tp, 1, hidden] where activations are split."""
        out = self._routed(hidden, call)
        if self.part.shared is not None:
            shared, _ = self.shared(hidden, call)
            out = out + shared * F.linear(hidden, self.shared_gate).sigmoid()
        return out, None

    def take_loads(self) -> Tensor:
        """Return the number of tokens that this rank has routed to each expert while training since the last call:
        int64 [experts].
        """
        loads, self._loads = self._loads, None
        return torch.zeros(self.part.experts, dtype=torch.int64, device=self.router.device) if loads is None else loads

    def _routed(self, hidden: Tensor, call: LayerCall) -> Tensor:
        if self.splits or self.tp.size() == 1:
            return self._of_local(hidden, call)
        padded = F.pad(hidden, (0, 0, 0, 0, 0, -len(hidden) % self.tp.size()))
        local = tensor_parallel.scatter_to_sequence_parallel_region(padded, group=self.tp)
        gather = tensor_parallel.gather_from_sequence_parallel_region
        out = gather(self._of_local(local, call), tensor_parallel_output_grad=False, group=self.tp)
        return out[: len(hidden)]

    def _of_local(self, hidden: Tensor, call: LayerCall) -> Tensor:
        """Apply the experts to this rank's tokens `hidden` [tokens, 1, hidden]; the result is zero for padding."""
        first = len(hidden) * self.tp.rank()
        count = max(0, min(call.tokens - first, len(hidden)))
        tokens = (hidden[:count] if count < len(hidden) else hidden).squeeze(1)  # Slicing would copy the gradient.
        dispatch, weights = self._route(tokens, call, first)
        out = self.experts(tokens, weights, dispatch)
        padding = len(hidden) - len(out)
        return F.pad(out.unsqueeze(1), (0, 0, 0, 0, 0, padding)) if padding else out.unsqueeze(1)

    def _route(self, tokens: Tensor, call: LayerCall, first: int) -> tuple[Dispatch, Tensor]:
        """Choose experts for `tokens` [tokens, hidden], which begin with token `first` of the shard. A recomputation
        reuses the choice of the first forward pass. Return the dispatch and the routing weights [tokens, k].
        """
        logits = F.linear(tokens, self.router)
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        dispatch: Dispatch | None = call.memo.get("dispatch")
        chosen = probabilities.detach().topk(self.part.top_k).indices if dispatch is None else dispatch.chosen
        if dispatch is None and call.trains:
            self._count(chosen)
        if call.balance is not None:
            samples = call.balance.of(first, len(tokens))
            if dispatch is None:
                call.balance.count(samples, chosen, probabilities)
            probabilities = call.balance.balanced(samples, probabilities)
        weights = probabilities.gather(1, chosen)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype)
        if dispatch is None:
            dispatch = Dispatch.of(chosen, weights, self.part.experts, self.group, self.imbalance)
            call.memo["dispatch"] = dispatch
        return dispatch, weights

    def _count(self, chosen: Tensor) -> None:
        if self._loads is None:
            self._loads = chosen.new_zeros(self.part.experts)
        self._loads.scatter_(0, chosen.flatten(), 1, reduce="add")


class _Experts(torch.nn.Module):
    """The experts of this rank, in a separate module because ZeRO 2 and 3 shard the weights of each view by module."""

    def __init__(self, part: ExpertMLP, experts: int, site: Site, options: dict[str, Any]):
        super().__init__()
        self.experts, self.limit, self.compiled = experts, site.recompute.chunk * part.top_k, site.compile_layers
        self.again = site.recompute.experts
        self.first = torch.nn.Parameter(torch.empty(experts * 2 * part.padded, part.hidden, **options))
        self.second = torch.nn.Parameter(torch.empty(experts * part.hidden, part.padded, **options))

    def forward(self, tokens: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        """Apply the experts to `tokens` [tokens, hidden] with routing `weights` [tokens, k]: [tokens, hidden]."""
        # Exchanges are inside this module, since FSDP2 has its weights only here.
        if dispatch.exchange is None:
            out, _ = self.of_pairs(tokens, weights.flatten().index_select(0, dispatch.choice), dispatch)
            return move(out, dispatch.to_pairs.adjoint)
        of_weights, there = Crossing(dispatch.exchange), Crossing(dispatch.exchange)
        received = dispatch.start_weights(weights, of_weights)
        rows = start(tokens, there, dispatch.to_rows)
        weights = dispatch.finish_weights(received, of_weights)
        out, compute = self.of_pairs(finish(rows, there, Move()), weights, dispatch)
        back = Crossing(dispatch.exchange.back, compute)
        out = start(out, back, dispatch.to_pairs.adjoint)
        return finish(out, back, dispatch.to_rows.adjoint)

    def of_pairs(self, rows: Tensor, weights: Tensor, dispatch: Dispatch) -> tuple[Tensor, Callable[[], None]]:
        """Apply the experts to the pairs of `rows` [rows, hidden] with routing `weights` [pairs]. Return the results
        [pairs, hidden], and a function that computes ahead what their backward pass recomputes.
        """
        first, second = self._matrices("first"), self._matrices("second")
        widths = (*first.weight.shape[1:], second.weight.shape[2])
        ends = dispatch.ends if is_grouped(rows, *widths) else dispatch.host_ends
        if self.again and not 0 < self.limit < len(dispatch.choice):
            widen = partial(grouped_linear, matrices=first, ends=ends)
            inner = recompute(lambda x, weights: self._inner(widen(move(x, dispatch.to_pairs)), weights), rows, weights)
        else:
            # Copy rows inside this module, since `not_saving` does not recognise tensors that FSDP2 has passed on.
            x = recompute(lambda rows: move(rows, dispatch.to_pairs), rows)
            if 0 < self.limit < len(x):
                plan = chunks(dispatch.host_ends, self.limit), ends, self._inner, (first.scale, second.scale)
                with not_saving(x):
                    return _Chunked.apply(x, weights, plan, *first[:3], *second[:3]), lambda: None  # pyright: ignore[reportReturnType]
            with not_saving(x):
                wide = grouped_linear(x, first, ends)
            inner = recompute(self._inner, wide, weights)
        with not_saving(inner):
            out = grouped_linear(inner, second, ends)
        return out, ahead(inner)

    def _matrices(self, name: str) -> Matrices:
        """Return the parameter `name` as one matrix per expert, with the matrices of its adapter, if any."""
        weight, lora = getattr(self, name), cast(ExpertsLowRank | None, getattr(self, f"{name}_lora", None))
        if lora is None:
            return Matrices(self._by_expert(weight))
        return Matrices(*map(self._by_expert, (weight, lora.A, lora.B)), scale=lora.scale)

    def _by_expert(self, matrices: Tensor) -> Tensor:
        return matrices.view(self.experts, -1, matrices.shape[1])

    def _inner(self, wide: Tensor, weights: Tensor) -> Tensor:
        """Return the activated gate times up, [pairs, ffn], for `wide` [pairs, 2 ffn], times `weights` [pairs]."""
        if self.compiled:
            return run(activated, wide, F.silu, True) * weights[:, None]
        return swiglu(wide, weights)


def chunks(ends: Sequence[int], limit: int) -> list[tuple[slice, slice, bool]]:
    """Divide experts, whose rows end at `ends`, into chunks of at most `limit` rows. A chunk has all rows of some
    experts, or some rows of a single expert.

    Return for each chunk its experts, its rows, and whether it continues the expert of the previous chunk.
    """
    result, first, start = list[tuple[slice, slice, bool]](), 0, 0
    while first < len(ends):
        last = max(first + 1, bisect_right(ends, start + limit))
        stop = ends[last - 1]
        for at in range(start, max(stop, start + 1), limit):
            result.append((slice(first, last), slice(at, min(at + limit, stop)), at > start))
        first, start = last, stop
    return result


def _inside(ends: Ends, experts: slice, rows: slice) -> Ends:
    """Return where the rows of each expert of a chunk end, counted from the chunk's first row."""
    if isinstance(ends, Tensor):
        return ends[experts].clamp(max=rows.stop) - rows.start
    return [min(end, rows.stop) - rows.start for end in ends[experts]]


class _Chunked(Function):
    """Autograd function that computes experts chunk by chunk and saves only its inputs. If an expert has several
    chunks, its weight gradient is summed over the chunks in fp32.

    `plan`: the chunks, `ends`, the activation function, and the scales of the adapters. `matrices`: weight, A and B of
    the first and then of the second parameter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, plan: Any, *matrices: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights, *matrices)
        ctx.plan = cuts, ends, activate, scales = plan
        out, layers = torch.empty_like(x), _layers(matrices, scales)
        for experts, rows, _ in cuts:
            first, second = (layer.of(experts) for layer in layers)
            inside = _inside(ends, experts, rows)
            wide, _ = first.forward(x[rows], inside)
            out[rows], _ = second.forward(activate(wide, weights[rows]), inside)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, *matrices = ctx.saved_tensors
        cuts, ends, activate, scales = ctx.plan
        layers, needed = _layers(matrices, scales), ctx.needs_input_grad[3:]
        grad_x, grad_weights, grad = torch.empty_like(x), torch.empty_like(weights), grad.contiguous()
        grads = {at: torch.empty_like(matrices[at]) for at, need in enumerate(needed) if need}
        sums, sum_type = dict[int, Tensor](), torch.promote_types(x.dtype, torch.float32)
        for experts, rows, continues in cuts:
            first, second = (layer.of(experts) for layer in layers)
            inside = _inside(ends, experts, rows)
            wide, low = first.forward(x[rows], inside)
            factors = weights[rows].detach()
            with torch.enable_grad():
                inner = activate(wide.requires_grad_(), factors.requires_grad_())
            grad_inner, grad_low = second.backward(grad[rows], inside)
            grad_wide, grad_weights[rows] = torch.autograd.grad(inner, (wide, factors), grad_inner)
            inner = inner.detach()
            low_inner = second.low(inner, inside) if any(needed[3:]) else None
            grads_second = second.gradients(grad[rows], inner, low_inner, grad_low, inside, needed[3:])
            grad_x[rows], grad_low = first.backward(grad_wide, inside)
            grads_first = first.gradients(grad_wide, x[rows], low, grad_low, inside, needed[:3])
            for at, product in enumerate((*grads_first, *grads_second)):
                if product is not None:
                    sums[at] = product + sums[at].to(sum_type) if continues else product
                    grads[at][experts] = sums[at]
        return grad_x, grad_weights, None, *map(grads.get, range(len(matrices)))


def _layers(matrices: Sequence[Any], scales: tuple[float, float]) -> list[Matrices]:
    """Return `matrices` (weight, A and B of two parameters) as `Matrices` of the first and of the second parameter."""
    (weight, a, b), (other_weight, other_a, other_b) = matrices[:3], matrices[3:]
    return [Matrices(weight, a, b, scales[0]), Matrices(other_weight, other_a, other_b, scales[1])]
