"""Rows and their gradients in a step: what does not fit the plan, or would be left out without a word."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero import Runner, UserError, build
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.ownership import Gradient, Ownership
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.groups.platform import CPU
from megatron_hetero.layout.graph import Edge, Graph
from megatron_hetero.layout.layout import Layout
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.contract import InChunks, MicroBatchInputs, ModuleOnRank
from megatron_hetero.schedule.settings import ScheduleSettings
from megatron_hetero.step.execution import StepExecution
from megatron_hetero.step.resources import Activation, LiveMicroBatch
from tests.support.pool import platform
from tests.support.ranks import on_ranks

WIDTH, EDGE = 8, Edge("encoder", "decoder")
COLOCATED, DISJOINT = ("dp:4", "tp:2,dp:2"), ("dp:2@0-1", "tp:2@2-3")
MICRO_BATCHES = 3


def runner_of(layouts: dict[str, Layout], models: dict[str, ModuleOnRank]) -> Runner:
    topology = build(Graph([EDGE], width=WIDTH, dtype=torch.float32), layouts, platform=platform(), planned=False)
    return Runner(topology, models, timeout_s=0)


def run(
    places: tuple[str, str], gradient: Gradient, parts: bool, settings: ScheduleSettings, padding: int = 0, **batch: Any
) -> float:
    """The gradient of the encoder's weight, over all ranks, after a step.

    Each decoder rank reads all rows of its replica, or every other one where `parts`. The first micro-batch uses none.
    `padding`: rows of each encoder rank before those that are needed.
    """
    layouts = {name: Layout.parse(text, 4) for name, text in zip(("encoder", "decoder"), places, strict=True)}
    rank, weight = dist.get_rank(), torch.ones(())
    weight.requires_grad_()

    def decoder(micro_batch: Tensor, rows: Tensor) -> Tensor:
        rows = rows * torch.tensor([[0.5], [1.5], [1.5], [0.5]])
        return (rows[rank % 2 :: 2] if parts else rows).sum() * micro_batch

    source = Ownership.of(
        {(r,): [*range(8 + i, 8 + i + padding), 2 * i, 2 * i + 1] for i, r in enumerate(layouts["encoder"].ranks)}
    )
    replicas = [range(4), range(4, 8)]
    target = Ownership.of(dict(zip(layouts["decoder"].groups("tp"), replicas, strict=False)), gradient)
    plan = load_plan(plan_boundary(source, target, 4 * WIDTH).rank(rank), CPU)

    def load(micro_batch: int) -> MicroBatchInputs:
        number = torch.tensor(float(micro_batch))
        given: dict[str, Any] = {"inputs": {"encoder": number, "decoder": number}, "rows": {EDGE: plan}}
        return MicroBatchInputs(**given | batch)

    models: dict[str, Any] = {"encoder": lambda _: weight * torch.ones(padding + 2, WIDTH), "decoder": decoder}
    held = {name: ModuleOnRank({0: models[name]}) for name, layout in layouts.items() if rank in layout}
    runner_of(layouts, held).run(build_schedule(layouts, MICRO_BATCHES, settings, text="decoder"), load)
    total = torch.zeros(()) if weight.grad is None else weight.grad
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("gradient", ["invariant", "partial"])
@pytest.mark.parametrize("places", [COLOCATED, DISJOINT])
@on_ranks(4)
def test_gradients_are_what_the_plan_says(places: tuple[str, str], gradient: Gradient) -> None:
    rows = 8 if places == COLOCATED else 4
    assert run(places, gradient, gradient == "partial", ScheduleSettings()) == (1 + 2) * rows * WIDTH


@pytest.mark.parametrize("kind", ["waves", "recompute"])
@pytest.mark.parametrize("gradient, other", [("invariant", "partial"), ("partial", "invariant")])
@on_ranks(4)
def test_gradients_that_are_not_what_the_plan_says_are_refused(gradient: Gradient, other: str, kind: Any) -> None:
    """Parts where each rank should have all, and the reverse, in the second micro-batch: the first one has zeros."""
    ranks = "0-1" if dist.get_rank() < 2 else "2-3"
    said = rf"boundary encoder>decoder backward: found .* on ranks {ranks}, .* gradient='{other}'"
    with pytest.raises(UserError, match=said):
        run(COLOCATED, gradient, gradient == "invariant", ScheduleSettings(kind))


@pytest.mark.parametrize("places", [COLOCATED, DISJOINT])
@on_ranks(4)
def test_rows_that_nobody_needs_are_padding(places: tuple[str, str]) -> None:
    """A class token, which has an id of its own in the plan: it does not cross, and has no gradient."""
    rows = 8 if places == COLOCATED else 4
    assert run(places, "invariant", False, ScheduleSettings(), padding=1) == (1 + 2) * rows * WIDTH


class Called:
    """An encoder of one weight, which makes two rows of each micro-batch that it is called with, and a decoder that
    checks whose rows it gets. The second micro-batch has no rows.
    """

    def __init__(self, call: range, waves: int, forward_only: bool = False, in_parts: bool = False):
        self.in_parts = in_parts
        self.layouts = {
            name: Layout.parse(text, 4) for name, text in zip(("encoder", "decoder"), COLOCATED, strict=True)
        }
        rank, self.call, self.weight = dist.get_rank(), call, torch.ones((), requires_grad=True)
        source = Ownership.of({(r,): [2 * r, 2 * r + 1] for r in range(4)})
        target = Ownership.of({(0, 1): range(4), (2, 3): range(4, 8)})
        self.plan = load_plan(plan_boundary(source, target, 4 * WIDTH).rank(rank), CPU)
        self.encoded: list[list[int]] = []
        models = {"encoder": ModuleOnRank({0: self._encode}), "decoder": ModuleOnRank({0: self._decode})}
        schedule = build_schedule(
            self.layouts,
            MICRO_BATCHES,
            ScheduleSettings(waves=waves),
            text="decoder",
            forward_only=list(self.layouts) if forward_only else (),
        )
        self.execution = StepExecution(runner_of(self.layouts, models), schedule, self._load)

    def _load(self, m: int) -> MicroBatchInputs:
        inputs: dict[str, Any] = {"decoder": m}
        if m == 0:
            given = InChunks([[0], [2]]) if self.in_parts else [0, 2]
            return MicroBatchInputs(inputs | {"encoder": given}, {EDGE: self.plan}, {"encoder": self.call})
        return MicroBatchInputs(inputs, {EDGE: self.plan} if m == 2 else {})

    def _encode(self, numbers: list[int]) -> Tensor:
        self.encoded.append(numbers)
        return self.weight * torch.cat([torch.full((2, WIDTH), 1.0 + m) for m in numbers])

    def _decode(self, m: int, rows: Tensor) -> Tensor:
        assert rows.tolist() == [[1.0 + m] * WIDTH] * (0 if m == 1 else 4)
        return rows.sum()


class Dropped(dict[int, LiveMicroBatch]):
    """Micro-batches of a step, and what their stages have `left` when they are dropped."""

    def __init__(self) -> None:
        self.left: list[dict[str, Any]] = []

    def pop(self, number: int, *default: Any) -> Any:
        dropped = super().pop(number, *default)
        assert not dropped.crossings and not dropped.rows
        self.left += map(vars, dropped.stages.values())
        return dropped


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
@on_ranks(4)
def test_a_call_of_several_micro_batches(forward_only: bool, in_parts: bool) -> None:
    called = Called(range(3), 3, forward_only, in_parts)
    called.execution.live = dropped = Dropped()
    loss = called.execution.run().loss
    passes = 1 if forward_only or not in_parts else 2
    assert called.encoded == ([[0], [2]] * passes if in_parts else [[0, 2]])
    assert loss.item() == 4 * WIDTH * (1 + 3)
    assert dropped.left == [vars(Activation())] * len(dropped.left) and len(dropped.left) >= MICRO_BATCHES
    if not forward_only:
        assert called.weight.grad is not None
        assert called.weight.grad.item() == 2 * WIDTH * (1 + 3)


@pytest.mark.parametrize(
    "places, settings",
    [
        (DISJOINT, ScheduleSettings()),
        (COLOCATED, ScheduleSettings(waves=2)),
        (COLOCATED, ScheduleSettings("recompute")),
    ],
)
@on_ranks(4)
def test_nothing_is_left_of_a_micro_batch_after_its_last_action(
    places: tuple[str, str], settings: ScheduleSettings
) -> None:
    dropped = Dropped()

    def execution(*args: Any) -> StepExecution:
        built = StepExecution(*args)
        built.live = dropped
        return built

    with patch("megatron_hetero.step.runner.StepExecution", execution):
        run(places, "invariant", False, settings)
    assert not dropped and len(dropped.left) >= MICRO_BATCHES
    assert dropped.left == [vars(Activation())] * len(dropped.left)


@on_ranks(4)
def test_a_call_of_micro_batches_of_two_turns_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"`calls` .* found range\(0, 3\) of `encoder`, expected .* within 0-1, because"
    ):
        Called(range(3), 2).execution.run()


@pytest.mark.parametrize(
    "field, said",
    [
        (
            {"inputs": {"encodr": 1}},
            "`inputs` .*: found `encodr`, .*`encoder`, `d",
        ),
        (
            {"rows": {("encoder", "decoder"): 1}},
            r"`rows` of .*: found `\('encoder', 'decoder'\)`, expected",
        ),
        (
            {"rows": {Edge("decoder", "encoder"): 1}},
            "found `decoder>encoder`, expected some of `encoder>decoder`",
        ),
        (
            {"inputs": {"decoder": InChunks([1, 2])}},
            "`inputs`: found `InChunks` of `decoder`",
        ),
        ({"inputs": {"encoder": InChunks([])}}, "`inputs`: found `InChunks` of `encoder`"),
    ],
)
@on_ranks(4)
def test_what_a_schedule_has_not_is_refused(field: dict[str, Any], said: str) -> None:
    """Rows under another name would not cross, a module under another would not run."""
    with pytest.raises(UserError, match=f"micro-batch 0: .*{said}"):
        run(COLOCATED, "invariant", False, ScheduleSettings(), **field)
