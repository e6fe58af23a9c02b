"""What the workers of the pool run for the tests of the library example."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples import generator as generator_example
from examples import plain_loop
from examples.custom_modules import Options, train
from megatron_hetero import Graph, Layout, UserError, build
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.contract import DeviceMicroBatch, ModuleOnRank
from megatron_hetero.schedule.settings import ScheduleSettings
from megatron_hetero.step.runtime import Interpreter


def trained(options: Options) -> tuple[list[float], list[str]]:
    """The losses of the example, and what it says."""
    said: list[str] = []
    return train(options, Platform(CPU, "gloo"), said.append), said


def differences_of_plain_loop(vision: str, text: str) -> list[float]:
    """Of the weights that the plain loop trains on this rank, from those of one process."""
    layouts = {name: Layout.parse(layout, 4) for name, layout in (("vision", vision), ("text", text))}
    edges = [("vision", "text")]
    topology = Topology.build(layouts, Platform(CPU, "gloo"), edges=edges, planned=edges)
    return plain_loop.differences(plain_loop.train(topology), plain_loop.train_alone(CPU))


def difference_of_generator(text: str, generator: str) -> float:
    """Of the weights that the example trains on any rank, from those of one process."""
    topology = build(generator_example.GRAPH, text=text, generator=generator)
    with contextlib.redirect_stdout(io.StringIO()):
        found = generator_example.train(topology)
    return generator_example.difference(topology, found, generator_example.train_alone(CPU))


def refusal(options: Options) -> str:
    """The message with which the example refuses to run."""
    try:
        trained(options)
    except UserError as error:
        return str(error)
    return ""


EDGE = Edge("encoder", "decoder")
LAYOUTS = {"encoder": Layout.parse("dp:4", 4), "decoder": Layout.parse("dp:4", 4)}
STAGED = {"encoder": Layout.parse("dp:2@0-1"), "decoder": Layout.parse("pp:2@2-3")}


class Weight(torch.nn.Module):
    """A batch of numbers times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        return self.weight * batch

    def hidden_shape(self, batch: Tensor) -> torch.Size:
        return batch.shape


def two_rows(_: int) -> DeviceMicroBatch:
    """A micro-batch in which two rows of one element stay where they are."""
    rank = dist.get_rank()
    side = Ownership.of({(r,): [2 * r, 2 * r + 1] for r in range(4)})
    part = load_plan(plan_boundary(side, side, row_bytes=4).rank(rank), CPU)
    batch = torch.ones(2, 1)
    return DeviceMicroBatch({"encoder": batch, "decoder": batch}, {EDGE: part})


def run_decoder(kind: str) -> tuple[float, float]:
    """The loss and the encoder's gradient, of a decoder that uses its rows, or does not, or does not add up."""
    topology, encoder = Topology.build(LAYOUTS, Platform(CPU, "gloo"), edges=[("encoder", "decoder")]), Weight()
    decoders = {
        "uses rows": lambda _, rows: (3 * rows).sum(),
        "ignores rows": lambda batch, _: batch.sum().requires_grad_(),
        "no scalar": lambda _, rows: rows.sum(1),
    }
    held = {"encoder": ModuleOnRank({0: encoder}), "decoder": ModuleOnRank({0: decoders[kind]})}
    interpreter = Interpreter.build(topology, held, Graph([EDGE], width=1, dtype=torch.float32), timeout_s=0)
    loss = interpreter.run(build_schedule(LAYOUTS, 2, text="decoder"), two_rows).loss
    assert encoder.weight.grad is not None
    return loss.item(), encoder.weight.grad.item()


def encoded(rows: int) -> str:
    """What the interpreter says on this rank of an encoder that returns so many rows instead of two."""
    topology = Topology.build(LAYOUTS, Platform(CPU, "gloo"), edges=[("encoder", "decoder")])
    weight = torch.ones((), requires_grad=True)
    held = {
        "encoder": ModuleOnRank({0: lambda batch: (weight * batch).new_ones(rows, 1) * weight}),
        "decoder": ModuleOnRank({0: lambda _, arrived: arrived.sum()}),
    }
    interpreter = Interpreter.build(topology, held, Graph([EDGE], width=1, dtype=torch.float32), timeout_s=0)
    try:
        interpreter.run(build_schedule(LAYOUTS, 2, text="decoder"), two_rows)
    except UserError as error:
        return str(error)
    return ""


class Shaped(torch.nn.Module):
    """The decoder's last stage, which takes hidden states of three rows of two."""

    def hidden_shape(self, _: Tensor) -> tuple[int, int]:
        return 3, 2

    def forward(self, _: Tensor, hidden: Tensor) -> Tensor:
        return hidden.sum()


def sent(shape: tuple[int, int]) -> str:
    """What the interpreter says on this rank where the decoder's first stage returns hidden states of that shape."""
    rank, topology = dist.get_rank(), Topology.build(STAGED, Platform(CPU, "gloo"), edges=[("encoder", "decoder")])
    weight = torch.ones((), requires_grad=True)
    first = ModuleOnRank({0: lambda _, rows: weight * rows.sum() * torch.ones(shape)})
    decoder = first if rank == 2 else ModuleOnRank({1: Shaped()})
    held = {"encoder": ModuleOnRank({0: Weight()})} if rank < 2 else {"decoder": decoder}
    interpreter = Interpreter.build(topology, held, Graph([EDGE], width=1, dtype=torch.float32), timeout_s=0)
    schedule = build_schedule(STAGED, 2, text="decoder", forward_only=("encoder", "decoder"))
    try:
        interpreter.run(schedule, crossing_rows)
    except UserError as error:
        return str(error)
    return ""


class Dropping(Weight):
    """Rows of which some are dropped, other ones each time."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[list[float]] = []

    def forward(self, batch: Tensor) -> Tensor:
        rows = torch.nn.functional.dropout(super().forward(batch.expand(-1, 16)), 0.5)
        self.returned.append(rows.detach().flatten().tolist())
        return rows


def with_dropout(settings: ScheduleSettings) -> tuple[float, float, list[list[float]], list[float]]:
    """The loss and the encoder's gradient with dropout in both modules, what the encoder returned each time, and what
    is drawn after the step.
    """
    topology, encoder = Topology.build(LAYOUTS, Platform(CPU, "gloo"), edges=[("encoder", "decoder")]), Dropping()
    torch.manual_seed(dist.get_rank())

    def decoder(_: Tensor, rows: Tensor) -> Tensor:
        return torch.nn.functional.dropout(rows, 0.5).sum()

    held = {"encoder": ModuleOnRank({0: encoder}), "decoder": ModuleOnRank({0: decoder})}
    interpreter = Interpreter.build(topology, held, Graph([EDGE], width=16, dtype=torch.float32), timeout_s=0)
    loss = interpreter.run(build_schedule(LAYOUTS, 3, settings, text="decoder"), sixteen_wide).loss
    assert encoder.weight.grad is not None
    return loss.item(), encoder.weight.grad.item(), encoder.returned, torch.rand(4).tolist()


def sixteen_wide(_: int) -> DeviceMicroBatch:
    """As `two_rows`, with rows of 16 elements."""
    side = Ownership.of({(r,): [2 * r, 2 * r + 1] for r in range(4)})
    part = load_plan(plan_boundary(side, side, row_bytes=64).rank(dist.get_rank()), CPU)
    return DeviceMicroBatch({"encoder": torch.ones(2, 1), "decoder": torch.ones(2, 1)}, {EDGE: part})


def oldest_on_the_device() -> list[str]:
    """What the watchdog names while a device comes to the end of one action after the other, after the host has issued
    all of them.
    """
    rank, held = dist.get_rank(), {}
    topology = Topology.build(STAGED, Platform(CPU, "gloo"), edges=[("encoder", "decoder")])
    if rank < 2:
        held = {"encoder": ModuleOnRank({0: Weight()})}
    else:
        stage: Any = First() if rank == 2 else Last()
        held = {"decoder": ModuleOnRank({rank - 2: stage})}
    graph = Graph([EDGE], width=1, dtype=torch.float32)
    interpreter, device = Interpreter.build(topology, held, graph, timeout_s=0), Device()
    interpreter.watchdog = Watchdog(600.0, rank, device.mark)
    interpreter.run(build_schedule(STAGED, 1, text="decoder"), crossing_rows)
    named = []
    for mark in device.marks:
        oldest = interpreter.watchdog.oldest()
        assert oldest is not None
        named.append(oldest[0]())
        mark.ended = True
        while (now := interpreter.watchdog.oldest()) is not None and now[0] is oldest[0]:
            time.sleep(0.01)
    return named


class Mark:
    """Done when the device is told to."""

    ended = False

    def __call__(self) -> bool:
        return self.ended


class Device:
    """Of a test: comes to its marks when it is told to."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]


class First(torch.nn.Module):
    """The first stage of a decoder."""

    def forward(self, _: Tensor, rows: Tensor) -> Tensor:
        return 3 * rows


class Last(torch.nn.Module):
    """The last one."""

    def hidden_shape(self, _: Tensor) -> tuple[int, int]:
        return 4, 1

    def forward(self, _: Tensor, hidden: Tensor) -> Tensor:
        return hidden.sum()


def crossing_rows(_: int) -> DeviceMicroBatch:
    """Two rows of each encoder rank go to the decoder's first stage."""
    source, target = Ownership.of({(0,): [0, 1], (1,): [2, 3]}), Ownership.of({(2,): range(4)})
    rank, batch = dist.get_rank(), torch.ones(2, 1)
    parts = {} if rank == 3 else {EDGE: load_plan(plan_boundary(source, target, row_bytes=4).rank(rank), CPU)}
    return DeviceMicroBatch({"encoder": batch, "decoder": batch}, parts)


class Widening(torch.nn.Module):
    """The first stage of a decoder, which returns another dtype than the interpreter's."""

    def forward(self, batch: Tensor, rows: Tensor) -> Tensor:
        return batch.double()


def misfit(kind: str) -> str:
    """What the interpreter says on each rank of a model that does not fit."""
    try:
        return str(run_decoder("no scalar")) if kind == "no scalar" else _staged(kind)
    except UserError as error:
        return str(error)


def _staged(kind: str) -> str:
    topology, rank = Topology.build(STAGED, Platform(CPU, "gloo"), edges=[("encoder", "decoder")]), dist.get_rank()
    first = {"encoder": ModuleOnRank({0: Weight()})}
    model = Widening() if rank < 3 else Weight()
    decoder = ModuleOnRank({max(0, rank - 2) if kind == "other type" else 0: model})
    held = first if rank < 2 else {"decoder": decoder}
    if kind == "unknown" and rank == 0:
        held = first | {"audio": ModuleOnRank({0: Weight()})}
    interpreter = Interpreter.build(topology, held, Graph([EDGE], width=1, dtype=torch.float32), timeout_s=0)
    if kind == "other type" and rank < 3:  # The last stage would wait for what the first refuses to send.
        schedule = build_schedule(STAGED, 1, text="decoder", forward_only=("encoder", "decoder"))
        interpreter.run(schedule, lambda _: DeviceMicroBatch({"decoder": torch.ones(2, 1)}, {}))
    return ""


TWO_OUTPUTS = {Edge("encoder", "decoder", 0, 0): ("near", "far"), EDGE: ("rows",)}
GIVEN: dict[str, Any] = {
    "all": lambda x: {"hidden": x, "near": 2 * x, "far": 3 * x},
    "too few": lambda x: {"hidden": x, "near": 2 * x},
    "unknown": lambda x: {"hidden": x, "near": 2 * x, "far": 3 * x, "farther": 4 * x},
    "hidden states alone": lambda x: x,
    "nothing": lambda x: {},
    "a tuple": lambda x: (x, 2 * x, 3 * x),
    "none": lambda x: None,
    "no tensor": lambda x: {"hidden": x, "near": 2 * x, "far": None},
    "too many rows": lambda x: {"hidden": x, "near": 2 * x, "far": torch.cat([3 * x, x])},
    "too wide": lambda x: {"hidden": x, "near": torch.cat([x, x], dim=1), "far": 3 * x},
    "no dims": lambda x: {"hidden": x, "near": x.sum(), "far": 3 * x},
}
"""What the first of two stages of an encoder returns for its input."""


class Second(torch.nn.Module):
    """The last stage of an encoder."""

    def hidden_shape(self, _: Tensor) -> tuple[int, int]:
        return 2, 1

    def forward(self, _: Tensor, hidden: Tensor) -> Tensor:
        return 5 * hidden


def several_outputs(kind: str) -> tuple[float, float | None, str]:
    """This rank's loss, the gradient of the encoder's first stage and what the interpreter says where that one returns
    `GIVEN[kind]`. Ranks that would wait for it in vain do nothing.
    """
    rank, weight = dist.get_rank(), torch.ones((), requires_grad=True)
    layouts = {"encoder": Layout.parse("pp:2@0-1"), "decoder": Layout.parse("dp:2@2-3")}
    topology = Topology.build(layouts, Platform(CPU, "gloo"), edges=list(TWO_OUTPUTS))

    def decoder(_: Tensor, rows: dict[str, Tensor]) -> Tensor:
        return sum(((k + 1) * rows[name].sum() for k, name in enumerate(("near", "far", "rows"))), torch.zeros(()))

    models: list[Any] = [lambda batch: GIVEN[kind](weight * batch), Second(), decoder, decoder]
    stage = {"encoder": ModuleOnRank({rank: models[rank]})} if rank < 2 else {"decoder": ModuleOnRank({0: decoder})}
    graph = Graph(list(TWO_OUTPUTS), width=1, dtype=torch.float32, outputs=TWO_OUTPUTS)
    interpreter = Interpreter.build(topology, stage, graph, timeout_s=0)
    if rank and kind != "all":
        return 0.0, None, ""
    schedule = build_schedule(layouts, 2, text="decoder", edges=list(TWO_OUTPUTS))
    try:
        loss = interpreter.run(schedule, rows_of_two_stages).loss
    except UserError as error:
        return 0.0, None, str(error)
    return loss.item(), None if weight.grad is None else weight.grad.item(), ""


def rows_of_two_stages(_: int) -> DeviceMicroBatch:
    """Two rows of each encoder stage go to the two decoders, one each."""
    rank, batch, parts = dist.get_rank(), torch.ones(2, 1), {}
    for edge, outputs in TWO_OUTPUTS.items():
        source = Ownership.of({(edge.source_coordinate(Layout.parse("pp:2@0-1")),): [0, 1]})
        plan = plan_boundary(source, Ownership.of({(2,): [0], (3,): [1]}), row_bytes=4 * len(outputs))
        if rank in plan.ranks:
            parts[edge] = load_plan(plan.rank(rank), CPU)
    return DeviceMicroBatch({"encoder": batch, "decoder": batch}, parts)


def other_edges(kind: str) -> str:
    """What the interpreter says where the graph, or the schedule, has another edge than the topology."""
    rank, deeper = dist.get_rank(), Edge("encoder", "decoder", 0, 1)
    topology = Topology.build(STAGED, Platform(CPU, "gloo"), edges=[EDGE])
    mine = {"encoder": ModuleOnRank({0: Weight()})} if rank < 2 else {"decoder": ModuleOnRank({rank - 2: Weight()})}
    edges = [EDGE, *{"graph": [deeper], "no module": [Edge("audio", "decoder")]}.get(kind, [])]
    schedule = build_schedule(STAGED, 1, text="decoder", edges=[EDGE, deeper])
    try:
        interpreter = Interpreter.build(topology, mine, Graph(edges, width=1, dtype=torch.float32), timeout_s=0)
        if rank != 2:  # To which the other edge does not go: it would wait for the others.
            interpreter.run(schedule, crossing_rows)
    except UserError as error:
        return str(error)
    return ""
