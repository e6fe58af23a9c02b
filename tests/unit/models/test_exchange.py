"""Exchanges of tokens for columns against their definition, with uneven, overlapping and empty columns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.measuring.meter import CollectiveMeter
from megatron_hetero.models.layers.exchange import Columns, even_ranges, gather_columns, scatter_columns, width_of
from tests.support.ranks import on_ranks

WORLD = 4


@given(st.integers(0, 200), st.integers(1, 20))
def test_even_ranges_follow_each_other_and_differ_by_one(size: int, members: int) -> None:
    ranges = even_ranges(size, members)
    assert len(ranges) == members and ranges[0][0] == 0 and ranges[-1][1] == size
    assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
    widths = [stop - start for start, stop in ranges]
    assert max(widths) - min(widths) <= 1 and widths[0] == max(widths)


Case = tuple[list[Columns], tuple[int, ...], int]
"""Columns of each member, tokens of each member, and the number of all columns."""


def drawn(rng: np.random.Generator, members: int) -> Case:
    """Each member has up to three ranges, which may be empty and overlap those of others; some have no tokens."""
    width = int(rng.integers(1, 9))
    columns = []
    for _ in range(members):
        bounds = np.sort(rng.integers(0, width + 1, 2 * int(rng.integers(0, 4)))).reshape(-1, 2)
        columns.append(tuple((int(start), int(stop)) for start, stop in bounds))
    lengths = tuple(int(n) for n in rng.integers(0, 5, members) * rng.integers(0, 2, members))
    return columns, lengths, width


def of_shape(rng: np.random.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small integers, whose sums are exact in every dtype."""
    return torch.from_numpy(rng.integers(-8, 9, shape)).to(dtype)


def index_of(columns: Columns) -> list[int]:
    return [column for start, stop in columns for column in range(start, stop)]


def scattered(xs: list[Tensor], columns: list[Columns], rank: int) -> Tensor:
    """The definition: own columns of all tokens."""
    return torch.cat([x[:, index_of(columns[rank])] for x in xs])


def gathered(xs: list[Tensor], lengths: tuple[int, ...], rank: int) -> Tensor:
    """The definition: all columns of own tokens."""
    return torch.cat([x.split(lengths)[rank] for x in xs], dim=1)


def groups() -> list[dist.ProcessGroup]:
    """Groups of the first rank, the first two, and so on. Ranks outside have none of them."""
    made: list[Any] = [dist.new_group(list(range(size))) for size in range(1, WORLD + 1)]
    return [group for size, group in enumerate(made, 1) if dist.get_rank() < size]


def run(exchange: Callable[[Tensor], Tensor], x: Tensor, c: Tensor) -> tuple[Tensor, Tensor, list[list[str]]]:
    """The result, the gradient for the cotangent `c`, and the collectives of each way."""
    meter, x = CollectiveMeter(phase="forward"), x.clone().requires_grad_()
    with meter:
        out = exchange(x)
        meter.phase = "backward"
        out.backward(c)
    assert x.grad is not None and out.dtype == x.grad.dtype == x.dtype
    return out.detach(), x.grad, [[record.name for record in meter.of(phase)] for phase in ("forward", "backward")]


def compare(group: dist.ProcessGroup, case: Case, rng: np.random.Generator, dtype: torch.dtype) -> None:
    """Values and gradients of both exchanges, by definition; that they are adjoint; and their collectives."""
    columns, lengths, width = case
    widths, rank, total = list(map(width_of, columns)), group.rank(), sum(lengths)
    whole = [of_shape(rng, dtype, n, width) for n in lengths]
    by_columns = [of_shape(rng, dtype, total, own) for own in widths]

    out, grad, collectives = run(lambda x: scatter_columns(x, columns, lengths, group), whole[rank], by_columns[rank])
    assert torch.equal(out, scattered(whole, columns, rank))
    expected = torch.zeros(lengths[rank], width, dtype=torch.float64)
    for own, theirs in zip(columns, by_columns, strict=True):
        expected.index_add_(1, torch.tensor(index_of(own), dtype=torch.int64), theirs.split(lengths)[rank].double())
    assert torch.equal(grad.double(), expected)
    assert collectives == [["alltoall_base"], ["alltoall_base"]]
    assert inner(group, out, by_columns[rank]) == inner(group, whole[rank], grad)

    c = [of_shape(rng, dtype, n, sum(widths)) for n in lengths]
    out, grad, collectives = run(lambda x: gather_columns(x, widths, lengths, group), by_columns[rank], c[rank])
    assert torch.equal(out, gathered(by_columns, lengths, rank))
    assert torch.equal(grad, torch.cat([each.split(widths, dim=1)[rank] for each in c]))
    assert collectives == [["alltoall_base"], ["alltoall_base"]]
    assert inner(group, out, c[rank]) == inner(group, by_columns[rank], grad)


def inner(group: dist.ProcessGroup, a: Tensor, b: Tensor) -> float:
    """The inner product over all members."""
    product = (a.double() * b.double()).sum()
    dist.all_reduce(product, group=group)
    return product.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(WORLD)
def test_drawn_exchanges_are_their_definitions_and_adjoint(dtype: torch.dtype) -> None:
    found = set[Any]()
    for group in groups():
        for seed in range(60):
            rng = np.random.default_rng((seed, group.size()))  # The same on all members.
            columns, lengths, width = case = drawn(rng, group.size())
            compare(group, case, rng, dtype)
            every = [column for own in columns for column in set(index_of(own))]
            found |= {
                ("no tokens on some", 0 in lengths and any(lengths)),
                ("no tokens at all", not any(lengths)),
                ("no columns on some", any(not width_of(own) for own in columns)),
                ("no columns at all", not every),
                ("columns of several members", len(every) > len(set(every))),
                ("columns of nobody", len(set(every)) < width),
            }
    if dist.get_rank() < 2:  # Members of groups of two and more.
        assert all((kind, True) in found for kind, _ in found), found


CASES: list[Case] = [
    ([((0, 4), (6, 8)), ((4, 6),), (), ((8, 9),)], (3, 0, 2, 1), 9),
    ([((0, 2), (4, 6)), ((0, 2), (6, 8)), ((2, 4), (8, 10)), ((2, 4), (10, 12))], (2, 2, 1, 0), 12),
    ([((0, 3),)] * WORLD, (1, 2, 3, 4), 3),
    ([()] * WORLD, (1, 2, 3, 4), 3),
    ([((0, 1),), ((1, 2),), ((2, 3),), ((3, 4),)], (0, 0, 0, 0), 4),
    ([((0, 1),), ((1, 2),), ((2, 3),), ((3, 4),)], (0, 0, 0, 7), 4),
]


@pytest.mark.parametrize("number", range(len(CASES)))
@on_ranks(WORLD)
def test_exchanges_by_example(number: int) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        compare(dist.group.WORLD, CASES[number], np.random.default_rng(number), dtype)  # pyright: ignore[reportArgumentType]


@on_ranks(WORLD)
def test_gathering_undoes_scattering_of_disjoint_columns() -> None:
    rng, group, lengths = np.random.default_rng(dist.get_rank()), dist.group.WORLD, (3, 0, 5, 1)
    assert group is not None
    columns = [(each,) for each in even_ranges(10, WORLD)]
    x = of_shape(rng, torch.float32, lengths[group.rank()], 10)
    there = scatter_columns(x, columns, lengths, group)
    assert torch.equal(gather_columns(there, list(map(width_of, columns)), lengths, group), x)


@on_ranks(WORLD)
def test_inputs_and_gradients_that_are_no_blocks_of_memory() -> None:
    rng, group, lengths = np.random.default_rng(0), dist.group.WORLD, (2, 3, 1, 2)
    assert group is not None
    columns, rank = [(each,) for each in even_ranges(6, WORLD)], group.rank()
    widths = list(map(width_of, columns))
    whole = [of_shape(rng, torch.float32, 8, n).t()[:, :6] for n in lengths]
    by_columns = [of_shape(rng, torch.float32, own, sum(lengths)).t() for own in widths]
    out, grad, _ = run_as_is(lambda x: scatter_columns(x, columns, lengths, group), whole[rank], by_columns[rank])
    assert torch.equal(out, scattered(whole, columns, rank))
    assert torch.equal(grad, gathered(by_columns, lengths, rank))
    out, grad, _ = run_as_is(lambda x: gather_columns(x, widths, lengths, group), by_columns[rank], whole[rank])
    assert torch.equal(out, gathered(by_columns, lengths, rank))
    assert torch.equal(grad, scattered(whole, columns, rank))


def run_as_is(exchange: Callable[[Tensor], Tensor], x: Tensor, c: Tensor) -> tuple[Tensor, Tensor, None]:
    """As `run`, without a copy of the input."""
    assert not x.is_contiguous() or min(x.shape) < 2
    x = x.detach().requires_grad_()
    out = exchange(x)
    (grad,) = torch.autograd.grad(out, x, c)
    return out.detach(), grad, None


@on_ranks(2)
def test_a_gradient_is_computed_once() -> None:
    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(1, 2, requires_grad=True)
    out = scatter_columns(x, [((0, 1),), ((1, 2),)], (1, 1), group)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
