"""How the ranks of a job find each other, each time they are started.

torchrun keeps one store through all restarts, in which what the dead have left is still to be read: addresses, ids of
communicators. So the ranks of each attempt need a prefix of their own, which the environment does not give them:
torchrun counts restarts on the host whose rank failed, and only there. They agree on one in the store itself:

    rank 0                                        rank r
    attempt = attempts += 1
                                                  rank r    := name          a new one for each process
    rank r is a name: attempt of name := attempt
                                                  rank r    := in attempt
    all ranks are in: attempt is complete
                                                  continue; if a later attempt has begun, start over

A name that a dead process left is answered like any other; nobody reads it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

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

MOST_SILENT_S = 15.0
"""Longest time that a rank waits for another without a word."""
SLOWEST_POLL_S = 0.25
AGENT_S = 60.0
"""Longest time without the store of torchrun: its torchrun has ended."""
_STORE_S = 1800.0
# The store's own, whatever the prefix (c10d/ProcessGroupNCCL.hpp): left by an attempt in which NCCL timed out, they
# would have the next one's ranks believe that they did.
_LEFT_BY_NCCL = ("exception_dump", "remote_error")


class Patience:
    """Waits for other ranks: reports which are missing, at growing intervals, and gives up after `timeout_s`."""

    def __init__(self, timeout_s: float, *, reports: bool):
        self._start = time.monotonic()
        self._timeout_s, self._reports = timeout_s, reports
        self._next_word_s = min(MOST_SILENT_S, timeout_s / 4)
        self._poll_s = 0.01

    def wait(self, missing: Callable[[], str]) -> None:
        """Wait a little for what `missing` names. Raises `UserError` where that was long enough."""
        waited = time.monotonic() - self._start
        if waited > self._timeout_s:
            raise UserError.at(
                "start of the ranks",
                found=f"no {missing()} after {waited:.0f} s",
                expected=f"all {world_size()} to come",
                because="training begins with all of them",
                fix="check the output of the missing ranks, and whether the network lets them through",
            )
        if self._reports and waited > self._next_word_s:
            self._next_word_s = 2 * waited
            print(f"waiting for {missing()} since {waited:.0f} s", file=sys.stderr, flush=True)
        time.sleep(self._poll_s)
        self._poll_s = min(SLOWEST_POLL_S, 1.5 * self._poll_s)


def meet(timeout_s: float) -> dist.Store:
    """The store of this attempt, once all ranks have come. Raises `UserError` where one does not within `timeout_s`, or
    where the environment does not say where to meet.
    """
    require_meeting_place()
    store = _connect(timeout_s)
    place = dist.PrefixStore("meeting", store)
    if rank() == 0:
        attempt = gather(place, world_size(), Patience(timeout_s, reports=True))
        for key in _LEFT_BY_NCCL:
            store.delete_key(key)
        place.set(_complete(attempt), "1")
    else:
        # Rank 0 speaks first.
        attempt = join(place, rank(), Patience(timeout_s + 5.0, reports=False))
    return dist.PrefixStore(f"attempt {attempt}", store)


def gather(place: dist.Store, world_size: int, patience: Patience) -> int:
    """On rank 0: the number of this attempt, once all others have joined it."""
    attempt = place.add("attempts", 1)
    missing, answered = set(range(1, world_size)), set[str]()
    while missing:
        for other in sorted(missing):
            if not place.check([_seat(other)]):
                continue
            said = place.get(_seat(other)).decode()
            if said == _joined(attempt):
                missing.discard(other)
            elif said not in answered:
                answered.add(said)
                place.set(_answer(said), str(attempt))
        if missing:
            patience.wait(lambda: _named(missing))
    return attempt


def join(place: dist.Store, rank: int, patience: Patience) -> int:
    """On another rank: the number of the attempt that rank 0 gathers, once all have joined it."""
    while True:
        name = secrets.token_hex(8)
        place.set(_seat(rank), name)
        while not place.check([_answer(name)]):
            patience.wait(lambda: "answer of rank 0")
        attempt = int(place.get(_answer(name)))
        place.set(_seat(rank), _joined(attempt))
        while place.add("attempts", 0) == attempt:
            if place.check([_complete(attempt)]):
                return attempt
            patience.wait(lambda: "word from rank 0 that all ranks have come")


def _seat(rank: int) -> str:
    return f"rank {rank}"


def _answer(name: str) -> str:
    return f"attempt of {name}"


def _joined(attempt: int) -> str:
    return f"in attempt {attempt}"


def _complete(attempt: int) -> str:
    return f"attempt {attempt} is complete"


def _named(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(sorted(ranks))}"


def _connect(timeout_s: float) -> dist.TCPStore:
    """The store where the environment says: torchrun's, or without one that of rank 0, which it makes here."""
    address, port = meeting_address()
    if has_agent_store() or rank() > 0:
        # The store of torchrun is there before the ranks are. One rank of each host says that they wait.
        patience_s, who = (min(timeout_s, AGENT_S), "torchrun") if has_agent_store() else (timeout_s, "rank 0")
        patience = Patience(patience_s, reports=local_rank() == 0 or rank() == 1)
        while not listens(address, port):
            patience.wait(lambda: f"{who} at {named_place(address, port)}")
    else:  # It listens itself, and connects by the name that the others use.
        patience = Patience(timeout_s, reports=True)
        while not resolves(address):
            patience.wait(lambda: f"rank 0, itself, at {named_place(address, port)}")
    # On a thread: whatever listens there is asked whether it is a store, and another service may never answer.
    connected = _in_background(
        partial(
            dist.TCPStore,
            address,
            port,
            world_size(),
            rank() == 0 and not has_agent_store(),
            timeout=timedelta(seconds=_STORE_S),
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
    )
    patience = Patience(timeout_s, reports=True)
    while not connected.done():
        patience.wait(lambda: f"answer of a store at {address}:{port}, where something else may listen")
    try:
        return connected.result()
    except (RuntimeError, ValueError) as error:
        raise UserError.at(
            f"MASTER_ADDR and MASTER_PORT, {address}:{port}",
            found=str(error).splitlines()[0],
            expected="a store there" if has_agent_store() else "to open a port there",
            because="the ranks meet in it",
            fix="correct them, or choose another port",
        ) from None


def _in_background(make: Callable[[], dist.TCPStore]) -> Future[dist.TCPStore]:
    """What `make` returns or raises, of a thread that the process does not wait for when it ends."""
    future: Future[dist.TCPStore] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="connects to the store", daemon=True).start()
    return future


def listens(address: str, port: int) -> bool:
    """Whether anybody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5.0):
        return True
    return False
