"""What the workers of the pool run for the matrix of layout pairs: pixels and rows cross as the planner says."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.plan import RankPlan
from megatron_hetero.boundary.routes import DirectionPlan
from megatron_hetero.data.dealing import PackShape
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from tests.support.pool import world
from tests.unit.train.jobs_packs import (
    BATCHES,
    SHAPE,
    Sharded,
    decoded_units,
    first_rows,
    needed_rows,
    partitioner,
    random_packs,
)

WIDTH = 3
CPU = torch.device("cpu")


class Spy:
    """Counts the all-to-alls that pass through it, and the bytes that leave and reach the rank."""

    def __init__(self) -> None:
        self.calls, self.sent, self.received = 0, 0, 0
        self._real = dist.all_to_all_single

    def __call__(self, output: Tensor, sent: Tensor, receive: list[int], send: list[int], **options: Any) -> Any:
        rank = dist.get_rank(options["group"])
        assert len(sent) == sum(send) and len(output) == sum(receive) and send[rank] == receive[rank] == 0
        self.calls += 1
        self.sent += sent.numel() * sent.element_size()
        self.received += output.numel() * output.element_size()
        return self._real(output, sent, receive, send, **options)


def cross(vision: str, text: str, sharded: Sharded, seed: int) -> list[dict[str, Any]]:
    """Cross the boundary both ways with every kind of batch; returns what is to be added up over ranks."""
    size = dist.get_world_size()
    layouts = {"vision": Layout.parse(vision, size), "text": Layout.parse(text, size)}
    replicas = _replica_groups(layouts["vision"])
    results = []
    for turn, batch in enumerate(BATCHES):
        packs = random_packs(batch, layouts["text"], seed)
        results.append({"batch": batch} | _cross(packs, layouts, sharded, replicas, turn))
    return results


def _replica_groups(layout: Layout) -> Any:
    groups = [dist.new_group(list(ranks)) for ranks in layout.groups("tp", "sp", "cp")]
    return groups[layout.replica_of(dist.get_rank())]


def _cross(
    packs: list[PackShape], layouts: dict[str, Layout], sharded: Sharded, replica: Any, turn: int
) -> dict[str, Any]:
    rank = dist.get_rank()
    plan = partitioner(layouts, sharded, rank).share(packs, turn)
    if not plan.boundaries or not plan.patches:
        assert first_rows(packs)[-1] == 0 and plan.text is not None and not len(plan.text.rows_at["vision"])
        return {"collectives": (0, 0)}
    held = _embedded_units(decoded_units(plan, packs), plan.patches["vision"].exchange, replica)
    assert plan.text is not None
    needed = needed_rows(plan.text, packs, layouts["text"], sharded["text"], rank)
    x, c = (_integers(first_rows(packs)[-1], s) for s in (1, 2))
    boundary = plan.boundaries[Edge("vision", "text")]
    returning = boundary.backward
    assert returning is not None
    communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float64, check=False)
    crossed, forward = _counted(communicator, "forward", boundary, x[held], boundary.forward)
    returned, backward = _counted(communicator, "backward", boundary, c[needed], returning)
    assert torch.equal(crossed, x[needed]), "rows changed on the way"
    assert torch.equal(returned, c[held]), "gradients changed on the way"
    assert boundary.forward.received_rows == len(set(needed.tolist()) - set(held.tolist()))
    assert returning.received_rows == len(set(held.tolist()) - set(needed.tolist()))
    # Invariant rows count once: of ranks that hold the same rows (replicated over tp) only the first is counted.
    first_reader = sharded["text"] or layouts["text"].coordinate(rank).tp == 0
    first_holder = sharded["vision"] or layouts["vision"].coordinate(rank).tp == 0
    return {
        "forward product": float((crossed * c[needed]).sum()) * first_reader,
        "backward product": float((x[held] * returned).sum()) * first_holder,
        "collectives": (forward, backward),
        "total": float((x * c).sum()),
    }


def _embedded_units(decoded: np.ndarray, plan: RankPlan, replica: Any) -> np.ndarray:
    """The units whose patches this rank embeds, once the patches, which say where they come from, have been shared."""
    patches = torch.from_numpy(decoded * SHAPE.unit)[:, None] + torch.arange(SHAPE.unit)
    communicator = BoundaryCommunicator(replica, CPU, SHAPE.unit, torch.float64, check=False)
    embedded = communicator.forward(load_plan(plan, CPU), patches.double()).numpy().astype(np.int64)
    assert (embedded == embedded[:, :1] + np.arange(SHAPE.unit)).all(), "a unit was torn apart"
    return embedded[:, 0] // SHAPE.unit


def _integers(rows: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-50, 50, (rows, WIDTH)).astype(np.float64))


def _counted(
    communicator: BoundaryCommunicator, name: str, plan: RankPlan, rows: Tensor, direction: DirectionPlan
) -> tuple[Tensor, int]:
    """The rows that arrive, and the number of all-to-alls, which with their bytes must be the plan's."""
    spy = Spy()
    with mock.patch.object(dist, "all_to_all_single", spy):
        result = getattr(communicator, name)(load_plan(plan, CPU), rows)
    assert spy.calls == direction.collectives
    assert spy.sent == direction.sent_rows * communicator.row_bytes
    assert spy.received == direction.received_rows * communicator.row_bytes
    return result, spy.calls
