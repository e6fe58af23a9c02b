"""Work that some ranks do and all ranks must know the outcome of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_hetero.errors import SharedError, UserError

T = TypeVar("T")
FIRST = 0
"""The rank that decides where one must."""
Working = Callable[[], AbstractContextManager[None]]
"""Around what a rank does by itself, for which others wait: see `Watchdog.working`."""


def on_every(group: dist.ProcessGroup | None, work: Callable[[], T], working: Working = nullcontext) -> list[T]:
    """What `work` gives on each rank, by rank. The first rank's `UserError` is raised on every rank, as a
    `SharedError`. Without a group, this process is the only rank."""
    if group is None:
        return [work()]
    mine, problem = _attempt(work, working)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (mine, problem), group=group)
    for _, found in gathered:
        if found is not None:
            raise SharedError(found)
    return [result for result, _ in gathered]


def on_first(group: dist.ProcessGroup | None, work: Callable[[], T], working: Working = nullcontext) -> T:
    """What `work` gives on the first rank, which alone does it. Its `UserError` is raised on every rank, as a
    `SharedError`. Without a group, this process is the only rank."""
    if group is None:
        return work()
    outcome: list[Any] = [_attempt(work, working) if dist.get_rank(group) == FIRST else None]
    dist.broadcast_object_list(outcome, src=FIRST, group=group)
    result, problem = outcome[0]
    if problem is not None:
        raise SharedError(problem)
    return result


def together(group: dist.ProcessGroup, work: Callable[[], T], working: Working = nullcontext) -> T:
    """What `work` gives on this rank, once it is done on all. The first rank's `UserError` is raised on every rank."""
    mine: list[T] = []
    on_every(group, lambda: mine.append(work()), working)
    return mine[0]


def _attempt(work: Callable[[], T], working: Working) -> tuple[T | None, str | None]:
    try:
        with working():
            return work(), None
    except UserError as error:
        return None, str(error)
