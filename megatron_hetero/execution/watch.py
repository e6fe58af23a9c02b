"""Watches a run: how long the parts of a step take, and that no rank waits for others for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_hetero.distributed.launch import leave
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.environment.cuda import write_trace
from megatron_hetero.execution.device_clock import DeviceClock, Mark, clock_of
from megatron_hetero.execution.peers import Peers, RollCall, within
from megatron_hetero.layout.grammar import format_ranks

MOST_ISSUED = 1024
"""Actions that may wait for the device; it takes no more launches at once, so that the host is rarely so far ahead."""
LEAVING_S = 30.0
"""Seconds after which a process that is given up ends, whatever it still has to say."""
_ROLL_CALL_S = 5.0
"""Seconds, at most, in which other ranks can say that they wait, too."""


class Stopwatch:
    """Seconds spent in named parts of a step: of the device's stream on a GPU (without waiting for it), of the host on
    a CPU. `keeps`: whether laps are kept, for someone who reads them; otherwise profilers alone see the parts.
    """

    def __init__(self, platform: Platform, *, keeps: bool = True):
        self._platform = platform
        self._keeps = keeps
        self._laps: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def part(self, name: str, label: str = "") -> Iterator[None]:
        """Count the time inside towards `name`. Profilers show it by `label`, or by `name` where that is left out."""
        start = self._now() if self._keeps else None
        try:
            with torch.profiler.record_function(label or name):
                yield
        finally:
            if self._keeps:
                self._laps.append((name, start, self._now()))

    def read(self) -> dict[str, list[float]]:
        """The seconds of each lap of each part since the last reading. On a GPU the device must have been waited
        for.
        """
        seconds: dict[str, list[float]] = {}
        for name, start, stop in self._laps:
            lap = start.elapsed_time(stop) / 1000 if self._platform.is_cuda else stop - start
            seconds.setdefault(name, []).append(lap)
        self._laps.clear()
        return seconds

    def _now(self) -> Any:
        if not self._platform.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Doing(NamedTuple):
    """What a rank waits for. `patient`: as long as any rank works."""

    described: Callable[[], str]
    began: float
    patient: bool = False


@dataclass(frozen=True)
class _Issued:
    """An action whose work has been issued to the device."""

    described: Callable[[], str]
    began: float
    mark: Mark


class Watchdog:
    """Ends the process where one action takes longer than `timeout_s`, and says which. 0 never does.

    A rank whose peers are gone or wait for something else would otherwise wait for as long as the process group allows,
    without a word.

    Outside of steps ranks wait for each other's files, too, which may take any time. There the clock starts again as
    long as some rank says that it works (`waiting`, `working`): a rank that is stopped does not, nor do ranks that all
    wait.

    On a device with a `clock`, an action takes until its work there has ended, counted from when that of the action
    before it had. So what is named is the first action that did not end, however far the host is ahead of it. `leaving`
    is called before the process ends and returns what else there is to say. With `peers`, the first rank that gives up
    speaks for all, and names those that do not wait.
    """

    def __init__(
        self,
        timeout_s: float,
        rank: int,
        clock: DeviceClock | None = None,
        leaving: Callable[[], str] = lambda: "",
        peers: Peers | None = None,
    ):
        self.timeout_s, self.rank = timeout_s, rank
        self._clock = clock if timeout_s > 0 else None
        self._leaving, self._peers = leaving, peers
        self._current: _Doing | None = None
        # One thread adds at the end, another takes away at the front.
        self._issued: deque[_Issued] = deque()
        self._device_idle_since = self._heard = time.monotonic()
        self._lock, self._at_work, self._work_done = threading.Lock(), 0, 0
        if timeout_s <= 0:
            return
        threading.Thread(target=self._guard, name="schedule-watchdog", daemon=True).start()
        if clock is not None:
            # Not the guard itself, which would be late where the device is slow to answer.
            threading.Thread(target=self._follow_device, name="schedule-device-clock", daemon=True).start()

    @classmethod
    def of_world(cls, timeout_s: float, platform: Platform) -> Watchdog:
        """That of a rank of the default process group."""
        rank = dist.get_rank()
        return cls(timeout_s, rank, clock_of(platform.device), partial(_traced, rank), Peers.of_world())

    @contextlib.contextmanager
    def doing(self, described: Callable[[], str]) -> Iterator[None]:
        """What this rank does inside, described when it takes too long."""
        outer, began = self._current, time.monotonic()
        self._current = _Doing(described, began)
        try:
            yield
        finally:
            self._go_back_to(outer)
        # Where the queue is full, the action counts towards the next one that finds room.
        clock = self._clock
        if clock is not None and len(self._issued) < MOST_ISSUED:
            self._issued.append(_Issued(described, began, clock.mark()))

    @contextlib.contextmanager
    def waiting(self, described: Callable[[], str]) -> Iterator[None]:
        """Inside, this rank does what it does together with others, for as long as some rank is `working`."""
        outer = self._current
        self._current = _Doing(described, time.monotonic(), patient=True)
        try:
            yield
        finally:
            self._go_back_to(outer)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Inside, this rank does by itself what may take long; other ranks may wait for it. For any thread."""
        with self._lock:
            self._at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1
                self._work_done += 1

    def oldest(self) -> tuple[Callable[[], str], float] | None:
        """The first action that has not ended, and since when nothing before it holds it up; None where all have."""
        current = self._current
        with contextlib.suppress(IndexError):
            first = self._issued[0]
            # In this order: what was first may be taken away meanwhile, after the time has been noted.
            return first.described, max(first.began, self._device_idle_since)
        if current is None:
            return None
        heard = self._heard if current.patient else current.began
        return current.described, max(current.began, self._device_idle_since, heard)

    def _go_back_to(self, outer: _Doing | None) -> None:
        # What was done inside it is something that it came on with.
        self._current = outer and outer._replace(began=time.monotonic())

    def _guard(self) -> None:
        asks = False
        while True:
            time.sleep(min(1.0, self.timeout_s / 4))
            oldest = self.oldest()
            age = time.monotonic() - oldest[1] if oldest else 0.0
            if self._peers is not None and not asks and (self._at_work or age > self.timeout_s / 8):
                # From now on, and by another thread: a store may not answer.
                threading.Thread(target=self._follow_peers, args=(self._peers,), name="peers", daemon=True).start()
                asks = True
            if oldest is not None and age > self.timeout_s:
                self._leave(*oldest)

    def _follow_peers(self, peers: Peers) -> None:
        """Tell the others that this rank works, or waits, and hear it of them, for as long as they can be asked."""
        beats, told, asked = None, 0, time.monotonic()
        with contextlib.suppress(Exception):  # The store is gone: then nobody is heard any more.
            while True:
                time.sleep(min(1.0, self.timeout_s / 16))
                now, oldest, current = time.monotonic(), self.oldest(), self._current
                if oldest is not None and now - oldest[1] > self.timeout_s / 2 and peers.given_up():
                    peers.answer()
                patient = current is not None and current.patient
                if not (patient or self._at_work) or now - asked < self.timeout_s / 8:
                    continue
                done = self._work_done
                heard = peers.beat(self._at_work > 0 or done != told)
                if beats is not None and heard != beats:
                    self._heard = now
                beats, told, asked = heard, done, now

    def _follow_device(self) -> None:
        """Take away what the device has ended, for as long as it can be asked."""
        try:
            while True:
                while self._issued and self._issued[0].mark.done():
                    self._device_idle_since = time.monotonic()
                    self._issued.popleft()
                time.sleep(min(0.2, self.timeout_s / 20))
        except RuntimeError:  # An error of the device: whoever issues the next work gets it, too.
            self._clock = None
            self._issued.clear()

    def _leave(self, described: Callable[[], str], since: float) -> None:
        waited, what, called = time.monotonic() - since, described(), self._roll_call()
        speaks = called is None or called.first
        if speaks:
            print(
                f"rank {self.rank}: found {what} unfinished after {waited:.0f} s, expected it within "
                f"schedule.timeout_s = {self.timeout_s:g}, because {_suspected(called)}. Look for the first error of "
                "another rank, or raise schedule.timeout_s",
                file=sys.stderr,
                flush=True,
            )
        # What else there is to say may ask a driver that does not answer, with the interpreter's lock held.
        faulthandler.dump_traceback_later(LEAVING_S, exit=True)
        more = self._leaving()
        if more and speaks:
            print(more, file=sys.stderr, flush=True)
        if not speaks:  # The first one ends the job when it has spoken.
            time.sleep(2 * self._roll_call_s)
        leave("", 1)

    def _roll_call(self) -> RollCall | None:
        """What is known of other ranks; None where nothing is, so that each speaks for itself."""
        if self._peers is None:
            return None
        peers = Peers(self._peers.store, self.rank, self._peers.ranks)
        return within(2 * self._roll_call_s, lambda: peers.roll_call(self._roll_call_s))

    @property
    def _roll_call_s(self) -> float:
        return min(_ROLL_CALL_S, self.timeout_s / 2)


def _suspected(called: RollCall | None) -> str:
    if called is None:
        return "a rank that it waits for is gone or does something else"
    if not called.absent:
        return "all ranks wait for each other"
    ranks = f"rank{'s' if len(called.absent) > 1 else ''} {format_ranks(called.absent)}"
    return f"{ranks} did not say to wait too, and may be stopped, gone or busy with something else"


def _traced(rank: int) -> str:
    """Where the NCCL operations of a rank that is given up can be read; empty without NCCL."""
    path = write_trace(rank)
    return "" if path is None else f"rank {rank}: wrote its last NCCL operations to {path}"
