"""Ownerships: their text, what they refuse, and what they answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.ownership import Ownership
from tests.unit.boundary.cases import random_ownership


@st.composite
def ownerships(draw: st.DrawFn) -> Ownership:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, rows = draw(st.integers(1, 20)), draw(st.integers(0, 40))
    return random_ownership(rng, rng.permutation(3 * ranks)[:ranks].tolist(), rng.permutation(2 * rows)[:rows])


def assert_equal(a: Ownership, b: Ownership) -> None:
    assert (a.groups, a.gradient, a.ids.tolist(), a.starts.tolist()) == (
        b.groups, b.gradient, b.ids.tolist(), b.starts.tolist(),
    )  # fmt: skip


@given(ownerships())
def test_text_and_back(ownership: Ownership) -> None:
    assert_equal(Ownership.parse(str(ownership)), ownership)
    assert_equal(eval(repr(ownership)), ownership)


@pytest.mark.parametrize("text", ["", "partial", "0: 0-3,8; 1: 4-7", "0,1: 0-8 partial", "2:; 0,5: 7,3-6", "3:"])
def test_this_text_is_the_one_that_is_printed(text: str) -> None:
    assert str(Ownership.parse(text)).strip() == text


def test_text_may_be_spaced_freely() -> None:
    assert_equal(Ownership.parse(" 0 , 1 :0 - 2 ,5;2: ; partial "), Ownership.parse("0,1: 0-2,5; 2: partial"))


@pytest.mark.parametrize(
    "text, found",
    [
        ("0: 0-3; 1: a", "`1: a` as group 1"),
        ("0: -3", "`0: -3` as group 0"),
        ("0: 0-", "`0: 0-` as group 0"),
        ("0: 1_0", "`0: 1_0` as group 0"),
        ("0: 1 2", "`0: 1 2` as group 0"),
        ("0: 3-1", "`0: 3-1` as group 0, with rows that descend"),
        ("0: 1; 1,b: 0", "`1,b: 0` as group 1"),
        ("0-1: 0", "`0-1: 0` as group 0"),
        ("-1: 0", "`-1: 0` as group 0"),
        (": 0-3", "`: 0-3` as group 0"),
        ("0,: 0-3", "`0,: 0-3` as group 0"),
        ("0 0-3", "`0 0-3` as group 0"),
        ("0: 4; 0: 0: 1", "`0: 0: 1` as group 1"),
        ("0: 0-3; 1: 3", "rows 3 in two groups"),
        ("0: 0,1,0", "rows 0 in two groups"),
        ("0: 0-20; 1: 0-20", "rows 0, 1, 2, 3, 4 and 16 more in two groups"),
        ("0,1: 0; 1,2: 1", "each rank in one group"),
        ("0,0: 0", "each rank in one group"),
        ("0: 0; 0: 1", "each rank in one group"),
        ("0: 0 invariant", "`0: 0 invariant` as group 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_text_is_said_with_the_text(text: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        Ownership.parse(text)
    message = str(caught.value)
    assert message.startswith(f"ownership `{text}`: found ") and found in message
    assert Ownership.parse(message.split("such as `")[1].split("`")[0]).ranks == (0, 1, 2)


def test_a_row_held_twice_is_refused() -> None:
    for holders in ({(0,): [0, 1], (1,): [1]}, {(0, 1): [1, 0, 1]}):
        with pytest.raises(ValueError, match="rows 1 in two groups"):
            Ownership.of(holders)


def test_a_rank_in_two_groups_and_a_group_of_none_are_refused() -> None:
    for groups in (((0, 1), (1, 2)), ((0, 0),), ((0,), ())):
        with pytest.raises(ValueError, match="each rank in one group"):
            Ownership.from_assignment(groups, np.zeros(3, np.int64))


@pytest.mark.parametrize("starts", [[0, 3], [0, 1, 2, 3], [1, 2, 3], [0, 2, 2], [0, 4, 3]])
def test_starts_that_do_not_part_the_rows_are_refused(starts: list[int]) -> None:
    found = f"starts {', '.join(map(str, starts))} of 2 groups, expected 3 .* from 0 to 3"
    with pytest.raises(ValueError, match=f"^ownership: found {found}"):
        Ownership(((0,), (1,)), np.arange(3), np.array(starts))


def test_ids_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="^ownership: found rows -4, -1, expected ids from 0$"):
        Ownership.of({(0,): [3, -4], (1,): [-1]})


def test_ranks_outside_an_ownership_hold_nothing() -> None:
    ownership = Ownership.of({(3, 1): [5, 2], (7,): []})
    assert ownership.ranks == (1, 3, 7)
    assert ownership.held_by(1).tolist() == ownership.held_by(3).tolist() == [5, 2]
    assert [ownership.num_rows(rank) for rank in (0, 1, 7, 9)] == [0, 2, 0, 0]
    assert Ownership.of({}).ranks == () and Ownership.of({}).num_rows(0) == 0


@given(ownerships())
def test_assigned_rows_are_those_of_the_group_in_ascending_order(ownership: Ownership) -> None:
    group, _ = ownership.locate(np.sort(ownership.ids))
    assigned = Ownership.from_assignment(ownership.groups, group, ownership.gradient)
    for found, rows in zip(assigned.rows, ownership.rows, strict=True):
        assert np.sort(ownership.ids)[found].tolist() == np.sort(rows).tolist()


@given(ownerships())
def test_rows_are_where_locate_says(ownership: Ownership) -> None:
    asked = np.arange(ownership.ids.max(initial=-1) + 3)
    for row, group, index in zip(asked, *ownership.locate(asked), strict=True):
        assert (group < 0) == (row not in ownership.ids)
        assert group < 0 or ownership.rows[group][index] == row


@settings(max_examples=40)
@given(ownerships(), st.lists(st.integers(0, 80), max_size=3))
def test_cut_rows_are_those_of_each_group_in_turn(ownership: Ownership, inner: list[int]) -> None:
    ends = sorted([0, *inner, 1 + int(ownership.ids.max(initial=0))])
    parts = ownership.cut(ends)
    for number, rows in enumerate(ownership.rows):
        for part, first, last in zip(parts, ends, ends[1:], strict=False):
            assert part.rows[number].tolist() == [row - first for row in rows.tolist() if first <= row < last]
    assert all((part.groups, part.gradient) == (ownership.groups, ownership.gradient) for part in parts)
