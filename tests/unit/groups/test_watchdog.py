"""The stopwatch and the watchdog."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.watchdog import Stopwatch, Watchdog, clock_of


def test_the_stopwatch_keeps_laps_and_starts_again() -> None:
    watch = Stopwatch(Platform(CPU, "gloo"))
    for _ in range(2):
        with watch.lap("boundary"):
            time.sleep(0.02)
    with watch.lap("text", "text.0.F0"):
        pass
    laps = watch.read()
    assert len(laps["boundary"]) == 2 and min(laps["boundary"]) >= 0.02
    assert len(laps["text"]) == 1 and 0 <= laps["text"][0] < 0.02 and laps.keys() == {"boundary", "text"}
    assert watch.read() == {}


def test_laps_of_a_step_are_read_after_the_next_step_has_begun() -> None:
    watch = Stopwatch(Platform(CPU, "gloo"))
    with watch.lap("text"):
        pass
    first = watch.take()
    with watch.lap("vision"):
        pass
    assert first().keys() == {"text"} and watch.read().keys() == {"vision"} and watch.take()() == {}


def test_the_stopwatch_counts_a_part_that_fails() -> None:
    watch = Stopwatch(Platform(CPU, "gloo"))
    with pytest.raises(ValueError, match="failed"), watch.lap("vision"):
        raise ValueError("failed")
    assert "vision" in watch.read()


STUCK = """
import time
from megatron_hetero.groups.watchdog import Watchdog
watchdog = Watchdog(0.4, rank=3)
for seconds in (0.2, 0.2, 0.2, 60):
    with watchdog.doing(lambda: f"an action of {seconds} s"):
        time.sleep(seconds)
"""


def test_the_watchdog_ends_a_process_that_is_stuck_and_says_where() -> None:
    expected = "rank 3: found an action of 60 s unfinished after "
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr[: len(expected)]) == (70, expected)


class Device:
    """A device that comes to its marks when the test says so."""

    def __init__(self) -> None:
        self.marks: list[Device.Mark] = []

    class Mark:
        def __init__(self) -> None:
            self.ended = self.reported = False

        def __call__(self) -> bool:
            assert not self.reported, "asked again"
            self.reported = self.ended
            return self.ended

    def mark(self) -> Device.Mark:
        self.marks.append(Device.Mark())
        return self.marks[-1]


def issue(watchdog: Watchdog, *names: str) -> None:
    for name in names:
        with watchdog.doing(lambda name=name: name):
            pass


def oldest(watchdog: Watchdog) -> str | None:
    found = watchdog.oldest()
    return None if found is None else found[0]()


def soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20.0
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return met


def test_what_the_device_has_not_ended_is_older_than_what_the_host_does() -> None:
    device = Device()
    watchdog = Watchdog(1000.0, rank=0, clock=device.mark)
    assert oldest(watchdog) is None
    issue(watchdog, "a", "b", "c")
    with watchdog.doing(lambda: "d"):
        assert oldest(watchdog) == "a"
        device.marks[1].ended = True  # It cannot be: the device works in order. Nothing is concluded from it.
        time.sleep(0.5)
        assert oldest(watchdog) == "a"
        device.marks[0].ended = True
        assert soon(lambda: oldest(watchdog) == "c")
        device.marks[2].ended = True
        assert soon(lambda: oldest(watchdog) == "d")
    assert len(device.marks) == 4 and oldest(watchdog) == "d"
    device.marks[3].ended = True
    assert soon(lambda: oldest(watchdog) is None)


def test_time_counts_from_the_end_of_the_action_before() -> None:
    device = Device()
    watchdog = Watchdog(1000.0, rank=0, clock=device.mark)
    before = time.monotonic()
    issue(watchdog, "a", "b")
    first = watchdog.oldest()
    assert first is not None and before <= first[1] <= time.monotonic(), "nothing before it: from when it was issued"
    time.sleep(0.3)
    ended = time.monotonic()
    device.marks[0].ended = True
    assert soon(lambda: oldest(watchdog) == "b")
    second = watchdog.oldest()
    assert second is not None and ended <= second[1] <= time.monotonic()
    device.marks[1].ended = True
    assert soon(lambda: watchdog.oldest() is None)
    begun = time.monotonic()
    issue(watchdog, "c")
    third = watchdog.oldest()
    assert third is not None and third[1] >= begun, "the device was idle: from when it was issued"


HUNG = """
import time
from megatron_hetero.groups.watchdog import Watchdog
class Mark:
    def __init__(self, end):
        self.end = end
    def __call__(self):
        return time.monotonic() >= self.end
class Device:
    # Each action takes 0.4 s on the device, the sixth for ever.
    end, marks = 0.0, 0
    def mark(self):
        self.marks += 1
        self.end = max(self.end, time.monotonic()) + (0.4 if self.marks < 6 else 60)
        return Mark(self.end)
watchdog = Watchdog(1.2, 3, Device().mark, lambda: "and more")
for action in range(20):
    with watchdog.doing(lambda: f"action {action}"):
        pass
with watchdog.doing(lambda: "the end of the step"):
    time.sleep(60)
"""


def test_the_action_that_hangs_on_the_device_is_named_and_not_the_host_s_nor_slow_ones() -> None:
    source = HUNG.replace('lambda: f"action {action}"', 'lambda action=action: f"action {action}"')
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 70
    assert done.stderr.startswith("rank 3: found action 5 unfinished after ") and done.stderr.endswith("\nand more\n")


def test_a_device_that_fails_leaves_the_rest_to_who_issues_the_next_work() -> None:
    """From then on the time of the host counts."""

    class Failing(Device):
        class Mark(Device.Mark):
            def __call__(self) -> bool:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def mark(self) -> Device.Mark:
            return self.Mark()

    watchdog = Watchdog(1000.0, rank=0, clock=Failing().mark)
    issue(watchdog, "a")
    time.sleep(0.5)
    issue(watchdog, "b")
    assert watchdog.oldest() is None
    with watchdog.doing(lambda: "c"):
        assert oldest(watchdog) == "c"


def test_the_clock_of_a_gpu_asks_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    event = SimpleNamespace(record=lambda: ended.append(False), query=lambda: ended[-1])
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    clock = clock_of(torch.device("cuda", 2))
    assert clock is not None and clock_of(CPU) is None
    mark = clock()
    assert not mark()
    ended.append(True)
    assert mark() and set(devices) == {torch.device("cuda", 2)}, "a thread begins on device 0"


def test_a_watchdog_of_zero_seconds_does_nothing() -> None:
    with Watchdog(0.0, rank=0).doing(lambda: "anything"):
        time.sleep(0.01)


RANKS = """
import os, signal, sys, time
import torch.distributed as dist
from megatron_hetero.groups.watchdog import Peers, Watchdog

def rank(number, ranks, port, does):
    store = dist.PrefixStore("run", dist.TCPStore("127.0.0.1", port, None, False))
    watchdog = Watchdog(TIMEOUT, number, peers=Peers(store, number, ranks))
    for what in does.split():
        if what == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "waits":
            with watchdog.waiting(lambda: "the others"):
                time.sleep(60)
        elif what == "acts":
            with watchdog.doing(lambda: "an action"):
                time.sleep(60)
        elif what == "works":
            with watchdog.working():
                time.sleep(2.5 * TIMEOUT)
        elif what == "pieces":
            for _ in range(100):
                with watchdog.working():
                    time.sleep(0.02 * TIMEOUT)
                time.sleep(0.005 * TIMEOUT)
        else:
            with watchdog.waiting(lambda: "it"):
                store.wait([what])
    store.set("done", "") if "waits" not in does else None
    os._exit(0)

def run(*does):
    # The ranks are forked before the store has a thread: a lock that it holds at that moment would stay locked.
    (reads, writes), children = os.pipe(), []
    for number, what in enumerate(does):
        child = os.fork()
        if child == 0:
            rank(number, len(does), int(os.read(reads, 5)), what)
        children.append(child)
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(writes, b"%5d" % server.port * len(does))
    ended = [child for child, what in zip(children, does) if "stops" not in what]
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ended), flush=True)
    for child in set(children) - set(ended):
        os.kill(child, signal.SIGKILL)
    os._exit(0)

runs = []
for number, does in enumerate(ALL):
    runs.append(os.fork())
    if runs[-1] == 0:
        for stream, name in ((1, "status"), (2, "said")):
            os.dup2(os.open(f"{sys.argv[1]}/{name}-{number}", os.O_WRONLY | os.O_CREAT), stream)
        run(*does)
for child in runs:
    os.waitpid(child, 0)
"""
SCENES = {
    "one is stopped": ("waits", "stops", "acts", "waits"),
    "all wait": ("waits", "waits"),
    "one works": ("done", "works"),
    "one works in pieces": ("done", "pieces"),
}
"""What the ranks of several runs do."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], str]]:
    """Exit status of the ranks of each run, but for those that stop, and what they say."""
    folder = tmp_path_factory.mktemp("scenes")
    source = RANKS.replace("TIMEOUT", "1.5").replace("ALL", str(list(SCENES.values())))
    subprocess.run([sys.executable, "-W", "ignore", "-c", source, str(folder)], check=True, timeout=90)
    found = [[(folder / f"{name}-{i}").read_text() for name in ("status", "said")] for i in range(len(SCENES))]
    return {name: (list(map(int, status.split())), said) for name, (status, said) in zip(SCENES, found, strict=True)}


def test_one_rank_speaks_for_all_and_names_the_one_that_is_stopped(scenes: dict[str, tuple[list[int], str]]) -> None:
    status, said = scenes["one is stopped"]
    assert status == [70, 70, 70] and said.count("found") == 1
    assert re.match(r"rank [023]: found (the others|an action) unfinished after [12] s, expected it within", said)
    assert "because rank 1 did not report to wait too, and may be stopped" in said
    assert re.search(r"\n  ranks 0,3: the others, at <string>:\d+\n  rank 2: an action, at <string>:\d+\n", said)


def test_ranks_that_all_wait_say_so(scenes: dict[str, tuple[list[int], str]]) -> None:
    status, said = scenes["all wait"]
    assert status == [70, 70] and said.count("found") == 1 and "because all ranks wait for each other" in said


@pytest.mark.parametrize("scene", ["one works", "one works in pieces"])
def test_who_waits_for_a_rank_that_works_is_patient(scene: str, scenes: dict[str, tuple[list[int], str]]) -> None:
    assert scenes[scene] == ([0, 0], "")


def test_nothing_is_watched_once_nobody_refers_to_it() -> None:
    """A runner that is let go takes its threads with it."""

    def threads() -> list[str]:
        return sorted(each.name for each in set(threading.enumerate()) - before)

    before = set(threading.enumerate())
    watchdog = Watchdog(0.4, rank=0, clock=Device().mark)
    assert threads() == ["schedule-device-clock", "schedule-watchdog"]
    del watchdog
    assert soon(lambda: not threads())
