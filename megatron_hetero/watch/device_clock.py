"""Marks in the work of a device, polled without synchronising."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the work of a device."""

    def done(self) -> bool:
        """Whether all work issued before the mark has ended. Does not block. Called by one thread at a time, and not
        again after it has returned True.
        """
        ...


class DeviceClock(Protocol):
    """Records marks in the work of a device."""

    def mark(self) -> Mark:
        """A mark after the work that this thread has issued so far."""
        ...


@dataclass(frozen=True)
class CudaClock:
    """Marks of a GPU: events on the current stream, reused once completed."""

    device: torch.device
    _free: deque[torch.cuda.Event] = field(default_factory=deque, init=False, repr=False)

    def mark(self) -> Mark:
        """An event after the work of the current stream."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record()
        return _CudaMark(event, self)

    def _has_completed(self, event: torch.cuda.Event) -> bool:
        # A new thread is on device 0, where a query would create a context.
        torch.cuda.set_device(self.device)
        done = event.query()
        if done:
            self._free.append(event)
        return done


@dataclass(frozen=True)
class _CudaMark:
    event: torch.cuda.Event
    clock: CudaClock

    def done(self) -> bool:
        return self.clock._has_completed(self.event)


def clock_of(device: torch.device) -> DeviceClock | None:
    """The clock of a device; None for a CPU, whose work is synchronous."""
    return CudaClock(device) if device.type == "cuda" else None
