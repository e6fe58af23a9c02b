"""Watches a step: how long its parts take, and that none of its actions takes for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_hetero.platform import Platform
from megatron_hetero.schedule.device_clock import DeviceClock, Mark

MOST_ISSUED = 1024
"""Actions that may wait for the device; it takes no more launches at once, so that the host is rarely so far ahead."""
LEAVING_S = 30.0
"""Seconds after which a process that is given up ends, whatever it still has to say."""


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

    On a device with a `clock`, an action takes until its work there has ended, counted from when that of the action
    before it had. So what is named is the first action that did not end, however far the host is ahead of it. `leaving`
    is called before the process ends and returns what else there is to say.
    """

    def __init__(
        self,
        timeout_s: float,
        rank: int,
        clock: DeviceClock | None = None,
        leaving: Callable[[], str] = lambda: "",
    ):
        self.timeout_s, self.rank = timeout_s, rank
        self._clock = clock if timeout_s > 0 else None
        self._leaving = leaving
        self._current: tuple[Callable[[], str], float] | None = None
        # One thread adds at the end, another takes away at the front.
        self._issued: deque[_Issued] = deque()
        self._device_idle_since = time.monotonic()
        if timeout_s <= 0:
            return
        threading.Thread(target=self._guard, name="schedule-watchdog", daemon=True).start()
        if clock is not None:
            # Not the guard itself, which would be late where the device is slow to answer.
            threading.Thread(target=self._follow_device, name="schedule-device-clock", daemon=True).start()

    @contextlib.contextmanager
    def doing(self, described: Callable[[], str]) -> Iterator[None]:
        """What this rank does inside, described when it takes too long."""
        began = time.monotonic()
        self._current = described, began
        try:
            yield
        finally:
            self._current = None
        # Where the queue is full, the action counts towards the next one that finds room.
        clock = self._clock
        if clock is not None and len(self._issued) < MOST_ISSUED:
            self._issued.append(_Issued(described, began, clock.mark()))

    def oldest(self) -> tuple[Callable[[], str], float] | None:
        """The first action that has not ended, and since when nothing before it holds it up; None where all have."""
        current = self._current
        with contextlib.suppress(IndexError):
            first = self._issued[0]
            # In this order: what was first may be taken away meanwhile, after the time has been noted.
            return first.described, max(first.began, self._device_idle_since)
        return None if current is None else (current[0], max(current[1], self._device_idle_since))

    def _guard(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout_s / 4))
            oldest = self.oldest()
            if oldest is not None and time.monotonic() - oldest[1] > self.timeout_s:
                self._leave(*oldest)

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
        print(
            f"rank {self.rank}: found {described()} unfinished after {time.monotonic() - since:.0f} s, expected it "
            f"within schedule.timeout_s = {self.timeout_s:g}, because a rank that it waits for is gone or does "
            "something else. Look for the first error of another rank, or raise schedule.timeout_s",
            file=sys.stderr,
            flush=True,
        )
        # What else there is to say may ask a driver that does not answer, with the interpreter's lock held.
        faulthandler.dump_traceback_later(LEAVING_S, exit=True)
        if more := self._leaving():
            print(more, file=sys.stderr, flush=True)
        faulthandler.cancel_dump_traceback_later()
        os._exit(1)
