"""Executes boundary plans: packs, exchanges and unpacks rows by the indices in the plan.

`start_forward` and `start_backward` return a `Crossing` whose first exchange overlaps what the caller does before
`Crossing.wait`; each later phase starts when the previous one has finished. If source and destination share no rank,
`wait` depends on the other side only to have started (docs/boundaries.md, "Overlap").
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.loaded import (
    BufferLease,
    BufferPool,
    LoadedPlan,
    RowIndex,
    gather_rows,
    scatter_add_rows,
    scatter_rows,
)
from megatron_hetero.boundary.routes import DirectionPlan, Exchange
from megatron_hetero.groups.collective import raise_first, require_same_facts
from megatron_hetero.groups.local_group import LocalGroup
from megatron_hetero.layout.grammar import format_ranks
from megatron_hetero.layout.graph import Edge

if TYPE_CHECKING:
    from megatron_hetero.groups.topology import Topology


class BoundaryCommunicator:
    """Communicator that moves rows, [rows, width], between the ranks of a group.

    Args:
        group: process group with the ranks of every plan, ascending.
        device: device of the rows.
        width: number of elements of a row.
        dtype: dtype of the rows.
        backward: process group of the same ranks for gradients; by default `group`. It must be a separate one if
            crossings of both directions can be in flight at once: an NCCL communicator is one queue.
        transport: dtype on the wire, such as bfloat16 for fp32 rows; by default `dtype`. All rows are rounded to it,
            including rows that stay on their rank, so that copies of a row are equal.
        check: whether all ranks verify, before sending, that rows fit plans and that all follow the same plan. An error
            on one rank is then raised on all ranks, with nothing in flight and the group usable. This costs a small
            gather when a crossing starts: a round trip, and on a GPU the host waits for the device. If False, a rank
            raises only errors in its local rows or plan, and plans of different batches go unnoticed, hang or fail in
            the backend. A plan of the wrong batch on all ranks, with matching numbers of rows, is never detected.
        name: name of the edge, for errors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        width: int,
        dtype: torch.dtype,
        *,
        transport: torch.dtype | None = None,
        check: bool = True,
        backward: dist.ProcessGroup | None = None,
        name: str = "",
    ):
        self.name = name
        _require_rows(self.title, width, dtype, transport or dtype)
        self.group, self.backward_group = group, backward or group
        self.device = device
        self.width = width
        self.dtype = dtype
        self.transport = transport or dtype
        self.check = check
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._buffers = BufferPool(width, device)

    @property
    def title(self) -> str:
        """The boundary's name in errors, such as ``boundary vision>text``."""
        return f"boundary {self.name}".rstrip()

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row on the wire."""
        return self.width * self.transport.itemsize

    @property
    def terms(self) -> dict[str, str]:
        """The settings of the boundary that must be equal on all ranks."""
        return {name: str(getattr(self, name)) for name in ("width", "dtype", "transport", "check")}

    def no_rows(self) -> Tensor:
        """Return the input of a rank without rows: [0, width]."""
        return torch.empty(0, self.width, dtype=self.dtype, device=self.device)

    def start_forward(self, plan: LoadedPlan, rows: Tensor) -> Crossing:
        """Start to exchange this rank's source rows, [held, width], for the rows that it needs, without autograd (see
        `Boundary`). `rows` must not change before `Crossing.wait` returns.

        Raises:
            UserError: rows do not fit the plan, or plans differ; on every rank with `check`.
        """
        return self._start("forward", plan, rows)

    def start_backward(self, plan: LoadedPlan, grads: Tensor, *, problem: str | None = None) -> Crossing:
        """Start to exchange gradients of needed rows, [needed, width], for gradients of held rows (the adjoint). If
        gradients are partial and the two sides share no rank, wait for the other ranks of this side.

        Raises:
            UserError: as `start_forward`; also if the plan has no backward direction, or for a `problem` of the caller.
        """
        return self._start("backward", plan, grads, problem)

    @torch.no_grad()
    def _start(self, name: str, plan: LoadedPlan, rows: Tensor, problem: str | None = None) -> Crossing:
        forward = name == "forward"
        direction, group = (plan.forward, self.group) if forward else (plan.backward, self.backward_group)
        problem = problem or self._problem(name, plan, direction, rows)
        if self.check:
            self._require_agreement(name, problem, plan, rows, group)
        elif problem:
            raise UserError(problem)
        assert direction is not None, "a plan without this direction has been refused"
        return Crossing(direction, rows.detach(), self, group, point_to_point=plan.point_to_point)

    def _problem(
        self, name: str, plan: LoadedPlan, direction: DirectionPlan[RowIndex] | None, rows: Tensor
    ) -> str | None:
        """Return the error in this rank's plan or rows as text; None if there is no error."""
        fix = "give the boundary this batch's plan and the rows that it names"
        if plan.edge and self.name and plan.edge != self.name:
            found, expected = f"a plan of boundary {plan.edge}", "its own"
        elif plan.ranks != self._ranks:
            found, expected = f"a plan for ranks {plan.ranks}", f"one for the communicator's ranks {self._ranks}"
        elif plan.rank != dist.get_rank():
            found, expected = f"the plan of rank {plan.rank}", "its own"
        elif direction is None:
            found, expected = "a plan of the forward direction only", "one of both, as `plan.rank(rank)` returns"
        elif not isinstance(rows, Tensor):
            found, expected = f"a {type(rows).__name__}", "a tensor of rows"
        elif rows.dim() != 2 or rows.shape[1] != self.width:
            found, expected = f"rows of shape {tuple(rows.shape)}", f"[rows, {self.width}], `width` being {self.width}"
            fix = "reshape the rows, or open the boundary with another `width`"
        elif rows.dtype != self.dtype:
            found, expected = f"rows of {rows.dtype}", f"{self.dtype}, as given to the communicator in `dtype`"
            fix = f"open the boundary with dtype={rows.dtype}, or convert the rows (`transport` halves the bytes)"
        elif rows.device.type != self.device.type:
            found, expected = f"rows on {rows.device}", f"on {self.device}, the platform's device"
        elif len(rows) != direction.held:
            found = f"{len(rows)} rows"
            expected = f"the {direction.held} that this rank holds in the plan"
            fix = "plan with the ids of this batch's rows, in `held` -1 for those that do not cross (a class token)"
        else:
            return None
        where = f"{self.title} {name} on rank {dist.get_rank()}"
        return str(UserError.at(where, found=found, expected=expected, fix=fix))

    def _require_agreement(
        self, name: str, problem: str | None, plan: LoadedPlan, rows: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Check that no rank has a `problem`, that all ranks follow the same plan and, if `name` is "backward", that
        gradients of the same rows on several ranks are equal if planned as `invariant`, and differ if `partial`. Raises
        the same `UserError` on every rank. Costs one small gather.
        """
        mine = torch.tensor([problem is not None, plan.digest, 0, 0, -1, 0, 0], dtype=torch.float64, device=self.device)
        if name == "backward" and problem is None and can_compare(plan, rows):
            mine[2:] = summarize(plan, rows)
        everyone = mine.new_empty(group.size() * len(mine))
        dist.all_gather_into_tensor(everyone, mine, group=group)
        stated = everyone.view(group.size(), -1).tolist()
        if any(has_problem for has_problem, *_ in stated):
            raise_first(group, problem)
        plans = [{"plan": f"{int(digest):08x}"} for _, digest, *_ in stated]
        fix = "plan with ownerships of the same batch on all ranks"
        require_same_facts(f"{self.title} {name}", plans, self._ranks, fix)
        copies = {rank: GradientCopy(*copy) for rank, (_, _, *copy) in zip(self._ranks, stated, strict=True)}
        for first in sorted({copy.leader for copy in copies.values()} - {-1}):
            require_fit(self.title, {rank: copy for rank, copy in copies.items() if copy.leader == first})


def _require_rows(title: str, width: int, dtype: torch.dtype, transport: torch.dtype) -> None:
    """Check the width and the dtypes of rows. Raises `UserError`."""
    if type(width) is not int or width < 1:
        expected = "an integer of 1 or more, the elements of a row"
        raise UserError.at(f"{title}: width", found=repr(width), expected=expected, fix="give that of the rows")
    for name, found in (("dtype", dtype), ("transport", transport)):
        if not (isinstance(found, torch.dtype) and found.is_floating_point):
            expected = "a floating dtype such as torch.bfloat16"
            raise UserError.at(f"{title}: {name}", found=repr(found), expected=expected, fix="give that of the rows")


def boundary_communicators(
    topology: Topology,
    widths: Mapping[Edge, int],
    dtype: torch.dtype,
    *,
    transport: torch.dtype | None = None,
    check: bool = True,
) -> dict[Edge, BoundaryCommunicator]:
    """Create a communicator for each edge in `widths`; on a rank outside of the edge, one for this rank alone.

    `widths`: number of elements per row of each edge; for the other arguments see `BoundaryCommunicator`.
    """
    rank = topology.rank
    create = partial(
        BoundaryCommunicator, device=topology.platform.device, dtype=dtype, transport=transport, check=check
    )
    communicators = dict[Edge, BoundaryCommunicator]()
    for edge, width in widths.items():
        forward, backward = topology.boundaries.get(edge) or [LocalGroup((rank,), rank, f"boundary {edge}")] * 2
        communicators[edge] = create(forward, width=width, backward=backward, name=str(edge))
    return communicators


class Crossing:
    """A crossing in flight; call `wait` once to finish it."""

    def __init__(
        self,
        direction: DirectionPlan[RowIndex],
        rows: Tensor,
        communicator: BoundaryCommunicator,
        group: dist.ProcessGroup,
        *,
        point_to_point: bool,
    ):
        self._communicator, self._group, self._point_to_point = communicator, group, point_to_point
        self._dtype, self._wire_dtype = communicator.dtype, communicator.transport
        self._lease = BufferLease(communicator._buffers)
        if self._wire_dtype == self._dtype:
            self._output = rows.new_empty(direction.needed, communicator.width)
        else:  # Receive rows in a buffer of the wire dtype.
            self._output = self._lease.acquire(direction.needed, self._wire_dtype)
        if not direction.complete:
            self._output.zero_()
        self._phases = self._run_phases(direction, rows)
        next(self._phases, None)

    @torch.no_grad()
    def wait(self) -> Tensor:
        """Wait for and return the needed rows, [needed, width]. On a GPU the current stream waits, not the host."""
        for _ in self._phases:
            pass
        result = self._output.to(self._dtype)
        self._lease.close()
        return result

    def _run_phases(self, direction: DirectionPlan[RowIndex], rows: Tensor) -> Iterator[None]:
        """Run all phases; yield while an exchange is in flight."""
        if (reduce := direction.exchange("reduce")) is not None:
            sums = self._lease.acquire(len(rows), self._dtype).copy_(rows)
            finish = self._launch(reduce, self._to_wire_dtype(rows), sums)
            if not self._point_to_point:  # If point-to-point, receivers may need the sums before `wait`.
                yield
            finish()
            rows = sums
        rows = self._to_wire_dtype(rows)
        scatter, gather = direction.exchange("scatter"), direction.exchange("gather")
        finish = None if scatter is None else self._launch(scatter, rows, self._output)
        with closing(BufferLease(self._communicator._buffers)) as lease:
            scatter_rows(self._output, direction.local_to, gather_rows(rows, direction.local_from, lease))
        if finish is not None:
            yield
            finish()
        if gather is not None:
            finish = self._launch(gather, self._output, self._output)
            yield
            finish()

    def _to_wire_dtype(self, rows: Tensor) -> Tensor:
        return rows if self._wire_dtype == self._dtype else self._lease.acquire(len(rows), self._wire_dtype).copy_(rows)

    def _launch(self, plan: Exchange[RowIndex], source: Tensor, target: Tensor) -> Callable[[], None]:
        """Start an exchange; return a function that waits for it and unpacks the rows into `target`."""
        lease = BufferLease(self._communicator._buffers)
        sent = gather_rows(source, plan.send, lease)
        # Receive a contiguous run in place, and other rows and partial sums in a buffer.
        in_place = isinstance(plan.receive, slice) and plan.phase != "reduce"
        rows = sum(plan.receive_counts)
        received = target[plan.receive] if in_place else lease.acquire(rows, source.dtype)
        works = (_point_to_point if self._point_to_point else _all_to_all)(received, sent, plan, self._group)

        def finish() -> None:
            for work in works:
                work.wait()
            if plan.phase == "reduce":
                scatter_add_rows(target, plan.receive, received, lease)
            elif not in_place:
                scatter_rows(target, plan.receive, received)
            lease.close()

        return finish


def _all_to_all(received: Tensor, sent: Tensor, plan: Exchange[RowIndex], group: dist.ProcessGroup) -> Sequence[Any]:
    """Start one uneven all-to-all over the group, and return its handle in a list."""
    return [dist.all_to_all_single(received, sent, plan.receive_counts, plan.send_counts, group=group, async_op=True)]


def _point_to_point(
    received: Tensor, sent: Tensor, plan: Exchange[RowIndex], group: dist.ProcessGroup
) -> Sequence[Any]:
    """Start one batch of sends and receives between ranks that exchange rows, and return their handles."""
    ranks = dist.get_process_group_ranks(group)
    sides = (dist.isend, sent, plan.send_counts), (dist.irecv, received, plan.receive_counts)
    batch = [
        dist.P2POp(operation, message, rank, group)
        for operation, rows, counts in sides
        for rank, message in zip(ranks, rows.split(counts), strict=True)
        if len(message)
    ]
    return dist.batch_isend_irecv(batch) if batch else []


# ---------------------------------------------------------------------------- checks before a crossing

_SAME = 1e-3
"""Tolerance for projections of equal gradients, which differ in rounding, relative to the sum of absolute values."""
_FEW = 8
"""Number of values up to which partial gradients are not compared, since they may be equal by chance."""


class GradientCopy(NamedTuple):
    """A summary of a rank's gradients of rows that several ranks need.

    `projection`: sum of the gradients, weighted by position; `size`: sum of their absolute values. `leader`: first rank
    that needs the rows. `summed`: whether gradients are partial. `pooled`: whether all rows have equal gradients.
    """

    projection: float
    size: float
    leader: float
    summed: float
    pooled: float


def can_compare(plan: LoadedPlan, grads: Tensor) -> bool:
    """Return whether the summaries of all ranks can reveal that `grads` contradict the plan."""
    return len(plan.copies) > 1 and not (plan.summed and grads.numel() <= _FEW)


def summarize(plan: LoadedPlan, grads: Tensor) -> Tensor:
    """Return this rank's `GradientCopy` as a tensor, fp64 [5] on the device."""
    size = torch.linalg.vector_norm(grads, 1, dtype=torch.float64)
    pooled = (grads == grads[:1]).all().to(size)
    return torch.stack([_projection(grads), size, *size.new_tensor([min(plan.copies), plan.summed]), pooled])


def require_fit(title: str, copies: Mapping[int, GradientCopy]) -> None:
    """Check by summaries that several ranks' gradients of the same rows are as planned. Raises `UserError`."""
    found = f"{title} backward: found gradients of rows that"
    projections, sizes, _, summed, _ = zip(*copies.values(), strict=True)
    apart = max(projections) - min(projections) + max(sizes) - min(sizes)
    if not any(summed) and apart > _SAME * max(sizes):
        raise UserError(
            f"{found} differ on ranks {format_ranks(copies)}, expected equal ones, because the plan has them as "
            "`invariant`: each rank computes the whole gradient; plan with gradient='partial' if each computes a "
            "partial sum"
        )
    equal: dict[tuple[float, float], list[int]] = {}
    for rank, copy in copies.items():
        if copy.summed and copy.size > 0:
            equal.setdefault(copy[:2], []).append(rank)
    for ranks in (ranks for ranks in equal.values() if len(ranks) > 1):
        problem = (
            f"{found} are equal on ranks {format_ranks(ranks)}, expected partial sums, because the plan has them as "
            "`partial` and adds them up; plan with gradient='invariant' if each rank computes the whole gradient, and "
            "let ranks with other tokens need other rows"
        )
        if not copies[ranks[0]].pooled:
            raise UserError(problem)
        # Only warn: partial gradients of a mean over rows may be equal, too.
        warnings.warn(problem, stacklevel=2)


def _projection(grads: Tensor) -> Tensor:
    """Return a weighted sum of `grads`, fp64, that depends on the positions of the values."""
    rows, columns = (torch.arange(1, n + 1, device=grads.device, dtype=torch.float32) for n in grads.shape)
    # Weights are fractional parts of multiples of an irrational number, which are spread evenly.
    by_row = torch.mv(grads, (columns * 0.618034 % 1 - 0.3).to(grads.dtype))
    return torch.dot(by_row.double(), (rows * 0.414214 % 1 - 0.3).double())
