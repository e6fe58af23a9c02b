"""Executes boundary plans: packs rows by index, exchanges them, unpacks by index. No decisions here.

A crossing is started and waited for in two calls, so that its first exchange runs beside whatever the caller does in
between (a later stage starts when the one before it has arrived):

    crossing = communicator.start_forward(plan, rows)
    ...                                    # embed the tokens
    rows = crossing.wait()

Where source and destination share no rank, whoever waits for a crossing needs nothing of the other side but that it has
started. Sums of parts are therefore complete, and on their way, when `start_backward` returns: it waits for the other
ranks that hold parts. For crossings that autograd goes back through see `megatron_hetero.boundary.autograd`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.plan import RankPlan
from megatron_hetero.boundary.routes import DirectionPlan, Exchange
from megatron_hetero.distributed.platform import on_device
from megatron_hetero.layout.grammar import format_ranks

if TYPE_CHECKING:
    from megatron_hetero.distributed.topology import Topology

Index = slice | Tensor
"""Rows of a buffer: a run of them, which needs no copy to be sent or received, or int64 indices on the device."""


@dataclass(frozen=True, eq=False)
class LoadedExchange:
    """An `Exchange` on the device."""

    stage: str
    send: Index
    send_counts: list[int]
    receive: Index
    receive_counts: list[int]


@dataclass(frozen=True, eq=False)
class LoadedDirection:
    """A `DirectionPlan` on the device."""

    held: int
    rows: int
    kept_from: Index
    kept_to: Index
    reduce: LoadedExchange | None
    scatter: LoadedExchange | None
    gather: LoadedExchange | None
    complete: bool


@dataclass(frozen=True, eq=False)
class LoadedPlan:
    """A `RankPlan` whose indices are on the device."""

    rank: int
    ranks: tuple[int, ...]
    digest: int
    point_to_point: bool
    forward: LoadedDirection
    backward: LoadedDirection | None


def load_plan(plan: RankPlan, device: torch.device) -> LoadedPlan:
    """Move the indices of `plan` to the device, without waiting for it."""
    forward = _load_direction(plan.forward, device)
    backward = None if plan.backward is None else _load_direction(plan.backward, device)
    return LoadedPlan(plan.rank, plan.ranks, plan.digest, plan.point_to_point, forward, backward)


class BoundaryCommunicator:
    """Moves rows of `width` elements of `dtype` between the ranks of `group`, which are those of every plan, ascending.

    Args:
        backward: a group of the same ranks for what goes back. Where crossings of both directions may be on their way
            at the same time it must be another one than `group`: on NCCL a group is one queue. `group` where left out.
        transport: what rows are rounded to on the wire, such as bfloat16 for fp32 rows; None sends them as they are.
            All rows are rounded, also those that stay, so that copies of a row are equal.
        check: whether all ranks agree, before anything is sent, that their rows fit their plans and that these are
            parts of one plan, so that an error of one is raised on all, none of that crossing is on its way, and the
            group can be used. This is one small all-reduce that each crossing waits for when it is started: a round
            trip, and on a GPU the host waits for the device. Where it is off, only the rank that sees an error in its
            own rows or plan raises it, and plans of different batches go unseen, or end in a hang or in whatever the
            back end says. In neither case does anyone see a plan that is of another batch on all ranks alike, if the
            numbers of rows happen to be the same.
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
    ):
        self.group, self.backward_group = group, backward or group
        self.device = device
        self.width = width
        self.dtype = dtype
        self.transport = transport or dtype
        self.check = check
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._buffers = _Buffers(width, device)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire."""
        return self.width * self.transport.itemsize

    def no_rows(self) -> Tensor:
        """What a rank that holds no rows passes: [0, width]."""
        return torch.empty(0, self.width, dtype=self.dtype, device=self.device)

    def forward(self, plan: LoadedPlan, rows: Tensor) -> Tensor:
        """Source rows of this rank, [held, width], to the rows that it needs, [needed, width]. Not differentiable: see
        `cross` for that.

        Raises:
            ValueError: on every rank, if the rows of any do not fit the plan, or plans differ (see `check`).
        """
        return self.start_forward(plan, rows).wait()

    def backward(self, plan: LoadedPlan, grads: Tensor) -> Tensor:
        """The adjoint: gradients of the rows that this rank needed to gradients of those that it held.

        Raises:
            ValueError: as `forward` does, and where the plan has the forward direction only.
        """
        return self.start_backward(plan, grads).wait()

    def start_forward(self, plan: LoadedPlan, rows: Tensor) -> Crossing:
        """Start `forward`, which raises here. The rows must not change until it has been waited for."""
        return self._start("forward", plan, plan.forward, rows)

    def start_backward(self, plan: LoadedPlan, grads: Tensor) -> Crossing:
        """Start `backward`, which raises here. The gradients must not change until it has been waited for.

        Where they are parts of sums and the two sides share no rank, this waits for the ranks of this side.
        """
        return self._start("backward", plan, plan.backward, grads)

    @torch.no_grad()
    def _start(self, name: str, plan: LoadedPlan, direction: LoadedDirection | None, rows: Tensor) -> Crossing:
        problem, group = self._problem(name, plan, direction, rows), self._group_of(name)
        if self.check:
            _require_agreement(name, problem, plan.digest, group, self.device)
        elif problem:
            raise ValueError(problem)
        assert direction is not None
        return Crossing(direction, rows.detach(), self, group, point_to_point=plan.point_to_point)

    def _group_of(self, direction: str) -> dist.ProcessGroup:
        return self.group if direction == "forward" else self.backward_group

    def _problem(self, name: str, plan: LoadedPlan, direction: LoadedDirection | None, rows: Tensor) -> str | None:
        """What is wrong with this rank's plan or rows, if anything."""
        if plan.ranks != self._ranks:
            found, expected = f"a plan for ranks {plan.ranks}", f"one for the communicator's ranks {self._ranks}"
        elif plan.rank != dist.get_rank():
            found, expected = f"the part of rank {plan.rank} of the plan", "its own"
        elif direction is None:
            found, expected = "a plan of the forward direction only", "one of both, as `plan.rank(rank)` returns"
        elif rows.dim() != 2 or rows.shape[1] != self.width:
            found, expected = f"rows of shape {tuple(rows.shape)}", f"[rows, {self.width}]"
        elif rows.dtype != self.dtype:
            found, expected = f"rows of {rows.dtype}", f"{self.dtype}, as the communicator was made for"
        elif len(rows) != direction.held:
            found = f"{len(rows)} rows"
            expected = f"the {direction.held} that the plan says this rank holds; the plan was made for another batch"
        else:
            return None
        return f"boundary {name} on rank {dist.get_rank()}: found {found}, expected {expected}"


def boundary_communicators(
    topology: Topology, width: int, dtype: torch.dtype, *, transport: torch.dtype | None = None, check: bool = True
) -> dict[str, BoundaryCommunicator]:
    """A communicator for each boundary of the topology that this rank takes part in, by the module that rows leave.

    `width`: elements of a row; the others as for `BoundaryCommunicator`.
    """
    device = topology.platform.device
    return {
        source: BoundaryCommunicator(
            groups.forward, device, width, dtype, transport=transport, check=check, backward=groups.backward
        )
        for (source, _), groups in topology.boundaries.items()
    }


class Crossing:
    """Rows on their way. `wait` returns those that arrive; call it once."""

    def __init__(
        self,
        direction: LoadedDirection,
        rows: Tensor,
        communicator: BoundaryCommunicator,
        group: dist.ProcessGroup,
        *,
        point_to_point: bool,
    ):
        self._communicator, self._group, self._point_to_point = communicator, group, point_to_point
        self._dtype, self._wire = communicator.dtype, communicator.transport
        self._loan = communicator._buffers.loan()
        self._arrived = self._room(direction)
        self._course = self._stages(direction, rows)
        next(self._course, None)

    @torch.no_grad()
    def wait(self) -> Tensor:
        """Wait for the rows, [needed, width]. On a GPU the current stream waits, not the host."""
        for _ in self._course:
            pass
        result = self._arrived.to(self._dtype)
        self._loan.give_back()
        return result

    def _room(self, direction: LoadedDirection) -> Tensor:
        """Where rows arrive: the result itself, or, where the wire has a type of its own, a buffer."""
        if self._wire == self._dtype:
            shape = direction.rows, self._communicator.width
            arrived = torch.empty(shape, dtype=self._dtype, device=self._communicator.device)
        else:
            arrived = self._loan.borrow(direction.rows, self._wire)
        return arrived if direction.complete else arrived.zero_()

    def _stages(self, direction: LoadedDirection, rows: Tensor) -> Iterator[None]:
        """Everything that happens, with a yield wherever an exchange is in the air."""
        if direction.reduce is not None:
            sums = self._loan.borrow(len(rows), self._dtype).copy_(rows)
            flight = self._launch(direction.reduce, self._rounded(rows), sums)
            if not self._point_to_point:  # Else the receivers may wait for the sums before this rank waits itself.
                yield
            flight.land()
            rows = sums
        rows = self._rounded(rows)
        flight = None if direction.scatter is None else self._launch(direction.scatter, rows, self._arrived)
        self._keep(direction, rows)
        if flight is not None:
            yield
            flight.land()
        if direction.gather is not None:
            flight = self._launch(direction.gather, self._arrived, self._arrived)
            yield
            flight.land()

    def _rounded(self, rows: Tensor) -> Tensor:
        """The rows as they travel."""
        return rows if self._wire == self._dtype else self._loan.borrow(len(rows), self._wire).copy_(rows)

    def _keep(self, direction: LoadedDirection, rows: Tensor) -> None:
        """Put the rows that stay where they belong."""
        with self._communicator._buffers.loan() as loan:
            _put(self._arrived, direction.kept_to, _take(rows, direction.kept_from, loan))

    def _launch(self, plan: LoadedExchange, source: Tensor, target: Tensor) -> _Flight:
        exchange = _point_to_point if self._point_to_point else _all_to_all
        return _Flight(plan, source, target, self._communicator, self._group, exchange)


class _Flight:
    """One exchange in the air."""

    def __init__(
        self,
        plan: LoadedExchange,
        source: Tensor,
        target: Tensor,
        communicator: BoundaryCommunicator,
        group: dist.ProcessGroup,
        exchange: _ExchangeFunction,
    ):
        self._plan, self._target = plan, target
        self._loan = communicator._buffers.loan()
        sent = _take(source, plan.send, self._loan)
        # A run of rows is received where it belongs; others, and what is to be added, go through a buffer.
        self._direct = isinstance(plan.receive, slice) and plan.stage != "reduce"
        rows = sum(plan.receive_counts)
        self._received = target[plan.receive] if self._direct else self._loan.borrow(rows, source.dtype)
        self._works = exchange(self._received, sent, plan, group)

    def land(self) -> None:
        """Wait, and put the rows where they belong."""
        for work in self._works:
            work.wait()
        if self._plan.stage == "reduce":
            _add(self._target, self._plan.receive, self._received, self._loan)
        elif not self._direct:
            _put(self._target, self._plan.receive, self._received)
        self._loan.give_back()


class _Buffers:
    """Buffers that are lent and used again, so that a crossing allocates nothing but its result once crossings as
    large have been seen: staged rows, sums, and copies in the type of the wire are all borrowed.

    Buffers are bytes, for rows of any type, and their sizes are powers of two, so that batches whose sizes creep up do
    not each need new ones.
    """

    def __init__(self, width: int, device: torch.device):
        self.width = width
        self._device = device
        self._free: list[Tensor] = []

    def loan(self) -> _Loan:
        """Room for as many rows as are asked of it."""
        return _Loan(self)

    def take(self, size: int) -> Tensor:
        """A buffer of at least so many bytes."""
        fitting = [i for i, buffer in enumerate(self._free) if len(buffer) >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        if self._free:  # Replace the smallest, so that the number of buffers stays that of those lent at once.
            self._free.pop(min(range(len(self._free)), key=lambda i: len(self._free[i])))
        return torch.empty(1 << max(0, size - 1).bit_length(), dtype=torch.uint8, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Lend it to others."""
        self._free.append(buffer)


class _Loan:
    """Buffers that are given back together, at the latest at the end of a `with`."""

    def __init__(self, buffers: _Buffers):
        self._buffers = buffers
        self._borrowed: list[Tensor] = []

    def borrow(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Room for so many rows, with anything in it."""
        width = self._buffers.width
        size = rows * width * dtype.itemsize
        buffer = self._buffers.take(size)
        self._borrowed.append(buffer)
        return buffer[:size].view(dtype).view(rows, width)

    def give_back(self) -> None:
        """Give everything back; on a GPU, what the current stream does next may write over it."""
        while self._borrowed:
            self._buffers.give_back(self._borrowed.pop())

    def __enter__(self) -> _Loan:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()


# ------------------------------------------------------------------------------------------ the agreement


class _Opinion(NamedTuple):
    """What a rank says of a crossing: what is wrong there, if anything, and the digest of its plan."""

    rank: int
    problem: str | None
    digest: int


def _require_agreement(
    name: str, problem: str | None, digest: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise the same `ValueError` on every rank where there is a problem on any, or the digests differ."""
    # The largest and the smallest digest in one reduction.
    flags = torch.tensor([problem is not None, digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    problems, largest, smallest = flags.tolist()
    if problems or largest != -smallest:
        opinions: list[Any] = [None] * group.size()
        dist.all_gather_object(opinions, _Opinion(dist.get_rank(), problem, digest), group=group)
        raise ValueError(_disagreement(name, opinions))


def _disagreement(name: str, opinions: Sequence[_Opinion]) -> str:
    """What is wrong on each rank, and which ranks have the same plan."""
    said = [opinion.problem for opinion in opinions if opinion.problem is not None]
    ranks: dict[int, list[int]] = {}
    for opinion in opinions:
        ranks.setdefault(opinion.digest, []).append(opinion.rank)
    if len(ranks) > 1:
        listed = "; ".join(f"one on ranks {format_ranks(alike)}" for alike in ranks.values())
        said.append(
            f"boundary {name}: found plans of {len(ranks)} different batches ({listed}), expected parts of one plan "
            "on all ranks; plan with ownerships of the same batch"
        )
    return "\n".join(said)


# ------------------------------------------------------------------------------------------ the exchanges

_ExchangeFunction = Callable[[Tensor, Tensor, LoadedExchange, dist.ProcessGroup], Sequence[Any]]


def _all_to_all(received: Tensor, sent: Tensor, plan: LoadedExchange, group: dist.ProcessGroup) -> Sequence[Any]:
    """One uneven all-to-all over the group."""
    work = dist.all_to_all_single(
        received, sent, plan.receive_counts, plan.send_counts, group=group, async_op=True
    )  # fmt: skip
    return [work]


def _point_to_point(received: Tensor, sent: Tensor, plan: LoadedExchange, group: dist.ProcessGroup) -> Sequence[Any]:
    """A batch of sends and receives between those ranks only that have something for each other."""
    ranks = dist.get_process_group_ranks(group)
    sides = (dist.isend, sent, plan.send_counts), (dist.irecv, received, plan.receive_counts)
    batch = [
        dist.P2POp(operation, part, rank, group)
        for operation, rows, counts in sides
        for rank, part in zip(ranks, rows.split(counts), strict=True)
        if len(part)
    ]
    return dist.batch_isend_irecv(batch) if batch else []


# ------------------------------------------------------------------------------------------------ indices


def _load_direction(plan: DirectionPlan, device: torch.device) -> LoadedDirection:
    return LoadedDirection(
        plan.held,
        plan.rows,
        _load_index(plan.kept_from, device),
        _load_index(plan.kept_to, device),
        _load_exchange(plan.exchange("reduce"), device),
        _load_exchange(plan.exchange("scatter"), device),
        _load_exchange(plan.exchange("gather"), device),
        plan.complete,
    )


def _load_exchange(exchange: Exchange | None, device: torch.device) -> LoadedExchange | None:
    if exchange is None:
        return None
    return LoadedExchange(
        exchange.stage,
        _load_index(exchange.send, device),
        exchange.send_counts.tolist(),
        _load_index(exchange.receive, device),
        exchange.receive_counts.tolist(),
    )


def _load_index(index: np.ndarray, device: torch.device) -> Index:
    if not len(index):
        return slice(0, 0)
    if index[-1] - index[0] == len(index) - 1 and np.all(np.diff(index) == 1):
        return slice(int(index[0]), int(index[-1]) + 1)
    return on_device(torch.from_numpy(index), device)


def _take(rows: Tensor, index: Index, loan: _Loan) -> Tensor:
    """Those of `rows`, one after the other in memory."""
    if not isinstance(index, slice):
        return torch.index_select(rows, 0, index, out=loan.borrow(len(index), rows.dtype))
    taken = rows[index]
    return taken if taken.is_contiguous() else loan.borrow(len(taken), rows.dtype).copy_(taken)


def _put(target: Tensor, index: Index, rows: Tensor) -> None:
    if isinstance(index, slice):
        target[index] = rows
    else:
        target.index_copy_(0, index, rows)


def _add(target: Tensor, index: Index, rows: Tensor, loan: _Loan) -> None:
    if rows.dtype != target.dtype:
        rows = loan.borrow(len(rows), target.dtype).copy_(rows)
    if isinstance(index, slice):
        target[index] += rows
    else:
        target.index_add_(0, index, rows)
