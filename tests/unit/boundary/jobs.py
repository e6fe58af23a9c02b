"""What the workers of the pool run for the tests of the communicator. Values are integers, so that sums are exact."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import LoadedPlan, load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import BoundaryPlan, RankPlan, plan_boundary
from megatron_hetero.boundary.routes import DirectionPlan
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
        self._real = {
            name: getattr(dist, name) for name in ("all_to_all_single", "batch_isend_irecv", "all_gather_into_tensor")
        }

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

    def _all_gather_into_tensor(self, output: Tensor, mine: Tensor, **options: Any) -> Any:
        assert mine.nbytes == 64
        self.checks += 1
        return self._real["all_gather_into_tensor"](output, mine, **options)

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
    def part(self) -> RankPlan:
        return self.plan.rank(dist.get_rank())

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

    def check_gradient(self, found: Tensor, group: dist.ProcessGroup, total: Tensor | None = None) -> None:
        """Invariant: whole on every holder. Partial: the parts of the holders add up to it. `total`: that of all rows
        where it is another one than `total()`.
        """
        total = self.total() if total is None else total
        if self.plan.source.gradient == "partial":
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, (self.held, found), group=group)
            summed = torch.zeros_like(self.x)
            for ids, part in parts:
                summed[ids] += part
            found = summed[self.held]
        assert torch.equal(found, total[self.held])


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
        met["summed"] += sum("reduce" in direction.phases for direction in directions)
    return met


def _counted(communicator: BoundaryCommunicator, boundary: Boundary) -> tuple[Tensor, list[Spy]]:
    """Cross both ways, with the exchanges and bytes that the plan states."""
    loaded, part, spies = boundary.loaded, boundary.part, [Spy(), Spy()]
    assert part.backward is not None
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
        part = boundary.part
        communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float32, transport=torch.bfloat16)
        x = torch.randn(boundary.x.shape, generator=torch.Generator().manual_seed(seed))
        with Spy().watching() as forward:
            rows = communicator.forward(boundary.loaded, x[boundary.held])
        assert rows.dtype == torch.float32 and torch.equal(rows, x.bfloat16().float()[boundary.needed])
        with Spy().watching() as backward:
            gradient = communicator.backward(boundary.loaded, _fraction(boundary, x))
        _check_rounded(boundary, gradient, x)
        assert communicator.row_bytes == WIDTH * 2
        assert forward.sent == part.forward.sent_rows * WIDTH * 2 and part.backward is not None
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


def allocate(placement: Placement, seeds: range, transport: torch.dtype | None) -> set[str]:
    """Cross parts of a batch once all of it has crossed: nothing but the results may be allocated. Returns the phases
    that were met.
    """
    phases: set[str] = set()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        source, destination = random_boundary(rng, range(dist.get_world_size()), 64, placement)
        chosen = [rng.random(1 + source.ids.max()) < share for share in (1, 1, *rng.uniform(0.1, 0.6, 4))]
        boundaries = [Boundary.between(_subset(source, rows), _subset(destination, rows), seed) for rows in chosen]
        communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float32, transport=transport, check=False)
        _allocated(communicator, boundaries[:2])
        found, results = _allocated(communicator, boundaries[2:])
        assert found == results, f"seed {seed}: allocated {found} bytes for results of {results}"
        phases |= {phase for direction in boundaries[2].plan.directions.values() for phase in direction.phases}
        phases |= {"kept" for kept in (boundaries[2].loaded.forward.kept_from,) if isinstance(kept, Tensor)}
    return phases


def _subset(ownership: Ownership, chosen: np.ndarray) -> Ownership:
    """The rows that are chosen, in their order."""
    holders = zip(ownership.groups, ownership.rows, strict=True)
    return Ownership.of({group: rows[chosen[rows]] for group, rows in holders}, ownership.gradient)


def grow(sizes: range) -> int:
    """Allocations, of bytes that are no results, where rows that are no run cross in batches of growing size."""
    communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float32, check=False)
    boundaries = []
    for rows in sizes:
        ids, order = np.arange(2 * rows).reshape(2, rows), np.random.default_rng(rows).permutation(rows)
        source, destination = ({(0,): a, (1,): b, (2, 3): []} for a, b in (ids, ids[::-1, order]))
        boundaries.append(Boundary.between(Ownership.of(source), Ownership.of(destination)))
    found, results = _allocated(communicator, boundaries)
    return len(found) - len(results)


def _allocated(communicator: BoundaryCommunicator, boundaries: Sequence[Boundary]) -> tuple[list[int], list[int]]:
    """Sizes of everything that the allocator of torch handed out in crossings both ways, and those of their results."""
    from torch.profiler import ProfilerActivity, profile

    given = [(b.loaded, b.x[b.held].float(), b.gradient(dist.get_rank()).float()) for b in boundaries]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        arrived = [
            rows
            for plan, x, c in given
            for rows in (communicator.forward(plan, x), communicator.backward(plan, c))
        ]  # fmt: skip
    for boundary, rows in zip(boundaries, arrived[::2], strict=True):
        assert torch.equal(rows, boundary.x[boundary.needed].float())
    events: Any = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    found = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    return found, [rows.nbytes for rows in arrived if rows.nbytes]


# ----------------------------------------------------------------------------------------------- errors


def go_wrong(kind: str, placement: Placement, wrong_ranks: tuple[int, ...], check: bool) -> tuple[str, str, int]:
    """What the communicator says forward and backward where `wrong_ranks` pass it something wrong, and bytes sent.

    Afterwards the group must work as before.
    """
    boundary = Boundary.random(11, range(dist.get_world_size()), placement)
    communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float64, check=check)
    loaded, rows, gradient = boundary.loaded, boundary.x[boundary.held], boundary.gradient(dist.get_rank())
    if dist.get_rank() in wrong_ranks:
        loaded, rows, gradient = _spoilt(kind, boundary, rows, gradient)
    with Spy().watching() as spy:
        said = [_error(communicator.forward, loaded, rows), _error(communicator.backward, loaded, gradient)]
    _cross_well(communicator, boundary)
    return said[0], said[1], spy.sent


def _cross_well(communicator: BoundaryCommunicator, boundary: Boundary) -> None:
    rows = communicator.forward(boundary.loaded, boundary.x[boundary.held])
    assert torch.equal(rows, boundary.x[boundary.needed])
    gradient = communicator.backward(boundary.loaded, boundary.gradient(dist.get_rank()))
    boundary.check_gradient(gradient, communicator.group)


def _spoilt(kind: str, boundary: Boundary, rows: Tensor, gradient: Tensor) -> tuple[LoadedPlan, Tensor, Tensor]:
    if kind in ("plan", "part"):
        other = plan_boundary(Ownership.parse("0: 0-5"), Ownership.parse("1: 0-5"), 8).rank(0)
        neighbour = boundary.plan.rank((dist.get_rank() + 1) % dist.get_world_size())
        return load_plan(other if kind == "plan" else neighbour, CPU), rows, gradient
    spoil = {
        "width": lambda t: torch.cat([t, t[:, :1]], 1),
        "dims": lambda t: t[None],
        "dtype": lambda t: t.float(),
        "count": lambda t: torch.cat([t, torch.zeros(1, WIDTH, dtype=t.dtype)]),
    }[kind]
    return boundary.loaded, spoil(rows), spoil(gradient)


def _error(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return ""


SHARDS = "0: 0-3; 1: 4-7; 2: 8-11; 3: 12-15"
BATCHES = (
    "0: 4-7; 1: 0-3; 2: 12-15; 3: 8-11",
    "0: 8-11; 1: 12-15; 2: 0-3; 3: 4-7",
    "0: 12-15; 1: 0-3; 2: 4-7; 3: 8-11",
)
"""Destinations of batches that nobody can tell apart by the rows that it holds or needs. They go elsewhere."""


def mix_batches(of_ranks: tuple[int, ...]) -> tuple[str, str, int]:
    """What is said forward and backward where each rank has a plan of another one of `BATCHES`, and bytes sent."""
    boundaries = [Boundary.between(Ownership.parse(SHARDS), Ownership.parse(text)) for text in BATCHES]
    communicator, own = BoundaryCommunicator(world(), CPU, WIDTH, torch.float64), boundaries[of_ranks[dist.get_rank()]]
    with Spy().watching() as spy:
        said = [
            _error(communicator.forward, own.loaded, own.x[own.held]),
            _error(communicator.backward, own.loaded, own.gradient(dist.get_rank())),
        ]
    for boundary in boundaries:
        _cross_well(communicator, boundary)
    return said[0], said[1], spy.sent


def forward_only(check: bool) -> str:
    """What a communicator says of a plan without a way back, which it crosses forward."""
    boundary = Boundary.between(Ownership.parse(SHARDS), Ownership.parse(BATCHES[0]))
    communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float64, check=check)
    loaded = load_plan(boundary.plan.rank(dist.get_rank(), backward=False), CPU)
    assert torch.equal(communicator.forward(loaded, boundary.x[boundary.held]), boundary.x[boundary.needed])
    return _error(communicator.start_backward, loaded, boundary.gradient(dist.get_rank()))


# ---------------------------------------------------------------------------------------------- overlap


def trace_embedding(delay_s: float) -> dict[str, tuple[float, float]]:
    """Begin and end, in microseconds, of what rank 0 did while rank 1 came late by `delay_s`."""
    from torch.profiler import ProfilerActivity, profile, record_function

    boundary = Boundary.between(Ownership.parse("0: 0-4; 1: 5-9"), Ownership.parse("0: 5-9; 1: 0-4"))
    communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float64, check=False)  # which would wait for rank 1
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
