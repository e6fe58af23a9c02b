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

    def end(self, thread: int) -> None:
        """Lift the limit of `thread`, and retract an exception that is still pending."""
        with self._lock:
            del self._ends[thread]
            _raise(thread, None)

    def _look(self) -> None:
        while True:
            self._used.wait()
            time.sleep(_LOOKS_S)
            with self._lock:
                late = [thread for thread, end in self._ends.items() if time.monotonic() > end]
                for thread in late:
                    self._ends[thread] = float("inf")
                    _raise(thread, TimeoutError)
                if not self._ends:
                    self._used.clear()


def _raise(thread: int, kind: type[Exception] | None) -> None:
    what = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


@cache
def _limits() -> _Limits:
    return _Limits()
