"""How long work takes on the device when the host is ahead of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.watchdog import Stopwatch

AHEAD = 20_000_000
"""Cycles, about 11 ms, for which the device sleeps while the host issues what is timed."""
NO_GPU = "needs a GPU"


def medians_ms(works: Mapping[str, Callable[[], object]], platform: Platform, rounds: int = 7) -> dict[str, float]:
    """Median milliseconds of each work, done in turn, after two rounds that do not count."""
    watch = Stopwatch(platform)
    for turn in range(rounds + 2):
        if turn == 2:
            platform.synchronize()
            watch.read()
            if platform.is_cuda:
                torch.cuda._sleep(AHEAD)
        for name, work in works.items():
            with watch.lap(name):
                work()
    platform.synchronize()
    return {name: 1e3 * median(laps) for name, laps in watch.read().items()}


def wall_ms(work: Callable[[], object], platform: Platform) -> float:
    """Milliseconds from the host's first call to the device's last kernel, once."""
    platform.synchronize()
    start = time.perf_counter()
    work()
    platform.synchronize()
    return 1e3 * (time.perf_counter() - start)
