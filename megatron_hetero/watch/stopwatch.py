"""Times the parts of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from megatron_hetero.distributed.platform import Platform


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
