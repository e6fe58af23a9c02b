"""What a loop may not do, refused on all ranks, and how modules go back: once, and in time."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.boundary import micro_batch
from megatron_hetero.boundary.loaded import LoadedPlan
from tests.support.ranks import on_ranks
from tests.unit.boundary.plain_loop import (
    PLACEMENTS,
    STEPS,
    Case,
    Loop,
    alone,
    encode,
    gradients,
    ids_of,
    pictures_of,
    replicated,
    tokens_in,
)

# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_gradients_that_do_not_go_back_are_refused_on_all_ranks(placement: str) -> None:
    """Of one rank. The boundary works afterwards."""
    loop = Loop(Case(), placement)

    def train(alone: bool) -> None:
        with loop.forward(range(12)) as (rows, losses):
            if losses is not None and dist.get_rank() == 3:
                torch.autograd.grad(losses.sum(), rows, retain_graph=True)
            if losses is not None and not (alone and dist.get_rank() == 3):
                losses.sum().backward()

    with pytest.raises(UserError, match="does not go back.*`rows.backward"):
        train(alone=True)
    train(alone=False)  # Looked at, and made again by a loss: as in one process.


@pytest.mark.parametrize("planned", ["inside", "outside"])
@pytest.mark.parametrize("placement", ["disjoint", "mixed"])
@on_ranks(4)
def test_a_crossing_under_a_checkpoint_is_refused_on_all_ranks(placement: str, planned: str) -> None:
    """Recomputed on the ranks with a loss, on others the micro-batch is over."""
    loop = Loop(Case(), placement)
    mine, seen = loop.mine("text", range(12)), loop.mine("vision", range(12))

    def plan() -> LoadedPlan:
        return loop.link.plan(held=ids_of(seen), needed=ids_of(mine))

    def crossed(made: Tensor | None) -> Tensor:
        return (loop.link(plan() if planned == "inside" else before, made) ** 2).sum()

    def train() -> None:
        with micro_batch(loop.link):
            rows = encode(loop.case, loop.modules["vision"], seen) if "vision" in loop.modules else None
            if "text" in loop.modules:
                checkpoint(crossed, rows, use_reentrant=False).backward()  # pyright: ignore[reportOptionalMemberAccess]
            else:
                crossed(rows)

    before = plan()
    with pytest.raises(UserError, match=r"a plan or a crossing amid a backward pass"):
        train()
    with loop.forward(range(12)) as (_, losses):
        if losses is not None:
            losses.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@on_ranks(4)
def test_rows_that_would_lose_digits_are_refused_on_all_ranks(dtype: torch.dtype) -> None:
    """fp64 into fp32 and fp16 into bfloat16; the narrower ones fit."""
    loop = Loop(Case(dtype=torch.float32 if dtype == torch.float64 else torch.bfloat16), "colocated")
    samples = loop.mine("vision", range(12))
    plan = loop.link.plan(held=ids_of(samples), needed=ids_of(samples))
    rows = loop.modules["vision"](pictures_of(samples)).detach()
    given = dtype if dist.get_rank() == 2 else loop.case.dtype
    with pytest.raises(UserError, match=rf"vision>text forward on rank 2: found rows of {dtype}, .* in `dtype`"):
        loop.link(plan, rows.to(given))
    for inside in (True, False):
        with micro_batch(*[loop.link] * inside):
            assert loop.link(plan, rows.to(loop.case.dtype)).dtype == loop.case.dtype


# ------------------------------------------------------------------------------------- one backward pass


@on_ranks(4)
def test_two_outputs_of_a_module_go_back_in_one_pass() -> None:
    """DDP reduces gradients in one backward pass for each forward pass, and once only."""
    loop = Loop(Case(wrap={"vision": replicated}), "colocated")
    samples = loop.mine("vision", range(12))
    plan = loop.link.plan(held=ids_of(samples), needed=ids_of(samples))
    model = loop.modules["vision"]
    with micro_batch(loop.link):
        made = model(pictures_of(samples))
        first, second = loop.link(plan, made), loop.link(plan, 3 * made)
        (first.sum() + (second**2).sum()).backward()
    found = [p.grad for p in model.parameters()]
    expected = Loop(Case(), "colocated").modules["vision"]
    everything = expected(pictures_of(range(12)))
    (everything.sum() + ((3 * everything) ** 2).sum()).backward()
    for mine, parameter in zip(found, expected.parameters(), strict=True):
        assert mine is not None and parameter.grad is not None
        torch.testing.assert_close(4 * mine, parameter.grad, rtol=1e-5, atol=1e-4)


@on_ranks(4)
def test_rows_made_of_rows_that_the_same_module_sent() -> None:
    """The second crossing is made of what the first brought: its gradient must be known before the first goes back."""
    loop = Loop(Case(), "colocated")
    weight, ids = nn.Parameter(torch.tensor(3.0)), [dist.get_rank()]
    plan = loop.link.plan(held=ids, needed=[(ids[0] + 1) % 4])
    with micro_batch(loop.link):
        first = loop.link(plan, weight * torch.full((1, 8), 1.0 + ids[0]))
        loop.link(plan, weight * first).sum().backward()
    # Rank r's row is read by r - 1, whose row is read by r - 2: 8 * weight^2 * (1 + r) in all.
    expected = [8 * 3 * (1 + ids[0]), 8 * 3 * (1 + (ids[0] + 1) % 4)]
    assert weight.grad is not None and weight.grad.item() == sum(expected)


@on_ranks(4)
def test_a_compiled_function_around_a_crossing() -> None:
    """The boundary itself is not traced."""
    loop = Loop(Case(), "colocated")
    samples = loop.mine("vision", range(12))
    plan = loop.link.plan(held=ids_of(samples), needed=ids_of(samples))

    def loss_of(pictures: Tensor) -> Tensor:
        rows = loop.link(plan, loop.modules["vision"](pictures))
        return (torch.sin(rows) ** 2).sum()

    results = []
    for function in (loss_of, torch.compile(loss_of, backend="eager")):
        loop.modules["vision"].zero_grad()
        with micro_batch(loop.link):
            loss = function(pictures_of(samples))
            loss.backward()
        results.append((loss.item(), [p.grad for p in loop.modules["vision"].parameters()]))
    (plain, grads), (traced, again) = results
    assert plain == traced and all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))  # pyright: ignore[reportArgumentType]


@on_ranks(4)
def test_a_compiled_step() -> None:
    """With the block and the backward pass in it, both of which break the graph."""
    loop = Loop(Case(), "colocated")
    samples = loop.mine("vision", range(12))
    model, pictures = loop.modules["vision"], pictures_of(samples)

    def step(pictures: Tensor) -> Tensor:
        with micro_batch(loop.link):
            rows = loop.link(loop.link.plan(held=ids_of(samples), needed=ids_of(samples)), model(pictures))
            loss = (rows**2).sum()
            loss.backward()
        return loss.detach()

    results = []
    for function in (step, torch.compile(step, backend="eager")):
        model.zero_grad()
        results.append((function(pictures).item(), [p.grad for p in model.parameters()]))
    (plain, grads), (traced, again) = results
    assert plain == traced and all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_gradients_of_some_micro_batches_are_not_reduced_yet(placement: str) -> None:
    """`no_sync` around the block, at whose end the encoder's backward pass runs."""
    loop = Loop(Case(wrap={"vision": replicated}), placement)
    for number, batch in enumerate(STEPS[0]):
        later = loop.modules["vision"].no_sync() if "vision" in loop.modules and not number else nullcontext()  # pyright: ignore[reportCallIssue]
        with later, loop.forward(batch) as (_, losses):
            if losses is not None:
                losses.sum().backward()
    expected = alone(Case())[0]
    for name, grad in gradients({"vision": loop.modules["vision"]} if "vision" in loop.modules else {}).items():
        scaled = grad * loop.topology.layouts["vision"].dp / tokens_in(STEPS[0])
        torch.testing.assert_close(scaled, expected[name], rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_padding_does_not_cross_and_gets_no_gradient() -> None:
    """A class token before the rows of each picture, declared in `held`; undeclared it is refused."""
    loop = Loop(Case(), "mixed")
    ids = ids_of(loop.mine("vision", range(12)))
    held = [row for id in ids for row in (-1, id)]
    rows = torch.arange(8.0 * len(held)).view(-1, 8) + 100 * dist.get_rank()
    rows.requires_grad_()
    needed = ids_of(loop.mine("text", range(12)))
    with micro_batch(loop.link):
        arrived = loop.link(loop.link.plan(held=held, needed=needed), rows)
        (2 * arrived).sum().backward()
    if held:
        assert rows.grad is not None
        assert torch.equal(rows.grad[1::2], torch.full((len(ids), 8), 2.0)) and not rows.grad[::2].any()
    plan = loop.link.plan(held=ids, needed=needed)
    with pytest.raises(UserError, match=r"rank 1: found 8 rows, expected the 4 .* -1 "):
        loop.link(plan, rows.detach())


@on_ranks(4)
def test_buffers_of_an_evaluation_serve_in_training() -> None:
    """Those of rounding, and the indices of a plan that was made in `inference_mode`."""
    loop = Loop(Case(), "colocated", transport=torch.bfloat16)
    ids = ids_of(loop.mine("vision", range(12)))
    needed = ids_of(loop.mine("text", range(12)))[::-1]
    rows = torch.ones(len(ids), 8)
    with torch.inference_mode():
        plan = loop.link.plan(held=ids, needed=needed)
        assert torch.equal(loop.link(plan, rows), torch.ones(len(needed), 8))
    with micro_batch(loop.link):
        loop.link(plan, rows.requires_grad_()).sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad, torch.ones(len(ids), 8))
