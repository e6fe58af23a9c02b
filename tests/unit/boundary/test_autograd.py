"""Crossings inside a graph behave as indexing does in PyTorch; gradients in parts leave when they are started."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.pool import Pool
from tests.unit.boundary import jobs_autograd as jobs
from tests.unit.boundary.cases import PLACEMENTS, Placement

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_equal_those_of_indexing(placement: Placement, dtype: torch.dtype, pools: Pools) -> None:
    assert sum(pools(4).run(jobs.back_propagate, placement, range(12), dtype)), "every rank had rows"


@pytest.mark.parametrize("kind", ["no_grad", "frozen"])
def test_nothing_comes_back_where_nobody_wants_it(kind: str, pools: Pools) -> None:
    assert pools(4).run(jobs.without_gradients, kind) == [(False, False)] * 4


def test_ranks_whose_rows_want_no_gradient_take_part(pools: Pools) -> None:
    assert pools(4).run(jobs.some_frozen, (1, 3)) == [False, True, False, True]


@pytest.mark.parametrize(
    "kind, found", [("mixed", "`torch.no_grad()` on others"), ("one way", "forward direction only")]
)
def test_what_could_not_come_back_is_refused_on_all_ranks(kind: str, found: str, pools: Pools) -> None:
    [message] = set(pools(4).run(jobs.refused, kind))
    assert found in message


def test_several_crossings_in_a_graph_and_backward_twice(pools: Pools) -> None:
    pools(4).run(jobs.there_and_back)


def test_a_gradient_of_the_gradient_is_refused(pools: Pools) -> None:
    for message in pools(4).run(jobs.second_derivative):
        assert "once_differentiable" in message or "does not require grad" in message


def test_disjoint_sides_in_one_graph(pools: Pools) -> None:
    pools(4).run(jobs.one_side_each)


def test_the_gradient_is_the_slope_of_the_loss(pools: Pools) -> None:
    along, changed = map(sum, zip(*pools(4).run(jobs.slope), strict=True))
    assert along == changed != 0


def test_gradients_in_parts_have_left_when_they_were_started(pools: Pools) -> None:
    assert pools(4).run(jobs.leave_early, 3, timeout_s=30) == [3 * 3, 3 * 5, 0, 0]
