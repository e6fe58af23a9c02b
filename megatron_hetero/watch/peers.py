"""Messages between the watchdogs of all ranks, over the store of the default process group: that a rank is working
while others wait, and which ranks wait when one of them gives up.

The store is not used before a rank has waited for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from megatron_hetero.distributed.meeting import in_background

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
_PREFIX = "watchdog"


@dataclass(frozen=True)
class RollCall:
    """The answers when a rank gives up. `first`: whether it was the first to give up, and reports for all. `doing`: by
    rank, what those that answered wait in. `absent`: those that did not.
    """

    first: bool
    doing: Mapping[int, str]
    absent: tuple[int, ...]


class Peers:
    """The ranks of a process group, for use by one thread of one of them."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self._own: Store | None = None

    @classmethod
    def of_world(cls) -> Peers | None:
        """The ranks of the default process group; None if it has one rank."""
        if dist.get_world_size() == 1:
            return None
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())

    def beat(self, works: bool) -> int:
        """Report whether this rank `works`. Returns the number of reports of work by all ranks."""
        return self._connected().add(f"{_PREFIX}/beats", int(works))

    def given_up(self) -> bool:
        """Whether any rank has given up."""
        return self._connected().add(f"{_PREFIX}/given up", 0) > 0

    def answer(self, doing: str) -> None:
        """Report what this rank waits in."""
        self._connected().set(self._key(self.rank), doing)

    def roll_call(self, seconds: float, doing: str) -> RollCall:
        """Give up `doing`, and wait up to `seconds` for the others to answer what they wait in."""
        self.answer(doing)
        first = self._connected().add(f"{_PREFIX}/given up", 1) == 1
        if not first:
            return RollCall(first, {}, ())
        store, keys, end = self._connected(), list(map(self._key, range(self.ranks))), time.monotonic() + seconds
        while not store.check(keys) and time.monotonic() < end:
            time.sleep(min(0.2, seconds / 10))
        answers = {rank: store.get(key).decode() for rank, key in enumerate(keys) if store.check([key])}
        return RollCall(first, answers, tuple(rank for rank in range(self.ranks) if rank not in answers))

    def _connected(self) -> Store:
        # A separate connection: the main thread may block in the other one, which serves one request at a time.
        if self._own is None:
            self._own = self.store.clone()  # pyright: ignore[reportAttributeAccessIssue] (the stub lacks it)
        return self._own  # pyright: ignore[reportReturnType]

    def _key(self, rank: int) -> str:
        return f"{_PREFIX}/{rank} waits"


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """The result of `work`; None if it fails or takes longer: a store may be on a host that has stopped."""
    try:
        return in_background(work, "watchdog-roll-call").result(seconds)
    except Exception:
        return None
