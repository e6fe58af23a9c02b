"""Facts that must be the same on all ranks: what differs is told, on every rank alike."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from megatron_hetero.base.errors import SharedError, UserError
from megatron_hetero.groups.collective import (
    Facts,
    all_or_none,
    on_every,
    on_first,
    on_first_of_all,
    require_equal,
    require_same,
    require_same_facts,
)
from tests.support.pool import world
from tests.support.ranks import on_ranks

FACTS = {"optimizer.lr": "0.1", "model.hf_path": "/model", "version of torch": "2.13"}


def compare(*of_ranks: Facts, absent: str | None = "nothing") -> None:
    require_same_facts("a run", of_ranks, range(len(of_ranks)), "start again", absent=absent)


def test_equal_facts_agree_in_any_order() -> None:
    compare(*[FACTS] * 4)
    compare({**FACTS}, dict(reversed(FACTS.items())), {**FACTS, "model.hf_path": None})


def test_the_message_names_the_first_fact_two_values_and_ranks() -> None:
    with pytest.raises(SharedError) as caught:
        compare({**FACTS}, {**FACTS}, FACTS | {"optimizer.lr": "0.2", "model.hf_path": "/other"})
    assert str(caught.value).startswith("a run: optimizer.lr: found 0.1 on rank 0 and 0.2 on rank 2, ")
    assert str(caught.value).endswith("Start again.") and "model.hf_path" not in str(caught.value)
    with pytest.raises(UserError, match=f"found {'x' * 120}... on rank 0 and y on rank 1"):
        compare({"a": "x" * 1000}, {"a": "y"})


def test_what_a_rank_does_not_name_differs_unless_it_need_not() -> None:
    with pytest.raises(UserError, match="b: found nothing on rank 0 and 1 on rank 1"):
        compare({"a": "0"}, {"a": "0", "b": "1"})
    compare({"a": "0"}, {"a": "0", "b": "1"}, absent=None)
    with pytest.raises(UserError, match="b: found 1 on rank 1 and 2 on rank 2"):
        compare({}, {"b": "1"}, {"b": "2"}, absent=None)


@on_ranks(4)
def test_all_ranks_hear_the_same_again_and_again() -> None:
    rank, group = dist.get_rank(), world()
    for _ in range(2):
        require_equal(group, "a call", {"a": "1", "b": None if rank else "2"}, "repair it")
        with pytest.raises(SharedError, match="a call: b: found 2 on rank 0 and 3 on rank 3"):
            require_equal(group, "a call", {"a": "1", "b": {0: "2", 3: "3"}.get(rank)}, "repair it")


@on_ranks(4)
def test_a_problem_of_one_rank_is_everybody_s() -> None:
    def work() -> int:
        if dist.get_rank() > 1:
            raise UserError(f"no file on rank {dist.get_rank()}")
        return dist.get_rank()

    with pytest.raises(SharedError, match="no file on rank 2"):
        all_or_none(world(), work)
    assert all_or_none(world(), dist.get_rank) == dist.get_rank()


@on_ranks(4)
def test_the_first_rank_alone_receives_what_it_alone_needs() -> None:
    def work() -> int:
        if dist.get_rank() > 1:
            raise UserError(f"no file on rank {dist.get_rank()}")
        return dist.get_rank()

    assert on_first_of_all(world(), dist.get_rank, lambda of_ranks: (dist.get_rank(), of_ranks)) == (0, [0, 1, 2, 3])
    with pytest.raises(SharedError, match="no file on rank 2"):
        on_first_of_all(world(), work, len)


@on_ranks(4)
def test_ranks_that_make_different_calls_are_named() -> None:
    """Whatever is exchanged, and again."""

    def named() -> int:
        return 1

    calls = [
        lambda: all_or_none(world(), named),
        lambda: on_every(world(), named),
        lambda: on_first(world(), named),
        lambda: on_first_of_all(world(), named, len),
        lambda: require_equal(world(), "some", FACTS, "repair it"),
        lambda: require_same(world(), "other", FACTS, "repair it"),
    ]
    for first, other in itertools.combinations(calls, 2):
        with pytest.raises(SharedError, match=r"calls of all ranks: .* on rank 0 and .* on rank 3"):
            first() if dist.get_rank() < 3 else other()


@on_ranks(2)
def test_many_facts_are_compared() -> None:
    facts = {f"fact {n}": str(n) for n in range(100)}
    require_equal(world(), "a call", facts, "repair it")
    with pytest.raises(SharedError, match="a call: fact 99: found 99 on rank 0 and 1 on rank 1"):
        require_equal(world(), "a call", facts | ({"fact 99": "1"} if dist.get_rank() else {}), "repair it")
