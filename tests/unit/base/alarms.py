"""A limit on the time of a test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """What waits for a pipe is interrupted, and fails."""

    def interrupt(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
