"""Traces of chosen steps, a file per rank, for Perfetto (ui.perfetto.dev) or Chrome (chrome://tracing)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from megatron_hetero.distributed.platform import Platform
from megatron_hetero.errors import UserError, reason


class StepProfiler:
    """Traces `steps` steps starting with step `start`, and writes `trace-rankN.json` to `folder` after the last one.

    Ranges are named after the schedule's actions, such as ``text.0.F3``. A `start` of 0 disables it. `settle` waits for
    what is in flight behind a step. `fault`: why the trace could not be written, which does not end the run.
    """

    def __init__(self, start: int, steps: int, folder: Path, rank: int, platform: Platform, settle: Callable[[], None]):
        self._first, self._last = start, start + steps - 1
        self._file = folder / f"trace-rank{rank}.json"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if platform.is_cuda else [])]
        self._profile: profile | None = None
        self._settle = settle
        self.fault: str | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number`."""
        if self._first and number == self._first:
            self._profile = profile(activities=self._activities)
            self._profile.start()
        yield
        if self._profile is not None and number == self._last:
            self._settle()  # A trace that ends while gloo's threads record what they do may end the process.
            self._profile.stop()
            self._write(self._profile)
            self._profile = None

    def _write(self, trace: profile) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_bytes(b"")  # The exporter itself reports no errors.
            trace.export_chrome_trace(str(self._file))
        except OSError as error:
            wrong = UserError.at(
                f"train.profile: {self._file}",
                problem=f"cannot be written ({reason(error)})",
                fix="free space or grant access, or choose another folder with --log.dir DIR",
            )
            self.fault = str(wrong)
            print(f"warning: {wrong}", file=sys.stderr, flush=True)
