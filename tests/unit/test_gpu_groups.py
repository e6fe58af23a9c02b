"""The process groups of the GPU benchmark."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.gpu.groups import EchoGroup
from tests.support.pool import Pool
from tests.unit import jobs_gpu_groups as jobs


def test_every_operation_gives_what_gloo_gives(pools: Callable[[int], Pool]) -> None:
    """Of a group that stages its tensors on the host."""
    for results in pools(3).run(jobs.both):
        for name, staged, gloo in results:
            assert gloo.any(), name
            assert torch.equal(staged, gloo), name


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
