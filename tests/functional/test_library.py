"""The library with modules that are not ours: the examples in all placements, against the same modules in one process
(they compare losses and gradients themselves), and started as a user starts them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
from tests.support.ranks import on_ranks

ROOT = Path(__file__).parents[2]
PLATFORM = Platform(CPU, "gloo")
# Encoder, decoder.
PLACEMENTS = [
    ("dp:4", "sp:2,dp:2"),  # colocated, gradients of rows in parts
    ("dp:2@0-1", "sp:2@2-3"),  # disjoint
    ("dp:3@0-2", "sp:2@2-3"),  # mixed
    ("dp:4", "sp:2,pp:2"),  # stages: colocated, disjoint, mixed
    ("dp:2@0-1", "pp:2@2-3"),
    ("dp:3@0-2", "pp:2@2-3"),
]


@pytest.mark.parametrize("encoder, decoder", PLACEMENTS)
@on_ranks(4)
def test_losses_and_gradients_are_those_of_one_process(encoder: str, decoder: str) -> None:
    options = Options(encoder, decoder, steps=2, micro_batches=5, samples=5, check=True)
    lines: list[str] = []
    losses = train(options, PLATFORM, lines.append)
    of_ranks: list[Any] = [None] * 4
    dist.all_gather_object(of_ranks, losses)
    assert len(losses) == 2 and of_ranks == [losses] * 4
    if dist.get_rank() == 0:
        assert lines[0].startswith("encoder dp:") and "from one process" in lines[-1]


@on_ranks(4)
def test_more_replicas_than_samples() -> None:
    train(Options("dp:4", "dp:4", steps=1, micro_batches=4, samples=2, check=True), PLATFORM, lambda _: None)


@on_ranks(4)
def test_it_learns() -> None:
    losses = train(Options(steps=12), PLATFORM, lambda _: None)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    "options, found",
    [
        (Options("tp:4"), "found 1 attention heads and tp:4"),
        (Options(decoder_parallel="cp:4"), "axis cp): found cp:4, expected cp:1"),
        (Options("dp:2@0-1", "dp:1@2"), "ranks 3: found no module that covers them"),
        (Options(decoder_parallel="pp:4"), "found 2 layers and pp:4"),
    ],
)
@on_ranks(4)
def test_layouts_that_do_not_fit_are_refused(options: Options, found: str) -> None:
    with pytest.raises(UserError, match=re.escape(found)):
        train(options, PLATFORM, lambda _: None)


@pytest.mark.parametrize(
    "vision, text",
    [("dp:4", "dp:4"), ("dp:4", "dp:2@0-1"), ("dp:3@0-2", "dp:1@3"), ("dp:1@0", "dp:3@1-3"), ("dp:3@0-2", "dp:3@1-3")],
)
@on_ranks(4)
def test_the_plain_loop_trains_as_one_process_does(vision: str, text: str) -> None:
    layouts = {"vision": Layout.parse(vision, 4), "text": Layout.parse(text, 4)}
    edges = [("vision", "text")]
    topology = Topology.build(layouts, PLATFORM, edges=edges, planned=edges)
    differences = plain_loop.differences(plain_loop.train(topology), plain_loop.train_alone(CPU))
    assert differences and max(differences) < 1e-5


@pytest.mark.parametrize("text, generator", [("dp:4", "dp:4"), ("pp:2,dp:2", "dp:4"), ("pp:2@0-1", "dp:2@2-3")])
@on_ranks(4)
def test_a_text_module_that_feeds_a_generator_trains_as_in_one_process(text: str, generator: str) -> None:
    topology = build(generator_example.GRAPH, text=text, generator=generator)
    with contextlib.redirect_stdout(io.StringIO()):
        trained = generator_example.train(topology)
    assert generator_example.difference(topology, trained, generator_example.train_alone(CPU)) < 1e-5


# ------------------------------------------------------------------------------------------- models of the tests' own

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


class Stage(torch.nn.Module):
    """A stage that takes hidden states of a shape, and returns `of` them."""

    def __init__(self, shape: tuple[int, ...], of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shape, self.of = shape, of

    def hidden_shape(self, _: Tensor) -> tuple[int, ...]:
        return self.shape

    def forward(self, _: Tensor, hidden: Tensor) -> Tensor:
        return self.of(hidden)


def colocated(encoder: Any, decoder: Any, width: int = 1) -> Interpreter:
    topology = Topology.build(LAYOUTS, PLATFORM, edges=[("encoder", "decoder")])
    modules = {"encoder": ModuleOnRank({0: encoder}), "decoder": ModuleOnRank({0: decoder})}
    return Interpreter.build(topology, modules, Graph([EDGE], width=width, dtype=torch.float32), timeout_s=0)


def staged(first: Any, last: Any, last_stage: int = 1, more: dict[str, ModuleOnRank] | None = None) -> Interpreter:
    """An encoder on ranks 0 and 1, stages of a decoder on ranks 2 and 3."""
    rank, topology = dist.get_rank(), Topology.build(STAGED, PLATFORM, edges=[("encoder", "decoder")])
    decoder = ModuleOnRank({0: first} if rank == 2 else {last_stage: last})
    modules = {"encoder": ModuleOnRank({0: Weight()})} if rank < 2 else {"decoder": decoder}
    graph = Graph([EDGE], width=1, dtype=torch.float32)
    return Interpreter.build(topology, modules | (more or {}), graph, timeout_s=0)


def same_rows(_: int, width: int = 1) -> DeviceMicroBatch:
    """A micro-batch in which two rows stay where they are."""
    side = Ownership.of({(r,): [2 * r, 2 * r + 1] for r in range(4)})
    part = load_plan(plan_boundary(side, side, row_bytes=4 * width).rank(dist.get_rank()), CPU)
    batch = torch.ones(2, 1)
    return DeviceMicroBatch({"encoder": batch, "decoder": batch}, {EDGE: part})


def crossing_rows(_: int) -> DeviceMicroBatch:
    """Two rows of each encoder rank go to the decoder's first stage."""
    source, target = Ownership.of({(0,): [0, 1], (1,): [2, 3]}), Ownership.of({(2,): range(4)})
    rank, batch = dist.get_rank(), torch.ones(2, 1)
    parts = {} if rank == 3 else {EDGE: load_plan(plan_boundary(source, target, row_bytes=4).rank(rank), CPU)}
    return DeviceMicroBatch({"encoder": batch, "decoder": batch}, parts)


@pytest.mark.parametrize("uses, loss, gradient", [(True, 12.0, 12.0), (False, 4.0, 0.0)])
@on_ranks(4)
def test_a_decoder_may_ignore_its_rows(uses: bool, loss: float, gradient: float) -> None:
    encoder = Weight()
    decoder = (lambda _, rows: (3 * rows).sum()) if uses else (lambda batch, _: batch.sum().requires_grad_())
    found = colocated(encoder, decoder).run(build_schedule(LAYOUTS, 2, text="decoder"), same_rows).loss
    assert encoder.weight.grad is not None and (found.item(), encoder.weight.grad.item()) == (loss, gradient)


@on_ranks(4)
def test_what_models_return_and_where_they_are_must_fit() -> None:
    rank, no_scalar = dist.get_rank(), colocated(Weight(), lambda _, rows: rows.sum(1))
    found = r"^micro-batch 0 of `decoder`, stage 0: found a loss of shape \(2,\), expected a scalar"
    with pytest.raises(UserError, match=found):
        no_scalar.run(build_schedule(LAYOUTS, 2, text="decoder"), same_rows)
    other_type = staged(lambda batch, _: batch.double(), Weight())
    if rank == 2:  # The last stage would wait for what the first refuses to send.
        schedule = build_schedule(STAGED, 1, text="decoder", forward_only=("encoder", "decoder"))
        with pytest.raises(UserError, match="found hidden states of torch.float64, expected torch.float32"):
            other_type.run(schedule, crossing_rows)
    elif rank < 2:
        schedule = build_schedule(STAGED, 1, text="decoder", forward_only=("encoder", "decoder"))
        other_type.run(schedule, crossing_rows)
    with pytest.raises(UserError, match=r"on rank 3: found stages \[0\] of `decoder`, expected stage 1 of `decoder`"):
        staged(Weight(), Weight(), last_stage=0)
    with pytest.raises(UserError, match="on rank 0: found `audio`, expected some of encoder, decoder"):
        staged(Weight(), Weight(), more={} if rank else {"audio": ModuleOnRank({0: Weight()})})


@pytest.mark.parametrize("rows", [1, 2, 3])
@on_ranks(4)
def test_an_encoder_returns_the_rows_of_the_plan(rows: int) -> None:
    weight = torch.ones((), requires_grad=True)
    interpreter = colocated(lambda batch: batch.new_ones(rows, 1) * weight, lambda _, arrived: arrived.sum())
    found = rf"found rows of shape \({rows}, 1\), expected \(2, 1\), what this rank holds in the plan"
    refused = pytest.raises(UserError, match=f"^micro-batch 0 of `encoder`, stage 0: {found}")
    with contextlib.nullcontext() if rows == 2 else refused:
        interpreter.run(build_schedule(LAYOUTS, 2, text="decoder"), same_rows)


@pytest.mark.parametrize("shape", [(2, 3), (6, 1), (4, 3), (1, 2), (3, 2)])
@on_ranks(4)
def test_hidden_states_have_the_shape_of_the_next_stage(shape: tuple[int, int]) -> None:
    """As many bytes or not: both ranks learn it before any are sent."""
    rank, weight = dist.get_rank(), torch.ones((), requires_grad=True)
    interpreter = staged(lambda _, rows: weight * rows.sum() * torch.ones(shape), Stage((3, 2), Tensor.sum))
    schedule = build_schedule(STAGED, 2, text="decoder", forward_only=("encoder", "decoder"))
    found = f"found hidden states of shape {shape} from rank 2, expected (3, 2), the `hidden_shape` of the next stage"
    message = f"micro-batch 0 of `decoder`, stage {rank - 2}: {found}."
    refused = pytest.raises(UserError, match=f"^{re.escape(message)}")
    with contextlib.nullcontext() if rank < 2 or shape == (3, 2) else refused:
        interpreter.run(schedule, crossing_rows)


@on_ranks(4)
def test_a_recomputed_forward_pass_drops_the_same() -> None:
    found: list[Any] = []
    for settings in (ScheduleSettings(kind="waves", waves=3), ScheduleSettings(kind="recompute")):  # in one order
        encoder, returned = Weight(), list[tuple[float, ...]]()

        def dropping(batch: Tensor, encoder: Weight = encoder, returned: list[Any] = returned) -> Tensor:
            rows = torch.nn.functional.dropout(encoder(batch.expand(-1, 16)), 0.5)
            returned.append(tuple(rows.detach().flatten().tolist()))
            return rows

        interpreter = colocated(dropping, lambda _, rows: torch.nn.functional.dropout(rows, 0.5).sum(), width=16)
        torch.manual_seed(dist.get_rank())
        schedule = build_schedule(LAYOUTS, 3, settings, text="decoder")
        loss = interpreter.run(schedule, lambda number: same_rows(number, width=16)).loss
        assert encoder.weight.grad is not None
        found.append((returned, loss.item(), encoder.weight.grad.item(), torch.rand(4).tolist()))
    (once, *values), (twice, *values_again) = found
    assert twice == [*once, *once] and len(set(once)) == 3 and values_again == values


class Mark:
    """Ends when the test says so."""

    ended = False

    def __call__(self) -> bool:
        return self.ended


@on_ranks(4)
def test_the_first_action_that_the_device_has_not_ended_is_named() -> None:
    """The host has issued all of them when the device ends one after the other."""
    rank, marks = dist.get_rank(), list[Mark]()

    def mark() -> Mark:
        marks.append(Mark())
        return marks[-1]

    interpreter = staged(lambda _, rows: 3 * rows, Stage((4, 1), Tensor.sum))
    interpreter.watchdog = Watchdog(600.0, rank, mark)
    interpreter.run(build_schedule(STAGED, 1, text="decoder"), crossing_rows)
    named = []
    for each in marks:
        oldest = interpreter.watchdog.oldest()
        assert oldest is not None
        named.append(oldest[0]())
        each.ended = True
        while (now := interpreter.watchdog.oldest()) is not None and now[0] is oldest[0]:
            time.sleep(0.01)
    if rank == 0:
        assert named[0] == "action encoder.0.F0 of micro-batch 0, with the other ranks of its stage,"
        assert named[1] == "action encoder>decoder.F0 of micro-batch 0, with ranks 1-2 over encoder>decoder,"
        assert any(what.startswith("action decoder>encoder.B0! ") and "over decoder>encoder" in what for what in named)
    elif rank == 2:
        assert "action decoder.0>1.F0 of micro-batch 0, with rank 3 over decoder forward from stage 0," in named
    elif rank == 3:
        assert "action decoder.1>0.B0 of micro-batch 0, with rank 2 over decoder backward from stage 1," in named


# ----------------------------------------------------------------------------------- outputs of stages, and their edges

TWO_OUTPUTS = {Edge("encoder", "decoder", 0, 0): ("near", "far"), EDGE: ("rows",)}
TWO_STAGES = {"encoder": Layout.parse("pp:2@0-1"), "decoder": Layout.parse("dp:2@2-3")}
NAMES = "expected a tensor by each of the names hidden, near, far. Correct what the model of the stage returns."
OWNED = "expected (2, 1), what this rank holds in the plan"
RETURNED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "too few": (lambda x: {"hidden": x, "near": 2 * x}, f"outputs hidden, near, {NAMES}"),
    "unknown": (
        lambda x: {"hidden": x, "near": 2 * x, "far": 3 * x, "farther": 4 * x},
        f"outputs hidden, near, far, farther, {NAMES}",
    ),
    "hidden states alone": (lambda x: x, f"outputs hidden, {NAMES}"),
    "nothing": (lambda x: {}, f"no outputs, {NAMES}"),
    "a tuple": (lambda x: (x, 2 * x, 3 * x), f"a tuple, {NAMES}"),
    "none": (lambda x: None, f"a NoneType, {NAMES}"),
    "no tensor": (lambda x: {"hidden": x, "near": 2 * x, "far": None}, f"far of type NoneType, {NAMES}"),
    "too many rows": (
        lambda x: {"hidden": x, "near": 2 * x, "far": torch.cat([3 * x, x])},
        f"far of shape (4, 1), {OWNED}",
    ),
    "too wide": (
        lambda x: {"hidden": x, "near": torch.cat([x, x], dim=1), "far": 3 * x},
        f"near of shape (2, 2), {OWNED}",
    ),
    "no dims": (lambda x: {"hidden": x, "near": x.sum(), "far": 3 * x}, f"near of shape (), {OWNED}"),
}
"""Results of the first of two stages of an encoder for its input, and what is found in them."""


def with_two_outputs(first: Callable[[Tensor], Any]) -> Interpreter:
    """An encoder of two stages, of which `first` feeds the decoder, too."""
    rank, topology = dist.get_rank(), Topology.build(TWO_STAGES, PLATFORM, edges=list(TWO_OUTPUTS))

    def decoder(_: Tensor, rows: dict[str, Tensor]) -> Tensor:
        return sum(((k + 1) * rows[name].sum() for k, name in enumerate(("near", "far", "rows"))), torch.zeros(()))

    models: list[Any] = [first, Stage((2, 1), lambda hidden: 5 * hidden), decoder, decoder]
    own = {"encoder": ModuleOnRank({rank: models[rank]})} if rank < 2 else {"decoder": ModuleOnRank({0: decoder})}
    graph = Graph(list(TWO_OUTPUTS), width=1, dtype=torch.float32, outputs=TWO_OUTPUTS)
    return Interpreter.build(topology, own, graph, timeout_s=0)


def rows_of_two_stages(_: int) -> DeviceMicroBatch:
    """Two rows of each encoder stage go to the two decoders, one each."""
    rank, batch, parts = dist.get_rank(), torch.ones(2, 1), {}
    for edge, outputs in TWO_OUTPUTS.items():
        source = Ownership.of({(edge.source_coordinate(TWO_STAGES["encoder"]),): [0, 1]})
        plan = plan_boundary(source, Ownership.of({(2,): [0], (3,): [1]}), row_bytes=4 * len(outputs))
        if rank in plan.ranks:
            parts[edge] = load_plan(plan.rank(rank), CPU)
    return DeviceMicroBatch({"encoder": batch, "decoder": batch}, parts)


@on_ranks(4)
def test_outputs_of_two_stages_arrive_by_name() -> None:
    rank, weight = dist.get_rank(), torch.ones((), requires_grad=True)
    interpreter = with_two_outputs(lambda x: {"hidden": weight * x, "near": 2 * weight * x, "far": 3 * weight * x})
    loss = interpreter.run(
        build_schedule(TWO_STAGES, 2, text="decoder", edges=list(TWO_OUTPUTS)), rows_of_two_stages
    ).loss
    # In each of two micro-batches, of each row: 1 * 2 of `near`, 2 * 3 of `far`, 3 * 5 of `rows`.
    assert loss.item() == (0.0 if rank < 2 else 2 * (2 + 6 + 15))
    assert (None if weight.grad is None else weight.grad.item()) == (2 * 2 * (2 + 6 + 15) if rank == 0 else None)


@pytest.mark.parametrize("kind", RETURNED)
@on_ranks(4)
def test_a_stage_returns_the_outputs_of_its_edges(kind: str) -> None:
    weight, (returned, found) = torch.ones((), requires_grad=True), RETURNED[kind]
    interpreter = with_two_outputs(lambda batch: returned(weight * batch))
    if dist.get_rank() == 0:  # The others would wait for it.
        with pytest.raises(
            UserError, match=re.escape(f"micro-batch 0 of `encoder`, stage 0: found {found}")
        ) as refused:
            interpreter.run(build_schedule(TWO_STAGES, 2, text="decoder", edges=list(TWO_OUTPUTS)), rows_of_two_stages)
        assert str(refused.value).count("found") == str(refused.value).count("expected") == 1


@on_ranks(4)
def test_edges_are_those_of_the_topology() -> None:
    rank, deeper = dist.get_rank(), Edge("encoder", "decoder", 0, 1)
    topology = Topology.build(STAGED, PLATFORM, edges=[EDGE])
    own = {"encoder": ModuleOnRank({0: Weight()})} if rank < 2 else {"decoder": ModuleOnRank({rank - 2: Weight()})}
    for edge in (deeper, Edge("audio", "decoder")):
        found = f"found a graph with the edges `{edge}`, `encoder>decoder`, expected `encoder>decoder`, because"
        with pytest.raises(UserError, match=f"^interpreter on rank 0: {found}"):
            Interpreter.build(topology, own, Graph([EDGE, edge], width=1, dtype=torch.float32), timeout_s=0)
    interpreter = Interpreter.build(topology, own, Graph([EDGE], width=1, dtype=torch.float32), timeout_s=0)
    schedule = build_schedule(STAGED, 1, text="decoder", edges=[EDGE, deeper])
    edges = (
        "`encoder.0>decoder.1`, `encoder>decoder`, expected `encoder>dec" if rank < 2 else f"`{deeper}`, expected none"
    )
    if rank != 2:  # It has no part in the other edge, and would wait for the others.
        with pytest.raises(UserError, match=f"with the edges {edges}"):
            interpreter.run(schedule, crossing_rows)


# ------------------------------------------------------------------------------------------------- under torchrun


def launched(program: str, *flags: str, ranks: int, folder: Path) -> list[str]:
    """The lines that an example prints, run in a folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    finished = subprocess.run(
        [*command, str(ROOT / "examples" / program), *flags],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def test_under_torchrun(tmp_path: Path) -> None:
    layouts = ("--encoder-parallel", "dp:1@0", "--decoder-parallel", "dp:1@1")
    lines = launched("custom_modules.py", "--check", "--steps", "2", *layouts, ranks=2, folder=tmp_path)
    first, *schedule, before, last = lines
    assert first == "encoder dp:1@0, decoder dp:1@1"
    assert [line.split()[:2] for line in schedule] == [["0", "encoder.0"], ["1", "decoder.0"]]
    assert before.startswith("step 1/2: loss ") and last.startswith("step 2/2: loss ")


def losses(lines: list[str]) -> dict[int, float]:
    """By step."""
    found = [re.fullmatch(r"step (\d+): loss (\d+\.\d+)", line) for line in lines]
    return {int(match[1]): float(match[2]) for match in found if match}


def test_the_recipe_to_copy_learns_and_resumes(tmp_path: Path) -> None:
    assert len((ROOT / "examples/recipe.py").read_text(encoding="utf-8").splitlines()) <= 60
    first = losses(launched("recipe.py", ranks=2, folder=tmp_path))
    assert list(first) == list(range(1, 21))
    shutil.rmtree(tmp_path / "runs/recipe/00000020")
    second = losses(launched("recipe.py", ranks=2, folder=tmp_path))
    assert list(second) == list(range(11, 31))
    assert {step: second[step] for step in range(11, 21)} == {step: first[step] for step in range(11, 21)}
    assert sum(second[step] for step in range(26, 31)) < 0.85 * sum(first[step] for step in range(1, 6))
