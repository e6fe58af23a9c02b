"""Reports that ranks exchange through a store: that they work, wait, have left or have failed."""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_hetero.layout.grammar import format_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

UNWATCHED = "nothing that is watched"
"""Answer of a rank that is not in a watched action."""
PAUSE_S = 2.0
"""Maximum seconds between polls of a rank that waits. Ranks have three times as long to answer a roll call."""
_PREFIX = "watchdog"
_LEFT = "left"
_MAX_LINES = 32


class Peers:
    """The ranks of a process group, with which this rank exchanges reports through a store."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._shared, self._rank, self._ranks = store, rank, ranks
        self._work: int | None = None

    @classmethod
    def of_world(cls) -> Peers | None:
        """Return the ranks of the default process group, or None if it has one rank."""
        if dist.get_world_size() == 1:
            return None
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())

    @cached_property
    def _store(self) -> Any:
        # A separate connection: the main thread may block in the other one, which serves one request at a time.
        return self._shared.clone()  # pyright: ignore[reportAttributeAccessIssue] (the stub lacks it)

    def any_works(self, works: bool) -> bool:
        """Report whether this rank works. Returns whether any rank has reported work since the previous call."""
        before, self._work = self._work, self._store.add(f"{_PREFIX}/work", int(works))
        return before is not None and before != self._work

    def given_up(self) -> bool:
        """Return whether any rank has given up."""
        return self._store.add(f"{_PREFIX}/given up", 0) > 0

    def answer(self, doing: str) -> None:
        """Report the action in which this rank waits."""
        key = f"{_PREFIX}/{self._rank} waits"
        if not (doing.startswith(UNWATCHED) and self._store.check([key])):  # Another watchdog may have reported more.
            self._store.set(key, doing)

    def fail(self, how: str) -> None:
        """Report that this rank ends with an error, which `how` describes."""
        self._store.set(f"{_PREFIX}/{self._rank} left", f"{_LEFT}{how}")
        self._store.set(f"{_PREFIX}/failed", "")

    def leave(self, how: str, timeout_s: float) -> None:
        """Report that this rank has finished, and wait until all ranks have. Raises `ConnectionError` if another rank
        fails or does not finish within `timeout_s`.
        """
        self._store.set(f"{_PREFIX}/{self._rank} left", f"{_LEFT}{how}")
        if self._store.add(f"{_PREFIX}/left", 1) == self._ranks:
            self._store.set(f"{_PREFIX}/all left", "")
        began, waited = time.monotonic(), 0.0
        while not self._store.check([f"{_PREFIX}/all left"]):
            if self.given_up() or self._store.check([f"{_PREFIX}/failed"]):
                raise ConnectionError("Connection closed by peer: it failed before the end")
            if waited > timeout_s:
                who = suspected(self.roll_call(3 * PAUSE_S, "the end") or {})
                raise ConnectionError(f"Connection closed by peer: no end after {waited:.0f} s, because {who}")
            time.sleep(min(PAUSE_S / 2, 0.01 + waited / 10))
            waited = time.monotonic() - began

    def is_first(self, error: str, patience_s: float) -> bool:
        """Wait up to `patience_s` for another rank to report an error. Returns whether this rank is the first."""
        end, key = time.monotonic() + patience_s, f"{_PREFIX}/reported {zlib.crc32(error.encode())}"
        while time.monotonic() < end and not self._store.check([key]):
            time.sleep(min(0.2, patience_s))
        return self._store.add(key, 1) == 1

    def roll_call(self, seconds: float, doing: str) -> dict[int, str | None] | None:
        """Report that this rank gives up `doing`, and wait up to `seconds` for all ranks. Returns the action in which
        each rank waits (None: no answer), or None if another rank has given up before and reports for all.
        """
        self.answer(doing)
        if self._store.add(f"{_PREFIX}/given up", 1) > 1:
            return None
        keys, end = [f"{_PREFIX}/{rank} waits" for rank in range(self._ranks)], time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(min(0.2, seconds / 10))
        return {rank: self._answer_of(rank) for rank in range(self._ranks)}

    def _answer_of(self, rank: int) -> str | None:
        keys = f"{_PREFIX}/{rank} left", f"{_PREFIX}/{rank} waits"
        return next((self._store.get(key).decode() for key in keys if self._store.check([key])), None)


def suspected(answers: Mapping[int, str | None]) -> str:
    """Describe which ranks probably make others wait, according to the answers to a roll call."""
    if not answers:
        return "a rank that it waits for is gone or does something else"
    if left := [rank for rank, doing in answers.items() if (doing or "").startswith(_LEFT)]:
        return f"{_named(left)} {_LEFT}"
    if absent := [rank for rank, doing in answers.items() if doing is None]:
        return f"{_named(absent)} did not report to wait too, and may be stopped, gone or busy"
    if elsewhere := [rank for rank, doing in answers.items() if (doing or "").startswith(UNWATCHED)]:
        return f"{_named(elsewhere)} did not come"
    return "all ranks wait for each other, or are slower than that"


def listed(answers: Mapping[int, str | None]) -> str:
    """Format one line for each action in which ranks are waiting, given the answers to a roll call."""
    ranks: dict[str, list[int]] = {}
    for rank, doing in answers.items():
        if doing is not None:
            ranks.setdefault(doing, []).append(rank)
    lines = [f"\n  {_named(who)}: {doing}" for doing, who in ranks.items()]
    return "".join(lines[:_MAX_LINES]) + ("\n  ..." if len(lines) > _MAX_LINES else "")


def _named(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
