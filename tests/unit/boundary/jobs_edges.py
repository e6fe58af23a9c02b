"""What the workers of the pool run for the tests of several edges: an encoder of two stages whose outputs enter two
stages of the next module, with plain modules and an interpreter. Values are integers, so that sums are exact.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero import Graph as RowGraph
from megatron_hetero import Layout
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import BoundaryPlan, plan_boundary
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.contract import DeviceMicroBatch, ModuleOnRank
from megatron_hetero.schedule.settings import ScheduleSettings
from megatron_hetero.step.interpreter import Interpreter
from tests.support.pool import platform
from tests.unit.boundary.cases import random_ownership
from tests.unit.boundary.jobs import CPU, Spy

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
    interleaved = ["decoder"] if graph.settings.virtual_stages > 1 else []
    topology = Topology.build(layouts, platform(), edges=edges, interleaved=interleaved)
    held = dict(_modules(graph, rank, {"encoder": Encoder, "decoder": Decoder}))
    rows = RowGraph(edges, width=WIDTH, dtype=torch.float64, outputs=graph.edges)
    interpreter = Interpreter.build(topology, held, rows, timeout_s=0)
    schedule = build_schedule(layouts, graph.micro_batches, graph.settings, text="decoder", edges=edges)

    def load(m: int) -> DeviceMicroBatch:
        plans = MicroBatch(graph, m).plans.items()
        mine = {e: load_plan(plan.rank(rank), CPU) for e, plan in plans if rank in plan.ranks}
        return DeviceMicroBatch({name: torch.tensor(m) for name in layouts}, mine)

    with Spy().watching() as spy:
        loss = interpreter.run(schedule, load).loss
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
