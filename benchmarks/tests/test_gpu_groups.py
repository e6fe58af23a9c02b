"""The process groups of the GPU benchmark."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import groups
from benchmarks.gpu.groups import EchoGroup
from benchmarks.gpu.phases import Phases, split
from megatron_hetero.groups.platform import CPU, Platform
from tests.support.ranks import on_ranks


def mine(*shape: int) -> Tensor:
    """Values that no other rank and no other place has."""
    return torch.arange(torch.Size(shape).numel()).view(shape) + 100.0 * (1 + dist.get_rank())


def all_reduce(group: Any) -> Tensor:
    work = dist.all_reduce(tensor := mine(3, 2), dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    work.wait()
    return tensor


def broadcast(group: Any) -> Tensor:
    dist.broadcast(tensor := mine(3, 2), src=1, group=group)
    return tensor


def all_gather(group: Any) -> Tensor:
    out = torch.zeros(dist.get_world_size() * 3, 2)
    dist.all_gather_into_tensor(out, mine(3, 2), group=group)
    return out


def reduce_scatter(group: Any) -> Tensor:
    out = torch.zeros(3, 2)
    dist.reduce_scatter_tensor(out, mine(dist.get_world_size() * 3, 2), group=group)
    return out


def all_to_all(group: Any) -> Tensor:
    """Rank r sends r + s rows to rank s."""
    rank, others = dist.get_rank(), range(dist.get_world_size())
    counts = [rank + other for other in others]
    out = torch.zeros(sum(counts), 2)
    dist.all_to_all_single(out, mine(sum(counts), 2), counts, counts, group=group)
    return out


def ring(group: Any) -> Tensor:
    """Everybody sends before it receives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(mine(3, 2), (rank + 1) % size, group=group)
    received = dist.irecv(out := torch.zeros(3, 2), (rank - 1) % size, group=group)
    assert sent is not None and received is not None
    received.wait()
    sent.wait()
    assert sent.is_completed() and received.is_completed()
    return out


def batch(group: Any) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, mine(3, 2), (rank + 1) % size, group)
    receive = dist.P2POp(dist.irecv, out := torch.zeros(3, 2), (rank - 1) % size, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return out


def coalesced(group: Any) -> Tensor:
    outs = [torch.zeros(3, 2), torch.zeros(2)]
    with dist.distributed_c10d._coalescing_manager(group):
        for out in outs:
            dist.reduce_scatter_tensor(out, mine(dist.get_world_size() * len(out), *out.shape[1:]), group=group)
    return torch.cat([out.flatten() for out in outs])


def objects(group: Any) -> Tensor:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {"rank": dist.get_rank()}, group=group)
    dist.barrier(group)
    return torch.tensor([entry["rank"] for entry in told])


OPERATIONS = {
    "all-reduce": all_reduce,
    "broadcast": broadcast,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
    "ring": ring,
    "batch": batch,
    "coalesced": coalesced,
    "objects": objects,
}


@on_ranks(3)
def test_every_operation_gives_what_gloo_gives() -> None:
    """Of a group that stages its tensors on the host."""
    groups.register()
    ranks = list(range(dist.get_world_size()))
    staged, gloo = (dist.new_group(ranks, backend=name, timeout=timedelta(seconds=60)) for name in ("staged", "gloo"))
    for name, run in OPERATIONS.items():
        found, expected = run(staged), run(gloo)
        assert expected.any(), name
        assert torch.equal(found, expected), name


def test_an_echo_fills_whatever_would_be_received() -> None:
    """As though all ranks had what this one has, sums as they were."""
    group = EchoGroup(dist.HashStore(), 1, 3, timedelta(seconds=1))
    mine, nan = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), float("nan")
    assert group.allreduce([mine]).wait() and mine.tolist() == [[1, 2], [3, 4]]
    gathered = torch.full((6, 2), nan)
    group._allgather_base(gathered, mine)
    assert gathered.tolist() == [[1, 2], [3, 4]] * 3
    group.all_gather_single(gathered, gathered[2:4])
    assert gathered.tolist() == [[1, 2], [3, 4]] * 3
    part = torch.full((2, 2), nan)
    group.reduce_scatter_single(part, torch.arange(12.0).view(6, 2))
    assert part.tolist() == [[4, 5], [6, 7]]
    received = torch.full((5, 2), nan)
    group.all_to_all_single(received, mine, [2, 1, 2], [1, 0, 1])
    assert received.tolist() == [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]]
    group.all_to_all_single(received, mine[:0], [2, 1, 2], [0, 0, 0])
    assert not received.any()
    group.recv([gathered], 0, 0)
    assert not gathered.any()


def test_stand_ins_are_timed_by_phase() -> None:
    """Each operation of an echo is a lap of its own, in the phase that the stopwatch is in."""
    watch, group = Phases(Platform(CPU, "gloo")), EchoGroup(dist.HashStore(), 0, 2, timedelta(seconds=1))
    with mock.patch.object(EchoGroup, "watch", watch):
        with watch.lap("text", "text.0.B1"):
            for _ in range(3):
                group.all_gather_single(torch.zeros(4), torch.ones(2))
        group.recv([torch.zeros(2)], 0, 0)
    phases, stand_ins = split(watch.read())
    assert {name: len(laps) for name, laps in phases.items()} == {"text backward": 1}
    assert {name: len(laps) for name, laps in stand_ins.items()} == {"text backward": 3, "between phases": 1}
    assert watch.host["text backward"] >= sum(stand_ins["text backward"])
