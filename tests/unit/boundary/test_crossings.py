"""Crossings of a micro-batch behave as indexing does in PyTorch; gradients in parts leave when they are started.

Values are integers, so that sums are exact; the reference is the same function of all rows in one process, with nothing
but PyTorch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.crossings import MicroBatchCrossings
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.groups.platform import CPU
from megatron_hetero.layout.graph import Edge
from tests.support.pool import world
from tests.support.ranks import on_ranks
from tests.unit.boundary.cases import PLACEMENTS, Placement
from tests.unit.boundary.rank_view import WIDTH, Boundary

SHARDS = "0: 0-2; 1: 3-4; 2: ; 3: 5-7"
"""Four ranks, one of which holds nothing."""
PARTS = "0,1: 0-4; 2,3: 5-7 partial"
"""The same rows, whose gradients come in parts; rank 2 gets rows, too."""
APART = ("0: 0-2; 1: 3-7", "2,3: 0-7 partial")
"""Disjoint sides with gradients in parts."""


def communicator(dtype: torch.dtype = torch.float64, *, check: bool = True) -> BoundaryCommunicator:
    return BoundaryCommunicator(world(), CPU, WIDTH, dtype, check=check)


@contextlib.contextmanager
def crossings() -> Iterator[Callable[..., Tensor]]:
    """Crosses rows, whose gradients go back at the end."""
    current = MicroBatchCrossings()
    yield lambda link, plan, rows: current.cross(Edge("a", "b"), link, plan, rows, lambda _: contextlib.nullcontext())
    current.end()


def between(source: str, destination: str, seed: int = 0) -> Boundary:
    return Boundary.between(Ownership.parse(source), Ownership.parse(destination), seed)


def loss_of(rows: Tensor, weights: Tensor) -> Tensor:
    """A loss in which rows are used twice."""
    return (rows * rows * weights).sum() + (3 * rows * weights).sum()


def reference(boundary: Boundary) -> Tensor:
    """The gradient of all rows: every rank of the destination reads its own; of equal copies one counts."""
    x, side = boundary.x.clone().requires_grad_(), boundary.plan.destination
    for group in side.groups:
        for rank in group if side.gradient == "partial" else group[:1]:
            loss_of(x[side.held_by(rank)], boundary.gradient(rank)).backward()
    return torch.zeros_like(x) if x.grad is None else x.grad


class Signed(Boundary):
    """Gradients of -1, 0 and 1."""

    def gradient(self, rank: int) -> Tensor:
        return torch.sign(super().gradient(rank))


def signs(boundary: Boundary) -> Boundary:
    return Signed(boundary.plan, boundary.loaded, boundary.x, boundary.seed)


def sum_over_ranks(*values: float) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_gradients_equal_those_of_indexing(placement: Placement, dtype: torch.dtype) -> None:
    """Of random boundaries."""
    nothing = 0
    for seed in range(12):
        boundary = Boundary.random(seed, range(dist.get_world_size()), placement, most_rows=12)
        values = torch.sign(boundary.x) * (boundary.x.abs() % 4)  # small enough to be exact in bfloat16
        boundary = Boundary(boundary.plan, boundary.loaded, values, seed)
        rows = boundary.x[boundary.held].to(dtype).requires_grad_()
        with crossings() as cross:
            arrived = cross(communicator(dtype, check=bool(seed % 2)), boundary.loaded, rows)
            assert arrived.requires_grad and torch.equal(arrived.double(), boundary.x[boundary.needed])
            weights = torch.sign(boundary.gradient(dist.get_rank())).to(dtype)
            loss_of(arrived, weights).backward()
        assert rows.grad is not None and rows.grad.dtype == dtype
        boundary.check_gradient(rows.grad.double(), world(), reference(signs(boundary)))
        nothing += not len(rows) or not len(arrived)
    assert sum_over_ranks(nothing) != [0], "every rank had rows"


@pytest.mark.parametrize("kind", ["no_grad", "frozen"])
@on_ranks(4)
def test_nothing_comes_back_where_nobody_wants_it(kind: str) -> None:
    boundary = between(SHARDS, PARTS)
    rows = boundary.x[boundary.held]
    with crossings() as cross, torch.set_grad_enabled(kind != "no_grad"):
        arrived = cross(communicator(), boundary.loaded, rows.requires_grad_(kind != "frozen"))
    assert torch.equal(arrived, boundary.x[boundary.needed])
    assert not arrived.requires_grad and arrived.grad_fn is None


@on_ranks(4)
def test_ranks_whose_rows_want_no_gradient_take_part() -> None:
    boundary, wanting = between(SHARDS, PARTS), dist.get_rank() in (1, 3)
    rows = boundary.x[boundary.held].requires_grad_(wanting)
    with crossings() as cross:
        loss_of(cross(communicator(), boundary.loaded, rows), boundary.gradient(dist.get_rank())).backward()
    if wanting:
        assert rows.grad is not None
        assert torch.equal(rows.grad, reference(boundary)[boundary.held])
    else:
        assert rows.grad is None


@pytest.mark.parametrize(
    "kind, found", [("mixed", "`torch.no_grad()` on others"), ("one way", "forward direction only")]
)
@on_ranks(4)
def test_what_could_not_come_back_is_refused_on_all_ranks(kind: str, found: str) -> None:
    """In the same words; the group works afterwards."""
    boundary = between(SHARDS, PARTS)
    rows = boundary.x[boundary.held].requires_grad_()
    way = load_plan(boundary.plan.rank(dist.get_rank(), backward=kind != "one way"), CPU)
    with (
        pytest.raises(ValueError, match=re.escape(found)) as error,
        torch.set_grad_enabled(kind != "mixed" or dist.get_rank() != 1),
        crossings() as cross,
    ):
        cross(communicator(), way, rows)
    messages: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(messages, str(error.value))
    assert len(set(messages)) == 1
    assert torch.equal(communicator().start_forward(boundary.loaded, rows).wait(), boundary.x[boundary.needed])


@pytest.mark.parametrize("kind", ["invariant", "partial"])
@on_ranks(4)
def test_copies_of_gradients_are_what_the_plan_says(kind: str) -> None:
    """Each rank of a group has the whole gradient of its rows, or a part; the other is noticed, on all ranks."""
    target = PARTS if kind == "partial" else PARTS.removesuffix(" partial")
    boundary, own = between(SHARDS, target), dist.get_rank()
    weights = {"partial": 1.0 + own, "invariant": 1.0 + own // 2}

    def gradients(weight: float, check: bool = True) -> None:
        rows = boundary.x[boundary.held].requires_grad_()
        with crossings() as cross:
            arrived = cross(communicator(check=check), boundary.loaded, rows)
            loss_of(arrived, torch.full_like(arrived, weight)).backward()

    gradients(weights[kind])
    gradients(0.0)  # Rows that nobody uses.
    other = "invariant" if kind == "partial" else "partial"
    with pytest.raises(ValueError, match=rf"rows .* on ranks 0-1, .* gradient='{other}'"):
        gradients(weights[other])
    gradients(weights[other], check=False)


@on_ranks(4)
def test_equal_parts_of_a_mean_are_warned_of() -> None:
    """Ranks that share the tokens of a pooled sample may have equal parts, as do those that compute the whole."""
    boundary = between(SHARDS, PARTS)
    rows = boundary.x[boundary.held].requires_grad_()
    said = "found gradients of rows that are equal on ranks .*, expected partial sums"
    with pytest.warns(UserWarning, match=said), crossings() as cross:
        (cross(communicator(), boundary.loaded, rows).mean(0).sum() / 2).backward()
    assert rows.grad is not None and (not len(rows) or rows.grad.abs().min() > 0)


@on_ranks(4)
def test_disjoint_sides_in_one_graph() -> None:
    """Those that only encode have no loss, those that only read hold no rows."""
    boundary = between(*APART)
    link, own = communicator(check=False), dist.get_rank()
    rows = boundary.x[boundary.held].requires_grad_() if own < 2 else link.no_rows()
    with crossings() as cross:
        arrived = cross(link, boundary.loaded, rows)
        if own >= 2:
            loss_of(arrived, boundary.gradient(own)).backward()
    if own < 2:
        assert rows.grad is not None and torch.equal(rows.grad, reference(boundary)[boundary.held])


@on_ranks(4)
def test_the_gradient_is_the_slope_of_the_loss() -> None:
    """<gradient, direction> = change of the loss, with parts of both sums on each rank, disjoint."""
    boundary = between(*APART, seed=3)
    link, own = communicator(), dist.get_rank()
    direction = between(*APART, seed=4).x
    rows = boundary.x[boundary.held].requires_grad_()
    with crossings() as cross:
        loss_of(cross(link, boundary.loaded, rows), boundary.gradient(own)).backward()
    ends = [
        loss_of(
            link.start_forward(boundary.loaded, (boundary.x + side * direction)[boundary.held]).wait(),
            boundary.gradient(own),
        )
        for side in (1, -1)
    ]
    assert rows.grad is not None
    along, changed = sum_over_ranks(float((rows.grad * direction[boundary.held]).sum()), float(ends[0] - ends[1]) / 2)
    assert along == changed != 0


@on_ranks(4, timeout_s=30)
def test_gradients_in_parts_have_left_when_they_were_started() -> None:
    """Ranks with parts start a crossing back and go on; that they wait for it only when the others have got it must
    hang nobody.
    """
    boundary, steps = between(*APART), 3
    link, own, arrived = communicator(check=False), dist.get_rank(), 0
    for step in range(1, steps + 1):
        crossing = link.start_backward(boundary.loaded, step * boundary.gradient(own))
        if own < 2:
            gradient = crossing.wait()
            assert torch.equal(gradient, step * boundary.total()[boundary.held])
            arrived += len(gradient)
        dist.barrier()
        if own >= 2:
            crossing.wait()
    assert arrived == steps * [3, 5, 0, 0][own]
