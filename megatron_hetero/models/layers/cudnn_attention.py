"""Causal attention by cuDNN, through operators of PyTorch that need no further package.

Shape suffixes:
    n  tokens
    H  query heads of this rank
    h  key/value heads of this rank, a divisor of H
    D  elements per head

cuDNN makes a plan for each new shape, which takes the host about 40 ms (pytorch/pytorch pull request 191576). So that
packs share plans, sizes are rounded up:

    ragged  one call for all segments. The plan depends on the numbers of tokens and segments and on the length of the
            longest segment, so tokens are padded and empty segments added. Before torch 2.15, every call makes a plan.
    dense   one call per segment, padded at its end, where none of its queries sees the padding.

Causal masks are aligned at the first query and key. Gradients of queries are summed in varying order.

Sources: aten/src/ATen/native/cudnn/MHA.cpp of PyTorch at v2.11 and v2.15 (`MHAParams`: what a plan depends on).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_hetero.groups.platform import Function

if TYPE_CHECKING:
    from megatron_hetero.models.layers.segments import PackedSegments

Form = Literal["ragged", "dense"]
Operators = tuple[Callable[..., Any], Callable[..., Any]]
"""Functions with the signatures of the operators for the forward and the backward pass."""
# Other lengths have had wrong gradients: pytorch/pytorch issue 196678, NVIDIA/cudnn-frontend issue 160.
MULTIPLE = 128
# Minimum FLOP of a forward pass. At 500 TFLOP/s in place of 200 it takes 50 µs less, and the backward pass 110 µs less,
# about what the additional launches take the host.
LEAST_FLOP = 16e9
# Maximum of segments times longest segment per token. The backward pass has a workspace for all of these.
WORKSPACE_ROWS = 4


class Call(NamedTuple):
    """Rounded sizes of a call: numbers of tokens and segments, and the length of the longest segment."""

    form: Form
    tokens: int
    segments: int
    longest: int

    @classmethod
    def ragged(cls, tokens: int, segments: int, longest: int) -> Call:
        """Return the call for a pack. The longest segment is rounded coarsely, because this takes only memory."""
        return cls("ragged", _rounded(tokens, 16), 1 << max(segments - 1, 0).bit_length(), _rounded(longest, 4))

    @classmethod
    def dense(cls, tokens: int) -> Call:
        """Return the call for one segment. Tokens are rounded finely, because padding is computed."""
        return cls("dense", padded := _rounded(tokens, 32), 1, padded)

    @property
    def rows(self) -> int:
        """Rows of the backward pass's workspace: all segments, each as long as the longest."""
        return self.segments * self.longest

    @property
    def is_compact(self) -> bool:
        """Whether the workspace is small enough for cuDNN to be the better choice."""
        return self.rows <= WORKSPACE_ROWS * self.tokens


def _rounded(tokens: int, steps: int) -> int:
    """Round up to a multiple of 128, and of 1 / `steps` of the power of two below."""
    step = max(MULTIPLE, (1 << (tokens - 1).bit_length()) // 2 // steps)
    return -(-tokens // step) * step


@lru_cache(maxsize=4096)
def calls_for(form: Form, lengths: tuple[int, ...], heads: int, head_dim: int) -> tuple[Call, ...]:
    """Return the calls for causal segments of these `lengths`: one, or one for each if dense; none if another kernel is
    the better choice, as for short segments (with launches, cuDNN has 0.65 of the speed: pytorch/pytorch pull request
    191576) and for many unequal ones.
    """
    pack = Call.ragged(sum(lengths), len(lengths), max(lengths, default=0))
    calls = (pack,) if form == "ragged" else tuple(map(Call.dense, lengths))
    fits = form == "dense" or pack.is_compact
    fits = fits and pack.tokens * heads * head_dim < 2**31  # Offsets of elements have 32 bits.
    flop = 2 * heads * head_dim * sum(n * n for n in lengths)
    return calls if fits and flop >= LEAST_FLOP * len(calls) else ()


def attend(
    q_nHD: Tensor,
    k_nhD: Tensor,
    v_nhD: Tensor,
    segments: PackedSegments,
    calls: Sequence[Call],
    operators: Operators | None = None,
) -> Tensor:
    """Compute causal attention inside each segment with the result of `calls_for`: [n, H, D]."""
    aten, inputs = torch.ops.aten, (q_nHD, k_nhD, v_nhD)
    operators = operators or (aten._cudnn_attention_forward, aten._cudnn_attention_backward)
    offsets = segments.padded_offsets(calls[0].segments) if calls[0].form == "ragged" else None
    lengths = (len(q_nHD),) if len(calls) == 1 else segments.segments.queries
    return _Attention.apply(*inputs, calls, lengths, offsets, operators)  # pyright: ignore[reportReturnType]


class _Attention(Function):
    """Autograd function of all calls, whose tokens are `lengths`. As in other kernels, saved tensors have the storages
    of its inputs and output, which hooks know. The output of one dense call keeps its padding, instead of being copied.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Call], lengths: Sequence[int],
        offsets: Tensor | None, operators: Operators,
    ) -> Tensor:  # fmt: skip
        ctx.calls, ctx.lengths, ctx.operator = calls, lengths, operators[1]
        outs, stored = list[Tensor](), list[Tensor]()
        keeps = len(calls) == 1 and calls[0].form == "dense"
        for call, *one in zip(calls, *(x.split(lengths) for x in (q, k, v)), strict=True):
            # No bias, logsumexps, no dropout, a causal mask, no debug mask.
            sizes, options = (None, offsets, offsets, call.longest, call.longest), (True, 0.0, True, False)
            padded = (_padded(x, call) for x in one)
            out, lse, *_, seed, offset, _ = operators[0](*padded, *sizes, *options, scale=q.shape[2] ** -0.5)
            outs.append(_cropped(out, call, call.tokens if keeps else len(one[0])))
            stored += [lse, seed, offset]
        # A view of a ragged call's output would keep more padding alive.
        out = torch.cat(outs) if len(outs) > 1 or (not keeps and calls[0].tokens > len(q)) else outs[0]
        ctx.save_for_backward(q, k, v, out, offsets, *stored)
        return out[: len(q)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, offsets, *stored = ctx.saved_tensors
        parts: list[list[Tensor]] = [[], [], []]
        outs = (out,) if len(ctx.calls) == 1 else out.split(ctx.lengths)
        by_call = zip(ctx.calls, *(x.split(ctx.lengths) for x in (grad, q, k, v)), outs, strict=True)
        for number, (call, *one) in enumerate(by_call):
            sizes, options = (None, offsets, offsets, call.longest, call.longest), (0.0, True)
            padded, of_call = (_padded(x, call) for x in one), stored[3 * number : 3 * number + 3]
            grads = ctx.operator(*padded, *of_call, *sizes, *options, scale=q.shape[2] ** -0.5)
            for part, x in zip(parts, grads, strict=True):
                part.append(_cropped(x, call, len(one[0])))
        return *(torch.cat(part) if len(part) > 1 else part[0] for part in parts), None, None, None, None


def _padded(x_nHD: Tensor, call: Call) -> Tensor:
    """Add zeros up to the tokens of the call: [tokens, H, D], or [1, H, tokens, D] in the same layout if dense."""
    padding = call.tokens - len(x_nHD)
    # `F.pad` would write all elements twice.
    x = torch.cat((x_nHD, x_nHD.new_zeros(padding, *x_nHD.shape[1:]))) if padding else x_nHD.contiguous()
    return x if call.form == "ragged" else x.unsqueeze(0).transpose(1, 2)


def _cropped(x: Tensor, call: Call, tokens: int) -> Tensor:
    """Return the first `tokens` rows, [n, H, D]. Padding of ragged calls is uninitialised."""
    return (x if call.form == "ragged" else x.squeeze(0).transpose(0, 1))[:tokens]
