"""What the workers of the pool run for the tests of the library example."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from examples.custom_modules import Options, train
from megatron_hetero import (
    DeviceMicroBatch,
    Interpreter,
    Layout,
    ModuleOnRank,
    Ownership,
    Platform,
    Topology,
    UserError,
    build_schedule,
    load_plan,
    plan_boundary,
)
from megatron_hetero.platform import CPU


def trained(options: Options) -> tuple[list[float], list[str]]:
    """The losses of the example, and what it says."""
    said: list[str] = []
    return train(options, Platform(CPU, "gloo"), said.append), said


def refusal(options: Options) -> str:
    """The message with which the example refuses to run."""
    try:
        trained(options)
    except UserError as error:
        return str(error)
    return ""


LAYOUTS = {"encoder": Layout.parse("dp:4", 4), "decoder": Layout.parse("dp:4", 4)}
STAGED = {"encoder": Layout.parse("dp:2@0-1"), "decoder": Layout.parse("pp:2@2-3")}


class Weight(torch.nn.Module):
    """A batch of numbers times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        return self.weight * batch


def two_rows(_: int) -> DeviceMicroBatch:
    """A micro-batch in which two rows of one element stay where they are."""
    rank = dist.get_rank()
    side = Ownership.of({(r,): [2 * r, 2 * r + 1] for r in range(4)})
    part = load_plan(plan_boundary(side, side, row_bytes=4).rank(rank), CPU)
    batch = torch.ones(2, 1)
    return DeviceMicroBatch({"encoder": batch, "decoder": batch}, {"encoder": part})


def run_decoder(kind: str) -> tuple[float, float]:
    """The loss and the encoder's gradient, of a decoder that uses its rows, or does not, or does not add up."""
    topology, encoder = Topology.build(LAYOUTS, Platform(CPU, "gloo"), edges=[("encoder", "decoder")]), Weight()
    decoders = {
        "uses rows": lambda _, rows: (3 * rows).sum(),
        "ignores rows": lambda batch, _: batch.sum().requires_grad_(),
        "no scalar": lambda _, rows: rows.sum(1),
    }
    held = {"encoder": ModuleOnRank({0: encoder}), "decoder": ModuleOnRank({0: decoders[kind]})}
    interpreter = Interpreter.build(topology, held, width=1, dtype=torch.float32, timeout_s=0)
    loss = interpreter.run(build_schedule(LAYOUTS, 2, text="decoder"), two_rows)
    assert encoder.weight.grad is not None
    return loss.item(), encoder.weight.grad.item()


def misfit(kind: str) -> str:
    """What the interpreter says on each rank of a model that does not fit."""
    try:
        return str(run_decoder("no scalar")) if kind == "no scalar" else _staged(kind)
    except UserError as error:
        return str(error)


def _staged(kind: str) -> str:
    topology, rank = Topology.build(STAGED, Platform(CPU, "gloo"), edges=[("encoder", "decoder")]), dist.get_rank()
    first = {"encoder": ModuleOnRank({0: Weight()})}
    decoder = ModuleOnRank({max(0, rank - 2) if kind == "other type" else 0: lambda batch, rows: batch.double()})
    held = first if rank < 2 else {"decoder": decoder}
    if kind == "unknown" and rank == 0:
        held = first | {"audio": ModuleOnRank({0: Weight()})}
    interpreter = Interpreter.build(topology, held, width=1, dtype=torch.float32, timeout_s=0)
    if kind == "other type" and rank < 3:  # The last stage would wait for what the first refuses to send.
        schedule = build_schedule(STAGED, 1, text="decoder", forward_only=("encoder", "decoder"))
        interpreter.run(schedule, lambda _: DeviceMicroBatch({"decoder": torch.ones(2, 1)}, {}))
    return ""
