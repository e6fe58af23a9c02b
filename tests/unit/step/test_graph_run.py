"""Graphs of modules, executed: losses and gradients are those of one process, wherever they lie.

A module takes numbers of its own and the rows of those that feed it, one per sample and edge, of a width of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_hetero as mh
from megatron_hetero import Runner, UserError
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.layout.graph import Edge, Graph, as_edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.contract import MicroBatchInputs, ModuleOnRank
from tests.support.pool import platform
from tests.support.ranks import on_ranks

SAMPLES, MICRO_BATCHES = 8, 3
WIDTHS = {"vision": 3, "audio": 4, "text": 5, "head": 2, "talker": 3, "generator": 4}
CHAIN = [Edge("vision", "text"), Edge("text", "generator")]
FAN = [Edge(*ends) for ends in [("audio", "text"), ("vision", "text"), ("vision", "head"), ("text", "talker")]]
LATE = [
    Edge("vision", "text", 0, 1),
    Edge("vision", "text"),
    Edge("text", "generator", 0, 0),
    Edge("text", "generator"),
]
_DISJOINT = {"audio": "dp:1@0", "vision": "dp:1@1", "text": "dp:1@2", "head": "dp:1@1", "talker": "dp:1@3"}
_MIXED = {"audio": "dp:1@0", "vision": "dp:2@2-3", "text": "pp:2@0-1", "head": "dp:4", "talker": "pp:2@2-3"}
CASES: dict[str, tuple[list[Edge], dict[str, str]]] = {
    "chain, colocated": (CHAIN, {"vision": "dp:4", "text": "tp:2,dp:2", "generator": "dp:4"}),
    "chain, disjoint": (CHAIN, {"vision": "dp:1@0", "text": "dp:2@1-2", "generator": "tp:1@3"}),
    "chain, disjoint with stages": (CHAIN, {"vision": "dp:1@0", "text": "pp:2@1-2", "generator": "dp:1@3"}),
    "chain, mixed with stages": (CHAIN, {"vision": "tp:2,dp:2@0-3", "text": "pp:2@0-1", "generator": "pp:2@2-3"}),
    "chain, all stages shared": (CHAIN, {"vision": "pp:2,dp:2", "text": "pp:4", "generator": "pp:2,tp:2"}),
    "fan, colocated": (FAN, {"vision": "dp:4", "audio": "tp:4", "text": "tp:2,dp:2", "head": "dp:4", "talker": "dp:4"}),
    "fan, disjoint": (FAN, _DISJOINT),
    "fan, mixed": (FAN, _MIXED),
    "later stages": (LATE, {"vision": "pp:2@0-1", "text": "pp:2,dp:2", "generator": "dp:1@3"}),
}  # fmt: skip


class Stage(nn.Module):
    """A stage of `module`. `entering`: what enters it, by name; `leaving`: whether its rows leave it."""

    def __init__(self, module: str, number: int, last: bool, entering: Sequence[str], leaving: bool, has_loss: bool):
        super().__init__()
        width = WIDTHS[module]
        generator = torch.Generator().manual_seed(100 * list(WIDTHS).index(module) + number)
        draw = lambda *shape: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))  # noqa: E731
        self.weight = draw(width, width)
        self.readers = nn.ParameterDict({name: draw(WIDTHS[name.split("_")[0]], width) for name in entering})
        self.output = f"{module}_{number}"
        self.number, self.width, self.last, self.leaving, self.has_loss = number, width, last, leaving, has_loss

    def hidden_shape(self, batch: Tensor) -> tuple[int, int]:
        return len(batch), self.width

    def forward(self, batch: Tensor, *rest: Any) -> Mapping[str, Tensor]:
        given = list(rest)
        hidden = given.pop(0) if self.number else batch
        rows = given.pop(0) if self.readers else {}
        assert not given and rows.keys() == set(self.readers)
        total = hidden @ self.weight + sum(rows[name] @ reader for name, reader in self.readers.items())
        after = torch.tanh(total)
        outputs = {} if self.last else {"hidden": after}
        outputs |= {self.output: after.square()} if self.leaving else {}
        return outputs | ({"loss": (after * (1 + self.number)).sum()} if self.last and self.has_loss else {})


def build(edges: Sequence[Edge], layouts: Mapping[str, Layout]) -> dict[str, list[Stage]]:
    """All stages of all modules, the same on all ranks."""
    ends = [(edge, *stages_of(edge, layouts)) for edge in edges]
    return {
        name: [
            Stage(
                name,
                stage,
                stage == layout.pp - 1,
                [f"{edge.source}_{own}" for edge, own, into in ends if (edge.target, into) == (name, stage)],
                any((edge.source, own) == (name, stage) for edge, own, _ in ends),
                name != "vision" and name != "audio",
            )
            for stage in range(layout.pp)
        ]
        for name, layout in layouts.items()
    }


def stages_of(edge: Edge, layouts: Mapping[str, Layout]) -> tuple[int, int]:
    source, target = layouts[edge.source].pp - 1, 0
    return (source, target) if edge.source_stage is None else (edge.source_stage, edge.target_stage or 0)


def inputs(module: str, micro_batch: int) -> Tensor:
    """Of all samples, [samples, width]."""
    generator = torch.Generator().manual_seed(1000 + 10 * list(WIDTHS).index(module) + micro_batch)
    return torch.randn(SAMPLES, WIDTHS[module], generator=generator, dtype=torch.float64)


def samples_of(layout: Layout, rank: int, micro_batch: int) -> Tensor:
    """Which a rank works on: unevenly many; in one micro-batch some replicas have none."""
    cuts = torch.tensor([SAMPLES * i // layout.dp + (i > 0 and i < layout.dp) for i in range(layout.dp + 1)])
    owner = torch.bucketize(torch.arange(SAMPLES), cuts[1:], right=True)
    if micro_batch == 1:
        owner = owner * 0
    return torch.nonzero(owner == layout.replica_of(rank)).flatten()


def ownership(layout: Layout, stage: int, micro_batch: int) -> Ownership:
    ranks = layout.stage(stage).ranks
    groups = {tuple(r for r in ranks if layout.replica_of(r) == i): i for i in range(layout.dp)}
    return Ownership.of({group: samples_of(layout, group[0], micro_batch).tolist() for group in groups})


def reference(edges: Sequence[Edge], layouts: Mapping[str, Layout]) -> tuple[Tensor, dict[str, list[Stage]]]:
    """The loss, and the stages with their gradients, of one process."""
    modules, loss = build(edges, layouts), torch.zeros((), dtype=torch.float64)
    for m in range(MICRO_BATCHES):
        made: dict[str, Tensor] = {}
        waiting = [stage for stages in modules.values() for stage in stages]
        while waiting:
            stage = waiting.pop(0)
            module, number = stage.output.split("_")
            before = f"{module}_{int(number) - 1}.hidden"
            if (stage.number and before not in made) or not stage.readers.keys() <= made.keys():
                waiting.append(stage)
                continue
            arguments = ([made[before]] if stage.number else []) + ([made] if stage.readers else [])
            arguments = [{n: made[n] for n in stage.readers} if isinstance(a, dict) else a for a in arguments]
            outputs = stage(inputs(module, m), *arguments)
            made |= {f"{stage.output}.hidden" if name == "hidden" else name: value for name, value in outputs.items()}
            loss = loss + outputs.get("loss", 0)
    loss.backward()
    return loss.detach(), modules


def run_case(edges: Sequence[Edge], texts: Mapping[str, str], frozen: Sequence[str] = ()) -> None:
    layouts = {name: Layout.parse(text, 4) for name, text in texts.items()}
    edges = [as_edge(edge, layouts) for edge in edges]
    graph = Graph(
        edges,
        width={edge: WIDTHS[edge.source] for edge in edges},
        dtype=torch.float64,
        outputs={edge: [f"{edge.source}_{stages_of(edge, layouts)[0]}"] for edge in edges},
    )
    topology, rank = mh.build(graph, layouts, platform=platform(), planned=False), dist.get_rank()
    schedule = build_schedule(layouts, MICRO_BATCHES, edges=edges, forward_only=frozen)
    check_schedule(schedule)
    modules = build(edges, layouts)
    held = {name: layouts[name].coordinate(rank).pp for name in layouts if rank in layouts[name]}
    runner = Runner(topology, {name: ModuleOnRank({stage: modules[name][stage]}) for name, stage in held.items()})

    def load(m: int) -> MicroBatchInputs:
        batch = {name: inputs(name, m)[samples_of(layouts[name], rank, m)] for name in held}
        plans = {}
        for edge in edges:
            own, stage = stages_of(edge, layouts)
            plan = plan_boundary(ownership(layouts[edge.source], own, m), ownership(layouts[edge.target], stage, m), 8)
            if rank in plan.ranks:
                plans[edge] = load_plan(plan.rank(rank), topology.platform.device)
        return MicroBatchInputs(batch, plans)

    loss = runner.run(schedule, load).loss
    expected, alone = reference(edges, layouts)
    check_loss(loss, expected, layouts)
    for name, stage in held.items():
        wanted = dict(alone[name][stage].named_parameters())
        for which, found in modules[name][stage].named_parameters():
            grad, group = found.grad, topology.group(name, "sp", "cp", "dp")
            if name in frozen:
                assert grad is None
                continue
            grad = torch.zeros_like(found) if grad is None else grad
            if group.size() > 1:
                dist.all_reduce(grad, group=group)
            assert torch.allclose(grad, wanted[which].grad, rtol=1e-10, atol=1e-10), f"{name}.{stage} {which}"  # pyright: ignore[reportArgumentType]


def check_loss(loss: Tensor, expected: Tensor, layouts: Mapping[str, Layout]) -> None:
    """Ranks' losses add up to that of one process, where ranks along tp do not compute the same one."""
    total = loss.double().clone()
    dist.all_reduce(total)
    if all(layout.tp == 1 for layout in layouts.values()):
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@on_ranks(4)
def test_a_graph_is_one_model(case: str) -> None:
    run_case(*CASES[case])


@pytest.mark.parametrize("case", ["chain, mixed with stages", "fan, mixed", "later stages"])
@on_ranks(4, fixture="rules_pools")
def test_a_graph_runs_with_nccls_rules(case: str) -> None:
    run_case(*CASES[case])


@pytest.mark.parametrize("case", ["chain, disjoint", "chain, colocated"])
@on_ranks(4)
def test_modules_at_the_beginning_may_be_frozen(case: str) -> None:
    run_case(*CASES[case], frozen=["vision"])


@on_ranks(2)
def test_a_plan_whose_sides_share_ranks_is_refused_between_disjoint_modules() -> None:
    """It would cross by a collective, which the two sides of a schedule start in other orders: a hang."""
    layouts, edge, rank = {"a": Layout.parse("dp:1@0"), "b": Layout.parse("dp:1@1")}, Edge("a", "b"), dist.get_rank()
    topology = mh.build(Graph([edge], width=2, dtype=torch.float32), layouts, platform=platform(), planned=False)
    name, model = ("a", nn.Linear(2, 2)) if rank == 0 else ("b", lambda _, rows: rows.sum())
    runner = Runner(topology, {name: ModuleOnRank({0: model})})
    source, target = Ownership.of({(0,): [0], (1,): []}), Ownership.of({(0,): [], (1,): [0]})
    part = load_plan(plan_boundary(source, target, 8).rank(rank), topology.platform.device)
    with pytest.raises(UserError, match="micro-batch 0, boundary a>b: found a plan "):
        runner.run(
            build_schedule(layouts, 2, edges=[edge]), lambda _: MicroBatchInputs({name: torch.ones(1, 2)}, {edge: part})
        )
