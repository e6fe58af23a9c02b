"""Differentiable boundary crossings, for loops that call `loss.backward()`:

    rows = cross(communicator, plan, encoder(pictures))
    loss = decoder(tokens, rows)
    loss.backward()

As with any collective inside a graph, whether a rank communicates must not depend on its data: docs/library.md says
what every rank has to do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import LoadedPlan
from megatron_hetero.errors import UserError


@_disable_dynamo
def cross(
    communicator: BoundaryCommunicator, plan: LoadedPlan, rows: Tensor, *, gradients: bool | None = None
) -> Tensor:
    """Source rows, [held, width], to the rows this rank needs, [needed, width]; differentiable.

    All ranks of the communicator call it. The gradient of `rows` is the adjoint (see `boundary.routes`): if the
    destination's gradients are `partial`, the sum over all copies of a row; if `invariant`, that of one copy.

    Args:
        communicator: its ranks are those of the plan.
        plan: this rank's part.
        rows: the rows that this rank holds, in the order of the source ownership, in the communicator's dtype.
        gradients: whether gradients come back, the same on all ranks. None: see `returns_gradients`. Under
            `torch.no_grad()` nothing comes back.

    Raises:
        UserError: as `BoundaryCommunicator.forward` and, with `gradients=None`, `returns_gradients`.
        RuntimeError: in a double backward.
    """
    if gradients is None:
        gradients = returns_gradients(communicator, plan, rows)
    if not (gradients and torch.is_grad_enabled() and isinstance(rows, Tensor)):
        return communicator.forward(plan, rows)
    # Autograd calls `_Cross.backward` only if an input requires a gradient.
    inputs: Any = rows if rows.requires_grad else rows.detach().requires_grad_()
    return _Cross.apply(inputs, communicator, plan)  # pyright: ignore[reportReturnType]


class _Cross(torch.autograd.Function):
    """Rows forward, their gradients backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, communicator: BoundaryCommunicator, plan: LoadedPlan) -> Tensor:
        ctx.communicator, ctx.plan = communicator, plan
        return communicator.forward(plan, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.communicator.backward(ctx.plan, grads), None, None


def requires_grad(rows: Tensor) -> bool:
    """Whether the rows of this rank require gradients."""
    return torch.is_grad_enabled() and isinstance(rows, Tensor) and rows.requires_grad


def returns_gradients(communicator: BoundaryCommunicator, plan: LoadedPlan, rows: Tensor) -> bool:
    """Whether gradients go back through a crossing, the same on all ranks: if the rows of any rank require them, which
    a small all-reduce tells. A communicator that checks nothing has no time for it: gradients then go back in grad mode
    where the plan has a way back.

    Raises:
        UserError: on every rank. Some rows require gradients, and another rank is not in grad mode or has a plan of the
            forward direction only.
    """
    on = torch.is_grad_enabled()
    if not communicator.check:
        return on and plan.backward is not None
    votes = torch.tensor(
        [requires_grad(rows), not on, plan.backward is None], dtype=torch.int32, device=communicator.device
    )
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=communicator.group)
    wanted, off, one_way = map(bool, votes.tolist())
    if wanted and off:
        raise UserError.at(
            communicator.title,
            found="rows that require gradients on some ranks and `torch.no_grad()` on others",
            expected="grad mode on all ranks or on none",
            because="gradients go back through all of them",
            fix="enter `torch.no_grad()` on all ranks",
        )
    if wanted and one_way:
        raise UserError.at(
            communicator.title,
            found="rows that require gradients and a plan of the forward direction only",
            expected="one of both, as `plan.rank(rank)` returns",
            fix="plan both directions, or detach the rows",
        )
    return wanted


def widened(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows in `dtype` if it holds their values without loss, such as bfloat16 in float32; else as they are."""
    floating = isinstance(rows, Tensor) and rows.is_floating_point()
    return rows.to(dtype) if floating and torch.promote_types(rows.dtype, dtype) == dtype else rows
