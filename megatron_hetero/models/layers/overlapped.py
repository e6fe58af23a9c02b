"""Gathers of a column-parallel layer's input that begin early in the backward pass, beside what is computed then
(docs/training.md, "Exchanges beside matrix products").
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.groups.platform import Function
from megatron_hetero.models.layers.linear import ColumnLinear, gathered


class Ahead:
    """Gather of a column-parallel layer's input for the gradient of its weight. `gather_ahead` starts it in the
    backward pass, before the layer needs the result.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._gathered: tuple[Tensor, dist.Work | None] | None = None

    def gather(self, x: Tensor) -> None:
        """Start the all-gather of `x` [S / tp, 1, in]."""
        self._gathered = gathered(x, self._group, async_op=True)

    def take(self) -> tuple[Tensor, dist.Work | None]:
        """Return the gathered input [S, 1, in], and the work after which it is valid."""
        assert self._gathered is not None, "`gather_ahead` comes first in the backward pass"
        result, self._gathered = self._gathered, None
        return result


def ahead_of(layer: Any) -> Ahead | None:
    """Return an early gather of a column-parallel layer's input, for the layer and `gather_ahead`; None if the layer
    gathers no input in its backward pass, or is not a `ColumnLinear`.
    """
    if not (isinstance(layer, ColumnLinear) and layer.sequence_parallel and torch.is_grad_enabled()):
        return None
    linear: Any = layer
    return Ahead(linear.tp_group) if linear.weight.requires_grad else None


def gather_ahead(out: Tensor, x: Tensor, ahead: Ahead) -> Tensor:
    """Return `out` unchanged. When its gradient arrives, start to gather `x` [S / tp, 1, in], which overlaps with the
    backward pass of everything between the layer of `ahead` and `out`: attention or an activation, which release
    multiprocessors earlier than a matrix product.
    """
    return _GatherAhead.apply(out, x, ahead)  # pyright: ignore[reportReturnType]


class _GatherAhead(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, ahead: Ahead) -> Tensor:
        ctx.save_for_backward(x)
        ctx.ahead = ahead
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ahead.gather(*ctx.saved_tensors)
        return grad, None, None
