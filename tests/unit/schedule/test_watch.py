"""What watches a step: the stopwatch and the watchdog."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megatron_hetero.platform import CPU, Platform
from megatron_hetero.schedule.watch import Stopwatch, Watchdog


def test_the_stopwatch_keeps_laps_and_starts_again() -> None:
    watch = Stopwatch(Platform(CPU, "gloo"))
    for _ in range(2):
        with watch.part("boundary"):
            time.sleep(0.02)
    with watch.part("text", "text.0.F0"):
        pass
    laps = watch.read()
    assert len(laps["boundary"]) == 2 and min(laps["boundary"]) >= 0.02
    assert len(laps["text"]) == 1 and 0 <= laps["text"][0] < 0.02 and laps.keys() == {"boundary", "text"}
    assert watch.read() == {}


def test_the_stopwatch_counts_a_part_that_fails() -> None:
    watch = Stopwatch(Platform(CPU, "gloo"))
    with pytest.raises(ValueError), watch.part("vision"):
        raise ValueError
    assert "vision" in watch.read()


STUCK = """
import time
from megatron_hetero.schedule.watch import Watchdog
watchdog = Watchdog(0.4, rank=3)
for seconds in (0.2, 0.2, 0.2, 60):
    with watchdog.doing(lambda: f"an action of {seconds} s"):
        time.sleep(seconds)
"""


def test_the_watchdog_ends_a_process_that_is_stuck_and_says_where() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("rank 3: found an action of 60 s unfinished after ")


def test_a_watchdog_of_zero_seconds_does_nothing() -> None:
    with Watchdog(0.0, rank=0).doing(lambda: "anything"):
        time.sleep(0.01)
