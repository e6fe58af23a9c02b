"""Boundary crossings that autograd goes back through by itself, for loops that call `loss.backward()`:

    rows = cross(communicator, plan, encoder(pictures))
    loss = decoder(tokens, rows)
    loss.backward()

As with all collectives inside a graph, whether ranks communicate must not depend on what one of them happens to hold.
So gradients go back through a crossing on all of its ranks or on none, also where a rank's own rows are none or want no
gradient; and every rank must reach the crossing from its loss:

  * the arrived rows are used on every rank, also where there are none of them;
  * a rank without a loss of its own (it only encodes) calls `rows.sum().backward()` on its no rows;
  * a rank that only receives passes `communicator.no_rows()`;
  * several crossings in one graph are made, and used, in one order on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.boundary.communicator import BoundaryCommunicator, LoadedPlan


def cross(
    communicator: BoundaryCommunicator, plan: LoadedPlan, rows: Tensor, *, gradients: bool | None = None
) -> Tensor:
    """Rows of the source, [held, width], to those that this rank needs, [needed, width]; differentiable.

    All ranks of the communicator call it. The gradient of `rows` is the adjoint (see `boundary.routes`): the sum over
    all places where a row arrived, where the destination's gradients are `partial`; where they are `invariant`, the
    gradient of one of its copies, which are equal.

    Args:
        communicator: of the ranks of the plan.
        plan: this rank's part.
        rows: what this rank holds, in the order of the source's ownership, in the communicator's type.
        gradients: whether they come back, the same on all ranks. None: where the rows of any rank require them (in grad
            mode), on which the ranks agree by a small all-reduce. Under `torch.no_grad()` nothing comes back.

    Raises:
        ValueError: as `BoundaryCommunicator.forward` does. Besides, where `gradients` is None, on every rank: some
            rows require them, and another rank is not in grad mode or has a plan of the forward direction only.
        RuntimeError: in a backward of the backward.
    """
    if gradients is None:
        gradients = _agreed(communicator, plan, rows)
    if not (gradients and torch.is_grad_enabled()):
        return communicator.forward(plan, rows)
    # An input that requires a gradient is what makes autograd come back here.
    entered: Any = rows if rows.requires_grad else rows.detach().requires_grad_()
    return _Cross.apply(entered, communicator, plan)  # pyright: ignore[reportReturnType]


class _Cross(torch.autograd.Function):
    """Rows one way, their gradients the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, communicator: BoundaryCommunicator, plan: LoadedPlan) -> Tensor:
        ctx.communicator, ctx.plan = communicator, plan
        return communicator.forward(plan, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.communicator.backward(ctx.plan, grads), None, None


def _agreed(communicator: BoundaryCommunicator, plan: LoadedPlan, rows: Tensor) -> bool:
    """Whether the rows of any rank require gradients. Raises `ValueError` where some ranks could not return them."""
    on = torch.is_grad_enabled()
    votes = torch.tensor(
        [on and rows.requires_grad, not on, plan.backward is None], dtype=torch.int32, device=communicator.device
    )
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=communicator.group)
    wanted, off, one_way = map(bool, votes.tolist())
    if wanted and off:
        raise ValueError(
            "boundary: found rows that require gradients on some ranks and `torch.no_grad()` on others, expected grad "
            "mode on all ranks or on none, because gradients go back through all of them"
        )
    if wanted and one_way:
        raise ValueError(
            "boundary: found rows that require gradients and a plan of the forward direction only, expected one of "
            "both, as `plan.rank(rank)` returns; or detach the rows"
        )
    return wanted
