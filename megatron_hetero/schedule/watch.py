"""Watches a step: how long its parts take, and that none of its actions takes for ever."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_hetero.platform import Platform


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


class Watchdog:
    """Ends the process where one action takes longer than `timeout_s`, and says which. 0 never does.

    A rank whose peers are gone or wait for something else would otherwise wait for as long as the process group allows,
    without a word.
    """

    def __init__(self, timeout_s: float, rank: int):
        self.timeout_s = timeout_s
        self.rank = rank
        self._current: tuple[Callable[[], str], float] | None = None
        if timeout_s > 0:
            threading.Thread(target=self._guard, name="schedule-watchdog", daemon=True).start()

    @contextlib.contextmanager
    def doing(self, described: Callable[[], str]) -> Iterator[None]:
        """What this rank does inside, described when it takes too long."""
        self._current = described, time.monotonic()
        try:
            yield
        finally:
            self._current = None

    def _guard(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout_s / 4))
            current = self._current
            if current is not None and time.monotonic() - current[1] > self.timeout_s:
                self._leave(*current)

    def _leave(self, described: Callable[[], str], since: float) -> None:
        print(
            f"rank {self.rank}: found {described()} unfinished after {time.monotonic() - since:.0f} s, expected it "
            f"within schedule.timeout_s = {self.timeout_s:g}, because a rank that it waits for is gone or does "
            "something else. Look for the first error of another rank, or raise schedule.timeout_s",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
