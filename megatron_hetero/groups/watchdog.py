"""The stopwatch times the parts of a step; the watchdog ends a process whose rank waits for others forever, and reports
what it waits for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_hetero.base.environment import write_trace
from megatron_hetero.groups.launch import in_background, leave
from megatron_hetero.groups.platform import Platform
from megatron_hetero.layout.grammar import format_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

Mark = Callable[[], bool]
"""Whether all work that was issued to a device before the mark has ended. Does not block; called by one thread at a
time, and not again after it has returned True.
"""
Clock = Callable[[], Mark]
"""Marks the work that the calling thread has issued to a device so far."""
MAX_ISSUED = 1024
"""The most actions tracked on the device. Its launch queue holds no more, so the host is rarely further ahead."""
EXIT_TIMEOUT_S = 30.0
"""Seconds after which a process that has given up ends, even if `on_exit` has not returned."""
_PREFIX = "watchdog"
_UNWATCHED = "nothing that is watched"
_MOST_LINES = 32
_INSTALLED = f"{Path(__file__).parents[1]}{os.sep}", f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen"
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


def clock_of(device: torch.device) -> Clock | None:
    """The clock of a device: events on the current stream of a GPU, reused once completed. None for a CPU, whose work
    is synchronous.
    """
    if device.type != "cuda":
        return None
    free: deque[torch.cuda.Event] = deque()

    def has_ended(event: torch.cuda.Event) -> bool:
        # A new thread is on device 0, where a query would create a context.
        torch.cuda.set_device(device)
        ended = event.query()
        if ended:
            free.append(event)
        return ended

    def mark() -> Mark:
        event = free.pop() if free else torch.cuda.Event()
        event.record()
        return partial(has_ended, event)

    return mark


class RollCall(NamedTuple):
    """The answers when a rank gives up. `first`: whether it was the first to give up, and reports for all. `doing`: by
    rank, what those that answered wait in. `absent`: the ranks that did not answer.
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


class _Activity(NamedTuple):
    """What the rank does. `patient`: it may last while any rank works."""

    described: Callable[[], str]
    began: float
    patient: bool = False


class _Issued(NamedTuple):
    """An action whose work has been issued to the device."""

    described: Callable[[], str]
    began: float
    has_ended: Mark


@dataclass
class _Exchange:
    """State of the exchange of reports: `beats` of all ranks at the last time (`exchanged`), and how much work of this
    rank had been `reported` then.
    """

    peers: Peers
    exchanged: float
    beats: int | None = None
    reported: int = 0


class Watchdog:
    """Ends the process if one action takes longer than `timeout_s`, and names the action. 0: never.

    Otherwise a rank whose peers are gone, or wait for something else, would wait silently until the process group times
    out.

    Outside of steps, ranks also wait for each other's files, for any time. There the time-out restarts while any rank
    reports that it works (`waiting`, `working`): a stopped rank does not, nor do ranks that all wait.

    On a device with a `clock`, an action lasts until its work there has ended, counted from the end of the action
    before it. So the action named is the first that has not ended, however far ahead the host is. `on_exit` is called
    before the process ends and returns further text to print. With `peers`, the first rank that gives up reports for
    all: what each rank waits in, and which did not answer. It watches as long as it is referenced.
    """

    def __init__(
        self,
        timeout_s: float,
        rank: int,
        clock: Clock | None = None,
        on_exit: Callable[[], str] = lambda: "",
        peers: Peers | None = None,
        setting: str = "timeout_s",
    ):
        self.timeout_s, self.rank, self._setting = timeout_s, rank, setting
        self._clock = clock if timeout_s > 0 else None
        self._on_exit, self._peers = on_exit, peers
        self._current: _Activity | None = None
        # One thread appends, another pops from the front.
        self._issued: deque[_Issued] = deque()
        self._device_idle_since = self._heard = self._resumed = time.monotonic()
        self._lock, self._at_work, self._work_done = threading.Lock(), 0, 0
        self._exchanges = False
        if timeout_s <= 0:
            return
        _repeat("schedule-watchdog", self, Watchdog._guard)
        if clock is not None:
            # A thread of its own: the guard would be late if the device is slow to answer.
            _repeat("schedule-device-clock", self, Watchdog._follow_device)

    @classmethod
    def of_world(cls, timeout_s: float, platform: Platform, setting: str = "timeout_s") -> Watchdog:
        """The watchdog of this rank of the default process group. `setting`: what users call `timeout_s`."""
        rank = dist.get_rank()
        return cls(timeout_s, rank, clock_of(platform.device), partial(_traced, rank), Peers.of_world(), setting)

    @contextlib.contextmanager
    def doing(self, described: Callable[[], str]) -> Iterator[None]:
        """Watch an action. `described` returns its description if it takes too long."""
        outer, began = self._current, time.monotonic()
        self._current = _Activity(described, began)
        try:
            yield
        finally:
            self._resume(outer)
        # If the queue is full, the time of the action counts towards the next one that fits.
        clock = self._clock
        if clock is not None and len(self._issued) < MAX_ISSUED:
            self._issued.append(_Issued(described, began, clock()))

    @contextlib.contextmanager
    def waiting(self, described: Callable[[], str]) -> Iterator[None]:
        """Watch a wait for other ranks, which may last as long as any rank is `working`."""
        outer = self._current
        self._current = _Activity(described, time.monotonic(), patient=True)
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
        """The first action that has not ended, and the time since which nothing before it delays it; None if idle."""
        current = self._current
        with contextlib.suppress(IndexError):
            first = self._issued[0]
            # In this order: the other thread pops the first only after it has set the time.
            return first.described, max(first.began, self._device_idle_since)
        if current is None:
            return None
        heard = self._heard if current.patient else current.began
        return current.described, max(current.began, self._device_idle_since, heard)

    def _resume(self, outer: _Activity | None) -> None:
        # The inner activity counts as progress of the outer one.
        self._resumed = time.monotonic()
        self._current = outer and outer._replace(began=self._resumed)

    def _doing(self) -> tuple[str, float]:
        """What this rank does, and since when, in a watched action or outside of any."""
        oldest = self.oldest()
        what, since = (_UNWATCHED, self._resumed) if oldest is None else (oldest[0]().rstrip(","), oldest[1])
        return f"{what}{_place()}", since

    def _guard(self) -> float:
        """Check whether an action takes too long. Returns the seconds until the next check."""
        oldest = self.oldest()
        age = time.monotonic() - (oldest[1] if oldest else self._resumed)
        # Work that comes in short pieces may be over at each check.
        works = self._at_work or self._work_done
        if self._peers is not None and not self._exchanges and (works or age > self.timeout_s / 8):
            # From now on, and in another thread: a store may not answer.
            exchange = _Exchange(self._peers, time.monotonic())
            _repeat("peers", self, partial(Watchdog._exchange_reports, exchange=exchange))
            self._exchanges = True
        if oldest is not None and age > self.timeout_s:
            self._give_up(*oldest)
        return min(1.0, self.timeout_s / 4)

    def _follow_device(self) -> float | None:
        """Pop the actions that the device has finished, as long as it can be queried."""
        try:
            while self._issued and self._issued[0].has_ended():
                self._device_idle_since = time.monotonic()
                self._issued.popleft()
        except RuntimeError:  # A device error, which is raised to the next caller, too.
            self._clock = None
            self._issued.clear()
            return None
        return min(0.2, self.timeout_s / 20)

    def _exchange_reports(self, exchange: _Exchange) -> float | None:
        """Exchange reports of work and of waits with the other ranks, as long as the store answers."""
        now, current, peers = time.monotonic(), self._current, exchange.peers
        with contextlib.suppress(Exception):  # The store is gone: no more reports.
            doing, since = self._doing()
            if now - since > self.timeout_s / 2 and peers.given_up():
                peers.answer(doing)
            patient, done = current is not None and current.patient, self._work_done
            works = self._at_work > 0 or done != exchange.reported
            if (patient or works) and now - exchange.exchanged >= self.timeout_s / 8:
                beats = peers.beat(works)
                if exchange.beats is not None and beats != exchange.beats:
                    self._heard = now
                exchange.beats, exchange.reported, exchange.exchanged = beats, done, now
            return min(1.0, self.timeout_s / 16)
        return None

    def _give_up(self, described: Callable[[], str], since: float) -> None:
        waited, what, called = time.monotonic() - since, described(), self._roll_call()
        reports = called is None or called.first
        if reports:
            print(
                f"rank {self.rank}: found {what} unfinished after {waited:.0f} s, expected it within "
                f"{self._setting} = {self.timeout_s:g}, because {_suspected(called)}. Look for the first error of "
                f"another rank, or raise {self._setting}{_listed(called)}",
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
        """The answers of the other ranks; None without any, so that each rank reports for itself."""
        if self._peers is None:
            return None
        peers = Peers(self._peers.store, self.rank, self._peers.ranks)
        doing, _ = self._doing()
        answers = in_background(lambda: peers.roll_call(self._roll_call_s, doing), "watchdog-roll-call")
        with contextlib.suppress(Exception):  # The store may be on a host that has stopped.
            return answers.result(2 * self._roll_call_s)
        return None

    @property
    def _roll_call_s(self) -> float:
        return min(_ROLL_CALL_S, self.timeout_s / 2)


def _repeat(name: str, watchdog: Watchdog, check: Callable[[Watchdog], float | None]) -> None:
    """Call `check`, which returns seconds until the next call or None to end, in a thread as long as `watchdog` exists.
    The thread keeps neither it nor what it refers to alive: an interpreter, and through that process groups.
    """
    existing = weakref.ref(watchdog)

    def run() -> None:
        pause: float | None = 0.0
        while pause is not None and (watchdog := existing()) is not None:
            pause = check(watchdog)
            del watchdog
            time.sleep(pause or 0.0)

    threading.Thread(target=run, name=name, daemon=True).start()


def _suspected(called: RollCall | None) -> str:
    if called is None:
        return "a rank that it waits for is gone or does something else"
    if called.absent:
        return f"{_named(called.absent)} did not report to wait too, and may be stopped, gone or busy"
    if elsewhere := [rank for rank, doing in called.doing.items() if doing.startswith(_UNWATCHED)]:
        return f"{_named(elsewhere)} did not come"
    return "all ranks wait for each other"


def _listed(called: RollCall | None) -> str:
    """A line for each thing that ranks wait in."""
    ranks: dict[str, list[int]] = {}
    for rank, doing in called.doing.items() if called else ():
        ranks.setdefault(doing, []).append(rank)
    lines = [f"\n  {_named(own)}: {doing}" for doing, own in ranks.items()]
    return "".join(lines[:_MOST_LINES]) + ("\n  ..." if len(lines) > _MOST_LINES else "")


def _named(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def _place() -> str:
    """The line of the user's program at which the main thread is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INSTALLED) and "site-packages" not in file:
            return f", at {Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _traced(rank: int) -> str:
    """Write the last NCCL operations of this rank to a file. Returns a note with its path; empty without NCCL."""
    path = write_trace(rank)
    return "" if path is None else f"rank {rank}: wrote its last NCCL operations to {path}"
