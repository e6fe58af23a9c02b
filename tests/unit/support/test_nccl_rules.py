"""The process group with NCCL's rules: numbers as gloo's, and what would hang on NCCL fails at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.pool import Pool
from tests.unit.support import jobs_nccl_rules as jobs

Pools = Callable[[int], Pool]


def refused(pool: Pool, job: Callable[..., Any], *args: Any) -> str:
    """What all ranks are told of a job that could not end; the pool must be usable afterwards."""
    failures = {outcome.failure for outcome in pool.attempt(job, *args, timeout_s=30)}
    assert None not in failures
    (text,) = {str(failure).split("RuntimeError: ")[-1] for failure in failures}
    assert pool.run(jobs.batch_works if pool.ranks == 2 else jobs.collectives, *[torch.float32][: pool.ranks - 2])
    return text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_numbers_are_those_of_gloo(dtype: torch.dtype, pools: Pools, rules_pools: Pools) -> None:
    found = (pool(3).run(jobs.collectives, dtype) for pool in (rules_pools, pools))
    for rules, gloo in zip(*found, strict=True):
        assert rules.keys() == gloo.keys()
        for name in gloo:
            torch.testing.assert_close(rules[name], gloo[name], rtol=0, atol=0, msg=name)


def test_objects(pools: Pools, rules_pools: Pools) -> None:
    assert rules_pools(3).run(jobs.objects, "host_rules") == pools(3).run(jobs.objects, "gloo")


def test_batch_is_one_operation(rules_pools: Pools) -> None:
    assert rules_pools(2).run(jobs.batch_works) == [1, 1]


def test_receives_before_sends_on_one_communicator(rules_pools: Pools) -> None:
    text = refused(rules_pools(2), jobs.receive_before_send, 1)
    assert text.startswith("deadlock: ranks wait for each other\n")
    for rank in (0, 1):
        line = next(line for line in text.splitlines() if line.startswith(f"  rank {rank}, ") and "begin" in line)
        other = 1 - rank
        assert "jobs_nccl_rules.py" in line
        assert f"send to rank {other} of 4 float32 on 'default_pg' (0, 1) cannot begin before" in line
        assert f"receive from rank {other} of 4 float32 has ended" in line


def test_receives_before_sends_on_two_communicators(rules_pools: Pools) -> None:
    assert rules_pools(2).run(jobs.receive_before_send, 2) == [[1.0] * 4, [0.0] * 4]


def test_receives_before_sends_on_gloo(pools: Pools) -> None:
    """What the rules are for: gloo lets it pass."""
    assert pools(2).run(jobs.receive_before_send, 1) == [[1.0] * 4, [0.0] * 4]


def test_collectives_in_other_order(rules_pools: Pools) -> None:
    text = refused(rules_pools(2), jobs.other_order)
    assert text.startswith("mismatch: collective 0 of a communicator differs between ranks")
    assert "all_reduce of 4 float32" in text and "broadcast of 4 float32" in text


def test_communicators_in_other_order(rules_pools: Pools) -> None:
    text = refused(rules_pools(2), jobs.crossed_communicators)
    assert text.startswith("deadlock: ranks wait for each other\n")
    assert text.count(": waits for all_reduce of 4 float32") == 2
    assert rules_pools(2).run(jobs.crossed_without_waiting) == [[8.0, 8.0]] * 2


def test_send_without_receive(rules_pools: Pools) -> None:
    text = refused(rules_pools(2), jobs.lone_send)
    assert text.startswith("unfinished: operations that never end")
    assert "send to rank 1 of 4 float32 on 'default_pg'" in text


def test_work_that_nobody_waits_for(rules_pools: Pools) -> None:
    assert rules_pools(2).run(jobs.never_waited_for) == [True, True]


def test_sizes_that_differ(rules_pools: Pools) -> None:
    text = refused(rules_pools(2), jobs.other_size)
    assert text.startswith("mismatch: a receive differs from its send")
    assert "send to rank 1 of 4 float32" in text and "receive from rank 0 of 5 float32" in text


def test_parts_that_differ(rules_pools: Pools) -> None:
    assert "rank 0 sends 2 to rank 1, which receives 1" in refused(rules_pools(2), jobs.other_all_to_all)


def test_rank_that_fails_is_named(rules_pools: Pools) -> None:
    pool = rules_pools(2)
    first, second = (outcome.failure or "" for outcome in pool.attempt(jobs.leaves_early))
    assert "ValueError: something of its own" in first
    assert "ranks wait for one that has ended its job" in second
    assert "needs rank 0, which has ended its job" in second
    with pytest.raises(AssertionError, match="something of its own"):
        pool.run(jobs.leaves_early)


@pytest.mark.parametrize("backend", [None, "host_rules"])
def test_group_of_some_ranks(backend: str | None, rules_pools: Pools) -> None:
    """A group of the device needs all ranks of its parent; one of the host its own."""
    if backend is None:
        text = refused(rules_pools(3), jobs.subgroup, None)
        assert text.startswith("deadlock: ranks wait for one that has ended its job")
        assert "split with ranks [0, 1] on 'default_pg' (0, 1, 2)" in text
    else:
        rules_pools(3).run(jobs.subgroup, backend)


@pytest.mark.parametrize("backend", ["gloo", "host_rules"])
def test_groups_of_the_host_in_between(backend: str, rules_pools: Pools) -> None:
    """Ranks outside a group of the host enter a split, those inside do not: rank 2 is one ahead."""
    text = refused(rules_pools(3), jobs.groups_before_splits, backend)
    assert text.startswith("mismatch: collective 0 of a communicator differs between ranks: other neighbours")
    assert "split with no colour" in text and "split with ranks [0, 1, 2]" in text


def test_one_split_makes_all_groups_of_a_partition(rules_pools: Pools) -> None:
    found = rules_pools(4).run(jobs.halves)
    assert [sums for sums, *_ in found] == [[1.0, 0.0], [1.0, 3.0], [5.0, 3.0], [5.0, 3.0]]
    assert [rest for _, *rest in found] == [["halves", ranks, "nccl_rules"] for ranks in ([0, 1],) * 2 + ([2, 3],) * 2]


def test_splits_that_disagree(rules_pools: Pools) -> None:
    assert "other neighbours" in refused(rules_pools(4), jobs.other_neighbours)


def test_one_connection(rules_pools: Pools, one_connection_pools: Pools) -> None:
    assert rules_pools(2).run(jobs.needs_two_connections) == [True, True]
    text = refused(one_connection_pools(2), jobs.needs_two_connections)
    assert text.startswith("deadlock: ranks wait for each other\n") and "(one connection)" in text


def test_first_messages_wait_for_each_other(rules_pools: Pools) -> None:
    """What may be posted early only where ranks have connected: otherwise each host waits in its receive."""
    assert rules_pools(2).run(jobs.first_uses, True) == [[1.0] * 4, [0.0] * 4]
    text = refused(rules_pools(2), jobs.first_uses, False)
    assert text.startswith("deadlock: ranks wait for each other\n")
    for rank in (0, 1):
        assert f"connects for receive from rank {1 - rank} of 4 float32" in text
        assert f"to which rank {1 - rank} has not come" in text


def test_first_use_of_an_algorithm_waits(rules_pools: Pools) -> None:
    """An all-reduce connects for all-reduces only."""
    rules_pools(2).run(jobs.first_use_on_one_rank, "all_reduce")
    text = refused(rules_pools(2), jobs.first_use_on_one_rank, "reduce_scatter")
    assert "rank 0, jobs_nccl_rules.py" in text and "connects for reduce_scatter of 2 float32" in text
