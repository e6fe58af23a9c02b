"""The phases of a measured step: how long each takes on the device and on the host, and what in it stands in for
collectives.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch

from benchmarks.measuring.actions import parsed
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.watchdog import Stopwatch

T = TypeVar("T")
BETWEEN = "between phases"
STAND_IN = "stand-ins in "
"""What the name of a lap of stand-ins begins with; the phase follows."""
MARK = "mark of a phase"


class Phases(Stopwatch):
    """The program's stopwatch, which tells forward from backward, and times stand-ins for collectives by phase.

    Attributes:
        host: seconds of the host by phase, since they were cleared. A host that is far ahead waits for the device.
        apart: whether the device finishes all work before each phase, so that no phase of the host waits in it, except
            for the place of its 1025th kernel in the device's queue.
        marks: the phase after each mark that was issued to the device; None to issue none.
    """

    def __init__(self, platform: Platform):
        super().__init__(platform)
        self.host, self.apart = defaultdict[str, float](float), False
        self.marks: list[str] | None = None
        self._phase = BETWEEN

    @contextlib.contextmanager
    def lap(self, name: str, label: str = "") -> Iterator[None]:
        """Measure the context as a phase. Phases do not contain each other."""
        if self.apart:
            self._platform.synchronize()
        phase = _phase(name, label)
        self._enter(phase)
        start = time.perf_counter()
        try:
            with super().lap(phase, label):
                yield
        finally:
            self.host[phase] += time.perf_counter() - start
            self._enter(BETWEEN)

    def stand_in(self) -> contextlib.AbstractContextManager[None]:
        """Measure the context as a stand-in for a collective in the current phase."""
        return super().lap(STAND_IN + self._phase, STAND_IN)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        if self.marks is None:
            return
        self.marks.append(phase)
        if self._platform.is_cuda:
            torch.cuda._sleep(1)  # Its kernel is `MARKS`.
        else:
            with torch.profiler.record_function(MARK):
                pass


MARKS = ("spin_kernel", MARK)
"""Parts of names of what marks the begin of a phase: on the device, a kernel that nothing else uses; on a CPU, a range.
"""


def split(laps: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """What there is of phases, and of stand-ins by the phase in which they were."""
    stand_ins = {name.removeprefix(STAND_IN): value for name, value in laps.items() if name.startswith(STAND_IN)}
    return {name: value for name, value in laps.items() if not name.startswith(STAND_IN)}, stand_ins


def _phase(name: str, label: str) -> str:
    action = parsed(label) if label else None
    if action is None or action.op != "run":
        return name
    return f"{name} {'backward' if action.kind == 'B' else 'forward'}"
