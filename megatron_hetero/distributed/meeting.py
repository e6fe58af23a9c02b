"""How the hosts of a run, and then its ranks, find each other: in a store that the first host serves.

Each enters its number; the first waits for all of them and says so. Whoever waits reports for whom, and gives up after
a time-out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from megatron_hetero.environment.ranks import (
    has_agent_store,
    local_rank,
    meeting_address,
    named_place,
    rank,
    require_meeting_place,
    resolves,
    world_size,
)
from megatron_hetero.errors import UserError
from megatron_hetero.layout.grammar import format_ranks

T = TypeVar("T")
MOST_SILENT_S = 15.0
"""Longest silent wait for others."""
AGENT_S = 60.0
"""Longest wait for torchrun's store, which exists before the ranks do."""
_SLOWEST_POLL_S = 0.25
_STORE_S = 1800.0


class Patience:
    """Waits for others: reports who is missing, at growing intervals, and gives up after `timeout_s`."""

    def __init__(self, timeout_s: float, *, reports: bool):
        self._start = time.monotonic()
        self._timeout_s, self._reports = timeout_s, reports
        self._next_word_s = min(MOST_SILENT_S, timeout_s / 4)
        self._poll_s = 0.01

    def wait(self, missing: Callable[[], str]) -> None:
        """Wait a little for what `missing` names. Raises `UserError` after the time-out."""
        waited = time.monotonic() - self._start
        if waited > self._timeout_s:
            raise UserError.at(
                "start of the run",
                found=f"no {missing()} after {waited:.0f} s",
                expected="all hosts and ranks to come",
                because="training begins with all of them",
                fix="check the output of the missing ones, and whether the network lets them through",
            )
        if self._reports and waited > self._next_word_s:
            self._next_word_s = 2 * waited
            print(f"waiting for {missing()} since {waited:.0f} s", file=sys.stderr, flush=True)
        time.sleep(self._poll_s)
        self._poll_s = min(_SLOWEST_POLL_S, 1.5 * self._poll_s)


def meet(timeout_s: float) -> dist.Store:
    """The store of the ranks, once all have come. Raises `UserError` if one does not within `timeout_s`, or if the
    environment does not say where to meet.
    """
    require_meeting_place()
    address, port = meeting_address()
    where = f"MASTER_ADDR and MASTER_PORT, {address}:{port}"
    who, patience_s = ("torchrun", min(timeout_s, AGENT_S)) if has_agent_store() else ("rank 0", timeout_s)
    # One rank of each host reports.
    place = Place(address, port, where, who, patience_s, reports=local_rank() == 0 or rank() == 1)
    # As torch does: plain torchrun keeps its store if it starts the ranks again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", place.connect(serves=rank() == 0 and not has_agent_store()))
    gather(store, "rank", rank(), world_size(), timeout_s)
    return store


def gather(store: dist.Store, what: str, number: int, size: int, timeout_s: float) -> None:
    """Wait until all `size` hosts or ranks have called this. Raises `UserError` naming those that have not."""
    room = dist.PrefixStore("meeting", store)
    room.set(f"{what} {number}", "here")
    if number == 0:
        missing, patience = set(range(1, size)), Patience(timeout_s, reports=True)
        while missing := {other for other in missing if not room.check([f"{what} {other}"])}:
            patience.wait(lambda: _named(what, missing))
        room.set("all", "here")
    patience = Patience(timeout_s + 5.0, reports=False)  # Number 0 reports first.
    while not room.check(["all"]):
        patience.wait(lambda: f"confirmation from {what} 0 that all have joined")


def _named(what: str, numbers: Collection[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {format_ranks(sorted(numbers))}"


@dataclass(frozen=True)
class Place:
    """Address of a store. `where`: the settings that name it; `who` serves it; `reports`: whether to report waiting."""

    address: str
    port: int
    where: str
    who: str
    timeout_s: float
    reports: bool = True

    def connect(self, *, serves: bool) -> dist.TCPStore:
        """The store there; `serves`: of this process. Raises `UserError`."""
        there = partial(resolves, self.address) if serves else self.listens
        patience = Patience(self.timeout_s, reports=self.reports or serves)
        while not there():
            patience.wait(lambda: f"{self.who} at {named_place(self.address, self.port)}")
        # On a thread: torch asks whatever listens there whether it is a store, and another service may never answer.
        connected = in_background(lambda: self._store(serves), "connects to the store")
        patience = Patience(self.timeout_s, reports=True)
        while not connected.done():
            patience.wait(lambda: f"TCPStore at {self.address}:{self.port}, where another service may listen,")
        try:
            return connected.result()
        except (RuntimeError, ValueError) as error:
            raise UserError.at(
                self.where,
                found=str(error).splitlines()[0],
                expected="to open a port there" if serves else "a store there",
                because="the run meets in it",
                fix="choose another port" if "EADDRINUSE" in str(error) else "correct them, or choose another port",
            ) from None

    def listens(self) -> bool:
        """Whether anybody listens there."""
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=5.0):
            return True
        return False

    def _store(self, serves: bool) -> dist.TCPStore:
        timeout = timedelta(seconds=_STORE_S)
        return dist.TCPStore(self.address, self.port, None, serves, timeout, wait_for_workers=False, multi_tenant=True)


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """The result of `work`, computed on a thread that the process does not wait for at exit."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # Whoever asks for the result gets it.
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
