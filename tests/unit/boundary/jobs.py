"""What the workers of the pool run for the tests of the communicator. Values are integers, so that sums are exact."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.communicator import BoundaryCommunicator, LoadedPlan, load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import BoundaryPlan, DirectionPlan, plan_boundary
from tests.support.pool import world
from tests.unit.boundary.cases import Placement, random_boundary

WIDTH = 3
CPU = torch.device("cpu")


class Spy:
    """Inside, counts the exchanges of this rank, and the bytes that leave and reach it."""

    def __init__(self) -> None:
        self.all_to_alls, self.batches, self.checks = 0, 0, 0
        self.sent, self.received = 0, 0
        self.staging: set[int] = set()
        self._real = {name: getattr(dist, name) for name in ("all_to_all_single", "batch_isend_irecv", "all_reduce")}

    @contextlib.contextmanager
    def watching(self) -> Iterator[Spy]:
        """Inside, this is what runs in place of the functions of `torch.distributed`."""
        with contextlib.ExitStack() as stack:
            for name in self._real:
                stack.enter_context(mock.patch.object(dist, name, getattr(self, f"_{name}")))
            yield self

    def _all_to_all_single(
        self, output: Tensor, sent: Tensor, receive: list[int], send: list[int], **options: Any
    ) -> Any:
        assert len(sent) == sum(send) and len(output) == sum(receive)
        assert send[options["group"].rank()] == receive[options["group"].rank()] == 0
        self.all_to_alls += 1
        self._count(sent=sent, received=output)
        return self._real["all_to_all_single"](output, sent, receive, send, **options)

    def _batch_isend_irecv(self, batch: list[dist.P2POp]) -> Any:
        self.batches += 1
        for operation in batch:
            assert operation.peer != dist.get_rank() and len(operation.tensor)
            self._count(**{"sent" if operation.op is dist.isend else "received": operation.tensor})
        return self._real["batch_isend_irecv"](batch)

    def _all_reduce(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        assert tensor.nbytes == 4
        self.checks += 1
        return self._real["all_reduce"](tensor, *args, **options)

    def _count(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, getattr(self, name) + tensor.nbytes)


@dataclass(frozen=True)
class Boundary:
    """A boundary on a group of ranks, seen from this one, with a value and a gradient for each row."""

    plan: BoundaryPlan
    loaded: LoadedPlan
    x: Tensor
    seed: int

    @classmethod
    def random(cls, seed: int, ranks: Sequence[int], placement: Placement, most_rows: int = 40) -> Boundary:
        """The same on all ranks."""
        rng = np.random.default_rng(seed)
        rows = int(rng.integers(0, most_rows)) * bool(seed % 8)
        return cls.between(*random_boundary(rng, ranks, rows, placement), seed)

    @classmethod
    def between(cls, source: Ownership, destination: Ownership, seed: int = 0) -> Boundary:
        plan = plan_boundary(source, destination, WIDTH * 8)
        size = 1 + int(source.ids.max(initial=0))
        return cls(plan, load_plan(plan.rank(dist.get_rank()), CPU), _integers(size, seed), seed)

    @property
    def held(self) -> np.ndarray:
        return self.plan.source.held_by(dist.get_rank())

    @property
    def needed(self) -> np.ndarray:
        return self.plan.destination.held_by(dist.get_rank())

    def gradient(self, rank: int) -> Tensor:
        """Of each row that `rank` needs: another part on each rank, or the same on all."""
        seed = self.seed + 1000 * (1 + rank if self.plan.destination.gradient == "partial" else 1)
        return _integers(len(self.x), seed)[self.plan.destination.held_by(rank)]

    def total(self) -> Tensor:
        """The whole gradient of each row, 0 where nobody needs it."""
        total = torch.zeros_like(self.x)
        for rank in self.plan.destination.ranks:
            ids, gradient = self.plan.destination.held_by(rank), self.gradient(rank)
            total[ids] = gradient + (total[ids] if self.plan.destination.gradient == "partial" else 0)
        return total

    def check_gradient(self, found: Tensor, group: dist.ProcessGroup) -> None:
        """Invariant: whole on every holder. Partial: the parts of the holders add up to it."""
        if self.plan.source.gradient == "partial":
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, (self.held, found), group=group)
            summed = torch.zeros_like(self.x)
            for ids, part in parts:
                summed[ids] += part
            found = summed[self.held]
        assert torch.equal(found, self.total()[self.held])


def _integers(rows: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-50, 50, (rows, WIDTH)).astype(np.float64))


def cross(ranks: tuple[int, ...], placement: Placement, seeds: range) -> dict[str, int]:
    """Cross random boundaries over `ranks`, both ways, and check everything; returns what was met on the way."""
    group: Any = world() if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))
    met = {"rows sent": 0, "rows kept": 0, "no rows": 0, "all-to-alls": 0, "batches": 0, "summed": 0}
    if dist.get_rank() not in ranks:
        return met
    for seed in seeds:
        boundary = Boundary.random(seed, ranks, placement)
        communicator = BoundaryCommunicator(group, CPU, WIDTH, torch.float64, check=bool(seed % 2))
        rows, spies = _counted(communicator, boundary)
        assert torch.equal(rows, boundary.x[boundary.needed])
        directions = boundary.plan.directions.values()
        met["rows sent"] += sum(spy.sent for spy in spies)
        met["rows kept"] += len(np.intersect1d(boundary.held, boundary.needed))
        met["no rows"] += not len(boundary.plan.source.ids)
        met["all-to-alls"] += sum(spy.all_to_alls for spy in spies)
        met["batches"] += sum(spy.batches for spy in spies)
        met["summed"] += sum("reduce" in direction.stages for direction in directions)
    return met


def _counted(communicator: BoundaryCommunicator, boundary: Boundary) -> tuple[Tensor, list[Spy]]:
    """Cross both ways, with the exchanges and bytes that the plan states."""
    loaded, part, spies = boundary.loaded, boundary.plan.rank(dist.get_rank()), [Spy(), Spy()]
    with spies[0].watching():
        rows = communicator.forward(loaded, boundary.x[boundary.held])
    with spies[1].watching():
        gradient = communicator.backward(loaded, boundary.gradient(dist.get_rank()))
    for spy, direction in zip(spies, (part.forward, part.backward), strict=True):
        _check_counts(spy, direction, loaded.point_to_point, communicator)
    boundary.check_gradient(gradient, communicator.group)
    return rows, spies


def _check_counts(spy: Spy, plan: DirectionPlan, point_to_point: bool, communicator: BoundaryCommunicator) -> None:
    busy = sum(len(e.send) + len(e.receive) > 0 for e in plan.exchanges)
    assert (spy.all_to_alls, spy.batches) == ((0, busy) if point_to_point else (plan.collectives, 0))
    assert spy.checks == int(communicator.check)
    assert spy.sent == plan.sent_rows * communicator.row_bytes
    assert spy.received == plan.received_rows * communicator.row_bytes


# ------------------------------------------------------------------------------------------- transport


def round_on_the_way(ranks: tuple[int, ...], placement: Placement, seeds: range) -> int:
    """Cross with fp32 rows that travel as bf16; returns the bytes sent."""
    sent = 0
    for seed in seeds:
        boundary = Boundary.random(seed, ranks, placement)
        part = boundary.plan.rank(dist.get_rank())
        communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float32, transport=torch.bfloat16)
        x = torch.randn(boundary.x.shape, generator=torch.Generator().manual_seed(seed))
        with Spy().watching() as forward:
            rows = communicator.forward(boundary.loaded, x[boundary.held])
        assert rows.dtype == torch.float32 and torch.equal(rows, x.bfloat16().float()[boundary.needed])
        with Spy().watching() as backward:
            gradient = communicator.backward(boundary.loaded, _fraction(boundary, x))
        _check_rounded(boundary, gradient, x)
        assert communicator.row_bytes == WIDTH * 2
        assert forward.sent == part.forward.sent_rows * WIDTH * 2
        assert backward.sent == part.backward.sent_rows * WIDTH * 2
        sent += forward.sent + backward.sent
    return sent


def _fraction(boundary: Boundary, x: Tensor) -> Tensor:
    """A gradient of rows that needs rounding: another one on each rank where it is a part of a sum."""
    summed = boundary.plan.destination.gradient == "partial"
    return x[boundary.needed] * (1 + dist.get_rank() if summed else 1)


def _check_rounded(boundary: Boundary, gradient: Tensor, x: Tensor) -> None:
    """What arrives is bf16, equal on all holders; where nothing is added up it is the rounded gradient."""
    assert gradient.dtype == torch.float32 and torch.equal(gradient, gradient.bfloat16().float())
    copies: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(copies, gradient)
    source, destination = boundary.plan.source, boundary.plan.destination
    if source.gradient == "partial":
        return
    for group in source.groups:
        places = [boundary.plan.ranks.index(rank) for rank in group]
        assert all(torch.equal(copies[place], copies[places[0]]) for place in places)
    if destination.gradient == "invariant":
        needed = np.isin(boundary.held, destination.ids)
        assert torch.equal(gradient, x.bfloat16().float()[boundary.held] * torch.from_numpy(needed)[:, None])


# --------------------------------------------------------------------------------- several at once, buffers


def two_at_once(ranks: tuple[int, ...], placement: Placement, seeds: range, last_first: bool) -> None:
    """Two crossings of one communicator in the air, waited for in either order."""
    communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float64)
    for seed in seeds:
        boundaries = [Boundary.random(s, ranks, placement) for s in (seed, seed + 500)]
        crossings = [communicator.start_forward(b.loaded, b.x[b.held]) for b in boundaries]
        back = [communicator.start_backward(b.loaded, b.gradient(dist.get_rank())) for b in boundaries]
        for i in (1, 0) if last_first else (0, 1):
            assert torch.equal(crossings[i].wait(), boundaries[i].x[boundaries[i].needed])
            boundaries[i].check_gradient(back[i].wait(), communicator.group)


def count_allocations(source: str, destination: str, crossings: int) -> list[int]:
    """Tensors made by each of so many crossings of the same size."""
    boundary = Boundary.between(Ownership.parse(source), Ownership.parse(destination))
    communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float64, check=False)
    counts = []
    for _ in range(crossings):
        with mock.patch.object(torch, "empty", wraps=torch.empty) as empty:
            rows = communicator.forward(boundary.loaded, boundary.x[boundary.held])
        assert torch.equal(rows, boundary.x[boundary.needed])
        counts.append(empty.call_count)
    return counts


# ----------------------------------------------------------------------------------------------- errors


def go_wrong(kind: str, placement: Placement, wrong_ranks: tuple[int, ...], check: bool) -> tuple[str, str, int]:
    """What the communicator says forward and backward where `wrong_ranks` pass it something wrong, and bytes sent.

    Afterwards the group must work as before.
    """
    ranks = tuple(range(dist.get_world_size()))
    boundary = Boundary.random(11, ranks, placement)
    communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float64, check=check)
    loaded, rows, gradient = boundary.loaded, boundary.x[boundary.held], boundary.gradient(dist.get_rank())
    if dist.get_rank() in wrong_ranks:
        loaded, rows, gradient = _spoilt(kind, loaded, rows, gradient)
    with Spy().watching() as spy:
        said = [_error(communicator.forward, loaded, rows), _error(communicator.backward, loaded, gradient)]
    assert torch.equal(communicator.forward(boundary.loaded, boundary.x[boundary.held]), boundary.x[boundary.needed])
    boundary.check_gradient(
        communicator.backward(boundary.loaded, boundary.gradient(dist.get_rank())), communicator.group
    )
    return said[0], said[1], spy.sent


def _spoilt(kind: str, loaded: LoadedPlan, rows: Tensor, gradient: Tensor) -> tuple[LoadedPlan, Tensor, Tensor]:
    if kind == "plan":
        other = plan_boundary(Ownership.parse("0: 0-5"), Ownership.parse("1: 0-5"), 8).rank(0)
        return load_plan(other, CPU), rows, gradient
    spoil = {
        "width": lambda t: torch.cat([t, t[:, :1]], 1),
        "dims": lambda t: t[None],
        "dtype": lambda t: t.float(),
        "count": lambda t: torch.cat([t, torch.zeros(1, WIDTH, dtype=t.dtype)]),
    }[kind]
    return loaded, spoil(rows), spoil(gradient)


def _error(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return ""


def take_no_part(placement: Placement, absent: int) -> tuple[str, float]:
    """What each rank says where `absent` has the plan of other ranks, and the seconds that this took."""
    group: Any = dist.new_group(timeout=timedelta(seconds=4))  # what is left in the air ends with it
    boundary = Boundary.random(11, range(dist.get_world_size()), placement)
    communicator = BoundaryCommunicator(group, CPU, WIDTH, torch.float64)
    loaded, rows = boundary.loaded, boundary.x[boundary.held]
    if dist.get_rank() == absent:
        loaded, *_ = _spoilt("plan", loaded, rows, rows)
    begin = time.monotonic()
    return _error(communicator.forward, loaded, rows), time.monotonic() - begin


# ---------------------------------------------------------------------------------------------- overlap


def trace_embedding(delay_s: float) -> dict[str, tuple[float, float]]:
    """Begin and end, in microseconds, of what rank 0 did while rank 1 came late by `delay_s`."""
    from torch.profiler import ProfilerActivity, profile, record_function

    boundary = Boundary.between(Ownership.parse("0: 0-4; 1: 5-9"), Ownership.parse("0: 5-9; 1: 0-4"))
    communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float64)
    rows = boundary.x[boundary.held]
    communicator.forward(boundary.loaded, rows)  # connections are made on first use
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(delay_s)
        crossing = communicator.start_forward(boundary.loaded, rows)
        with record_function("text embedding"):
            torch.nn.functional.embedding(torch.arange(64), torch.ones(64, 16))
        assert torch.equal(crossing.wait(), boundary.x[boundary.needed])
    wanted = ("c10d::alltoall_base_", "gloo:all_to_all", "text embedding")
    events = [event for event in profiler.events() or [] if event.name in wanted]
    assert sorted(event.name for event in events) == sorted(wanted)
    return {event.name: (event.time_range.start, event.time_range.end) for event in events}
