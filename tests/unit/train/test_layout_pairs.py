"""Pairs of layouts on real process groups: exact both ways, with the collectives and bytes that the plan states."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.plan import RankPlan
from megatron_hetero.boundary.routes import DirectionPlan
from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from tests.support.matrix import thinned
from tests.support.pool import world
from tests.support.ranks import on_ranks
from tests.support.sizes import received_rows, sent_rows
from tests.unit.data.packs import (
    BATCHES,
    SHAPE,
    Sharded,
    decoded_units,
    first_rows,
    needed_rows,
    partitioner,
    planned,
    random_packs,
)

WIDTH = 3
CPU = torch.device("cpu")
SHARDED, WHOLE = (True, True), (False, False)
FOUR = ["dp:4", "tp:4", "sp:4", "cp:4", "tp:2,dp:2", "sp:2,tp:2", "cp:2,tp:2", "sp:2,cp:2"]
EIGHT = [
    ("sp:8", "tp:8"),
    ("tp:8", "sp:8"),
    ("cp:8", "sp:8"),
    ("sp:8", "cp:4,tp:2"),
    ("sp:2,cp:2,tp:2", "dp:2,cp:2,sp:2"),
    ("sp:4,dp:2", "tp:2,dp:4"),
    ("tp:2,sp:2,dp:2", "tp:4,dp:2"),
    ("cp:2,dp:4", "sp:2,cp:4"),
    ("tp:4,dp:2", "tp:2,sp:2,cp:2"),
    ("dp:8", "tp:8"),
]
# Degrees that do not divide each other.
SIX = [("sp:2,dp:3", "tp:3,dp:2"), ("sp:6", "tp:2,dp:3"), ("tp:3,dp:2", "sp:2,cp:3"), ("cp:3,dp:2", "cp:2,dp:3")]
CASES = [
    *((4, vision, text, SHARDED) for vision, text in product(FOUR, FOUR)),
    *((4, vision, text, WHOLE) for vision, text in product(("tp:4", "sp:2,tp:2", "dp:4"), ("tp:4", "cp:2,tp:2"))),
    (4, "tp:4", "tp:4", (True, False)),
    (4, "tp:2,dp:2", "tp:4", (False, True)),
    *((6, vision, text, SHARDED) for vision, text in SIX),
    *((6, vision, text, WHOLE) for vision, text in SIX),
    *((8, vision, text, SHARDED) for vision, text in EIGHT),
    *((8, vision, text, WHOLE) for vision, text in EIGHT[:5]),
]


@pytest.mark.parametrize("ranks, vision, text, sharded", thinned(CASES, 11))
@on_ranks("ranks")
def test_crossing(ranks: int, vision: str, text: str, sharded: tuple[bool, bool]) -> None:
    """Both ways, with every kind of batch."""
    layouts = {"vision": Layout.parse(vision, ranks), "text": Layout.parse(text, ranks)}
    replicas = _replica_groups(layouts["vision"])
    for turn, batch in enumerate(BATCHES):
        packs = random_packs(batch, layouts["text"], 7)
        own = _cross(packs, layouts, dict(zip(("vision", "text"), sharded, strict=True)), replicas, turn)
        results: list[Any] = [None] * ranks
        dist.all_gather_object(results, own)
        assert len({result["collectives"] for result in results}) == 1
        if batch in ("no rows", "no tokens"):
            assert results[0]["collectives"] == (0, 0)
            continue
        # <A x, c> = <x, A^T c>, exactly, and A is a permutation of rows once replicas count once.
        forward = sum(result["forward product"] for result in results)
        backward = sum(result["backward product"] for result in results)
        assert forward == backward == results[0]["total"]
        # One all-to-all each way, and one more where ranks of a tp group need the same rows.
        replicated = ["tp" in text and not sharded[1], "tp" in vision and not sharded[0]]
        assert all(n <= 1 + more for n, more in zip(results[0]["collectives"], replicated, strict=True))


def test_there_are_sixty_pairs_of_layouts() -> None:
    assert len({(ranks, vision, text) for ranks, vision, text, _ in CASES if ranks in (4, 8)}) >= 60


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


def _replica_groups(layout: Layout) -> Any:
    groups = [dist.new_group(list(ranks)) for ranks in layout.groups("tp", "sp", "cp")]
    return groups[layout.replica_of(dist.get_rank())]


def _cross(
    packs: list[PackMetadata], layouts: dict[str, Layout], sharded: Sharded, replica: Any, turn: int
) -> dict[str, Any]:
    rank = dist.get_rank()
    share = planned(partitioner(layouts, sharded, rank), packs, turn)
    if not share.rows or not share.vision:
        assert first_rows(packs)[-1] == 0 and share.text is not None and not len(share.text.rows_at["vision"])
        return {"collectives": (0, 0)}
    assert share.vision.exchange is not None
    held = _embedded_units(decoded_units(share, packs), share.vision.exchange, replica)
    assert share.text is not None
    needed = needed_rows(share.text, packs, layouts["text"], sharded["text"], rank)
    x, c = (_integers(first_rows(packs)[-1], s) for s in (1, 2))
    boundary = share.rows[Edge("vision", "text")]
    returning = boundary.backward
    assert returning is not None
    communicator = BoundaryCommunicator(world(), CPU, WIDTH, torch.float64, check=False)
    crossed, forward = _counted(communicator, "start_forward", boundary, x[held], boundary.forward)
    returned, backward = _counted(communicator, "start_backward", boundary, c[needed], returning)
    assert torch.equal(crossed, x[needed]), "rows changed on the way"
    assert torch.equal(returned, c[held]), "gradients changed on the way"
    assert received_rows(boundary.forward) == len(set(needed.tolist()) - set(held.tolist()))
    assert received_rows(returning) == len(set(held.tolist()) - set(needed.tolist()))
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
    embedded = communicator.start_forward(load_plan(plan, CPU), patches.double()).wait().numpy().astype(np.int64)
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
        result = getattr(communicator, name)(load_plan(plan, CPU), rows).wait()
    assert spy.calls == len(direction.exchanges)
    assert spy.sent == sent_rows(direction) * communicator.row_bytes
    assert spy.received == received_rows(direction) * communicator.row_bytes
    return result, spy.calls
