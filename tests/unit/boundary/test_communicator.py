"""The boundary on real process groups: exact both ways, with the exchanges and bytes that the plan states."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import LoadedPlan, load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.boundary.routes import DirectionPlan
from megatron_hetero.groups.platform import CPU
from tests.support.matrix import thinned
from tests.support.pool import world
from tests.support.ranks import on_ranks
from tests.support.sizes import received_rows, sent_rows
from tests.unit.boundary.cases import PLACEMENTS, Placement, random_boundary
from tests.unit.boundary.rank_view import WIDTH, Boundary, Spy

ALL_4, ALL_8 = tuple(range(4)), tuple(range(8))
RANKS = [(4, ALL_4), (8, ALL_8), (8, (1, 3, 6)), (8, (0, 2, 5, 7)), (8, (0, 1, 4, 5, 7))]


def gathered(value: Any, group: Any = None) -> list[Any]:
    """What each rank gives."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def communicator_of(dtype: torch.dtype = torch.float64, **options: Any) -> BoundaryCommunicator:
    return BoundaryCommunicator(world(), CPU, WIDTH, dtype, **options)


@pytest.mark.parametrize("placement, of_pool, ranks", thinned(((p, *ranks) for p in PLACEMENTS for ranks in RANKS), 3))
@on_ranks("of_pool")
def test_random_ownerships(of_pool: int, ranks: tuple[int, ...], placement: Placement) -> None:
    group: Any = world() if len(ranks) == of_pool else dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return
    met = dict.fromkeys(("rows sent", "rows kept", "no rows", "all-to-alls", "batches", "summed"), 0)
    for seed in range(16):
        boundary = Boundary.random(seed, ranks, placement)
        communicator = BoundaryCommunicator(group, CPU, WIDTH, torch.float64, check=bool(seed % 2))
        rows, spies = counted(communicator, boundary)
        assert torch.equal(rows, boundary.x[boundary.needed])
        met["rows sent"] += sum(spy.sent for spy in spies)
        met["rows kept"] += len(np.intersect1d(boundary.held, boundary.needed))
        met["no rows"] += not len(boundary.plan.source.ids)
        met["all-to-alls"] += sum(spy.all_to_alls for spy in spies)
        met["batches"] += sum(spy.batches for spy in spies)
        met["summed"] += sum("reduce" in direction.phases for direction in boundary.plan.directions.values())
    total = {what: sum(rank[what] for rank in gathered(met, group)) for what in met}
    assert total["no rows"] == 2 * len(ranks)
    assert total["rows sent"] and total["summed"]
    assert (total["rows kept"] > 0) == (placement != "disjoint")
    # Mixed sides may happen to have no rank in common.
    assert bool(total["all-to-alls"]) == (placement != "disjoint") and (placement != "disjoint" or total["batches"])


def counted(communicator: BoundaryCommunicator, boundary: Boundary) -> tuple[Tensor, list[Spy]]:
    """Cross both ways, with the exchanges and bytes that the plan states."""
    loaded, part, spies = boundary.loaded, boundary.part, [Spy(), Spy()]
    assert part.backward is not None
    with spies[0].watching():
        rows = communicator.start_forward(loaded, boundary.x[boundary.held]).wait()
    with spies[1].watching():
        gradient = communicator.start_backward(loaded, boundary.gradient(dist.get_rank())).wait()
    for spy, direction in zip(spies, (part.forward, part.backward), strict=True):
        check_counts(spy, direction, loaded.point_to_point, communicator)
    boundary.check_gradient(gradient, communicator.group)
    return rows, spies


def check_counts(
    spy: Spy, plan: DirectionPlan[np.ndarray], point_to_point: bool, communicator: BoundaryCommunicator
) -> None:
    busy = sum(len(e.send) + len(e.receive) > 0 for e in plan.exchanges)
    assert (spy.all_to_alls, spy.batches) == ((0, busy) if point_to_point else (len(plan.exchanges), 0))
    assert spy.checks == int(communicator.check)
    assert spy.sent == sent_rows(plan) * communicator.row_bytes
    assert spy.received == received_rows(plan) * communicator.row_bytes


# ------------------------------------------------------------------------------------------- transport


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_bf16_on_the_way_rounds_all_rows_equally(placement: Placement) -> None:
    sent = 0
    for seed in range(1, 21):
        boundary, spies = Boundary.random(seed, ALL_4, placement), (Spy(), Spy())
        part, communicator = boundary.part, communicator_of(torch.float32, transport=torch.bfloat16)
        x = torch.randn(boundary.x.shape, generator=torch.Generator().manual_seed(seed))
        with spies[0].watching():
            rows = communicator.start_forward(boundary.loaded, x[boundary.held]).wait()
        assert rows.dtype == torch.float32 and torch.equal(rows, x.bfloat16().float()[boundary.needed])
        # A gradient that needs rounding: another one on each rank where it is a part of a sum.
        scale = 1 + dist.get_rank() if boundary.plan.destination.gradient == "partial" else 1
        with spies[1].watching():
            gradient = communicator.start_backward(boundary.loaded, x[boundary.needed] * scale).wait()
        check_rounded(boundary, gradient, x)
        assert communicator.row_bytes == WIDTH * 2
        assert spies[0].sent == sent_rows(part.forward) * WIDTH * 2 and part.backward is not None
        assert spies[1].sent == sent_rows(part.backward) * WIDTH * 2
        sent += spies[0].sent + spies[1].sent
    assert sum(gathered(sent))


def check_rounded(boundary: Boundary, gradient: Tensor, x: Tensor) -> None:
    """What arrives is bf16, equal on all holders; where nothing is added up it is the rounded gradient."""
    assert gradient.dtype == torch.float32 and torch.equal(gradient, gradient.bfloat16().float())
    copies, source, destination = gathered(gradient), boundary.plan.source, boundary.plan.destination
    if source.gradient == "partial":
        return
    for group in source.groups:
        places = [boundary.plan.ranks.index(rank) for rank in group]
        assert all(torch.equal(copies[place], copies[places[0]]) for place in places)
    if destination.gradient == "invariant":
        needed = np.isin(boundary.held, destination.ids)
        assert torch.equal(gradient, x.bfloat16().float()[boundary.held] * torch.from_numpy(needed)[:, None])


# --------------------------------------------------------------------------------- several at once, buffers


@pytest.mark.parametrize("last_first, placement", thinned(product([False, True], PLACEMENTS), 2))
@on_ranks(4)
def test_two_crossings_at_once(placement: Placement, last_first: bool) -> None:
    communicator = communicator_of()
    for seed in range(1, 16):
        boundaries = [Boundary.random(s, ALL_4, placement) for s in (seed, seed + 500)]
        crossings = [communicator.start_forward(b.loaded, b.x[b.held]) for b in boundaries]
        back = [communicator.start_backward(b.loaded, b.gradient(dist.get_rank())) for b in boundaries]
        for i in (1, 0) if last_first else (0, 1):
            assert torch.equal(crossings[i].wait(), boundaries[i].x[boundaries[i].needed])
            boundaries[i].check_gradient(back[i].wait(), communicator.group)


@pytest.mark.parametrize("transport, placement", thinned(product([None, torch.bfloat16], PLACEMENTS), 2))
@on_ranks(4)
def test_crossings_no_larger_than_before_allocate_their_results_only(
    placement: Placement, transport: torch.dtype | None
) -> None:
    """Parts of a batch, once all of it has crossed."""
    phases: set[str] = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        source, destination = random_boundary(rng, ALL_4, 64, placement)
        chosen = [rng.random(1 + source.ids.max()) < share for share in (1, 1, *rng.uniform(0.1, 0.6, 4))]
        boundaries = [Boundary.between(subset(source, rows), subset(destination, rows), seed) for rows in chosen]
        communicator = communicator_of(torch.float32, transport=transport, check=False)
        allocated(communicator, boundaries[:2])
        found, results = allocated(communicator, boundaries[2:])
        assert found == results, f"seed {seed}: allocated {found} bytes for results of {results}"
        phases |= {phase for direction in boundaries[2].plan.directions.values() for phase in direction.phases}
        phases |= {"kept" for kept in (boundaries[2].loaded.forward.local_from,) if isinstance(kept, Tensor)}
    assert set().union(*gathered(phases)) == {"reduce", "scatter", "gather"} | (
        {"kept"} if placement != "disjoint" else set()
    )


def subset(ownership: Ownership, chosen: np.ndarray) -> Ownership:
    """The rows that are chosen, in their order."""
    holders = zip(ownership.groups, ownership.rows, strict=True)
    return Ownership.of({group: rows[chosen[rows]] for group, rows in holders}, ownership.gradient)


@on_ranks(4)
def test_buffers_grow_in_large_steps() -> None:
    """Where rows that are no run cross in batches of growing size."""
    communicator, boundaries = communicator_of(torch.float32, check=False), []
    for rows in range(1, 201):
        ids, order = np.arange(2 * rows).reshape(2, rows), np.random.default_rng(rows).permutation(rows)
        source, destination = ({(0,): a, (1,): b, (2, 3): []} for a, b in (ids, ids[::-1, order]))
        boundaries.append(Boundary.between(Ownership.of(source), Ownership.of(destination)))
    found, results = allocated(communicator, boundaries)
    # Two buffers, for what leaves and what arrives, of up to 200 rows of 12 bytes, which is less than 2 ** 12.
    assert 0 < max(gathered(len(found) - len(results))) <= 2 * 12


def allocated(communicator: BoundaryCommunicator, boundaries: Sequence[Boundary]) -> tuple[list[int], list[int]]:
    """Sizes of everything that the allocator of torch handed out in crossings both ways, and those of their results."""
    given = [(b.loaded, b.x[b.held].float(), b.gradient(dist.get_rank()).float()) for b in boundaries]
    arrived: list[Tensor] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for plan, x, c in given:
            arrived += [communicator.start_forward(plan, x).wait(), communicator.start_backward(plan, c).wait()]
    for boundary, rows in zip(boundaries, arrived[::2], strict=True):
        assert torch.equal(rows, boundary.x[boundary.needed].float())
    events: Any = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    found = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    return found, [rows.nbytes for rows in arrived if rows.nbytes]


# ----------------------------------------------------------------------------------------------- errors

FIX = r"Give .* plan .*"
KINDS = {
    "width": r"rows of shape \(\d+, 4\), expected \[rows, 3\], .*",
    "dims": r"rows of shape \(1, \d+, 3\), expected \[rows, 3\], .*",
    "dtype": r"rows of torch.float32, expected torch.float64, as .*",
    "count": r"\d+ rows, expected the \d+ that this rank holds in the plan\. Plan with the ids .*",
    "part": rf"the plan of rank \d, expected its own\. {FIX}",
    "plan": rf"a plan for ranks \(0, 1\), expected one for the communicator's ranks \(0, 1, 2, 3\)\. {FIX}",
}


def error(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return ""


def said_of(kind: str, placement: Placement, wrong_ranks: tuple[int, ...], check: bool) -> tuple[str, str]:
    """What the communicator says forward and backward where `wrong_ranks` pass it something wrong. Nothing is sent, and
    the group works afterwards.
    """
    boundary, communicator, spy = Boundary.random(11, ALL_4, placement), communicator_of(check=check), Spy()
    loaded, rows, gradient = boundary.loaded, boundary.x[boundary.held], boundary.gradient(dist.get_rank())
    if dist.get_rank() in wrong_ranks:
        loaded, rows, gradient = spoilt(kind, boundary, rows, gradient)
    with spy.watching():
        said = error(communicator.start_forward, loaded, rows), error(communicator.start_backward, loaded, gradient)
    assert spy.sent == 0
    cross_well(communicator, boundary)
    return said


def cross_well(communicator: BoundaryCommunicator, boundary: Boundary) -> None:
    rows = communicator.start_forward(boundary.loaded, boundary.x[boundary.held]).wait()
    assert torch.equal(rows, boundary.x[boundary.needed])
    gradient = communicator.start_backward(boundary.loaded, boundary.gradient(dist.get_rank())).wait()
    boundary.check_gradient(gradient, communicator.group)


def spoilt(kind: str, boundary: Boundary, rows: Tensor, gradient: Tensor) -> tuple[LoadedPlan, Tensor, Tensor]:
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


def assert_says(message: str, direction: str, rank: int, what: str) -> None:
    assert re.fullmatch(f"boundary {direction} on rank {rank}: found {what}", message), message


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_what_is_wrong_on_one_rank_is_raised_on_all(kind: str, placement: Placement) -> None:
    for direction, message in zip(("forward", "backward"), said_of(kind, placement, (2,), True), strict=True):
        assert_says(message, direction, 2, KINDS[kind])
        assert len(set(gathered(message))) == 1


@on_ranks(4)
def test_the_first_rank_s_error_is_reported() -> None:
    assert_says(said_of("width", "mixed", (1, 3), True)[0], "forward", 1, KINDS["width"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_unchecked_errors_are_raised_before_anything_is_sent(kind: str, placement: Placement) -> None:
    for direction, message in zip(("forward", "backward"), said_of(kind, placement, ALL_4, False), strict=True):
        assert_says(message, direction, dist.get_rank(), KINDS[kind])


SHARDS = "0: 0-3; 1: 4-7; 2: 8-11; 3: 12-15"
BATCHES = (
    "0: 4-7; 1: 0-3; 2: 12-15; 3: 8-11",
    "0: 8-11; 1: 12-15; 2: 0-3; 3: 4-7",
    "0: 12-15; 1: 0-3; 2: 4-7; 3: 8-11",
)
"""Destinations of batches that nobody can tell apart by the rows that it holds or needs. They go elsewhere."""


@pytest.mark.parametrize(
    "of_ranks, other", [((0, 0, 1, 0), 2), ((1, 0, 0, 1), 1), ((0, 2, 1, 0), 1), ((1, 1, 1, 1), None)]
)
@on_ranks(4)
def test_plans_of_different_batches_are_refused_on_all_ranks(of_ranks: tuple[int, ...], other: int | None) -> None:
    """`other`: the first rank whose plan is another one than that of rank 0. Where all are equally wrong, none is."""
    boundaries = [Boundary.between(Ownership.parse(SHARDS), Ownership.parse(text)) for text in BATCHES]
    communicator, own, spy = communicator_of(), boundaries[of_ranks[dist.get_rank()]], Spy()
    with spy.watching():
        said = [
            error(communicator.start_forward, own.loaded, own.x[own.held]),
            error(communicator.start_backward, own.loaded, own.gradient(dist.get_rank())),
        ]
    for boundary in boundaries:
        cross_well(communicator, boundary)
    if other is None:
        assert said == ["", ""]
        return
    assert spy.sent == 0
    for direction, message in zip(("forward", "backward"), said, strict=True):
        found = rf"boundary {direction}: plan: found \w{{8}} on rank 0 and \w{{8}} on rank {other}, .*"
        assert re.fullmatch(found, message), message


@pytest.mark.parametrize("check", [True, False])
@on_ranks(4)
def test_a_plan_without_a_way_back_is_crossed_forward_only(check: bool) -> None:
    boundary = Boundary.between(Ownership.parse(SHARDS), Ownership.parse(BATCHES[0]))
    communicator, rank = communicator_of(check=check), dist.get_rank()
    loaded = load_plan(boundary.plan.rank(rank, backward=False), CPU)
    assert torch.equal(
        communicator.start_forward(loaded, boundary.x[boundary.held]).wait(), boundary.x[boundary.needed]
    )
    message = error(communicator.start_backward, loaded, boundary.gradient(rank))
    said = r"a plan of the forward direction only, .*"
    assert_says(message, "backward", 0 if check else rank, said)


# ---------------------------------------------------------------------------------------------- overlap


@on_ranks(2)
def test_tokens_are_embedded_while_rows_are_on_their_way() -> None:
    """In the trace of `torch.profiler`: the exchange is launched before the embedding and ends after it.

    It is taken to begin with its launch: gloo's own event begins only when one of its threads gets a core.
    """
    boundary = Boundary.between(Ownership.parse("0: 0-4; 1: 5-9"), Ownership.parse("0: 5-9; 1: 0-4"))
    communicator = communicator_of(check=False)  # which would wait for rank 1
    rows = boundary.x[boundary.held]
    communicator.start_forward(boundary.loaded, rows).wait()  # connections are made on first use
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.5)
        crossing = communicator.start_forward(boundary.loaded, rows)
        with record_function("text embedding"):
            torch.nn.functional.embedding(torch.arange(64), torch.ones(64, 16))
        assert torch.equal(crossing.wait(), boundary.x[boundary.needed])
    wanted = ("c10d::alltoall_base_", "gloo:all_to_all", "text embedding")
    events = [event for event in profiler.events() or [] if event.name in wanted]
    assert sorted(event.name for event in events) == sorted(wanted)
    if dist.get_rank() == 0:
        trace = {event.name: event.time_range for event in events}
        launched, arrived = trace["c10d::alltoall_base_"].start, trace["gloo:all_to_all"].end
        assert launched < trace["text embedding"].start < trace["text embedding"].end < arrived
        assert arrived - launched > 0.1e6, "rank 1 was not late"
