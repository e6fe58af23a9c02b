"""Executes boundary plans: packs rows by index, exchanges them, unpacks by index. No decisions here.

A crossing is started and waited for in two calls, so that its first exchange runs beside whatever the caller does in
between (a later stage starts when the one before it has arrived):

    crossing = communicator.start_forward(plan, rows)
    ...                                    # embed the tokens
    rows = crossing.wait()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.plan import DirectionPlan, Exchange, RankPlan

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

    ranks: tuple[int, ...]
    point_to_point: bool
    forward: LoadedDirection
    backward: LoadedDirection


def load_plan(plan: RankPlan, device: torch.device) -> LoadedPlan:
    """Move the indices of `plan` to the device, without waiting for it."""
    return LoadedPlan(
        plan.ranks, plan.point_to_point, _load_direction(plan.forward, device), _load_direction(plan.backward, device)
    )


class BoundaryCommunicator:
    """Moves rows of `width` elements of `dtype` between the ranks of `group`, which are those of every plan, ascending.

    Args:
        transport: what rows are rounded to on the wire, such as bfloat16 for fp32 rows; None sends them as they are.
            All rows are rounded, also those that stay, so that copies of a row are equal.
        check: whether all ranks tell each other, in one small all-reduce beside each crossing, that their rows fit the
            plan, so that an error of one is raised on all. On a GPU this waits for the device. Where it is off, only
            the rank with the error raises it.
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
    ):
        self.group = group
        self.device = device
        self.width = width
        self.dtype = dtype
        self.transport = transport or dtype
        self.check = check
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._buffers = _Buffers(width, self.transport, device)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire."""
        return self.width * self.transport.itemsize

    def forward(self, plan: LoadedPlan, rows: Tensor) -> Tensor:
        """Source rows of this rank, [held, width], to the rows that it needs, [needed, width]. Not differentiable.

        Raises:
            ValueError: on every rank, if the rows of any do not fit the plan (see `check`).
        """
        return self.start_forward(plan, rows).wait()

    def backward(self, plan: LoadedPlan, grads: Tensor) -> Tensor:
        """The adjoint: gradients of the rows that this rank needed to gradients of those that it held."""
        return self.start_backward(plan, grads).wait()

    def start_forward(self, plan: LoadedPlan, rows: Tensor) -> Crossing:
        """Start `forward`. The rows must not change until it has been waited for."""
        return self._start("forward", plan, plan.forward, rows)

    def start_backward(self, plan: LoadedPlan, grads: Tensor) -> Crossing:
        """Start `backward`. The gradients must not change until it has been waited for."""
        return self._start("backward", plan, plan.backward, grads)

    @torch.no_grad()
    def _start(self, name: str, plan: LoadedPlan, direction: LoadedDirection, rows: Tensor) -> Crossing:
        problem, able = self._problem(name, plan, direction, rows), plan.ranks == self._ranks
        if problem and not self.check:
            raise ValueError(problem)
        verdict = _Verdict.ask(problem, able, self.group, self.device) if self.check else None
        if problem and not able:  # It does not know what the others expect of it.
            raise ValueError(problem)
        if problem:  # Take part all the same, so that nobody waits for ever; all will know when it has arrived.
            rows = torch.zeros(direction.held, self.width, dtype=self.dtype, device=self.device)
        exchange = _point_to_point if plan.point_to_point else _all_to_all
        return Crossing(direction, rows.detach(), self, exchange, verdict)

    def _problem(self, name: str, plan: LoadedPlan, direction: LoadedDirection, rows: Tensor) -> str | None:
        """What is wrong with this rank's rows, if anything."""
        if plan.ranks != self._ranks:
            found, expected = f"a plan for ranks {plan.ranks}", f"one for the communicator's ranks {self._ranks}"
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


class Crossing:
    """Rows on their way. `wait` returns those that arrive; call it once."""

    def __init__(
        self,
        direction: LoadedDirection,
        rows: Tensor,
        communicator: BoundaryCommunicator,
        exchange: _ExchangeFunction,
        verdict: _Verdict | None,
    ):
        self._communicator, self._exchange, self._verdict = communicator, exchange, verdict
        self._dtype = rows.dtype
        new = torch.empty if direction.complete else torch.zeros
        self._result = new(direction.rows, rows.shape[1], dtype=communicator.transport, device=rows.device)
        self._course = self._stages(direction, rows)
        next(self._course, None)

    @torch.no_grad()
    def wait(self) -> Tensor:
        """Wait for the rows, [needed, width]. On a GPU the current stream waits, not the host."""
        if self._verdict is not None:
            self._verdict.require_all_able()
        for _ in self._course:
            pass
        if self._verdict is not None:
            self._verdict.require()
        return self._result.to(self._dtype)

    def _stages(self, direction: LoadedDirection, rows: Tensor) -> Iterator[None]:
        """Everything that happens, with a yield wherever an exchange is in the air."""
        if direction.reduce is not None:
            sums = rows.clone()
            flight = self._launch(direction.reduce, rows.to(self._result.dtype), sums)
            yield
            flight.land()
            rows = sums
        rows = rows.to(self._result.dtype)
        flight = None if direction.scatter is None else self._launch(direction.scatter, rows, self._result)
        _put(self._result, direction.kept_to, _take(rows, direction.kept_from))
        if flight is not None:
            yield
            flight.land()
        if direction.gather is not None:
            flight = self._launch(direction.gather, self._result, self._result)
            yield
            flight.land()

    def _launch(self, plan: LoadedExchange, source: Tensor, target: Tensor) -> _Flight:
        return _Flight(plan, source, target, self._communicator, self._exchange)


class _Flight:
    """One exchange in the air."""

    def __init__(
        self,
        plan: LoadedExchange,
        source: Tensor,
        target: Tensor,
        communicator: BoundaryCommunicator,
        exchange: _ExchangeFunction,
    ):
        self._plan, self._target, self._buffers = plan, target, communicator._buffers
        self._borrowed: list[Tensor] = []
        sent = self._pack(source)
        # A run of rows is received where it belongs; others, and what is to be added, go through a buffer.
        self._direct = isinstance(plan.receive, slice) and plan.stage != "reduce"
        self._received = target[plan.receive] if self._direct else self._borrow(sum(plan.receive_counts))
        self._works = exchange(self._received, sent, plan, communicator.group)

    def land(self) -> None:
        """Wait, and put the rows where they belong."""
        for work in self._works:
            work.wait()
        if self._plan.stage == "reduce":
            _add(self._target, self._plan.receive, self._received)
        elif not self._direct:
            _put(self._target, self._plan.receive, self._received)
        for buffer in self._borrowed:
            self._buffers.give_back(buffer)

    def _pack(self, source: Tensor) -> Tensor:
        if isinstance(self._plan.send, slice):
            return source[self._plan.send].contiguous()
        return torch.index_select(source, 0, self._plan.send, out=self._borrow(len(self._plan.send)))

    def _borrow(self, rows: int) -> Tensor:
        buffer = self._buffers.take(rows)
        self._borrowed.append(buffer)
        return buffer[:rows]


class _Buffers:
    """Buffers of rows that are lent and used again; a crossing of usual size allocates nothing but its result."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device):
        self._new = lambda rows: torch.empty(rows, width, dtype=dtype, device=device)
        self._free: list[Tensor] = []

    def take(self, rows: int) -> Tensor:
        """A buffer of at least so many rows."""
        fitting = [i for i, buffer in enumerate(self._free) if len(buffer) >= rows]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        if self._free:  # Replace the smallest, so that the number of buffers stays that of crossings in the air.
            self._free.pop(min(range(len(self._free)), key=lambda i: len(self._free[i])))
        return self._new(rows)

    def give_back(self, buffer: Tensor) -> None:
        """Lend it to others."""
        self._free.append(buffer)


class _Verdict:
    """Whether the rows of all ranks fit their plans, agreed on by all.

    The flag is 0 where they do, 1 where a rank has a problem, 2 + rank where that rank cannot even take part.
    """

    def __init__(self, problem: str | None, flag: Tensor, work: Any, group: dist.ProcessGroup):
        self._problem, self._flag, self._work, self._group = problem, flag, work, group

    @classmethod
    def ask(cls, problem: str | None, able: bool, group: dist.ProcessGroup, device: torch.device) -> _Verdict:
        """Start to agree."""
        value = int(problem is not None) if able else 2 + dist.get_rank()
        flag = torch.tensor(value, dtype=torch.int32, device=device)
        return cls(problem, flag, dist.all_reduce(flag, dist.ReduceOp.MAX, group=group, async_op=True), group)

    def require_all_able(self) -> None:
        """Raise `ValueError` where a rank takes no part, rather than wait for it."""
        self._work.wait()
        if (value := int(self._flag.item())) >= 2:
            raise ValueError(
                f"boundary: rank {value - 2} takes no part, because its plan is for other ranks than the "
                f"communicator's {tuple(dist.get_process_group_ranks(self._group))}; see what it says itself"
            )

    def require(self) -> None:
        """Raise `ValueError` on every rank where there is a problem on any."""
        if not self._flag.item():
            return
        problems: list[Any] = [None] * self._group.size()
        dist.all_gather_object(problems, self._problem, group=self._group)
        raise ValueError("\n".join(filter(None, problems)))


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
    tensor = torch.from_numpy(index)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _take(rows: Tensor, index: Index) -> Tensor:
    return rows[index] if isinstance(index, slice) else rows.index_select(0, index)


def _put(target: Tensor, index: Index, rows: Tensor) -> None:
    if isinstance(index, slice):
        target[index] = rows
    else:
        target.index_copy_(0, index, rows)


def _add(target: Tensor, index: Index, rows: Tensor) -> None:
    if isinstance(index, slice):
        target[index] += rows
    else:
        target.index_add_(0, index, rows.to(target.dtype))
