"""`Graph`, `build` and `Runner`: a graph of ordinary models by a schedule, and in a plain loop, is one model."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megatron_hetero import (
    AdamW,
    Boundary,
    Graph,
    Layout,
    MicroBatchInputs,
    Rows,
    Runner,
    Stage,
    UserError,
    build,
    build_optimizers,
    total_loss,
)
from megatron_hetero import micro_batch as block
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.communicators import GroupNeeds
from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.contract import ModuleOnRank
from megatron_hetero.schedule.settings import ScheduleSettings
from tests.support.ranks import on_ranks

WIDTH, SAMPLES, MICRO_BATCHES = 4, 6, 3
GRAPH = Graph({"vision": ["text"], "text": ["generator"]}, width=WIDTH, dtype=torch.float64)
PLACEMENTS = {
    "colocated": {"vision": "dp:4", "text": "dp:2,tp:2", "generator": "dp:4"},
    "disjoint": {"vision": "dp:1@0", "text": "dp:2@1-2", "generator": "dp:1@3"},
    "stages": {"vision": "dp:2@0-1", "text": "pp:2@2-3", "generator": "dp:2@0-1"},
}


class Text(nn.Module):
    """Two layers; rows are added to the tokens. Its loss, and rows for the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def begin(self, tokens: Tensor, rows: Tensor) -> Tensor:
        return torch.tanh(self.first(tokens + rows))

    def end(self, hidden: Tensor) -> dict[str, Tensor]:
        rows = self.second(hidden)
        return {"rows": rows, "loss": rows.square().sum()}

    def forward(self, tokens: Tensor, rows: Tensor) -> dict[str, Tensor]:
        return self.end(self.begin(tokens, rows))


class Generator(nn.Module):
    """A loss of rows and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, noise: Tensor, rows: Tensor) -> Tensor:
        return (self.layer(rows) - noise).abs().sum()


def models() -> dict[str, Any]:
    torch.manual_seed(3)
    return {"vision": nn.Linear(WIDTH, WIDTH, dtype=torch.float64), "text": Text(), "generator": Generator()}


def inputs(name: str, m: int) -> Tensor:
    torch.manual_seed(10 * m + len(name))
    return torch.randn(SAMPLES, WIDTH, dtype=torch.float64)


def mine(topology: Topology, name: str) -> list[int]:
    """The samples of this rank."""
    layout = topology.layouts[name]
    return list(range(layout.replica_of(topology.rank), SAMPLES, layout.dp)) if topology.has(name) else []


def part_of(topology: Topology, m: int) -> MicroBatchInputs:
    samples = {name: mine(topology, name) for name in topology.layouts}
    layout = topology.layouts["text"]
    stage = layout.coordinate(topology.rank).pp if topology.has("text") else 0
    first, last = stage == 0, stage == layout.pp - 1
    rows = {
        ("vision", "text"): Rows(held=samples["vision"], needed=samples["text"] if first else []),
        Edge("text", "generator"): Rows(held=samples["text"] if last else [], needed=samples["generator"]),
    }
    return MicroBatchInputs({name: inputs(name, m)[samples[name]] for name in samples if topology.has(name)}, rows)


def alone() -> dict[str, Any]:
    found = models()
    for m in range(MICRO_BATCHES):
        text = found["text"](inputs("text", m), found["vision"](inputs("vision", m)))
        (text["loss"] + found["generator"](inputs("generator", m), text["rows"])).backward()
    return found


def compare(topology: Topology, held: dict[str, Any]) -> None:
    """Gradients of this rank's parameters, summed over its replicas, are those of one process."""
    expected = alone()
    for name in held:
        layout, group = topology.layouts[name], topology.group(name, "sp", "cp", "dp")
        for (which, own), other in zip(held[name].named_parameters(), expected[name].parameters(), strict=True):
            if layout.pp > 1 and (("first", "second")[layout.coordinate(topology.rank).pp] not in which):
                continue
            assert own.grad is not None, f"{name}.{which}"
            if group.size() > 1:
                dist.all_reduce(own.grad, group=group)
            assert torch.allclose(own.grad, other.grad, rtol=1e-11, atol=1e-11), f"{name}.{which}"


def held_by(topology: Topology) -> dict[str, Any]:
    return {name: model for name, model in models().items() if topology.has(name)}


def stages_of(topology: Topology, held: dict[str, Any]) -> dict[str, Any]:
    """What the runner is given."""
    text, layout = held.get("text"), topology.layouts["text"]
    if text is None or layout.pp == 1:
        return dict(held)
    last = Stage(lambda _, hidden: text.end(hidden), hidden_shape=lambda tokens: tokens.shape)
    return held | {"text": last if layout.coordinate(topology.rank).pp else text.begin}


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_a_step_of_the_runner(placement: str) -> None:
    topology = build(GRAPH, PLACEMENTS[placement])
    held = held_by(topology)
    runner = Runner(topology, stages_of(topology, held))
    batches = [part_of(topology, m) for m in range(MICRO_BATCHES)]
    evaluated, trained = runner(batches, forward_only=True).loss, runner(batches).loss
    assert torch.equal(evaluated, trained) and runner.schedule(MICRO_BATCHES).micro_batches == MICRO_BATCHES
    compare(topology, held)


@on_ranks(4)
def test_without_gradients_there_is_no_backward_pass() -> None:
    """And a module without an input is not run."""
    topology = build(GRAPH, PLACEMENTS["disjoint"])
    held = held_by(topology)
    runner, batches = Runner(topology, held), [part_of(topology, m) for m in range(2)]
    with torch.no_grad():
        evaluated = runner(batches).loss
    assert all(p.grad is None for model in held.values() for p in model.parameters())
    assert torch.equal(evaluated, runner(batches, forward_only=True).loss)
    images_only = {name: each for name, each in batches[0].inputs.items() if name == "vision"}
    assert (
        runner([MicroBatchInputs(images_only, {("vision", "text"): Rows(batches[0].rows["vision", "text"].held)})]).loss
        == 0
    )


@pytest.mark.parametrize("placement", ["colocated", "disjoint"])
@on_ranks(4)
def test_the_same_functions_in_a_plain_loop(placement: str) -> None:
    """Boundaries take width and dtype from the graph."""
    topology = build(GRAPH, PLACEMENTS[placement])
    held, edges = held_by(topology), [edge for edge in topology.graph.edges if edge in topology.planned]  # pyright: ignore[reportOptionalMemberAccess]
    links = {edge: Boundary.open(topology, edge.source, edge.target) for edge in edges}
    for m in range(MICRO_BATCHES):
        part, made, losses = part_of(topology, m), {}, []
        with block(*links.values()):
            for name in topology.layouts:
                arrived = []
                for edge, link in links.items():
                    if edge.target == name:
                        rows = part.rows[(edge.source, edge.target) if edge.source == "vision" else edge]
                        arrived.append(link(link.plan(held=rows.held, needed=rows.needed), made.get(edge.source)))
                if name in held:
                    output = held[name](part.inputs[name], *arrived)
                    output = output if isinstance(output, dict) else {"loss" if name == "generator" else "rows": output}
                    made[name] = output.get("rows")
                    losses += [output["loss"]] if "loss" in output else []
            if losses:
                # The text module's graph is that of its loss and of the rows that it feeds to the generator.
                torch.stack(losses).sum().backward(retain_graph="text" in held)
    compare(topology, held)


@on_ranks(4)
def test_a_module_in_shards_amid_a_chain() -> None:
    """Its backward pass communicates, in the same place on all ranks, though on one of them its rows are not made of
    those that arrived.
    """
    topology = build(GRAPH, dict.fromkeys(GRAPH.modules, "dp:4"))
    first, second = (Boundary.open(topology, *ends) for ends in (("vision", "text"), ("text", "generator")))
    layers, id, rank = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)], topology.rank, topology.rank
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(WIDTH) * 2)
            layer.bias.zero_()
    shards: Any = fully_shard(layers[1], mesh=topology.mesh("text")["dp"])
    there, back = first.plan(held=[id], needed=[(id + 1) % 4]), second.plan(held=[id], needed=[id])
    with block(first, second):
        losses = []
        for _ in range(2):
            arrived = first(there, layers[0](torch.full((1, WIDTH), 1.0 + rank, dtype=torch.float64)))
            texts = shards(torch.ones(1, WIDTH, dtype=torch.float64) if rank == 2 else arrived)
            losses.append(layers[2](second(back, texts)).sum())
        torch.stack(losses).sum().backward()
    # A gradient of 2 comes to each text, and of 4 to each picture but the last rank's, which is not used.
    grad: Any = shards.weight.grad
    inputs = 2 * [4.0, 6.0, 1.0, 2.0]
    assert torch.equal(grad.full_tensor() * 4, torch.full((WIDTH, WIDTH), 2 * sum(inputs), dtype=torch.float64))
    expected = 0.0 if rank == 3 else 2 * 4.0 * (1 + rank)
    found: Any = layers[0].weight.grad
    assert torch.equal(found, torch.full((WIDTH, WIDTH), expected, dtype=torch.float64))


@on_ranks(2)
def test_modules_that_no_edge_joins() -> None:
    """Alone, in stages; and beside others. They take no rows."""
    alone = Graph({"text": []}, width=WIDTH, dtype=torch.float64)
    topology, found = build(alone, text="pp:2"), models()["text"]
    rows, values = torch.zeros(SAMPLES, WIDTH, dtype=torch.float64), [inputs("text", m) for m in range(MICRO_BATCHES)]
    last = Stage(lambda _, hidden: found.end(hidden)["loss"], hidden_shape=lambda tokens: tokens.shape)
    runner = Runner(topology, {"text": last if topology.rank else lambda tokens: found.begin(tokens, rows)})
    loss = runner([MicroBatchInputs({"text": each}) for each in values]).loss
    expected = models()["text"]
    losses = torch.stack([expected(each, rows)["loss"] for each in values]).sum()
    losses.backward()
    assert not topology.rank or torch.allclose(loss.double(), losses.detach(), rtol=1e-6)
    own, theirs = ((each.second if topology.rank else each.first).weight.grad for each in (found, expected))
    assert torch.allclose(own, theirs, rtol=1e-12)

    beside = Graph({"vision": ["text"], "critic": []}, width=WIDTH, dtype=torch.float64)
    topology = build(beside, vision="dp:2", text="dp:2", critic="dp:2")
    stages = {"vision": nn.Identity(), "text": lambda _, rows: rows.sum(), "critic": lambda values: 2 * values.sum()}
    part = Rows(held=[topology.rank], needed=[topology.rank])
    values = torch.ones(1, WIDTH, dtype=torch.float64)
    given = MicroBatchInputs(dict.fromkeys(stages, values), {("vision", "text"): part})
    assert Runner(topology, stages)([given]).loss.item() == 3 * WIDTH


@on_ranks(2)
def test_edges_are_known_by_the_stages_that_they_join() -> None:
    """The last stage to the first is the edge without stages, whatever it is called."""
    ends = Edge("vision", "text", 1, 0)
    graph = Graph([ends], width={ends: WIDTH}, dtype=torch.float64, outputs={ends: ["rows"]})
    topology = build(graph, vision="pp:2", text="dp:1@0")
    first = {"vision": nn.Identity(), "text": lambda _, rows: rows.sum()}
    last = {"vision": Stage(lambda _, hidden: 2 * hidden, hidden_shape=(1, WIDTH))}
    values = torch.ones(1, WIDTH, dtype=torch.float64, requires_grad=True)
    part = {Edge("vision", "text", 1, 0): Rows(held=[0] * topology.rank, needed=[0] * (1 - topology.rank))}
    batch = MicroBatchInputs({"vision": values, "text": values} if topology.rank == 0 else {"vision": values}, part)
    assert Runner(topology, last if topology.rank else first)([batch]).loss.item() == (1 - topology.rank) * 2 * WIDTH
    with pytest.raises(UserError, match="`vision>text` twice"):
        build(Graph([ends, ("vision", "text")], width=2, dtype=torch.float64), vision="pp:2", text="dp:1@0")


@on_ranks(2)
def test_virtual_stages_of_a_module_that_others_feed() -> None:
    """Two on each rank, of which every one is a layer."""
    graph = Graph({"vision": ["text"]}, width=WIDTH, dtype=torch.float64)
    topology = build(graph, vision="dp:2", text="pp:2", needs={"text": GroupNeeds(interleaved=True)})
    torch.manual_seed(5)
    encoder, layers = (
        nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
        nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)),
    )

    def stage(number: int) -> Any:
        def run(tokens: Tensor, given: Tensor) -> Tensor:
            hidden = torch.tanh(layers[number](tokens + given if number == 0 else given))
            return hidden.square().sum() if number == 3 else hidden

        return Stage(run, hidden_shape=lambda tokens: tokens.shape) if number else run

    mine = {"vision": encoder, "text": {number: stage(number) for number in (topology.rank, topology.rank + 2)}}
    runner = Runner(topology, mine, settings=ScheduleSettings(virtual_stages=2))
    held, batches = list(range(topology.rank, SAMPLES, 2)), []
    for m in range(4):
        part = Rows(held=held, needed=range(SAMPLES) if topology.rank == 0 else [])
        batches.append(
            MicroBatchInputs(
                {"vision": inputs("vision", m)[held], "text": inputs("text", m)}, {("vision", "text"): part}
            )
        )
    runner(batches)
    found = {
        name: p.grad for name, p in [*encoder.named_parameters(), *layers.named_parameters()] if p.grad is not None
    }
    own = dict(encoder.named_parameters())
    for p in own.values():
        assert p.grad is not None
        dist.all_reduce(p.grad)
    for p in (*encoder.parameters(), *layers.parameters()):
        p.grad = None
    for m in range(4):
        hidden = inputs("text", m) + encoder(inputs("vision", m))
        for layer in layers:
            hidden = torch.tanh(layer(hidden))
        hidden.square().sum().backward()
    of_one: dict[str, Any] = {name: p.grad for name, p in [*encoder.named_parameters(), *layers.named_parameters()]}
    assert len(found) == 6, "the encoder, and two layers"
    for name, grad in found.items():
        assert torch.allclose(grad, of_one[name], rtol=1e-11, atol=1e-12), name


@on_ranks(2)
def test_rows_of_one_name_are_equally_wide() -> None:
    """A stage is given them in one tensor."""
    ends, width = [("vision", "text"), ("sound", "text")], {("vision", "text"): 4, ("sound", "text"): 8}
    names = {"vision": "dp:1@0", "sound": "dp:1@1", "text": "dp:1@1"}
    rank = dist.get_rank()
    held = {"vision": nn.Identity()} if rank == 0 else {"sound": nn.Identity(), "text": nn.Identity()}
    topology = build(Graph(ends, width=width, dtype=torch.float64), names)
    with pytest.raises(UserError, match="width: found 4 of `rows` along `vision>text` and 8 along `sound>text`"):
        Runner(topology, held)
    outputs = {("sound", "text"): ["sounds"]}
    Runner(build(Graph(ends, width=width, dtype=torch.float64, outputs=outputs), names), held)


@on_ranks(4)
def test_wrong_uses_are_errors_on_all_ranks() -> None:
    rank = dist.get_rank()
    with pytest.raises(UserError, match="build: found no layout of `generator`"):
        build(GRAPH, vision="dp:4", text="dp:4")
    with pytest.raises(UserError, match="build: found a layout of `sound`, expected one of vision, text, generator"):
        build(GRAPH, vision="dp:4", text="dp:4", generator="dp:4", sound="dp:4")
    with pytest.raises(UserError, match=r"text layout `dp:4@2-5`: found ranks 4-5, .*from 0 to 3.*`text="):
        build(GRAPH, vision="dp:4", text="dp:4@2-5", generator="dp:4")
    with pytest.raises(UserError, match="layout of `text`: found `dp:4@2-5`, expected ranks from 0 to 3"):
        build(GRAPH, vision="dp:4", text=Layout.parse("dp:4@2-5"), generator="dp:4")
    with pytest.raises(UserError, match="layout of `text`: found dp:4@0-3 on rank 0 and tp:4@0-3 on rank 2"):
        build(GRAPH, vision="dp:4", text="tp:4" if rank == 2 else "dp:4", generator="dp:4")
    with pytest.raises(UserError, match="vision"):
        build(GRAPH, vision="xp:4" if rank == 1 else "dp:4", text="dp:4", generator="dp:4")
    with pytest.raises(UserError, match=r"layout of `text\.experts`: found a dot"):
        build(
            Graph({"text": [], "text.experts": []}, width=2, dtype=torch.float32),
            {"text": "dp:4", "text.experts": "dp:4"},
        )
    topology = build(GRAPH, PLACEMENTS["colocated"])
    with pytest.raises(UserError, match="Runner on rank 1: found no stage of `text`"):
        Runner(topology, {n: m for n, m in models().items() if n != "text" or rank != 1})
    with pytest.raises(UserError, match="settings: found .*waves=3"):
        Runner(topology, models(), settings=ScheduleSettings(waves=3))
    runner = Runner(topology, models())
    batches = [part_of(topology, m) for m in range(2)]
    with pytest.raises(UserError, match="Runner: micro-batches: found 2 on rank 0 and 1 on rank 3"):
        runner(batches[: 1 if rank == 3 else 2])
    with pytest.raises(UserError, match="Runner: forward_only: found False on rank 0 and True on rank 1"):
        runner(batches, forward_only=rank == 1)
    frozen = models()["vision"].requires_grad_(False)
    with pytest.raises(UserError, match="Runner: forward_only: found .* on rank 0 and .'vision'. on rank 2"):
        Runner(topology, models() | {"vision": frozen}, forward_only=["vision"] if rank == 2 else [])
    with pytest.raises(UserError, match="forward_only `vision`: .*require gradients"):
        Runner(topology, models(), forward_only=["vision"])
    held = models()
    optimizer = build_optimizers(topology, held, partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(UserError, match="forward_only `vision`: .*require gradients"):
        Runner(topology, held | {"vision": held["vision"].forward}, optimizer=optimizer, forward_only=["vision"])
    nothing = MicroBatchInputs({**batches[0].inputs, "generator": None}, batches[0].rows)
    with pytest.raises(UserError, match="on rank 3: inputs: found none of `generator`, .*`text>gen"):
        runner([nothing if rank == 3 else batches[0]])
    no_rows = MicroBatchInputs({name: each for name, each in batches[0].inputs.items() if name != "text" or rank != 2})
    with pytest.raises(UserError, match=r"with an input of `text`: found \[0\] on rank 0 and \[\] on rank 2"):
        runner([no_rows])
    a_tuple: Any = {("vision", "text"): ([], [])}
    with pytest.raises(UserError, match="Runner on rank 2: .*`vision>text`: found a tuple, expected `Rows`"):
        runner([MicroBatchInputs(batches[0].inputs, a_tuple) if rank == 2 else batches[0]])
    scalar = MicroBatchInputs(batches[0].inputs, {("vision", "text"): Rows(torch.tensor(3), [])})
    with pytest.raises(
        UserError, match=r"boundary vision>text on rank 2: held: found .*, expected int64 of shape \[rows\]"
    ):
        runner([scalar if rank == 2 else batches[0]])
    with pytest.raises(UserError, match="Runner on rank 1: inputs: found an input of `sound`"):
        runner([MicroBatchInputs({**batches[0].inputs, "sound": 0}) if rank == 1 else batches[0]])
    with pytest.raises(UserError, match="rows: found rows of `text>vision`, .*vision>text, text>generator"):
        runner([MicroBatchInputs(batches[0].inputs, {("text", "vision"): Rows([0], [0])}) if rank == 1 else batches[0]])
    runner(batches)  # It can be used afterwards.


@on_ranks(4)
def test_an_error_of_one_edge_is_that_of_all_ranks() -> None:
    """Ranks of the others would wait for those that raise it."""
    topology = build(GRAPH, PLACEMENTS["disjoint"])
    runner, part = Runner(topology, held_by(topology)), part_of(topology, 0)
    wrong = {**part.rows, ("vision", "text"): Rows(held=part.rows["vision", "text"].held, needed=[99])}
    with pytest.raises(UserError, match="vision>text: needed: found row 99 on rank 1"):
        runner([MicroBatchInputs(part.inputs, wrong) if topology.rank == 1 else part])


@on_ranks(2)
def test_a_last_stage_that_feeds_nobody_returns_its_loss() -> None:
    """Also where rows leave an earlier stage of its module."""
    graph = Graph([Edge("text", "critic", 0, 0), ("vision", "text")], width=WIDTH, dtype=torch.float64)
    topology = build(graph, vision="dp:1@0", text="pp:2@0-1", critic="dp:1@0")
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    first = {
        "vision": nn.Identity(),
        "text": lambda tokens, rows: {"hidden": tokens + rows, "rows": rows},
        "critic": lambda _, rows: 0 * rows.sum(),
    }
    last = {"text": Stage(lambda _, hidden: layer(hidden).sum(), hidden_shape=(2, WIDTH))}
    runner = Runner(topology, last if topology.rank else first)
    values = torch.ones(2, WIDTH, dtype=torch.float64)
    inputs = {name: values for name in topology.layouts if topology.has(name)}
    ids = [0, 1] if topology.rank == 0 else []
    rows = Rows(held=ids, needed=ids)
    loss = runner([MicroBatchInputs(inputs, {("vision", "text"): rows, Edge("text", "critic", 0, 0): rows})]).loss
    if topology.rank == 1:
        assert (
            torch.allclose(loss.double(), layer(2 * values).sum().detach(), rtol=1e-6) and layer.weight.grad is not None
        )
    else:
        assert loss == 0


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_losses_and_metrics_of_each_module(placement: str) -> None:
    """Of several modules with losses, on the same ranks or others, each has its own total."""
    topology = build(GRAPH, PLACEMENTS[placement])
    held = held_by(topology)
    stages: dict[str, Any] = stages_of(topology, held)
    if "generator" in held:

        def generate(noise: Tensor, rows: Tensor) -> dict[str, Any]:
            return {"loss": held["generator"](noise, rows), "metrics": {"samples": len(noise)}}

        stages["generator"] = generate
    result = Runner(topology, stages)([part_of(topology, m) for m in range(MICRO_BATCHES)])
    found, expected = models(), dict.fromkeys(("text", "generator"), 0.0)
    for m in range(MICRO_BATCHES):
        text = found["text"](inputs("text", m), found["vision"](inputs("vision", m)))
        expected["text"] += text["loss"].item()
        expected["generator"] += found["generator"](inputs("generator", m), text["rows"]).item()
    for name, loss in expected.items():
        assert total_loss(topology, name, result).item() == pytest.approx(loss, rel=1e-5)
    samples = result.metrics.get("generator", {}).get("samples", 0)
    assert total_loss(topology, "generator", samples).item() == SAMPLES * MICRO_BATCHES
    assert result.loss.item() == pytest.approx(sum(each.item() for each in result.losses.values()))


@on_ranks(2)
def test_what_callables_hold_out_of_sight() -> None:
    graph = Graph({"vision": ["text"]}, width=WIDTH, dtype=torch.float64)
    topology = build(graph, vision="dp:2", text="dp:2")
    head, vision = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    wrapped = nn.parallel.DistributedDataParallel(head, process_group=topology.group("text", "dp"))
    rows = Rows(held=[topology.rank], needed=[topology.rank])
    batch = MicroBatchInputs(
        {"vision": torch.ones(1, WIDTH, dtype=torch.float64), "text": ()}, {("vision", "text"): rows}
    )

    def with_text(text: Any, **options: Any) -> Runner:
        return Runner(topology, {"vision": vision, "text": text}, **options)

    class Recipe:
        def __init__(self) -> None:
            self.parts = {"language": [wrapped]}

        def loss(self, _: Any, rows: Tensor) -> Tensor:
            return self.parts["language"][0](rows).sum()

    def of_part(part: nn.Module, _: Any, rows: Tensor) -> Tensor:
        return part(rows).sum()

    listed = lambda _, rows: sum(each(rows).sum() for each in [wrapped])  # noqa: E731
    for hides in (lambda _, rows: wrapped(rows).sum(), Recipe().loss, partial(of_part, wrapped), listed):
        with pytest.raises(UserError, match="found DistributedDataParallel in stage 0 of `text`"):
            with_text(hides)([batch])
    for detached in (lambda _, rows: head(rows.detach()).sum().detach(), lambda _, rows: rows.sum().detach()):
        with pytest.raises(UserError, match="stage 0 of `text`: found a loss "):
            with_text(detached)([batch])
        with torch.no_grad():
            assert with_text(detached)([batch]).loss != 0
    no_tokens = with_text(lambda _, rows: torch.zeros((), dtype=torch.float64))
    assert no_tokens([batch]).loss == 0
    for model in (head, vision):
        model.zero_grad()
    with_text(lambda _, rows: head(rows).sum())([batch])
    assert all(p.grad is not None for model in (head, vision) for p in model.parameters())


@on_ranks(2)
def test_a_later_stage_without_the_shape_of_what_it_receives() -> None:
    topology = build(Graph({"text": []}, width=WIDTH, dtype=torch.float64), text="pp:2")
    with pytest.raises(UserError, match="on rank 1: found a Linear without `hidden_shape` as stage 1 of `text`"):
        Runner(topology, {"text": nn.Linear(WIDTH, WIDTH)})


@on_ranks(4)
def test_the_kind_of_gradients_is_compared_for_each_kind() -> None:
    """A later micro-batch may have another one."""
    graph = Graph({"vision": ["text"]}, width=WIDTH, dtype=torch.float64)
    topology = build(graph, vision="dp:4", text="tp:4")
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(4, WIDTH, dtype=torch.float64))
    run = Runner(topology, {"vision": nn.Identity(), "text": lambda _, rows: (rows * weight).sum()})
    values = torch.ones(1, WIDTH, dtype=torch.float64, requires_grad=True)

    def part(kind: Any) -> MicroBatchInputs:
        rows = Rows(held=[topology.rank], needed=range(4), gradient=kind)
        return MicroBatchInputs({"vision": values, "text": ()}, {("vision", "text"): rows})

    run([part("invariant"), part("invariant")])
    different = Runner(
        topology, {"vision": nn.Identity(), "text": lambda _, rows: (rows * weight * (1 + topology.rank)).sum()}
    )
    with pytest.raises(UserError, match="that differ on ranks 0-3, expected equal ones"):
        different([part("invariant")])
    with pytest.raises(UserError, match="that are equal on ranks 0-3, expected partial sums"):
        run([part("invariant"), part("partial")])


class LateSum:
    """A sum over ranks that lands when it is waited for, as one in a stream of a GPU may."""

    def __init__(self, tensor: Tensor, group: Any, async_op: bool):
        self.tensor, self.summed = tensor, tensor.clone()
        dist.all_reduce(self.summed, group=group)

    def wait(self) -> None:
        self.tensor.copy_(self.summed)


@on_ranks(2)
def test_gradients_that_are_not_applied() -> None:
    """After `zero_grad` nothing is left of a step, in which one run is summed."""
    topology = build(Graph({"text": []}, width=WIDTH, dtype=torch.float32), text="dp:2")
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1, bias=False)
    optimizer = build_optimizers(topology, {"text": model}, AdamW(lr=0.5, eps=1.0))
    runner = Runner(topology, {"text": lambda rows: model(rows).sum()}, optimizer=optimizer)
    rows = torch.full((1, WIDTH), topology.rank + 1.0)
    batch, [buffer] = MicroBatchInputs({"text": rows}), optimizer.modules[0].gradients.summed
    with patch("megatron_hetero.step.buffers.dist", SimpleNamespace(all_reduce=LateSum)):
        runner([batch])
        optimizer.zero_grad()
    assert not buffer.any()
    for _ in range(2):
        model(rows).sum().backward()
        norm = optimizer.step(tokens=3)
        assert norm.item() == pytest.approx(WIDTH**0.5), "the sum over ranks"
        optimizer.zero_grad()
    for _ in range(2):
        runner([batch])
        with torch.no_grad():
            runner([batch])
        runner([batch], forward_only=True)
        with pytest.raises(UserError, match="gradients of `text`: a backward pass .* begun"):
            runner([batch])
        with pytest.raises(UserError, match="a backward pass "):
            model(rows).sum().backward()
        optimizer.step(tokens=3)
        with pytest.raises(UserError, match="call `zero_grad` before the next"):
            runner([batch])
        optimizer.zero_grad()


def test_a_graph_is_checked() -> None:
    float32 = torch.float32
    assert Graph({"a": ["b", "c"], "d": []}, width=2, dtype=float32).modules == ("a", "d", "b", "c")
    with pytest.raises(UserError, match="`a>b` twice"):
        Graph([("a", "b"), Edge("a", "b")], width=2, dtype=float32)
    with pytest.raises(UserError, match="`a>a` from a module to itself"):
        Graph({"a": ["a"]}, width=2, dtype=float32)
    with pytest.raises(UserError, match="width: found none for `b>c`"):
        Graph({"a": ["b"], "b": ["c"]}, width={("a", "b"): 2}, dtype=float32)
    with pytest.raises(UserError, match="width: found `a>c`, expected edges of the graph, `a>b`"):
        Graph({"a": ["b"]}, width={("a", "b"): 2, ("a", "c"): 3}, dtype=float32)
    with pytest.raises(UserError, match="width: found 0, expected 1 or more"):
        Graph({"a": ["b"]}, width=0, dtype=float32)


@on_ranks(2)
def test_stages_that_gather_weights_are_those_of_the_optimizer() -> None:
    """However they are given: they learn how long gathered weights stay."""
    topology = build(Graph({"text": []}, width=WIDTH, dtype=torch.float32), text="dp:2")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    optimizer = build_optimizers(topology, {"text": model}, AdamW(zero=3))
    for given in (model, {0: model}, ModuleOnRank({0: model})):
        [(place, [stage])] = Runner(topology, {"text": given}, optimizer=optimizer).gathered.items()
        assert (place, stage.zero) == (("text", 0), 3)
