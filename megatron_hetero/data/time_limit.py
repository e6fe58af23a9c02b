"""A limit on the time of code that a user's file brings along."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Inside, `TimeoutError` is raised once the time is over. For any thread; Python's own code alone can be ended, one
    call into C comes to its end first.
    """
    thread, lock, ended = ctypes.c_ulong(threading.get_ident()), threading.Lock(), threading.Event()

    def end() -> None:
        with lock:  # So that it is not raised in what comes after.
            if not ended.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeoutError))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            ended.set()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # One that has not been raised yet.
        timer.cancel()
