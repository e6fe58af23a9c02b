"""Boundaries of several edges: outputs that leave two stages of an encoder and enter two stages of the next module."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_hetero import Graph as RowGraph
from megatron_hetero import Layout, Runner, build
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import BoundaryPlan, plan_boundary
from megatron_hetero.data.balance import assign_in_order
from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.data.partition import StepPartitioner
from megatron_hetero.data.token_shards import TokenShards
from megatron_hetero.groups.platform import CPU
from megatron_hetero.layout.communicators import GroupNeeds
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.names import ROWS
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.contract import MicroBatchInputs, ModuleOnRank
from megatron_hetero.schedule.settings import ScheduleSettings
from tests.support.matrix import thinned
from tests.support.pool import platform
from tests.support.ranks import on_ranks
from tests.support.sizes import received_rows, sent_rows
from tests.unit.boundary.cases import random_ownership
from tests.unit.boundary.checks import Values, check_everything, inner_product
from tests.unit.boundary.rank_view import Spy
from tests.unit.boundary.simulation import Boundary, SimulatedDirection
from tests.unit.data.packs import BATCHES, SHAPE, Planned, needed_rows, planned, random_packs

WIDTH, ITEM = 3, 8
"""Elements of a row of one output, and bytes of an element."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Graph:
    """Layouts of both modules, and the outputs that cross along each edge."""

    encoder: str
    decoder: str
    ranks: int
    edges: dict[Edge, tuple[str, ...]]
    settings: ScheduleSettings = field(default_factory=ScheduleSettings)
    micro_batches: int = 3

    @property
    def layouts(self) -> dict[str, Layout]:
        return {"encoder": Layout.parse(self.encoder, self.ranks), "decoder": Layout.parse(self.decoder, self.ranks)}


@dataclass(frozen=True)
class MicroBatch:
    """Random ownerships on both sides of every edge; the rows of all outputs of one stage have one."""

    graph: Graph
    number: int

    @cached_property
    def plans(self) -> dict[Edge, BoundaryPlan]:
        rng = np.random.default_rng([self.number, zlib.crc32(str(self.graph.layouts).encode())])
        layouts, ids = self.graph.layouts, rng.permutation(60)[:30]
        sources: dict[int, Ownership] = {}
        plans = {}
        for edge, outputs in self.graph.edges.items():
            at = edge.source_coordinate(layouts["encoder"])
            if at not in sources:
                sources[at] = random_ownership(rng, edge.source_ranks(layouts["encoder"]), ids)
            held = random_ownership(rng, edge.target_ranks(layouts["decoder"]), ids[: rng.integers(0, 31)])
            holders = dict(zip(held.groups, held.rows, strict=True))
            # Of partial gradients each rank has a part of its own, so that no loss counts twice.
            needed = Ownership.of(holders, "partial")
            plans[edge] = plan_boundary(sources[at], needed, WIDTH * ITEM * len(outputs))
        return plans

    def rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Those of an output, [ids, width]."""
        return _integers(name, self.number)[ids]

    def cotangent(self, name: str, rank: int, ids: np.ndarray) -> np.ndarray:
        """What the loss of `rank` multiplies the rows of an output with, [ids, width]."""
        return _integers(name, self.number, 1 + rank)[ids]


def _integers(name: str, *seeds: int) -> np.ndarray:
    rng = np.random.default_rng([zlib.crc32(name.encode()), *seeds])
    return rng.integers(-50, 50, (60, WIDTH)).astype(np.float64)


class Encoder(torch.nn.Module):
    """A stage that gives rows of its own."""

    def __init__(self, graph: Graph, stage: int, stages: int):
        super().__init__()
        self.is_last, self.rank = stage == stages - 1, dist.get_rank()
        leaving = {e: o for e, o in graph.edges.items() if e.source_coordinate(graph.layouts["encoder"]) == stage}
        self.names = [name for outputs in leaving.values() for name in outputs]
        self.leaves = torch.nn.ParameterDict()
        for m in range(graph.micro_batches):
            batch, edge = MicroBatch(graph, m), next(iter(leaving), None)
            if edge is not None:
                ids = batch.plans[edge].source.held_by(self.rank)
                for name in self.names:
                    rows = torch.from_numpy(batch.rows(name, ids))
                    self.leaves[f"{m} {name.replace('.', '_')}"] = torch.nn.Parameter(rows)

    def hidden_shape(self, _: Tensor) -> tuple[int, ...]:
        return (1,)

    def forward(self, batch: Tensor, hidden: Tensor | None = None) -> dict[str, Tensor]:
        m = int(batch)
        # The hidden states matter to every row, and to none of their values.
        nothing = torch.zeros((), dtype=torch.float64) if hidden is None else 0 * hidden.sum()
        found = {name: self.leaves[f"{m} {name.replace('.', '_')}"] + nothing for name in self.names}
        if not self.is_last:
            found["hidden"] = sum((rows.sum() for rows in found.values()), nothing).reshape(1)
        return found

    def gradients(self) -> Arrays:
        """By micro-batch and output."""
        return {name: p.grad.numpy().copy() for name, p in self.leaves.items() if p.grad is not None}


class Decoder(torch.nn.Module):
    """A stage that adds up the products of rows and other numbers."""

    def __init__(self, graph: Graph, stage: int, stages: int):
        super().__init__()
        self.graph, self.stage, self.is_last, self.rank = graph, stage, stage == stages - 1, dist.get_rank()
        layout, entries = graph.layouts["decoder"], graph.edges.items()
        self.entering = {e: names for e, names in entries if (e.target_stage or 0) % stages == stage}
        assert layout.coordinate(self.rank).pp == stage % layout.pp

    def hidden_shape(self, _: Tensor) -> tuple[int, ...]:
        return (1,)

    def forward(self, batch: Tensor, *inputs: Any) -> Tensor:
        rows: Mapping[str, Tensor] = inputs[-1] if self.entering else {}
        total = inputs[0].sum() if self.stage else torch.zeros((), dtype=torch.float64, requires_grad=True)
        assert rows.keys() == {name for names in self.entering.values() for name in names}
        for edge, names in self.entering.items():
            micro_batch = MicroBatch(self.graph, int(batch))
            ids = micro_batch.plans[edge].destination.held_by(self.rank)
            for name in names:
                total = total + (rows[name] * torch.from_numpy(micro_batch.cotangent(name, self.rank, ids))).sum()
        return total if self.is_last else total.reshape(1)


def crossed(graph: Graph) -> tuple[float, Arrays, dict[str, int]]:
    """A step: this rank's loss, the gradients of the rows that it gave, and what the exchanges moved."""
    rank, layouts, edges = dist.get_rank(), graph.layouts, list(graph.edges)
    needs = {"decoder": GroupNeeds(interleaved=graph.settings.virtual_stages > 1)}
    held = dict(_modules(graph, rank, {"encoder": Encoder, "decoder": Decoder}))
    rows = RowGraph(edges, width=WIDTH, dtype=torch.float64, outputs=graph.edges)
    topology = build(rows, layouts, platform=platform(), needs=needs, planned=False)
    runner = Runner(topology, held, timeout_s=0)
    schedule = build_schedule(layouts, graph.micro_batches, graph.settings, text="decoder", edges=edges)

    def load(m: int) -> MicroBatchInputs:
        plans = MicroBatch(graph, m).plans.items()
        mine = {e: load_plan(plan.rank(rank), CPU) for e, plan in plans if rank in plan.ranks}
        return MicroBatchInputs({name: torch.tensor(m) for name in layouts}, mine)

    spy = Spy()
    with spy.watching():
        loss = runner.run(schedule, load).loss
    stages: list[Any] = list(held["encoder"].stages.values()) if "encoder" in held else []
    gradients = {name: gradient for stage in stages for name, gradient in stage.gradients().items()}
    moved = {"sent": spy.sent, "received": spy.received, "exchanges": spy.all_to_alls + spy.batches}
    return loss.item(), gradients, moved


def _modules(graph: Graph, rank: int, kinds: Mapping[str, Any]) -> Iterator[tuple[str, ModuleOnRank]]:
    for name, layout in graph.layouts.items():
        if rank in layout:
            virtual = graph.settings.virtual_stages if name == "decoder" else 1
            own = [layout.coordinate(rank).pp + layout.pp * turn for turn in range(virtual)]
            yield name, ModuleOnRank({stage: kinds[name](graph, stage, layout.pp * virtual) for stage in own})


# ------------------------------------------------------------------------------------- on process groups

AHEAD, RECOMPUTE, WAVES = (ScheduleSettings(run_ahead=1), ScheduleSettings("recompute"), ScheduleSettings(waves=1))
FOUR = {
    Edge("encoder", "decoder", 0, 0): ("a", "b"),
    Edge("encoder", "decoder", 0, 1): ("c",),
    Edge("encoder", "decoder"): (ROWS, "d", "e"),
    Edge("encoder", "decoder", 1, 1): ("f", "g"),
}
"""From both stages of an encoder to both of the next module."""
ONE_STAGE = {Edge("encoder", "decoder"): (ROWS, "a"), Edge("encoder", "decoder", 0, 2): ("b",)}
GRAPHS = {
    "colocated": Graph("dp:2,pp:2", "dp:2,pp:2", 4, FOUR),
    "colocated, recompute": Graph("dp:2,pp:2", "dp:2,pp:2", 4, FOUR, RECOMPUTE),
    "mixed": Graph("dp:2,pp:2@0-3", "dp:2,pp:2@2-5", 6, FOUR, WAVES),
    "disjoint": Graph("dp:2,pp:2@0-3", "dp:2,pp:2@4-7", 8, FOUR, AHEAD),
    "encoder without stages": Graph("dp:3@0-2", "pp:3@2-4", 5, ONE_STAGE),
    "virtual stages": Graph(
        "pp:2,dp:2", "pp:2,dp:2", 4, FOUR | {Edge("encoder", "decoder", 0, 3): ("h",)},
        ScheduleSettings(virtual_stages=2), 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("graph", thinned(GRAPHS.values(), 2), ids=GRAPHS)
@on_ranks("graph.ranks")
def test_gradients_return_by_the_adjoint_over_all_edges(graph: Graph) -> None:
    """⟨A x, c⟩ = ⟨x, Aᵀ c⟩ over all edges together, exactly, in the fewest exchanges of the fewest bytes."""
    found: list[Any] = [None] * graph.ranks
    dist.all_gather_object(found, crossed(graph))
    if dist.get_rank():
        return
    gradients = [of_rank for _, of_rank, _ in found]
    after, before, moved = 0, 0, {"sent": 0, "received": 0, "exchanges": 0}
    for m in range(graph.micro_batches):
        batch = MicroBatch(graph, m)
        for edge, plan in batch.plans.items():
            check_everything(Boundary.of(plan.source, plan.destination))
            for name in graph.edges[edge]:
                after += _check_rows(batch, edge, name, gradients)
                before += _inner_product(batch, edge, name, gradients)
    assert sum(loss for loss, *_ in found) == after == before != 0
    for rank, (*_, of_rank) in enumerate(found):
        assert of_rank == _planned(graph, rank)
        moved = {what: n + of_rank[what] for what, n in moved.items()}
    assert moved["sent"] == moved["received"] > 0


def _check_rows(batch: MicroBatch, edge: Edge, name: str, gradients: list[Arrays]) -> int:
    """Compare the gradient of every row with the sum of what it was multiplied with. Returns the part of the loss."""
    plan, total, loss = batch.plans[edge], np.zeros((60, WIDTH)), 0
    for rank in plan.destination.ranks:
        ids = plan.destination.held_by(rank)
        cotangent = batch.cotangent(name, rank, ids)
        total[ids] += cotangent
        loss += int((batch.rows(name, ids) * cotangent).sum())
    found = np.zeros_like(total)
    for rank in plan.source.ranks:
        ids, gradient = plan.source.held_by(rank), gradients[rank][f"{batch.number} {name}"]
        if plan.source.gradient == "partial":
            found[ids] += gradient
        else:
            assert np.array_equal(gradient, total[ids])
            found[ids] = gradient
    assert np.array_equal(found, total)
    return loss


def _inner_product(batch: MicroBatch, edge: Edge, name: str, gradients: list[Arrays]) -> int:
    source = batch.plans[edge].source
    ranks = tuple(source.ranks)
    rows = [batch.rows(name, source.held_by(rank)).ravel() for rank in ranks]
    return inner_product(source, ranks, rows, [gradients[rank][f"{batch.number} {name}"].ravel() for rank in ranks])


def _planned(graph: Graph, rank: int) -> dict[str, int]:
    """What the exchanges of a rank move: rows of k outputs are rows of k times the bytes, in the exchanges of one."""
    moved = {"sent": 0, "received": 0, "exchanges": 0}
    for m in range(graph.micro_batches):
        for edge, plan in MicroBatch(graph, m).plans.items():
            if rank not in plan.ranks:
                continue
            part, row = plan.rank(rank), WIDTH * ITEM * len(graph.edges[edge])
            assert part.backward is not None
            for direction in (part.forward, part.backward):
                moved["sent"] += row * sent_rows(direction)
                moved["received"] += row * received_rows(direction)
                busy = [len(e.send) + len(e.receive) > 0 for e in direction.exchanges]
                moved["exchanges"] += sum(busy) if plan.point_to_point else len(direction.exchanges)
    return moved


# ------------------------------------------------------------------------------------- as a step is planned

VISION = ["pp:2,dp:4", "pp:2,sp:4", "pp:2,tp:2,dp:2", "pp:2,cp:2,sp:2", "pp:2,tp:4", "pp:2,sp:2@0-3"]
TEXT = ["pp:2,dp:4", "pp:4,dp:2", "pp:2,cp:4", "pp:2,tp:2,cp:2", "pp:2,sp:4", "pp:4,tp:2", "pp:2,tp:2@4-7", "pp:4@4-7"]
EDGES = {
    Edge("vision", "text"): (ROWS,),
    Edge("vision", "text", 0, 0): ("a", "b"),
    Edge("vision", "text", 0, 1): ("c",),
    Edge("vision", "text", 1, 1): ("d", "e", "f"),
}


@settings(max_examples=40)
@given(
    st.sampled_from(VISION),
    st.sampled_from(TEXT),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(BATCHES),
    st.integers(0, 10**6),
)
def test_each_edge_has_the_minimum_of_its_ownerships(
    vision: str, text: str, sharded: tuple[bool, bool], batch: str, seed: int
) -> None:
    layouts = {"vision": Layout.parse(vision, 8), "text": Layout.parse(text, 8)}
    sequence_parallel = dict(zip(layouts, sharded, strict=True))
    packs = random_packs(batch, layouts["text"], seed)
    partitioners = [
        StepPartitioner({"vision": SHAPE}, layouts, sequence_parallel, r, 24, EDGES, "off") for r in range(8)
    ]
    plans = [planned(partitioner, packs) for partitioner in partitioners]
    grids = [grid for pack in packs for grid in pack.sizes[0]]
    if not grids:
        assert not any(plan.rows for plan in plans)
        return
    before = after = 0
    for number, edge in enumerate(EDGES):
        boundary = _expected(edge, layouts, sequence_parallel, packs)
        check_everything(boundary)
        _check_parts(edge, boundary, plans)
        for rank in boundary.plan.destination.ranks:
            share = plans[rank].text
            assert share is not None
            needed = needed_rows(share, packs, layouts["text"], sequence_parallel["text"], rank)
            assert boundary.plan.destination.held_by(rank).tolist() == needed.tolist()
        with_rows, with_gradients = _inner_products(edge, boundary, plans, number)
        after, before = after + with_rows, before + with_gradients
    assert after == before


def _expected(edge: Edge, layouts: dict[str, Layout], sharded: dict[str, bool], packs: list[PackMetadata]) -> Boundary:
    grids = tuple(grid for pack in packs for grid in pack.sizes[0])
    vision, text = layouts["vision"], layouts["text"]
    assigned = tuple(map(tuple, assign_in_order(len(grids), vision.dp)))
    at_source, at_target = edge.source_coordinate(vision), edge.target_coordinate(text)
    source = EncoderShards(SHAPE, vision.stage(at_source), sharded["vision"], grids, assigned)
    places = {"vision": tuple(pack.positions(0) for pack in packs)}
    lengths = tuple(pack.lengths for pack in packs)
    target = TokenShards(text.stage(at_target), sharded["text"], lengths, places)
    return Boundary.of(source.ownership(), target.ownership("vision"))


def _check_parts(edge: Edge, boundary: Boundary, plans: list[Planned]) -> None:
    """The ranks on either side of an edge, and no others, have its plan."""
    having = [rank for rank, plan in enumerate(plans) if edge in plan.rows]
    assert having == sorted(boundary.plan.ranks)
    for rank, expected in zip(boundary.plan.ranks, boundary.parts, strict=True):
        part = plans[rank].rows[edge]
        assert part.backward is not None and expected.backward is not None
        assert (part.rank, part.ranks) == (rank, boundary.plan.ranks)
        for found, wanted in ((part.forward, expected.forward), (part.backward, expected.backward)):
            assert received_rows(found) == received_rows(wanted) and sent_rows(found) == sent_rows(wanted)
        least = np.setdiff1d(boundary.plan.destination.held_by(rank), boundary.plan.source.held_by(rank))
        assert received_rows(part.forward) == len(least)


def _inner_products(edge: Edge, boundary: Boundary, plans: list[Planned], seed: int) -> tuple[int, int]:
    """⟨A x, c⟩ and ⟨x, Aᵀ c⟩ of the parts that the ranks have planned, whose rows arrive where they belong."""
    source, destination, ranks = boundary.plan.source, boundary.plan.destination, boundary.plan.ranks
    parts = [plans[rank].rows[edge] for rank in ranks]
    forward = SimulatedDirection(ranks, [part.forward for part in parts])
    backward = SimulatedDirection(ranks, [part.backward for part in parts if part.backward is not None])
    values = Values(boundary, seed)
    x, c = values.held(source), values.gradients(destination)
    a_x, at_c = forward.run(x)[0], backward.run(c)[0]
    for arrived, expected in zip(a_x, values.held(destination), strict=True):
        assert arrived.tolist() == expected.tolist()
    return inner_product(destination, ranks, a_x, c), inner_product(source, ranks, x, at_c)
