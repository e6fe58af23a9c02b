"""Ownerships from what each rank knows of its own rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.boundary import RowIds, Rows, ownerships_of


def known(*sides: tuple[Any, Any], gradient: Any = "invariant") -> list[RowIds]:
    return [RowIds.of("a>b", 0, Rows(held, needed, gradient)) for held, needed in sides]


def test_ranks_with_the_same_rows_are_replicas() -> None:
    """Ids may be any numbers, and come as lists, arrays or tensors."""
    sides = known(([70, 5], [3]), (torch.tensor([70, 5]), ()), (np.array([3, 10**12]), [5, 70]), ((), [5, 70]))
    source, destination = ownerships_of("a>b", (2, 3, 5, 8), sides)
    assert str(source) == "2,3: 2,1; 5: 0,3; 8:" and str(destination) == "2: 0; 3:; 5,8: 1-2"


def test_padding_is_held_by_its_ranks_and_needed_by_none() -> None:
    """Rows of the same id, on replicas and on others, also where there is nothing else."""
    sides = known(([-1, 7, -1], [9]), ([-1, 7, -1], ()), ([9, -1], [7]), ([-1], ()))
    source, destination = ownerships_of("a>b", (0, 1, 2, 3), sides)
    assert str(source) == "0,1: 2,0,3; 2: 1,4; 3: 5" and str(destination) == "0: 1; 1:; 2: 0; 3:"


@pytest.mark.parametrize(
    "held, needed, message",
    [
        ([-2], [], "held: found row -2, expected ids from 0, or -1"),
        ([1], [-1], "needed: found row -1, expected ids from 0. Give"),
        ([-1, 4, 4], [], "held: found row 4 twice"),
    ],
)
def test_ids_are_not_negative(held: list[int], needed: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        known((held, needed))


def test_gradients_may_come_in_parts() -> None:
    source, destination = ownerships_of("a>b", (0, 1), known(([1, 2], [1, 2]), ([], [1, 2]), gradient="partial"))
    assert (source.gradient, destination.gradient) == ("invariant", "partial")


def test_a_crossing_may_have_no_rows() -> None:
    source, destination = ownerships_of("a>b", (0, 1), known(([], []), ([], [])))
    assert str(source) == str(destination) == "0:; 1:"


@given(st.permutations(range(12)), st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(0, 2**62))
def test_numbering_keeps_the_order_of_each_rank(order: list[int], holder: list[int], first: int) -> None:
    """Whatever the ids are: the same plan as with ids from 0."""
    ids = [first + 3 * row for row in order]
    sides = [([ids[i] for i in range(12) if holder[i] == rank], ids if rank == 0 else []) for rank in range(4)]
    source, destination = ownerships_of("a>b", range(4), known(*sides))
    for rank in range(4):
        assert source.held_by(rank).tolist() == [order[i] for i in range(12) if holder[i] == rank]
    assert destination.held_by(0).tolist() == list(order)


@pytest.mark.parametrize(
    "message, sides",
    [
        ("a>b: held: found row 2 on ranks 4 and 5, which differ", [([1, 2], []), ([2, 3], [])]),
        ("a>b: held: found row 3 on ranks 4 and 5", [([2, 3], []), ([3, 2], [])]),
        ("a>b: needed: found row 1 on ranks 4 and 5", [([1, 2], [1]), ([], [1, 2])]),
        ("a>b: needed: found row 9 on rank 5, expected one of the 2 rows", [([1, 2], [1]), ([], [9])]),
    ],
)
def test_what_does_not_fit_is_refused(message: str, sides: list[tuple[list[int], list[int]]]) -> None:
    with pytest.raises(UserError, match=message):
        ownerships_of("a>b", (4, 5), known(*sides))


def test_ranks_agree_on_the_gradient() -> None:
    sides = [*known(([1], [1])), *known(([], [1]), gradient="partial")]
    with pytest.raises(UserError, match="a>b: gradient: found invariant on rank 0 and partial on rank 1"):
        ownerships_of("a>b", (0, 1), sides)


@pytest.mark.parametrize(
    "held, found",
    [
        ([3, 3], "row 3 twice"),
        ([[1], [2]], "int64 of shape"),
        ([1.5], "float64 of shape"),
        (torch.ones(2), "float32"),
        (torch.ones(2, requires_grad=True), "float32"),
        (torch.ones(2, dtype=torch.bfloat16), "a Tensor"),
        ([[1], [2, 3]], "a list"),
        (7, "a int"),
        (np.array([2**63], np.uint64), "uint64 of shape"),
    ],
)
def test_ids_are_integers_and_each_is_given_once(held: Any, found: str) -> None:
    with pytest.raises(UserError, match=f"held: found {found}"):
        known((held, ()))


def test_a_gradient_is_one_of_two() -> None:
    with pytest.raises(UserError, match="gradient: found 'sum', expected 'invariant' or 'partial'"):
        known(((), ()), gradient="sum")
