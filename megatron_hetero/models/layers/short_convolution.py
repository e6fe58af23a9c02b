"""Causal depthwise convolution over a few tokens along each sequence, then SiLU, computed in fp32 and rounded once.
Only the input is saved for the backward pass.

On a CPU the tokens of a sequence are computed in blocks of rows that stay in the cache. On a GPU with a compiler, one
kernel computes each pass (and one the weight's gradient); without a compiler there are several kernels.

Shape suffixes: n tokens, c channels, t taps, l tokens of a block of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.groups.platform import Function, compiles_for
from megatron_hetero.models.layers.compiled import run
from megatron_hetero.models.layers.sequences import Sequences

ROWS = 2**17
"""Number of elements in a block of rows on a CPU."""


def convolved(x_nc: Tensor, weight_ct: Tensor, sequences: Sequences) -> Tensor:
    """Convolve `x_nc` along each sequence, with zeros before it, and apply SiLU. Return [n, c] in the dtype of `x_nc`.
    The last tap multiplies the current token.
    """
    return _Convolved.apply(x_nc, weight_ct, sequences)  # pyright: ignore[reportReturnType]


class _Convolved(Function):
    @staticmethod
    def forward(ctx: Any, x_nc: Tensor, weight_ct: Tensor, sequences: Sequences) -> Tensor:
        ctx.save_for_backward(x_nc, weight_ct)
        ctx.sequences = sequences
        if x_nc.device.type != "cpu":
            return _run(activated, x_nc, _fixed(weight_ct), sequences.offsets)
        out, weight_tc = torch.empty_like(x_nc), _by_tap(weight_ct)
        for rows in _rows(sequences.lengths, x_nc.shape[1]):
            mixed = _mixed(x_nc, weight_tc, *rows)
            torch.mul(mixed, mixed.sigmoid(), out=out[rows[1] : rows[2]])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_nc, weight_ct = ctx.saved_tensors
        if x_nc.device.type != "cpu":
            grad_x, grad_weight = _run(gradients, grad, x_nc, _fixed(weight_ct), ctx.sequences.offsets)
        else:
            grad_x, grad_weight = _gradients_by_rows(grad, x_nc, weight_ct, ctx.sequences)
        wanted = ctx.needs_input_grad
        return grad_x if wanted[0] else None, grad_weight.to(weight_ct.dtype) if wanted[1] else None, None


def _gradients_by_rows(grad: Tensor, x_nc: Tensor, weight_ct: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    grad_x, weight_tc, taps = torch.empty_like(x_nc), _by_tap(weight_ct), weight_ct.shape[1]
    grad_weight_tc = torch.zeros_like(weight_tc)
    for start, begin, stop, end in _rows(sequences.lengths, x_nc.shape[1]):
        # Tokens after this block that depend on it are computed here too, and again in the next block.
        until = min(stop + taps - 1, end)
        grad_mixed = _silu_backward(grad[begin:until], _mixed(x_nc, weight_tc, start, begin, until, end))
        grad_rows = grad_mixed[: stop - begin] * weight_tc[-1]
        for back in range(1, taps):
            count = min(stop, until - back) - begin
            if count > 0:
                grad_rows[:count].addcmul_(grad_mixed[back : back + count], weight_tc[-1 - back])
        grad_x[begin:stop] = grad_rows
        for back in range(taps):
            first = max(start, begin - back)
            if first + back < stop:
                seen = grad_mixed[first + back - begin : stop - begin] * x_nc[first : stop - back]
                grad_weight_tc[-1 - back] += seen.sum(0)
    return grad_x, grad_weight_tc.t()


def _rows(lengths: tuple[int, ...], channels: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield blocks of rows as (start, begin, stop, end): rows [begin, stop) of the sequence [start, end)."""
    size, start = max(1, ROWS // channels), 0
    for length in lengths:
        end = start + length
        for begin in range(start, end, size):
            yield start, begin, min(begin + size, end), end
        start = end


def _mixed(x_nc: Tensor, weight_tc: Tensor, start: int, begin: int, stop: int, end: int) -> Tensor:  # noqa: ARG001
    """Return the convolution of rows [begin, stop) of the sequence that begins at `start`: fp32 [l, c]."""
    out = x_nc[begin:stop] * weight_tc[-1]
    for back in range(1, len(weight_tc)):
        first = max(start, begin - back)
        if first + back < stop:
            out[first + back - begin :].addcmul_(x_nc[first : stop - back], weight_tc[-1 - back])
    return out


def _by_tap(weight_ct: Tensor) -> Tensor:
    return weight_ct.detach().t().to(torch.float32, memory_format=torch.contiguous_format)


def _silu_backward(grad: Tensor, mixed: Tensor) -> Tensor:
    """Return the gradient of `mixed`, the input of SiLU. `mixed` is overwritten."""
    gate = mixed.sigmoid()
    return mixed.mul_(1 - gate).add_(1).mul_(gate).mul_(grad)


def _fixed(weight_ct: Tensor) -> Tensor:
    """Return the weight as a parameter, because `run` compiles for the fixed shapes of parameters."""
    return torch.nn.Parameter(weight_ct.detach(), requires_grad=False)


def _run(function: Any, *inputs: Tensor) -> Any:
    return run(function, *inputs) if compiles_for(inputs[0]) else function(*inputs)


# ---------------------------------------------------------------------------------- functions that are compiled


def activated(x_nc: Tensor, weight_ct: Tensor, offsets_n: Tensor) -> Tensor:
    """Compute the forward pass of `convolved`. `offsets_n`: offset of each token in its sequence."""
    mixed = _convolve(x_nc, weight_ct, offsets_n)
    return (mixed * mixed.sigmoid()).to(x_nc.dtype)


def gradients(grad: Tensor, x_nc: Tensor, weight_ct: Tensor, offsets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input of `convolved`, and of its weight in fp32."""
    mixed, taps = _convolve(x_nc, weight_ct, offsets_n), weight_ct.shape[1]
    gate = mixed.sigmoid()
    grad_mixed = grad * gate * (1 + mixed * (1 - gate))
    grad_x = grad_mixed * weight_ct[:, -1]
    grad_weight = [(grad_mixed * x_nc).sum(0)]
    for back in range(1, taps):
        later = _moved(grad_mixed, -back) * (_moved(offsets_n, -back) == offsets_n + back)[:, None]
        grad_x = grad_x + later * weight_ct[:, -1 - back]
        grad_weight.append((grad_mixed * _before(x_nc, back, offsets_n)).sum(0))
    return grad_x.to(x_nc.dtype), torch.stack(grad_weight[::-1], dim=1)


def _convolve(x_nc: Tensor, weight_ct: Tensor, offsets_n: Tensor) -> Tensor:
    out = x_nc.float() * weight_ct[:, -1]
    for back in range(1, weight_ct.shape[1]):
        out = out + _before(x_nc, back, offsets_n).float() * weight_ct[:, -1 - back]
    return out


def _before(x_nc: Tensor, back: int, offsets_n: Tensor) -> Tensor:
    """Return for each token the row of `x_nc` that is `back` tokens earlier, or zeros before its sequence."""
    return torch.where((offsets_n >= back)[:, None], _moved(x_nc, back), 0)


def _moved(x: Tensor, back: int) -> Tensor:
    """Return for each row of `x` the row `back` places earlier (later if negative), clamped to the ends of `x`."""
    rows = torch.arange(len(x), device=x.device) - back
    return x[rows.clamp(0, len(x) - 1)]
