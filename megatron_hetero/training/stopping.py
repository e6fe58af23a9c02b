"""Signals that ask a run to stop: noted when they come, agreed on at the end of a step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""What a scheduler sends before it ends a job, and Ctrl-C."""


class StopRequest:
    """Whether this rank was asked to stop. `seen`: by which signal."""

    def __init__(self) -> None:
        self.seen: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.seen is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler. A second Ctrl-C raises `KeyboardInterrupt`, which ends the process at once."""
        if self.seen is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.seen = self.seen or signal.Signals(number)


@contextmanager
def stop_requests(wanted: bool = True) -> Iterator[StopRequest]:
    """Inside, `SIGNALS` are noted instead of ending the process. Nothing changes where that is not `wanted`."""
    request = StopRequest()
    before = {number: signal.signal(number, request.note) for number in SIGNALS} if wanted else {}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
