"""A stopwatch, which times phases of a step, and a watchdog, which ends a process that waits for other ranks for too
long and reports what it waits for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from megatron_hetero.base.environment import write_trace
from megatron_hetero.base.errors import main_place
from megatron_hetero.groups.launch import FAILED, in_background, leave
from megatron_hetero.groups.peers import PAUSE_S, UNWATCHED, Peers, listed, suspected
from megatron_hetero.groups.platform import Platform

P = ParamSpec("P")
T = TypeVar("T")
Mark = Callable[[], bool]
"""A function that returns whether all work issued to a device before the mark has ended. It does not block. One thread
at a time calls it, and not again after it has returned True.
"""
Clock = Callable[[], Mark]
"""A function that returns a mark of the work that the calling thread has issued to a device so far."""
EXIT_TIMEOUT_S = 30.0
"""Seconds after which a process that has given up is killed even if `on_exit` has not returned."""


class Stopwatch:
    """A stopwatch for named phases of a step. It times the current stream on a GPU, without synchronising, and the host
    on a CPU. `record`: whether to record laps; otherwise only profilers see the phases.
    """

    def __init__(self, platform: Platform, *, record: bool = True):
        self._platform = platform
        self._record = record
        self._laps: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def lap(self, name: str, label: str = "") -> Iterator[None]:
        """Measure the context as a lap called `name`. Profilers show the lap as `label`, by default `name`."""
        start = self._now() if self._record else None
        try:
            with torch.profiler.record_function(label or name):
                yield
        finally:
            if self._record:
                self._laps.append((name, start, self._now()))

    def read(self) -> dict[str, list[float]]:
        """Return the seconds of each lap since the last call, by name. On a GPU, synchronise first."""
        return self.take()()

    def take(self) -> Callable[[], dict[str, list[float]]]:
        """Forget the laps since the last call, and return a function that returns what `read` would have returned. On a
        GPU, wait for the end of these laps before calling the function.
        """
        laps, self._laps = self._laps, []

        def read() -> dict[str, list[float]]:
            seconds: dict[str, list[float]] = {}
            for name, start, stop in laps:
                lap = start.elapsed_time(stop) / 1000 if self._platform.is_cuda else stop - start
                seconds.setdefault(name, []).append(lap)
            return seconds

        return read

    def _now(self) -> Any:
        if not self._platform.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_of(device: torch.device) -> Clock | None:
    """Return the clock of a GPU, which records events on its current stream; None for a CPU, which is synchronous."""
    if device.type != "cuda":
        return None

    def has_ended(event: torch.cuda.Event) -> bool:
        # A new thread uses device 0, on which a query would create a context.
        torch.cuda.set_device(device)
        return event.query()

    def mark() -> Mark:
        event = torch.cuda.Event()
        event.record()
        return partial(has_ended, event)

    return mark


class _Activity(NamedTuple):
    """A watched action of at most `limit_s` seconds. `patient`: whether it may last longer while any rank works."""

    described: Callable[[], str]
    began: float
    patient: bool
    limit_s: float


class Watchdog:
    """A guard that ends the process and names the action if an action takes longer than `timeout_s` (0: no limit).
    Without it, a rank whose peers are gone or wait for something else would wait until the process group times out.

    Outside of steps, ranks also wait for each other's files, which may take any time. There the time-out restarts while
    any rank reports that it works (`waiting`, `working`). A stopped rank does not report work, nor do ranks that all
    wait.

    On a device with a `clock`, an action lasts until its work there has ended, counted from the end of the previous
    action. So the reported action is the first one that has not ended, however far ahead the host is. `on_exit` is
    called before the process ends and returns further text to print. With `peers`, the first rank that gives up reports
    for all: what each rank waits for, and which ranks did not answer. The watchdog lives as long as it is referenced.
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
        self.timeout_s, self.rank, self._setting = timeout_s or math.inf, rank, setting
        self._shortest_s, self._clock = self.timeout_s, clock
        self._on_exit, self._peers = on_exit, peers
        self._current: _Activity | None = None
        # Actions whose work has been issued to the device, as many as its queue holds. One thread appends, another
        # pops.
        self._issued: deque[tuple[_Activity, Mark]] = deque()
        self._device_idle_since = self._heard = self._resumed = time.monotonic()
        self._lock, self._at_work, self._worked = threading.Lock(), 0, -math.inf
        # Separate threads: a device or a store that is slow to answer must not delay the guard.
        _repeat("schedule-watchdog", self, Watchdog._guard)
        if clock is not None:
            _repeat("schedule-device-clock", self, Watchdog._follow_device)
        if peers is not None:
            _repeat("peers", self, Watchdog._follow_peers)

    @classmethod
    def of_world(cls, timeout_s: float, platform: Platform, setting: str = "timeout_s") -> Watchdog:
        """Return this rank's watchdog in the default process group. `setting`: the user's name for `timeout_s`."""
        rank = dist.get_rank()
        return cls(timeout_s, rank, clock_of(platform.device), partial(write_trace, rank), Peers.of_world(), setting)

    def doing(
        self, described: Callable[[], str], timeout_s: float | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Watch the context as an action. `described` returns its description if it takes too long. `timeout_s`: its
        time-out in seconds, by default the time-out of the enclosing action or the watchdog.
        """
        return self._watch(described, patient=False, timeout_s=timeout_s)

    def waiting(self, described: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """Watch the context as a wait for other ranks, which may last as long as any rank is `working`."""
        return self._watch(described, patient=True)

    @contextlib.contextmanager
    def _watch(self, described: Callable[[], str], patient: bool, timeout_s: float | None = None) -> Iterator[None]:
        outer = self._current
        limit_s = outer.limit_s if outer else self.timeout_s
        limit_s = limit_s if timeout_s is None else timeout_s or math.inf
        self._current = activity = _Activity(described, time.monotonic(), patient, limit_s)
        self._shortest_s = min(self._shortest_s, limit_s)
        try:
            yield
        finally:
            # The inner activity counts as progress of the outer one.
            self._resumed = time.monotonic()
            self._current = outer and outer._replace(began=self._resumed)
        clock = self._clock
        if clock is not None and activity.limit_s < math.inf and not patient:
            self._issued.append((activity, clock()))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Report that this rank works alone inside the context, so that others may wait longer. Thread-safe."""
        with self._lock:
            self._at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1
                self._worked = time.monotonic()

    def oldest(self) -> _Activity | None:
        """Return the first unfinished action, with a start not before the previous action's end; None if idle."""
        current = self._current
        with contextlib.suppress(IndexError):
            first, _ = self._issued[0]
            # Read the action before the time: the other thread sets the time before it pops the action.
            return first._replace(began=max(first.began, self._device_idle_since))
        if current is None:
            return None
        heard = self._heard if current.patient else current.began
        return current._replace(began=max(current.began, self._device_idle_since, heard))

    def _doing(self) -> str:
        """Describe the oldest unfinished action of this rank, and the line that its main thread executes."""
        oldest = self.oldest()
        return f"{UNWATCHED if oldest is None else oldest.described().rstrip(',')}{main_place()}"

    def _guard(self) -> float:
        """End the process if an action takes too long. Returns the seconds until the next check."""
        oldest = self.oldest()
        if oldest is not None and time.monotonic() - oldest.began > oldest.limit_s:
            self._give_up(oldest)
        return min(1.0, self._shortest_s / 4)

    def _follow_device(self) -> float | None:
        """Pop actions that the device has finished. Returns seconds to wait; None if the device cannot be queried."""
        try:
            while self._issued and self._issued[0][1]():
                self._device_idle_since = time.monotonic()
                self._issued.popleft()
        except RuntimeError:  # A device error, which the next call of the main thread raises too.
            self._clock = None
            self._issued.clear()
            return None
        return min(0.2, self._shortest_s / 20)

    def _follow_peers(self) -> float | None:
        """Answer a rank's roll call, and exchange reports of work. Returns seconds to wait; None without a store."""
        now, current, oldest, pause = time.monotonic(), self._current, self.oldest(), self._shortest_s / 16
        waits = now - (oldest.began if oldest else self._resumed) > 2 * pause
        # Short work may begin and end between two calls.
        works = self._at_work > 0 or now - self._worked < 2 * pause
        assert self._peers is not None, "this is called with peers only"
        with contextlib.suppress(Exception):  # The store is gone.
            if waits and self._peers.given_up():
                self._peers.answer(self._doing())
            patient = waits and current is not None and current.patient
            if (works or patient) and self._peers.any_works(works):
                self._heard = now
            return min(PAUSE_S, pause)
        return None

    def _give_up(self, action: _Activity) -> None:
        waited, what, answers = time.monotonic() - action.began, action.described(), self._roll_call()
        # The terminal may be gone, and `on_exit` may block in a driver with the GIL held.
        faulthandler.dump_traceback_later(EXIT_TIMEOUT_S, exit=True)
        with contextlib.suppress(OSError):
            if answers is not None:
                print(
                    f"rank {self.rank}: found {what} unfinished after {waited:.0f} s, expected it within "
                    f"{self._setting} = {action.limit_s:g}, because {suspected(answers)}. Look for the first error of "
                    f"another rank, or raise {self._setting}{listed(answers)}",
                    file=sys.stderr,
                    flush=True,
                )
        more = self._on_exit()
        if answers is None:  # The first rank that gave up ends the job after its report.
            time.sleep(2 * self._roll_call_s)
        leave(more if answers is not None else "", FAILED)

    def _roll_call(self) -> dict[int, str | None] | None:
        """Return the answers of all ranks (see `Peers.roll_call`). The result is empty without peers or a store: each
        rank then reports for itself.
        """
        if self._peers is None:
            return {}
        answers = in_background(partial(self._peers.roll_call, self._roll_call_s, self._doing()), "roll call")
        with contextlib.suppress(Exception):  # The store may be on a host that has stopped.
            return answers.result(2 * self._roll_call_s)
        return {}

    @property
    def _roll_call_s(self) -> float:
        return min(3 * PAUSE_S, self._shortest_s / 2)


def _repeat(name: str, watchdog: Watchdog, check: Callable[[Watchdog], float | None]) -> None:
    """Call `check` repeatedly in a thread, as long as `watchdog` exists. `check` returns the seconds until the next
    call, or None to end. The thread keeps neither the watchdog nor objects to which the watchdog refers alive.
    """
    existing = weakref.ref(watchdog)

    def run() -> None:
        pause: float | None = 0.0
        while pause is not None and (watchdog := existing()) is not None:
            pause = check(watchdog)
            del watchdog
            time.sleep(pause or 0.0)

    threading.Thread(target=run, name=name, daemon=True).start()


def watched(call: Callable[P, T], *, patient: bool = False) -> Callable[P, T]:
    """Decorate a function that all ranks call, so that a topology's watchdog watches it. One argument is the topology
    or has it as an attribute; `timeout_s` may be an argument, or an attribute of `self`.
    """

    @wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        given: list[Any] = [getattr(each, "topology", each) for each in (*args, *kwargs.values())]
        watchdog = next(each.watchdog for each in given if hasattr(each, "watchdog"))
        timeout_s: Any = kwargs.get("timeout_s", getattr(args[0], "timeout_s", None) if args else None)
        described = f"`{call.__qualname__}`, with all other ranks,"
        with watchdog._watch(lambda: described, patient, timeout_s):
            return call(*args, **kwargs)

    return run
