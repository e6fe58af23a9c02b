"""The process group with NCCL's rules: numbers as gloo's, and what would hang on NCCL fails at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pool, Pools, platform, world

# ------------------------------------------------------------------------------------ what the workers of a pool do


def after_connecting(job: Callable[..., Any]) -> Callable[..., Any]:
    """The job, with ranks that have connected; on gloo they have."""

    @wraps(job)
    def connected(*args: Any) -> Any:
        if hasattr(group := world(), "client"):
            group.client.takes_as_connected = True
        return job(*args)

    return connected


def collectives(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What all collectives that the project uses give on this rank, by name."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = (torch.arange(ranks * 3) * (rank + 1) % 7).to(dtype)
    found: dict[str, torch.Tensor] = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        dist.all_reduce(found.setdefault(f"all_reduce {op}", own.clone()), op)
    dist.broadcast(found.setdefault("broadcast", own.clone()), src=ranks - 1)
    everyone = found.setdefault("all_gather", torch.empty(ranks * len(own), dtype=dtype))
    dist._all_gather_base(everyone, own) if not hasattr(dist, "all_gather_single") else dist.all_gather_single(
        everyone, own
    )
    part = found.setdefault("reduce_scatter", torch.empty(3, dtype=dtype))
    dist.distributed_c10d._reduce_scatter_base(part, own)
    sent = [(rank + other) % 3 for other in range(ranks)]
    rows = torch.arange(sum(sent) * 2).to(dtype).view(-1, 2) + 10 * rank
    arrived = found.setdefault("all_to_all", torch.empty(sum(sent), 2, dtype=dtype))
    dist.all_to_all_single(arrived, rows, sent, sent)
    dist.barrier()
    found |= _coalesced(own, ranks) | _point_to_point(own, rank, ranks)
    return found


def _coalesced(own: torch.Tensor, ranks: int) -> dict[str, torch.Tensor]:
    first, second, c10d = own.clone(), own[:2].clone(), dist.distributed_c10d
    # Up to PyTorch 2.12 they had the second name only.
    scatter = getattr(c10d, "reduce_scatter_single", c10d.reduce_scatter_tensor)
    gather = getattr(c10d, "all_gather_single", c10d.all_gather_into_tensor)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(first)
        dist.all_reduce(second)
    manager.wait()
    parts = torch.empty(3, dtype=own.dtype), torch.empty(1, dtype=own.dtype)
    with dist.distributed_c10d._coalescing_manager():
        scatter(parts[0], own)
        scatter(parts[1], own[:ranks].clone())
    gathered = [torch.empty(ranks * len(part), dtype=own.dtype) for part in parts]
    with dist.distributed_c10d._coalescing_manager():
        for whole, part in zip(gathered, parts, strict=True):
            gather(whole, part)
    names = "all_reduce 1", "all_reduce 2", "scatter 1", "scatter 2", "gather 1", "gather 2"
    return {f"coalesced {n}": t for n, t in zip(names, (first, second, *parts, *gathered), strict=True)}


def _point_to_point(own: torch.Tensor, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Rings: with ranks in turn, with immediate calls, in a batch."""
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    arrived = [torch.empty_like(own) for _ in range(3)]
    for sender in range(ranks):
        if sender == rank:
            dist.send(own, right)
        if sender == left:
            dist.recv(arrived[0], left)
    if rank == 0:
        works = [dist.isend(own, right), dist.irecv(arrived[1], left)]
    else:
        works = [dist.irecv(arrived[1], left), dist.isend(own, right)]
    for work in works:
        work.wait()  # pyright: ignore[reportOptionalMemberAccess]
    batch = [dist.P2POp(dist.irecv, arrived[2], left), dist.P2POp(dist.isend, own, right)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return dict(zip(("send", "isend", "batch"), arrived, strict=True))


def batch_works() -> int:
    """How many works a batch of two gives."""
    tensors, other = torch.zeros(2, 1), 1 - dist.get_rank()
    batch = [dist.P2POp(dist.isend, tensors[0], other), dist.P2POp(dist.irecv, tensors[1], other)]
    works = dist.batch_isend_irecv(batch)
    for work in works:
        work.wait()
    return len(works)


def objects(backend: str) -> list[Any]:
    """Objects over a group of the host, and over the device's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    host: Any = dist.new_group(list(range(ranks)), backend=backend, use_local_synchronization=True)
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, {"rank": rank}, group=host)
    word = [f"from {rank}"]
    dist.broadcast_object_list(word, src=1, group=host)
    passed: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([("to", 1)], 1)
    elif rank == 1:
        dist.recv_object_list(passed, 0)
    gathered: list[Any] | None = [None] * ranks if rank == 1 else None
    dist.gather_object(rank, gathered, 1, group=host)
    assigned: list[Any] = [None]
    dist.scatter_object_list(assigned, [f"for {other}" for other in range(ranks)] if rank == 2 else None, 2, group=host)
    dist.barrier(host)
    return [told, word, passed, gathered, assigned]


# ------------------------------------------------------------------------------------------------- what would hang


@after_connecting
def receive_before_send(groups: int) -> list[float]:
    """Each of two ranks posts a receive, then sends, on one communicator or on one for each direction."""
    rank = dist.get_rank()
    made: list[Any] = [dist.group.WORLD] if groups == 1 else [dist.new_group([0, 1]) for _ in range(2)]
    host: Any = dist.new_group([0, 1], backend=platform().host_backend)
    mine, theirs = torch.full((4,), float(rank)), torch.empty(4)
    receive: Any = dist.irecv(theirs, 1 - rank, group=made[rank % groups])
    send: Any = dist.isend(mine, 1 - rank, group=made[(1 - rank) % groups])
    dist.barrier(host)  # Then all is issued, and the message always the same.
    send.wait()
    receive.wait()
    return theirs.tolist()


@after_connecting
def other_order() -> None:
    """Collectives in different orders."""
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
    else:
        dist.broadcast(tensor, 0)
        dist.all_reduce(tensor)


@after_connecting
def crossed_communicators() -> None:
    """Two communicators, waited for in different orders: legal where nobody waits in between."""
    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        dist.all_reduce(torch.ones(4), group=group)


@after_connecting
def crossed_without_waiting() -> list[float]:
    """As `crossed_communicators`, but all is issued before anything is waited for."""
    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(2)]
    tensors = [torch.ones(4), torch.ones(4)]
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    works: list[Any] = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    return [float(tensor.sum()) for tensor in tensors]


@after_connecting
def lone_send() -> None:
    """A send that nobody receives, and that nobody waits for."""
    if dist.get_rank() == 0:
        dist.isend(torch.ones(4), 1)


@after_connecting
def never_waited_for() -> bool:
    """A send and a receive whose works are dropped."""
    tensor = torch.ones(4)
    dist.isend(tensor, 1) if dist.get_rank() == 0 else dist.irecv(tensor, 0)
    return True


@after_connecting
def other_size() -> None:
    """A receive larger than its send."""
    dist.send(torch.ones(4), 1) if dist.get_rank() == 0 else dist.recv(torch.empty(5), 0)


@after_connecting
def other_all_to_all() -> None:
    """An all-to-all in which a rank sends what nobody expects."""
    counts = [1, 2] if dist.get_rank() == 0 else [1, 1]
    dist.all_to_all_single(torch.empty(2), torch.ones(sum(counts)), [1, 1], counts)


@after_connecting
def leaves_early() -> None:
    """One rank fails, another waits for it."""
    if dist.get_rank() == 0:
        raise ValueError("something of its own")
    dist.all_reduce(torch.ones(1))


# ------------------------------------------------------------------------------------------------------ splits


def subgroup(backend: str | None) -> None:
    """A group of ranks 0 and 1 of three, that rank 2 hears nothing of."""
    if dist.get_rank() < 2:
        group: Any = dist.new_group([0, 1], backend=backend, use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=group)


def groups_before_splits(backend: str) -> None:
    """Groups of the host that only their members know how to make, then one of the device: c097563 began like this
    where an encoder does not cover all ranks.
    """
    dist.new_group([0, 1], backend=backend)
    dist.new_group([0, 1, 2])


def halves() -> list[Any]:
    """One split for two groups, and one that leaves ranks without."""
    rank = dist.get_rank()
    half: Any = dist.split_group(split_ranks=[[0, 1], [2, 3]], group_desc="halves")
    pair: Any = dist.split_group(split_ranks=[[1, 2]], group_desc="pair")
    sums = []
    for group in (half, pair):
        tensor = torch.tensor([float(rank)])
        if group is not None:
            dist.all_reduce(tensor, group=group)
        sums.append(float(tensor))
    described = None if half is None else half.group_desc
    return [sums, described, dist.get_process_group_ranks(half), dist.get_backend(half)]


def other_neighbours() -> None:
    """A split whose ranks disagree on who is with whom."""
    dist.split_group(split_ranks=[[0, 1], [2, 3]] if dist.get_rank() < 3 else [[0, 1, 2], [3]])


# ----------------------------------------------------------------------------------------------------- strictness


@after_connecting
def needs_two_connections() -> bool:
    """Rank 0 issues an operation that cannot begin before one that it issues later on another communicator; with a
    single connection nothing overtakes.
    """
    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(3)]
    tensors, rank = torch.ones(3, 4), dist.get_rank()
    # Rank 0's second operation stands behind its first, which ends when rank 1 comes to it, after the third has ended.
    order = (0, 0, 2) if rank == 0 else (2, 0, 0)
    works: list[Any] = []
    for index in order:
        works.append(dist.all_reduce(tensors[index], group=groups[index], async_op=True))
        if rank == 1 and index == 2:
            works[-1].wait()
    for work in works:
        work.wait()
    return True


def first_uses(connected: bool) -> list[float]:
    """Posts receives early, on two communicators: one way each."""
    rank, tensors = dist.get_rank(), torch.zeros(2, 4)
    groups: list[Any] = [dist.split_group(split_ranks=[[0, 1]]) for _ in range(2)]
    if connected:
        for sender, group in enumerate(groups):
            (dist.send if rank == sender else dist.recv)(tensors[0], 1 - rank, group=group)
    receive: Any = dist.irecv(tensors[1], 1 - rank, group=groups[1 - rank])
    dist.send(torch.full((4,), float(rank)), 1 - rank, group=groups[rank])
    receive.wait()
    return tensors[1].tolist()


def first_use_on_one_rank(algorithm: str) -> None:
    """Rank 0 begins a sum that rank 1 begins when a message has come: the host of rank 0 sends it behind the sum."""
    rank, group, tensor = dist.get_rank(), dist.split_group(split_ranks=[[0, 1]]), torch.zeros(4)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=group)
    (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
    works: list[Any] = []
    for what in ("sum", "message")[:: 1 if rank == 0 else -1]:
        if what == "message":
            (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
        elif algorithm == "all_reduce":
            works.append(dist.all_reduce(tensor.clone(), group=group, async_op=True))
        else:
            works.append(dist.reduce_scatter_tensor(tensor[:2].clone(), tensor, group=group, async_op=True))
    for work in works:
        work.wait()


# ---------------------------------------------------------------------------------------------------- what comes of it


def refused(pool: Pool, job: Callable[..., Any], *args: Any) -> str:
    """What all ranks are told of a job that could not end; the pool must be usable afterwards."""
    failures = {outcome.failure for outcome in pool.attempt(job, *args, timeout_s=30)}
    assert None not in failures
    (text,) = {str(failure).split("RuntimeError: ")[-1] for failure in failures}
    assert pool.run(batch_works if pool.ranks == 2 else collectives, *[torch.float32][: pool.ranks - 2])
    return text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_numbers_are_those_of_gloo(dtype: torch.dtype, pools: Pools, rules_pools: Pools) -> None:
    found = (pool(3).run(collectives, dtype) for pool in (rules_pools, pools))
    for rules, gloo in zip(*found, strict=True):
        assert rules.keys() == gloo.keys()
        for name in gloo:
            torch.testing.assert_close(rules[name], gloo[name], rtol=0, atol=0, msg=name)


def test_objects(pools: Pools, rules_pools: Pools) -> None:
    assert rules_pools(3).run(objects, "host_rules") == pools(3).run(objects, "gloo")


def test_batch_is_one_operation(rules_pools: Pools) -> None:
    assert rules_pools(2).run(batch_works) == [1, 1]


def test_receives_before_sends_on_one_communicator(rules_pools: Pools) -> None:
    text = refused(rules_pools(2), receive_before_send, 1)
    assert text.startswith("deadlock: ranks wait for each other\n")
    for rank in (0, 1):
        line = next(line for line in text.splitlines() if line.startswith(f"  rank {rank}, ") and "begin" in line)
        other = 1 - rank
        assert "test_nccl_rules.py" in line
        assert f"send to rank {other} of 4 float32 on 'default_pg' (0, 1) cannot begin before" in line
        assert f"receive from rank {other} of 4 float32 has ended" in line


def test_receives_before_sends_on_two_communicators(rules_pools: Pools) -> None:
    assert rules_pools(2).run(receive_before_send, 2) == [[1.0] * 4, [0.0] * 4]


def test_receives_before_sends_on_gloo(pools: Pools) -> None:
    """What the rules are for: gloo lets it pass."""
    assert pools(2).run(receive_before_send, 1) == [[1.0] * 4, [0.0] * 4]


def test_collectives_in_other_order(rules_pools: Pools) -> None:
    text = refused(rules_pools(2), other_order)
    assert text.startswith("mismatch: collective 0 of a communicator differs between ranks")
    assert "all_reduce of 4 float32" in text and "broadcast of 4 float32" in text


def test_communicators_in_other_order(rules_pools: Pools) -> None:
    text = refused(rules_pools(2), crossed_communicators)
    assert text.startswith("deadlock: ranks wait for each other\n")
    assert text.count(": waits for all_reduce of 4 float32") == 2
    assert rules_pools(2).run(crossed_without_waiting) == [[8.0, 8.0]] * 2


def test_send_without_receive(rules_pools: Pools) -> None:
    text = refused(rules_pools(2), lone_send)
    assert text.startswith("unfinished: operations that never end")
    assert "send to rank 1 of 4 float32 on 'default_pg'" in text


def test_work_that_nobody_waits_for(rules_pools: Pools) -> None:
    assert rules_pools(2).run(never_waited_for) == [True, True]


def test_sizes_that_differ(rules_pools: Pools) -> None:
    text = refused(rules_pools(2), other_size)
    assert text.startswith("mismatch: a receive differs from its send")
    assert "send to rank 1 of 4 float32" in text and "receive from rank 0 of 5 float32" in text


def test_parts_that_differ(rules_pools: Pools) -> None:
    assert "rank 0 sends 2 to rank 1, which receives 1" in refused(rules_pools(2), other_all_to_all)


def test_rank_that_fails_is_named(rules_pools: Pools) -> None:
    pool = rules_pools(2)
    first, second = (outcome.failure or "" for outcome in pool.attempt(leaves_early))
    assert "ValueError: something of its own" in first
    assert "ranks wait for one that has ended its job" in second
    assert "needs rank 0, which has ended its job" in second
    with pytest.raises(AssertionError, match="something of its own"):
        pool.run(leaves_early)


@pytest.mark.parametrize("backend", [None, "host_rules"])
def test_group_of_some_ranks(backend: str | None, rules_pools: Pools) -> None:
    """A group of the device needs all ranks of its parent; one of the host its own."""
    if backend is None:
        text = refused(rules_pools(3), subgroup, None)
        assert text.startswith("deadlock: ranks wait for one that has ended its job")
        assert "split with ranks [0, 1] on 'default_pg' (0, 1, 2)" in text
    else:
        rules_pools(3).run(subgroup, backend)


@pytest.mark.parametrize("backend", ["gloo", "host_rules"])
def test_groups_of_the_host_in_between(backend: str, rules_pools: Pools) -> None:
    """Up to PyTorch 2.14 ranks outside a group of the host enter a split, those inside do not: rank 2 is one ahead."""
    if "requested_backend" in signature(dist.distributed_c10d._get_split_source).parameters:
        rules_pools(3).run(groups_before_splits, backend)
        return
    text = refused(rules_pools(3), groups_before_splits, backend)
    assert text.startswith("mismatch: collective 0 of a communicator differs between ranks: other neighbours")
    assert "split with no colour" in text and "split with ranks [0, 1, 2]" in text


def test_one_split_makes_all_groups_of_a_partition(rules_pools: Pools) -> None:
    found = rules_pools(4).run(halves)
    assert [sums for sums, *_ in found] == [[1.0, 0.0], [1.0, 3.0], [5.0, 3.0], [5.0, 3.0]]
    assert [rest for _, *rest in found] == [["halves", ranks, "nccl_rules"] for ranks in ([0, 1],) * 2 + ([2, 3],) * 2]


def test_splits_that_disagree(rules_pools: Pools) -> None:
    assert "other neighbours" in refused(rules_pools(4), other_neighbours)


def test_one_connection(rules_pools: Pools, one_connection_pools: Pools) -> None:
    assert rules_pools(2).run(needs_two_connections) == [True, True]
    text = refused(one_connection_pools(2), needs_two_connections)
    assert text.startswith("deadlock: ranks wait for each other\n") and "(one connection)" in text


def test_first_messages_wait_for_each_other(rules_pools: Pools) -> None:
    """What may be posted early only where ranks have connected: otherwise each host waits in its receive."""
    assert rules_pools(2).run(first_uses, True) == [[1.0] * 4, [0.0] * 4]
    text = refused(rules_pools(2), first_uses, False)
    assert text.startswith("deadlock: ranks wait for each other\n")
    for rank in (0, 1):
        assert f"connects for receive from rank {1 - rank} of 4 float32" in text
        assert f"to which rank {1 - rank} has not come" in text


def test_first_use_of_an_algorithm_waits(rules_pools: Pools) -> None:
    """An all-reduce connects for all-reduces only."""
    rules_pools(2).run(first_use_on_one_rank, "all_reduce")
    text = refused(rules_pools(2), first_use_on_one_rank, "reduce_scatter")
    assert "rank 0, test_nccl_rules.py" in text and "connects for reduce_scatter of 2 float32" in text
