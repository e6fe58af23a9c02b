"""A time limit for code from a user's file."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_LOOKS_S = 0.05
"""Polling interval."""
_OVER = float("inf")
"""In place of the end of a time that is over."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Inside, `TimeoutError` is raised once the time is over. Works in any thread, between Python instructions: a call
    into C finishes first. Overhead: microseconds.
    """
    limits, me = _limits(), threading.get_ident()
    limits.begin(me, time.monotonic() + seconds)
    try:
        yield
    finally:
        try:
            if limits.end(me):
                _take_pending()
        except TimeoutError:  # It came amid this.
            limits.end(me)


class _Limits:
    """Enforces the limits from one thread per process, which is cheaper than one per use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        self._used, self._thread = threading.Event(), threading.Thread()

    def begin(self, thread: int, end: float) -> None:
        """Raise `TimeoutError` in `thread` after the time `end`."""
        with self._lock:
            self._ends[thread] = end
            if not self._thread.is_alive():  # The first use, or the first one after a fork.
                self._thread = threading.Thread(target=self._look, name="time limits", daemon=True)
                self._thread.start()
        self._used.set()

    def end(self, thread: int) -> bool:
        """Lift the limit of `thread`. Returns whether its time was over: an exception may still be pending."""
        with self._lock:
            return self._ends.pop(thread, _OVER) == _OVER

    def _look(self) -> None:
        while True:
            self._used.wait()
            time.sleep(_LOOKS_S)
            with self._lock:
                late = [thread for thread, end in self._ends.items() if time.monotonic() > end]
                for thread in late:
                    self._ends[thread] = _OVER
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))
                if not self._ends:
                    self._used.clear()


def _take_pending() -> None:
    """Let an exception come that is still pending: it does within a few instructions.

    Not with `PyThreadState_SetAsyncExc(thread, NULL)`: after that Python 3.11 looks for an exception at every call, and
    forever at the first one that a debugger or a coverage tool traces.
    """
    for _ in range(1000):
        pass


@cache
def _limits() -> _Limits:
    return _Limits()
