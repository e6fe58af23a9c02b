"""What the workers of the pool run for the test of staged groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import groups


def both() -> list[tuple[Any, ...]]:
    """Name and result of each operation on a staged group and on gloo, of this rank."""
    groups.register()
    ranks = list(range(dist.get_world_size()))
    pair = [dist.new_group(ranks, backend=name, timeout=timedelta(seconds=60)) for name in ("staged", "gloo")]
    return [
        (name, *(run(group).clone() for group in pair)) for name, run in _OPERATIONS.items()
    ]  # fmt: skip


def _mine(*shape: int) -> Tensor:
    """Values that no other rank and no other place has."""
    return torch.arange(torch.Size(shape).numel()).view(shape) + 100.0 * (1 + dist.get_rank())


def _all_reduce(group: Any) -> Tensor:
    work = dist.all_reduce(tensor := _mine(3, 2), dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    work.wait()
    return tensor


def _broadcast(group: Any) -> Tensor:
    dist.broadcast(tensor := _mine(3, 2), src=1, group=group)
    return tensor


def _all_gather(group: Any) -> Tensor:
    out = torch.zeros(dist.get_world_size() * 3, 2)
    dist.all_gather_into_tensor(out, _mine(3, 2), group=group)
    return out


def _reduce_scatter(group: Any) -> Tensor:
    out = torch.zeros(3, 2)
    dist.reduce_scatter_tensor(out, _mine(dist.get_world_size() * 3, 2), group=group)
    return out


def _all_to_all(group: Any) -> Tensor:
    """Rank r sends r + s rows to rank s."""
    rank, others = dist.get_rank(), range(dist.get_world_size())
    counts = [rank + other for other in others]
    out = torch.zeros(sum(counts), 2)
    dist.all_to_all_single(out, _mine(sum(counts), 2), counts, counts, group=group)
    return out


def _ring(group: Any) -> Tensor:
    """Everybody sends before it receives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(_mine(3, 2), (rank + 1) % size, group=group)
    received = dist.irecv(out := torch.zeros(3, 2), (rank - 1) % size, group=group)
    assert sent is not None and received is not None
    received.wait()
    sent.wait()
    assert sent.is_completed() and received.is_completed()
    return out


def _batch(group: Any) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, _mine(3, 2), (rank + 1) % size, group)
    receive = dist.P2POp(dist.irecv, out := torch.zeros(3, 2), (rank - 1) % size, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return out


def _coalesced(group: Any) -> Tensor:
    outs = [torch.zeros(3, 2), torch.zeros(2)]
    with dist.distributed_c10d._coalescing_manager(group):
        for out in outs:
            dist.reduce_scatter_tensor(out, _mine(dist.get_world_size() * len(out), *out.shape[1:]), group=group)
    return torch.cat([out.flatten() for out in outs])


def _objects(group: Any) -> Tensor:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {"rank": dist.get_rank()}, group=group)
    dist.barrier(group)
    return torch.tensor([entry["rank"] for entry in told])


_OPERATIONS = {
    "all-reduce": _all_reduce,
    "broadcast": _broadcast,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "ring": _ring,
    "batch": _batch,
    "coalesced": _coalesced,
    "objects": _objects,
}
