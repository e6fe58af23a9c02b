"""The crossings of a micro-batch, and the return of their gradients.

Rows that arrive are the output of an autograd node that stores the gradients of these rows. At the end of the
micro-batch, all ranks send the gradients back, the last crossing first. A module that computed rows runs its backward
pass once, with the gradients of all of its rows: wrappers such as DDP reduce gradients in each backward pass and expect
one for each forward pass. The order of backward passes is the same on all ranks of a module, as FSDP2 requires, whose
backward passes communicate: it follows from the names of edges, not from the graph of each rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import LoadedPlan
from megatron_hetero.groups.platform import Function
from megatron_hetero.layout.graph import Edge

_NOT_ACCUMULATED = (
    "micro_batch: `torch.autograd.grad` computed the gradient of rows that arrived, and none reached the rows, because "
    "what it returns does not go back. Call `rows.backward(gradient)` with what it returned; to look at a gradient "
    "only, compute that of `rows.detach().requires_grad_()`."
)
_IN_BACKWARD = (
    "micro_batch: a plan or a crossing amid a backward pass, because rows would cross twice, as under "
    "`torch.utils.checkpoint`, which calls its function again. Plan and cross outside of what is checkpointed."
)
_AFTER_ITS_END = (
    "micro_batch: a backward pass after its end, because the gradients of the rows that arrived have gone back. Call "
    "backward inside the block."
)
_FREED = (
    "micro_batch: the backward pass of a loss has freed the graph of rows that left, whose gradients are back. Call "
    "`boundary.backward(loss)`, of the boundary that the rows of its module leave by, in place of `loss.backward()`."
)
_OF_LATER_ROWS = (
    "micro_batch: a loss given to `Boundary.backward` depends on rows that crossed that boundary, whose gradients it "
    "waits for. Give it the loss of the module that the rows leave, and call `loss.backward()` for the other's."
)

Doing = Callable[[str], AbstractContextManager[None]]
"""Returns a context that watches the enclosed code, described by a text, for ranks that never arrive."""


@dataclass(eq=False)
class _Crossing:
    """A crossing along `edge`.

    `rows`: the rows that this rank sent, or None once they are no longer needed. `grad`: the sum of the gradients of
    the rows that arrived. `computed`: whether any of these gradients was computed.
    """

    edge: Edge
    communicator: BoundaryCommunicator
    plan: LoadedPlan
    rows: Tensor | None
    doing: Doing
    grad: Tensor | None = None
    computed: bool = False

    def arrive(self, rows: Tensor) -> Tensor:
        """Return `rows` as the output of an autograd node that ends the graph at this crossing."""
        arrived: Any = _Arrival.apply(torch.empty(0, requires_grad=True), self, [rows])
        arrived.register_hook(self._notice)
        return arrived

    def _notice(self, _: Tensor) -> None:
        if self.rows is None:
            raise UserError(_AFTER_ITS_END)
        self.computed = True

    def accumulate(self, grad: Tensor) -> None:
        """Add `grad`, [needed, width], the gradient from one backward pass."""
        self._notice(grad)
        self.grad = grad if self.grad is None else self.grad + grad

    def go_back(self, problem: str | None) -> Tensor:
        """Send gradients back, a collective, and return the gradient of this rank's rows, [held, width]. Raises
        `problem` on all ranks.
        """
        if self.grad is None:
            shape = self.plan.forward.needed, self.communicator.width
            self.grad = torch.zeros(shape, dtype=self.communicator.dtype, device=self.communicator.device)
            problem = problem or (_NOT_ACCUMULATED if self.computed else None)
        grad, self.grad = self.grad, None  # Free the gradient, since the rows that arrived keep this object alive.
        with self.doing("the return of gradients"):
            return self.communicator.start_backward(self.plan, grad, problem=problem).wait()


class _Arrival(Function):
    """An autograd function that returns arrived rows, given in a list so that the output is not a view of an input."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, crossing: _Crossing, arrived: list[Tensor]) -> Tensor:
        ctx.crossing = crossing
        return arrived.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.crossing.accumulate(grad)
        return None, None, None


_Returned = dict[Tensor, Tensor]
"""Gradients by rows, from all crossings whose gradients have returned so far."""


@dataclass(eq=False)
class MicroBatchCrossings:
    """The crossings of a micro-batch, in order. `losses`: losses by module, back-propagated together with the module's
    rows. `problem`: an error of this rank during a backward pass, which all ranks raise at the end.
    """

    crossings: list[_Crossing] = field(default_factory=list)
    losses: defaultdict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    problem: str | None = None

    def cross(
        self, edge: Edge, communicator: BoundaryCommunicator, plan: LoadedPlan, rows: Tensor, doing: Doing
    ) -> Tensor:
        """Send `rows` along `edge` and return the rows that arrive, see `Boundary.__call__`. `doing` watches the return
        of gradients, which waits for other ranks.
        """
        returns = returns_gradients(communicator, plan, rows)
        arrived = communicator.start_forward(plan, widened(rows, communicator.dtype)).wait()
        if not returns:
            return arrived
        self.crossings.append(_Crossing(edge, communicator, plan, rows, doing))
        return self.crossings[-1].arrive(arrived)

    @_disable_dynamo
    def end(self) -> None:
        """Send the gradients of all crossings back, and run the backward passes of the modules."""
        if not self.crossings and not self.losses:
            return
        # Disable autocast, which must not wrap backward passes.
        device = (self.crossings[-1].communicator if self.crossings else next(iter(self.losses.values()))[0]).device
        with torch.autocast(device.type, enabled=False):
            self._end()
        if self.problem:
            raise UserError(self.problem)

    def _end(self) -> None:
        waiting: dict[str, _Returned] = {}  # gradients of rows, by the module that computed the rows
        for source in sorted(self.losses.keys() - {crossing.edge.source for crossing in self.crossings}):
            self._backward(source, {})  # No rows of this module get gradients.
        while self.crossings:
            crossing = self.crossings[-1]
            due = [source for source, rows in waiting.items() if not self._may_wait(source, rows)]
            due += [crossing.edge.target] * (crossing.edge.target in self.losses)
            for source in dict.fromkeys(due):
                self._backward(source, waiting.pop(source, {}))
            if any(_computed_from(loss, crossing) for loss in self.losses.get(crossing.edge.source, ())):
                self.problem = _OF_LATER_ROWS
            grad, rows = crossing.go_back(self.problem), crossing.rows
            self.crossings.pop()
            crossing.rows = None
            if rows is not None and rows.requires_grad:
                returned = waiting.setdefault(crossing.edge.source, {})
                returned[rows] = returned[rows] + grad if rows in returned else grad
            if not any(left.edge.source == crossing.edge.source for left in self.crossings):
                self._backward(crossing.edge.source, waiting.pop(crossing.edge.source, {}))

    def _may_wait(self, source: str, waiting: _Returned) -> bool:
        """Return whether the backward pass of `source` can wait: no rows in `waiting` depend on the last crossing. Rows
        that crossed before it cannot depend on it.
        """
        last, before = self.crossings[-1], {earlier.rows for earlier in self.crossings}
        later = [rows for rows in waiting if rows not in before]
        return not later or not (last.edge.target == source or any(_computed_from(rows, last) for rows in later))

    def _backward(self, source: str, waiting: _Returned) -> None:
        """Run the backward pass of module `source`, once for all of its rows and losses."""
        losses = self.losses.pop(source, [])
        roots = [*losses, *waiting]
        if not roots or self.problem:
            return
        # Retain the graph if other rows that wait for gradients may share its nodes.
        shared = any(left.rows is not None and left.rows.requires_grad for left in self.crossings)
        grads = [*(None for _ in losses), *(grad.to(rows.dtype) for rows, grad in waiting.items())]
        try:
            torch.autograd.backward(roots, grads, retain_graph=shared)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            self.problem = self.problem or _FREED  # Raised on all ranks of the next crossing when it goes back.

    def close(self) -> None:
        """Forget all crossings and losses, so that later backward passes raise an error."""
        for crossing in self.crossings:
            crossing.rows = None
        self.crossings.clear()
        self.losses.clear()


def require_no_backward(current: MicroBatchCrossings | None) -> None:
    """Check, before waiting for other ranks, that this rank is not in a backward pass. If it is, raise `UserError`
    here, and on the other ranks at the end of the micro-batch.
    """
    if torch._C._current_graph_task_id() != -1:
        if current is not None:
            current.problem = _IN_BACKWARD
        raise UserError(_IN_BACKWARD)


def _computed_from(rows: Tensor, crossing: _Crossing) -> bool:
    """Return whether the graph of `rows` depends on the rows that arrived by `crossing`."""
    seen: set[Any] = set()
    left: list[Any] = [rows.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "crossing", None) is crossing:
            return True
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return False


def requires_grad(rows: Tensor) -> bool:
    """Return whether the rows of this rank require gradients."""
    return torch.is_grad_enabled() and isinstance(rows, Tensor) and rows.requires_grad


def returns_gradients(communicator: BoundaryCommunicator, plan: LoadedPlan, rows: Tensor) -> bool:
    """Return whether gradients go back through a crossing: on all ranks, if the rows of any rank require gradients,
    which a small all-reduce determines. Without checks there is no all-reduce, and gradients go back in grad mode if
    the plan has a backward direction.

    Raises:
        UserError: on every rank, if some rows require gradients and another rank is not in grad mode or has a plan of
            the forward direction only.
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
        found = "rows that require gradients on some ranks and `torch.no_grad()` on others"
        because, fix = "gradients go back through all of them", "enter `torch.no_grad()` on all ranks"
        expected = "grad mode on all ranks or on none"
        raise UserError.at(communicator.title, found=found, expected=expected, because=because, fix=fix)
    if wanted and one_way:
        found = "rows that require gradients and a plan of the forward direction only"
        expected, fix = "one of both, as `plan.rank(rank)` returns", "plan both directions, or detach the rows"
        raise UserError.at(communicator.title, found=found, expected=expected, fix=fix)
    return wanted


def widened(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert `rows` to `dtype` if that is lossless, as from bfloat16 to float32; else return `rows` unchanged."""
    floating = isinstance(rows, Tensor) and rows.is_floating_point()
    return rows.to(dtype) if floating and torch.promote_types(rows.dtype, dtype) == dtype else rows
