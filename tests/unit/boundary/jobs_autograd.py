"""What the workers of the pool run for the tests of crossings inside a graph. Values are integers, so that sums are
exact; the reference is the same function of all rows in one process, with nothing but PyTorch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.autograd import cross
from megatron_hetero.boundary.communicator import BoundaryCommunicator, load_plan
from megatron_hetero.boundary.ownership import Ownership
from tests.support.pool import world
from tests.unit.boundary.cases import Placement
from tests.unit.boundary.jobs import CPU, WIDTH, Boundary

SHARDS = "0: 0-2; 1: 3-4; 2: ; 3: 5-7"
"""Four ranks, one of which holds nothing."""
PARTS = "0,1: 0-4; 2,3: 5-7 partial"
"""The same rows, whose gradients come in parts; rank 2 gets rows, too."""
APART = ("0: 0-2; 1: 3-7", "2,3: 0-7 partial")
"""Disjoint sides with gradients in parts."""


def communicator(dtype: torch.dtype = torch.float64, *, check: bool = True) -> BoundaryCommunicator:
    return BoundaryCommunicator(world(), CPU, WIDTH, dtype, check=check)


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


def back_propagate(placement: Placement, seeds: range, dtype: torch.dtype) -> int:
    """Random boundaries; returns how many of this rank's rows and arrivals were none."""
    nothing = 0
    for seed in seeds:
        boundary = Boundary.random(seed, range(dist.get_world_size()), placement, most_rows=12)
        values = torch.sign(boundary.x) * (boundary.x.abs() % 4)  # small enough to be exact in bfloat16
        boundary = Boundary(boundary.plan, boundary.loaded, values, seed)
        rows = boundary.x[boundary.held].to(dtype).requires_grad_()
        arrived = cross(communicator(dtype, check=bool(seed % 2)), boundary.loaded, rows)
        assert arrived.requires_grad and torch.equal(arrived.double(), boundary.x[boundary.needed])
        weights = torch.sign(boundary.gradient(dist.get_rank())).to(dtype)
        loss_of(arrived, weights).backward()
        assert rows.grad is not None and rows.grad.dtype == dtype
        boundary.check_gradient(rows.grad.double(), world(), reference(_signs(boundary)))
        nothing += not len(rows) or not len(arrived)
    return nothing


class _Signed(Boundary):
    """Gradients of -1, 0 and 1."""

    def gradient(self, rank: int) -> Tensor:
        return torch.sign(super().gradient(rank))


def _signs(boundary: Boundary) -> Boundary:
    return _Signed(boundary.plan, boundary.loaded, boundary.x, boundary.seed)


def without_gradients(kind: str) -> tuple[bool, bool]:
    """Whether what arrives requires a gradient, and has a graph, where nobody asks for gradients."""
    boundary = between(SHARDS, PARTS)
    rows = boundary.x[boundary.held]
    with torch.set_grad_enabled(kind != "no_grad"):
        arrived = cross(communicator(), boundary.loaded, rows.requires_grad_(kind != "frozen"))
    assert torch.equal(arrived, boundary.x[boundary.needed])
    return arrived.requires_grad, arrived.grad_fn is not None


def some_frozen(wanting: tuple[int, ...]) -> bool:
    """Only the rows of some ranks require gradients; they get theirs, and the others take part."""
    boundary = between(SHARDS, PARTS)
    rows = boundary.x[boundary.held].requires_grad_(dist.get_rank() in wanting)
    arrived = cross(communicator(), boundary.loaded, rows)
    loss_of(arrived, boundary.gradient(dist.get_rank())).backward()
    if dist.get_rank() in wanting:
        assert rows.grad is not None
        assert torch.equal(rows.grad, reference(boundary)[boundary.held])
    return rows.grad is not None


def refused(kind: str) -> str:
    """What is said where the ranks want what does not fit together; the group works afterwards."""
    boundary = between(SHARDS, PARTS)
    rows, message = boundary.x[boundary.held].requires_grad_(), ""
    way = load_plan(boundary.plan.rank(dist.get_rank(), backward=kind != "one way"), CPU)
    try:
        with torch.set_grad_enabled(kind != "mixed" or dist.get_rank() != 1):
            cross(communicator(), way, rows)
    except ValueError as error:
        message = str(error)
    assert torch.equal(communicator().forward(boundary.loaded, rows), boundary.x[boundary.needed])
    return message


def there_and_back() -> None:
    """Two crossings in one graph, one after the other, and two beside each other; backward is called twice."""
    there, back, link = between(SHARDS, PARTS), between(PARTS, SHARDS), communicator()
    x, own = there.x, dist.get_rank()
    rows = x[there.held].requires_grad_()
    middle = cross(link, there.loaded, rows)
    loss = loss_of(cross(link, back.loaded, middle), back.gradient(own)) + loss_of(
        cross(link, there.loaded, 2 * rows), there.gradient(own)
    )
    loss.backward(retain_graph=True)
    first = rows.grad
    assert first is not None
    expected = reference(back) + 2 * reference(Boundary(there.plan, there.loaded, 2 * x, there.seed))
    assert torch.equal(first, expected[there.held])
    first = first.clone()
    loss.backward()
    assert rows.grad is not None and torch.equal(rows.grad, 2 * first)


def second_derivative() -> str:
    """What is said where somebody asks for a gradient of the gradient."""
    boundary = between(SHARDS, PARTS)
    rows = boundary.x[boundary.held].requires_grad_()
    arrived = cross(communicator(), boundary.loaded, rows)
    (grads,) = torch.autograd.grad(loss_of(arrived, torch.ones_like(arrived)), rows, create_graph=True)
    try:
        grads.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def one_side_each() -> None:
    """Disjoint sides in one graph: those that only encode have no loss, those that only read hold no rows."""
    boundary = between(*APART)
    link, own = communicator(check=False), dist.get_rank()
    rows = boundary.x[boundary.held].requires_grad_() if own < 2 else link.no_rows()
    arrived = cross(link, boundary.loaded, rows)
    (arrived.sum() if own < 2 else loss_of(arrived, boundary.gradient(own))).backward()
    if own < 2:
        assert rows.grad is not None and torch.equal(rows.grad, reference(boundary)[boundary.held])


def slope() -> tuple[float, float]:
    """This rank's parts of both sides of <gradient, direction> = change of the loss, disjoint with parts of sums."""
    boundary = between(*APART, seed=3)
    link, own = communicator(), dist.get_rank()
    direction = between(*APART, seed=4).x
    rows = boundary.x[boundary.held].requires_grad_()
    loss_of(cross(link, boundary.loaded, rows), boundary.gradient(own)).backward()
    ends = [
        loss_of(link.forward(boundary.loaded, (boundary.x + side * direction)[boundary.held]), boundary.gradient(own))
        for side in (1, -1)
    ]
    assert rows.grad is not None
    return float((rows.grad * direction[boundary.held]).sum()), float(ends[0] - ends[1]) / 2


# ------------------------------------------------------------------------- gradients in parts, disjoint


def leave_early(steps: int) -> int:
    """Ranks with parts start a crossing back and go on; that they wait for it only when the others have got it must
    hang nobody. Returns the gradients that arrived.
    """
    boundary = between(*APART)
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
    return arrived
