"""Steps of small modules by a schedule: what models return, what enters stages, and what the watchdog names."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hetero import Graph, Layout, Runner, UserError, build
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.groups.platform import CPU
from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.contract import InChunks, MicroBatchInputs, ModuleOnRank
from megatron_hetero.schedule.settings import ScheduleSettings
from tests.support.pool import platform
from tests.support.ranks import on_ranks

EDGE = Edge("encoder", "decoder")
LAYOUTS = {"encoder": Layout.parse("dp:4", 4), "decoder": Layout.parse("dp:4", 4)}
STAGED = {"encoder": Layout.parse("dp:2@0-1"), "decoder": Layout.parse("pp:2@2-3")}


class Weight(nn.Module):
    """A batch of numbers times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        return self.weight * batch

    def hidden_shape(self, batch: Tensor) -> torch.Size:
        return batch.shape


class Last(nn.Module):
    """The last stage of a module, for hidden states of `shape`."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def hidden_shape(self, _: Tensor) -> tuple[int, ...]:
        return self.shape

    def forward(self, _: Tensor, hidden: Tensor) -> Tensor:
        return hidden.sum()


def runner_of(
    layouts: dict[str, Layout], models: dict[str, Any], width: int = 1, stage: int = 0, graph: Graph | None = None
) -> Runner:
    """A runner of `models`, each at `stage`, for one edge."""
    graph = graph or Graph([EDGE], width=width, dtype=torch.float32)
    topology = build(graph, layouts, platform=platform(), planned=False)
    return Runner(topology, {name: ModuleOnRank({stage: model}) for name, model in models.items()}, timeout_s=0)


def staged(encoder: Any, first: Any, last: Any) -> Runner:
    """A runner of an encoder on ranks 0 and 1, and of a decoder with a stage on each of ranks 2 and 3."""
    rank = dist.get_rank()
    models = {"encoder": encoder} if rank < 2 else {"decoder": first if rank == 2 else last}
    return runner_of(STAGED, models, stage=max(0, rank - 2))


def local_rows(width: int) -> Any:
    """Micro-batches in which two rows of each rank stay there."""
    side = Ownership.of({(r,): [2 * r, 2 * r + 1] for r in range(4)})
    part = load_plan(plan_boundary(side, side, row_bytes=4 * width).rank(dist.get_rank()), CPU)
    return lambda _: MicroBatchInputs({"encoder": torch.ones(2, 1), "decoder": torch.ones(2, 1)}, {EDGE: part})


def crossing_rows(_: int) -> MicroBatchInputs:
    """Two rows of each encoder rank go to the decoder's first stage."""
    source, target = Ownership.of({(0,): [0, 1], (1,): [2, 3]}), Ownership.of({(2,): range(4)})
    rank, batch = dist.get_rank(), torch.ones(2, 1)
    parts = {} if rank == 3 else {EDGE: load_plan(plan_boundary(source, target, row_bytes=4).rank(rank), CPU)}
    return MicroBatchInputs({"encoder": batch, "decoder": batch}, parts)


@on_ranks(4)
def test_a_decoder_may_ignore_its_rows() -> None:
    for decoder, expected in (
        (lambda _, rows: (3 * rows).sum(), (12.0, 12.0)),
        (lambda batch, _: batch.sum().requires_grad_(), (4.0, 0.0)),
    ):
        encoder = Weight()
        runner = runner_of(LAYOUTS, {"encoder": encoder, "decoder": decoder})
        loss = runner.run(build_schedule(LAYOUTS, 2, text="decoder"), local_rows(1)).loss
        assert encoder.weight.grad is not None
        assert (loss.item(), encoder.weight.grad.item()) == expected


@on_ranks(4)
def test_a_loss_is_a_scalar() -> None:
    runner = runner_of(LAYOUTS, {"encoder": Weight(), "decoder": lambda _, rows: rows.sum(1)})
    found = r"micro-batch 0 of `decoder`, stage 0: found a loss of shape \(2,\)"
    with pytest.raises(UserError, match=found):
        runner.run(build_schedule(LAYOUTS, 2, text="decoder"), local_rows(1))


@on_ranks(4)
def test_hidden_states_have_the_dtype_of_the_graph() -> None:
    runner = staged(Weight(), lambda batch, _: batch.double(), Weight())
    schedule = build_schedule(STAGED, 1, text="decoder", forward_only=("encoder", "decoder"))
    batch = MicroBatchInputs({"decoder": torch.ones(2, 1)}, {})
    if (rank := dist.get_rank()) < 2:
        runner.run(schedule, lambda _: batch)
    elif rank == 2:  # The last stage would wait for what the first refuses to send.
        with pytest.raises(UserError, match="found hidden states of torch.float64, expected torch.float32"):
            runner.run(schedule, lambda _: batch)


@on_ranks(4)
def test_modules_are_those_of_the_rank() -> None:
    rank = dist.get_rank()
    with pytest.raises(UserError, match="on rank 3: found stages .0. of `decoder`, expected stage 1 of `decoder`"):
        runner_of(STAGED, {"encoder" if rank < 2 else "decoder": Weight()})
    models = {"encoder": Weight()} if rank < 2 else {"decoder": Weight()}
    with pytest.raises(UserError, match="on rank 0: found `audio`, .*encoder, decoder"):
        runner_of(STAGED, models | ({} if rank else {"audio": Weight()}), stage=max(0, rank - 2))


@pytest.mark.parametrize("rows", [1, 2, 3])
@on_ranks(4)
def test_an_encoder_returns_the_rows_of_the_plan(rows: int) -> None:
    weight = torch.ones((), requires_grad=True)
    models = {"encoder": lambda _: weight * torch.ones(rows, 1), "decoder": lambda _, arrived: arrived.sum()}
    runner, schedule = runner_of(LAYOUTS, models), build_schedule(LAYOUTS, 2, text="decoder")
    if rows == 2:
        runner.run(schedule, local_rows(1))
        return
    found = f"found rows of shape ({rows}, 1), expected (2, 1)"
    with pytest.raises(UserError, match=re.escape(f"micro-batch 0 of `encoder`, stage 0: {found}")):
        runner.run(schedule, local_rows(1))


@pytest.mark.parametrize("shape", [(2, 3), (6, 1), (4, 3), (1, 2), (3, 2)])
@on_ranks(4)
def test_hidden_states_have_the_shape_of_the_next_stage(shape: tuple[int, int]) -> None:
    """As many bytes or not: both ranks learn it before any are sent."""
    weight = torch.ones((), requires_grad=True)
    runner = staged(Weight(), lambda _, rows: weight * rows.sum() * torch.ones(shape), Last(3, 2))
    schedule = build_schedule(STAGED, 2, text="decoder", forward_only=("encoder", "decoder"))
    if (rank := dist.get_rank()) < 2 or shape == (3, 2):
        runner.run(schedule, crossing_rows)
        return
    found = f"found hidden states of shape {shape} from rank 2, expected (3, 2)"
    with pytest.raises(UserError, match=re.escape(f"micro-batch 0 of `decoder`, stage {rank - 2}: {found}")):
        runner.run(schedule, crossing_rows)


# ------------------------------------------------------------------------------------------- several outputs

TWO_OUTPUTS = {Edge("encoder", "decoder", 0, 0): ("near", "far"), EDGE: ("rows",)}
RETURNED: dict[str, Any] = {
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
NAMES = "expected |hidden, near, far"
HELD = "expected (2, 1)"


class Second(Last):
    """The last stage of an encoder."""

    def forward(self, _: Tensor, hidden: Tensor) -> Tensor:
        return 5 * hidden


def rows_of_two_stages(_: int) -> MicroBatchInputs:
    """Two rows of each encoder stage go to the two decoders, one each."""
    rank, batch, parts = dist.get_rank(), torch.ones(2, 1), {}
    for edge, outputs in TWO_OUTPUTS.items():
        source = Ownership.of({(edge.source_coordinate(Layout.parse("pp:2@0-1")),): [0, 1]})
        plan = plan_boundary(source, Ownership.of({(2,): [0], (3,): [1]}), row_bytes=4 * len(outputs))
        if rank in plan.ranks:
            parts[edge] = load_plan(plan.rank(rank), CPU)
    return MicroBatchInputs({"encoder": batch, "decoder": batch}, parts)


@pytest.mark.parametrize(
    "kind, found",
    [
        ("all", ""),
        ("too few", f"outputs hidden, near, {NAMES}"),
        ("unknown", f"outputs hidden, near, far, farther, {NAMES}"),
        ("hidden states alone", f"outputs hidden, {NAMES}"),
        ("nothing", f"no outputs, {NAMES}"),
        ("a tuple", f"a tuple, {NAMES}"),
        ("none", f"a NoneType, {NAMES}"),
        ("no tensor", f"far of type NoneType, {NAMES}"),
        ("too many rows", f"far of shape (4, 1), {HELD}"),
        ("too wide", f"near of shape (2, 2), {HELD}"),
        ("no dims", f"near of shape (), {HELD}"),
    ],
)
@on_ranks(4)
def test_a_stage_returns_the_outputs_of_its_edges_by_name(kind: str, found: str) -> None:
    rank, weight = dist.get_rank(), torch.ones((), requires_grad=True)
    layouts = {"encoder": Layout.parse("pp:2@0-1"), "decoder": Layout.parse("dp:2@2-3")}

    def decoder(_: Tensor, rows: dict[str, Tensor]) -> Tensor:
        return sum(((k + 1) * rows[name].sum() for k, name in enumerate(("near", "far", "rows"))), torch.zeros(()))

    encoder = [lambda batch: RETURNED[kind](weight * batch), Second(2, 1)]
    models = {"encoder": encoder[rank]} if rank < 2 else {"decoder": decoder}
    graph = Graph(list(TWO_OUTPUTS), width=1, dtype=torch.float32, outputs=TWO_OUTPUTS)
    runner = runner_of(layouts, models, stage=rank if rank < 2 else 0, graph=graph)
    schedule = build_schedule(layouts, 2, text="decoder", edges=list(TWO_OUTPUTS))
    if found:
        if rank == 0:  # The others would wait for it in vain.
            with pytest.raises(UserError) as refused:
                runner.run(schedule, rows_of_two_stages)
            message = str(refused.value)
            start, _, names = found.partition("|")
            assert message.startswith(f"micro-batch 0 of `encoder`, stage 0: found {start}") and names in message
            assert message.count("found") == message.count("expected") == 1
        return
    loss = runner.run(schedule, rows_of_two_stages).loss.item()
    # In each of two micro-batches, of each row: 1 * 2 of `near`, 2 * 3 of `far`, 3 * 5 of `rows`.
    assert loss == (0.0 if rank < 2 else 2 * (2 + 6 + 15))
    assert rank > 0 or (weight.grad is not None and weight.grad.item() == 2 * 2 * (2 + 6 + 15))


# ------------------------------------------------------------------------------------------------- the rest


@on_ranks(4)
def test_edges_are_those_of_the_topology() -> None:
    rank, deeper = dist.get_rank(), Edge("encoder", "decoder", 0, 1)
    models = {"encoder": Weight()} if rank < 2 else {"decoder": Weight()}
    runner = runner_of(STAGED, models, stage=max(0, rank - 2))
    if rank == 2:  # The other edge does not enter it: it would wait for the others.
        return
    edges = "`encoder.0>decoder.1`, expected none" if rank == 3 else (
        "`encoder.0>decoder.1`, `encoder>decoder`, expected `encoder>decoder`"
    )  # fmt: skip
    with pytest.raises(UserError, match=f"found a schedule with the edges {edges}"):
        runner.run(build_schedule(STAGED, 1, text="decoder", edges=[EDGE, deeper]), crossing_rows)


class Dropping(Weight):
    """Rows of which some are dropped, other ones each time."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[list[float]] = []

    def forward(self, batch: Tensor) -> Tensor:
        rows = nn.functional.dropout(super().forward(batch.expand(-1, 16)), 0.5)
        self.returned.append(rows.detach().flatten().tolist())
        return rows


@on_ranks(4)
def test_a_recomputed_forward_pass_drops_the_same() -> None:
    results = []
    for settings in (ScheduleSettings(kind="waves", waves=3), ScheduleSettings(kind="recompute")):  # draw in one order
        torch.manual_seed(dist.get_rank())
        encoder = Dropping()
        models = {"encoder": encoder, "decoder": lambda _, rows: nn.functional.dropout(rows, 0.5).sum()}
        runner = runner_of(LAYOUTS, models, width=16)
        loss = runner.run(build_schedule(LAYOUTS, 3, settings, text="decoder"), local_rows(16)).loss
        assert encoder.weight.grad is not None
        results.append(((loss.item(), encoder.weight.grad.item(), torch.rand(4).tolist()), encoder.returned))
    (once, first), (twice, both) = results
    assert both == [*first, *first] and len({tuple(rows) for rows in first}) == 3
    assert once == twice


def in_parts(load: Any) -> Any:
    """The micro-batches of `load`, whose encoder makes one row in each call."""

    def parted(m: int) -> MicroBatchInputs:
        batch = load(m)
        return replace(batch, inputs={**batch.inputs, "encoder": InChunks(batch.inputs["encoder"].split(1))})

    return parted


@pytest.mark.parametrize("settings", [ScheduleSettings(kind="waves", waves=3), ScheduleSettings(kind="recompute")])
@on_ranks(4)
def test_an_input_in_parts_runs_again_and_drops_the_same(settings: ScheduleSettings) -> None:
    torch.manual_seed(dist.get_rank())
    encoder, seen = Dropping(), list[float]()

    def decoder(_: Tensor, rows: Tensor) -> Tensor:
        seen.extend(rows.detach().flatten().tolist())
        return nn.functional.dropout(rows, 0.5).sum()

    runner = runner_of(LAYOUTS, {"encoder": encoder, "decoder": decoder}, width=16)
    schedule, load = build_schedule(LAYOUTS, 3, settings, text="decoder"), in_parts(local_rows(16))
    loss = runner.run(schedule, load).loss
    first, again = encoder.returned[:6], encoder.returned[6:]
    assert first == again and len({tuple(rows) for rows in first}) == 6
    assert seen == [element for rows in first for element in rows]
    assert encoder.weight.grad is not None and encoder.weight.grad.item() == loss.item()


@on_ranks(4)
def test_an_input_in_parts_is_evaluated_once() -> None:
    encoder = Weight()
    runner = runner_of(LAYOUTS, {"encoder": encoder, "decoder": lambda _, rows: rows.sum()})
    schedule = build_schedule(LAYOUTS, 2, text="decoder", forward_only=("encoder", "decoder"))
    assert runner.run(schedule, in_parts(local_rows(1))).loss.item() == 4
    assert encoder.weight.grad is None


class Mark:
    """Done when the test says so."""

    ended = False

    def __call__(self) -> bool:
        return self.ended


class Device:
    """A device that reaches its marks when the test says so."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]


@on_ranks(4)
def test_the_first_action_that_the_device_has_not_ended_is_named() -> None:
    """After the host has issued all of them."""
    runner, device = staged(Weight(), lambda _, rows: 3 * rows, Last(4, 1)), Device()
    rank = dist.get_rank()
    runner.watchdog = Watchdog(600.0, rank, device.mark)
    runner.run(build_schedule(STAGED, 1, text="decoder"), crossing_rows)
    named = []
    for mark in device.marks:
        oldest = runner.watchdog.oldest()
        assert oldest is not None
        named.append(oldest[0]())
        mark.ended = True
        while (now := runner.watchdog.oldest()) is not None and now[0] is oldest[0]:
            time.sleep(0.01)
    if rank == 0:
        assert named[0].startswith("action encoder.0.F0 of micro-batch 0, ")
        assert named[1].startswith("action encoder>decoder.F0 of micro-batch 0, with ranks 1-2 ")
        assert any(what.startswith("action decoder>encoder.B0! ") and "over decoder>encoder" in what for what in named)
    elif rank == 2:
        assert any(what.startswith("action decoder.0>1.F0 of micro-batch 0, with rank 3 ") for what in named)
    elif rank == 3:
        assert any(what.startswith("action decoder.1>0.B0 of micro-batch 0, with rank 2 ") for what in named)
