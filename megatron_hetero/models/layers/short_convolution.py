"""Causal depthwise convolution over a few tokens, then SiLU, of each sequence by itself, computed in fp32 and rounded
once. Only the input is saved for the backward pass.

On a CPU it is computed by rows of one sequence that stay in the cache; on a GPU in one kernel each way (and one for the
weight) if there is a compiler, in some passes otherwise.

Shape suffixes: n tokens, c channels, t taps; l tokens of some rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.groups.platform import compiles_for
from megatron_hetero.models.layers.compiled import run
from megatron_hetero.models.layers.sequences import Sequences

ROWS = 2**17
"""Elements of the rows that a CPU computes at once."""


def convolved(x_nc: Tensor, weight_ct: Tensor, sequences: Sequences) -> Tensor:
    """Convolve each sequence by itself, with zeros before it, and apply SiLU: [n, c], in the dtype of `x`. The last tap
    multiplies the token itself.
    """
    return _Convolved.apply(x_nc, weight_ct, sequences)  # pyright: ignore[reportReturnType]


class _Convolved(torch.autograd.Function):
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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_nc, weight_ct = ctx.saved_tensors
        if x_nc.device.type != "cpu":
            of_x, of_weight = _run(gradients, grad, x_nc, _fixed(weight_ct), ctx.sequences.offsets)
        else:
            of_x, of_weight = _gradients_by_rows(grad, x_nc, weight_ct, ctx.sequences)
        wanted = ctx.needs_input_grad
        return of_x if wanted[0] else None, of_weight.to(weight_ct.dtype) if wanted[1] else None, None


def _gradients_by_rows(grad: Tensor, x_nc: Tensor, weight_ct: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    of_x, weight_tc, taps = torch.empty_like(x_nc), _by_tap(weight_ct), weight_ct.shape[1]
    of_weight_tc = torch.zeros_like(weight_tc)
    for start, begin, stop, end in _rows(sequences.lengths, x_nc.shape[1]):
        # The tokens after these, which see them, are computed twice.
        until = min(stop + taps - 1, end)
        of_mixed = _of_mixed(grad[begin:until], _mixed(x_nc, weight_tc, start, begin, until, end))
        of_rows = of_mixed[: stop - begin] * weight_tc[-1]
        for back in range(1, taps):
            count = min(stop, until - back) - begin
            if count > 0:
                of_rows[:count].addcmul_(of_mixed[back : back + count], weight_tc[-1 - back])
        of_x[begin:stop] = of_rows
        for back in range(taps):
            first = max(start, begin - back)
            if first + back < stop:
                seen = of_mixed[first + back - begin : stop - begin] * x_nc[first : stop - back]
                of_weight_tc[-1 - back] += seen.sum(0)
    return of_x, of_weight_tc.t()


def _rows(lengths: tuple[int, ...], channels: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield, for rows [begin, stop) of a sequence [start, end): start, begin, stop, end."""
    most, start = max(1, ROWS // channels), 0
    for length in lengths:
        end = start + length
        for begin in range(start, end, most):
            yield start, begin, min(begin + most, end), end
        start = end


def _mixed(x_nc: Tensor, weight_tc: Tensor, start: int, begin: int, stop: int, end: int) -> Tensor:  # noqa: ARG001
    """Convolve rows [begin, stop) of the sequence from `start`: fp32 [l, c]."""
    out = x_nc[begin:stop] * weight_tc[-1]
    for back in range(1, len(weight_tc)):
        first = max(start, begin - back)
        if first + back < stop:
            out[first + back - begin :].addcmul_(x_nc[first : stop - back], weight_tc[-1 - back])
    return out


def _by_tap(weight_ct: Tensor) -> Tensor:
    return weight_ct.detach().t().to(torch.float32, memory_format=torch.contiguous_format)


def _of_mixed(grad: Tensor, mixed: Tensor) -> Tensor:
    """Return the gradient of the input of SiLU."""
    gate = mixed.sigmoid()
    return mixed.mul_(1 - gate).add_(1).mul_(gate).mul_(grad)


def _fixed(weight_ct: Tensor) -> Tensor:
    """Return a parameter, the sizes of which `run` compiles for; the weight may be some channels of one."""
    return torch.nn.Parameter(weight_ct.detach(), requires_grad=False)


def _run(function: Any, *inputs: Tensor) -> Any:
    return run(function, *inputs) if compiles_for(inputs[0]) else function(*inputs)


# ---------------------------------------------------------------------------------- functions that are compiled


def activated(x_nc: Tensor, weight_ct: Tensor, offsets_n: Tensor) -> Tensor:
    """Forward pass of `convolved`. `offsets`: place of each token in its sequence."""
    mixed = _convolve(x_nc, weight_ct, offsets_n)
    return (mixed * mixed.sigmoid()).to(x_nc.dtype)


def gradients(grad: Tensor, x_nc: Tensor, weight_ct: Tensor, offsets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Backward pass of `convolved`: gradients of the input, and of the weight in fp32."""
    mixed, taps = _convolve(x_nc, weight_ct, offsets_n), weight_ct.shape[1]
    gate = mixed.sigmoid()
    of_mixed = grad * gate * (1 + mixed * (1 - gate))
    of_x = of_mixed * weight_ct[:, -1]
    of_weight = [(of_mixed * x_nc).sum(0)]
    for back in range(1, taps):
        later = _moved(of_mixed, -back) * (_moved(offsets_n, -back) == offsets_n + back)[:, None]
        of_x = of_x + later * weight_ct[:, -1 - back]
        of_weight.append((of_mixed * _before(x_nc, back, offsets_n)).sum(0))
    return of_x.to(x_nc.dtype), torch.stack(of_weight[::-1], dim=1)


def _convolve(x_nc: Tensor, weight_ct: Tensor, offsets_n: Tensor) -> Tensor:
    out = x_nc.float() * weight_ct[:, -1]
    for back in range(1, weight_ct.shape[1]):
        out = out + _before(x_nc, back, offsets_n).float() * weight_ct[:, -1 - back]
    return out


def _before(x_nc: Tensor, back: int, offsets_n: Tensor) -> Tensor:
    """Return the tokens so many before each, or zeros before its sequence."""
    return torch.where((offsets_n >= back)[:, None], _moved(x_nc, back), 0)


def _moved(x: Tensor, back: int) -> Tensor:
    """Return the row so many before each (after, if negative), or the first (last) row."""
    rows = torch.arange(len(x), device=x.device) - back
    return x[rows.clamp(0, len(x) - 1)]
