"""What the workers of the pool run for the tests of the communicator."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.plan import DirectionPlan
from megatron_hetero.layout import Layout
from megatron_hetero.training.step_plan import MicroBatchPlan, PackMetadata, plan_micro_batch
from tests.support.pool import world
from tests.unit.training.jobs_packs import BATCHES, SHAPE, encoded_rows, random_packs, rows_of_positions

WIDTH = 5


class Spy:
    """Counts the all-to-alls that pass through it, and the bytes that leave the rank."""

    def __init__(self) -> None:
        self.calls, self.bytes = 0, 0
        self._real = dist.all_to_all_single

    def __call__(self, output: Tensor, sent: Tensor, receive: list[int], send: list[int], group: Any) -> Any:
        self.calls += 1
        self.bytes += (sum(send) - send[dist.get_rank(group)]) * sent[0:1].numel() * sent.element_size()
        assert len(sent) == sum(send) and len(output) == sum(receive)
        return self._real(output, sent, receive, send, group=group)


def cross(vision: str, text: str, sequence_parallel: dict[str, bool], seed: int) -> list[dict[str, Any]]:
    """Cross the boundary both ways with every kind of batch; returns what is to be added up over ranks."""
    world_size = dist.get_world_size()
    layouts = {"vision": Layout.parse(vision, world_size), "text": Layout.parse(text, world_size)}
    results = []
    for batch in BATCHES:
        multiple = layouts["text"].tp if sequence_parallel["text"] else 1
        packs = random_packs(batch, layouts["text"], multiple, seed)
        plan = plan_micro_batch(packs, SHAPE, layouts, sequence_parallel, dist.get_rank(), world_size)
        results.append({"batch": batch} | _cross(plan, packs, layouts, sequence_parallel))
    return results


def _cross(
    plan: MicroBatchPlan, packs: list[PackMetadata], layouts: dict[str, Layout], sequence_parallel: dict[str, bool]
) -> dict[str, Any]:
    if plan.encoder is None or plan.boundary is None:
        assert sum(len(pack.positions) for pack in packs) == 0
        return {"collectives": (0, 0)}
    rank, text = dist.get_rank(), layouts["text"].coordinate(dist.get_rank())
    total = sum(len(pack.positions) for pack in packs)
    x, c = (_integers(total, seed) for seed in (1, 2))
    held = encoded_rows(plan.encoder.parts, packs)
    padding = torch.full((plan.encoder.padding // SHAPE.unit, WIDTH), torch.nan, dtype=x.dtype)
    start = packs[text.dp].padded_length // layouts["text"].tp * text.tp if sequence_parallel["text"] else 0
    at = rows_of_positions(packs)[text.dp]
    needed = np.array([at[int(place) + start] for place in plan.rows_at], dtype=np.int64)

    communicator = BoundaryCommunicator(world(), torch.device("cpu"), WIDTH)
    crossed, forward = _counted(communicator, "forward", plan, torch.cat([x[held], padding]), plan.boundary.forward)
    returned, backward = _counted(communicator, "backward", plan, c[needed], plan.boundary.backward)
    assert torch.equal(crossed, x[needed]), "rows changed on the way"
    assert torch.equal(returned, c[held]), "gradients changed on the way"
    first_holder = layouts["vision"].coordinate(rank).tp == 0 or sequence_parallel["vision"]
    first_reader = text.tp == 0 or sequence_parallel["text"]
    return {
        # Invariant rows count once: of ranks that hold the same rows (replicated over tp) only the first is counted.
        "forward product": float((crossed * c[needed]).sum()) * first_reader,
        "backward product": float((x[held] * returned).sum()) * first_holder,
        "collectives": (forward, backward),
        "total": float((x * c).sum()),
    }


def _integers(rows: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-50, 50, (rows, WIDTH)).astype(np.float64))


def _counted(
    communicator: BoundaryCommunicator, name: str, plan: MicroBatchPlan, rows: Tensor, direction: DirectionPlan
) -> tuple[Tensor, int]:
    """The rows that arrive, and the number of all-to-alls, which with their bytes must be the plan's."""
    spy = Spy()
    with mock.patch.object(dist, "all_to_all_single", spy):
        result = getattr(communicator, name)(plan.boundary, rows)
    assert spy.calls == direction.collectives
    assert spy.bytes == direction.sent_rows * WIDTH * rows.element_size()
    return result, spy.calls


def wrong_width() -> str:
    """What the communicator says of rows of another width."""
    communicator = BoundaryCommunicator(world(), torch.device("cpu"), WIDTH)
    layouts = {name: Layout.parse("dp:4", 4) for name in ("vision", "text")}
    packs = random_packs("ragged", layouts["text"], 1, 0)
    plan = plan_micro_batch(packs, SHAPE, layouts, {"vision": False, "text": False}, dist.get_rank(), 4)
    assert plan.boundary is not None
    try:
        communicator.forward(plan.boundary, torch.zeros(3, WIDTH + 1))
    except ValueError as error:
        return str(error)
    return ""


def bf16() -> bool:
    """Whether bf16 rows cross unchanged."""
    layouts = {"vision": Layout.parse("sp:4", 4), "text": Layout.parse("tp:4", 4)}
    packs = random_packs("ragged", layouts["text"], 1, 3)
    plan = plan_micro_batch(packs, SHAPE, layouts, {"vision": False, "text": False}, dist.get_rank(), 4)
    assert plan.boundary is not None and plan.encoder is not None
    x = torch.randn(len(packs[0].positions), WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    communicator = BoundaryCommunicator(world(), torch.device("cpu"), WIDTH)
    held = encoded_rows(plan.encoder.parts, packs)
    return torch.equal(communicator.forward(plan.boundary, x[held]), x)
