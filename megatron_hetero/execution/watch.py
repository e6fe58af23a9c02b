"""Times the parts of a step, and ends a process whose rank waits for others forever."""

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

MAX_ISSUED = 1024
"""The most actions tracked on the device. Its launch queue holds no more, so the host is rarely further ahead."""
EXIT_TIMEOUT_S = 30.0
"""Seconds after which a process that has given up ends, even if `on_exit` has not returned."""
_ROLL_CALL_S = 5.0
"""The most seconds in which other ranks can answer that they wait, too."""


class Stopwatch:
    """Measures the seconds of named parts of a step: of the current stream on a GPU, without synchronising, and of the
    host on a CPU. `record`: whether laps are recorded; otherwise only profilers see the parts.
    """

    def __init__(self, platform: Platform, *, record: bool = True):
        self._platform = platform
        self._record = record
        self._laps: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def part(self, name: str, label: str = "") -> Iterator[None]:
        """Add the time inside to `name`. Profilers show it as `label`, by default `name`."""
        start = self._now() if self._record else None
        try:
            with torch.profiler.record_function(label or name):
                yield
        finally:
            if self._record:
                self._laps.append((name, start, self._now()))

    def read(self) -> dict[str, list[float]]:
        """The seconds of each lap, by part, since the last call. On a GPU, synchronise first."""
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


class _Current(NamedTuple):
    """The rank's current activity. `patient`: it may last while any rank works."""

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
    """Ends the process if one action takes longer than `timeout_s`, and names the action. 0: never.

    Otherwise a rank whose peers are gone, or wait for something else, would wait silently until the process group times
    out.

    Outside of steps, ranks also wait for each other's files, for any time. There the time-out restarts while any rank
    reports that it works (`waiting`, `working`): a stopped rank does not, nor do ranks that all wait.

    On a device with a `clock`, an action lasts until its work there has ended, counted from the end of the action
    before it. So the action named is the first that has not ended, however far ahead the host is. `on_exit` is called
    before the process ends and returns further text to print. With `peers`, the first rank that gives up reports for
    all, and names those that do not wait.
    """

    def __init__(
        self,
        timeout_s: float,
        rank: int,
        clock: DeviceClock | None = None,
        on_exit: Callable[[], str] = lambda: "",
        peers: Peers | None = None,
    ):
        self.timeout_s, self.rank = timeout_s, rank
        self._clock = clock if timeout_s > 0 else None
        self._on_exit, self._peers = on_exit, peers
        self._current: _Current | None = None
        # One thread appends, another pops from the front.
        self._issued: deque[_Issued] = deque()
        self._device_idle_since = self._heard = time.monotonic()
        self._lock, self._at_work, self._work_done = threading.Lock(), 0, 0
        if timeout_s <= 0:
            return
        threading.Thread(target=self._guard, name="schedule-watchdog", daemon=True).start()
        if clock is not None:
            # A thread of its own: the guard would be late if the device is slow to answer.
            threading.Thread(target=self._follow_device, name="schedule-device-clock", daemon=True).start()

    @classmethod
    def of_world(cls, timeout_s: float, platform: Platform) -> Watchdog:
        """The watchdog of this rank of the default process group."""
        rank = dist.get_rank()
        return cls(timeout_s, rank, clock_of(platform.device), partial(_traced, rank), Peers.of_world())

    @contextlib.contextmanager
    def doing(self, described: Callable[[], str]) -> Iterator[None]:
        """Watch an action. `described` returns its description if it takes too long."""
        outer, began = self._current, time.monotonic()
        self._current = _Current(described, began)
        try:
            yield
        finally:
            self._resume(outer)
        # If the queue is full, the time of the action counts towards the next one that fits.
        clock = self._clock
        if clock is not None and len(self._issued) < MAX_ISSUED:
            self._issued.append(_Issued(described, began, clock.mark()))

    @contextlib.contextmanager
    def waiting(self, described: Callable[[], str]) -> Iterator[None]:
        """Watch a wait for other ranks, which may last as long as any rank is `working`."""
        outer = self._current
        self._current = _Current(described, time.monotonic(), patient=True)
        try:
            yield
        finally:
            self._resume(outer)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Report long work of this rank alone, for which other ranks may wait. For any thread."""
        with self._lock:
            self._at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1
                self._work_done += 1

    def oldest(self) -> tuple[Callable[[], str], float] | None:
        """The first action that has not ended, and the time since which nothing before it holds it up; None if idle."""
        current = self._current
        with contextlib.suppress(IndexError):
            first = self._issued[0]
            # In this order: the other thread pops the first only after it has set the time.
            return first.described, max(first.began, self._device_idle_since)
        if current is None:
            return None
        heard = self._heard if current.patient else current.began
        return current.described, max(current.began, self._device_idle_since, heard)

    def _resume(self, outer: _Current | None) -> None:
        # The inner activity counts as progress of the outer one.
        self._current = outer and outer._replace(began=time.monotonic())

    def _guard(self) -> None:
        asks = False
        while True:
            time.sleep(min(1.0, self.timeout_s / 4))
            oldest = self.oldest()
            age = time.monotonic() - oldest[1] if oldest else 0.0
            # Work that comes in short pieces may be over whenever this looks.
            works = self._at_work or self._work_done
            if self._peers is not None and not asks and (works or age > self.timeout_s / 8):
                # From now on, and in another thread: a store may not answer.
                threading.Thread(target=self._follow_peers, args=(self._peers,), name="peers", daemon=True).start()
                asks = True
            if oldest is not None and age > self.timeout_s:
                self._give_up(*oldest)

    def _follow_peers(self, peers: Peers) -> None:
        """Exchange reports of work and of waits with the other ranks, as long as the store answers."""
        beats, reported, asked = None, 0, time.monotonic()
        with contextlib.suppress(Exception):  # The store is gone: no more reports.
            while True:
                time.sleep(min(1.0, self.timeout_s / 16))
                now, oldest, current = time.monotonic(), self.oldest(), self._current
                if oldest is not None and now - oldest[1] > self.timeout_s / 2 and peers.given_up():
                    peers.answer()
                patient = current is not None and current.patient
                done = self._work_done
                works = self._at_work > 0 or done != reported
                if not (patient or works) or now - asked < self.timeout_s / 8:
                    continue
                heard = peers.beat(works)
                if beats is not None and heard != beats:
                    self._heard = now
                beats, reported, asked = heard, done, now

    def _follow_device(self) -> None:
        """Pop the actions that the device has finished, as long as it can be queried."""
        try:
            while True:
                while self._issued and self._issued[0].mark.done():
                    self._device_idle_since = time.monotonic()
                    self._issued.popleft()
                time.sleep(min(0.2, self.timeout_s / 20))
        except RuntimeError:  # A device error, which is raised to the next caller, too.
            self._clock = None
            self._issued.clear()

    def _give_up(self, described: Callable[[], str], since: float) -> None:
        waited, what, called = time.monotonic() - since, described(), self._roll_call()
        reports = called is None or called.first
        if reports:
            print(
                f"rank {self.rank}: found {what} unfinished after {waited:.0f} s, expected it within "
                f"schedule.timeout_s = {self.timeout_s:g}, because {_suspected(called)}. Look for the first error of "
                "another rank, or raise schedule.timeout_s",
                file=sys.stderr,
                flush=True,
            )
        # `on_exit` may block in a driver with the GIL held.
        faulthandler.dump_traceback_later(EXIT_TIMEOUT_S, exit=True)
        more = self._on_exit()
        if more and reports:
            print(more, file=sys.stderr, flush=True)
        if not reports:  # The first one ends the job after its report.
            time.sleep(2 * self._roll_call_s)
        leave("", 1)

    def _roll_call(self) -> RollCall | None:
        """The answers of the other ranks; None if there are none, so that each rank reports for itself."""
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
    """Writes the last NCCL operations of this rank to a file. Returns a note with its path; empty without NCCL."""
    path = write_trace(rank)
    return "" if path is None else f"rank {rank}: wrote its last NCCL operations to {path}"
