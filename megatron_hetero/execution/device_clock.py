"""When the device has come to a point of its work, asked without waiting for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the work of a device."""

    def done(self) -> bool:
        """Whether all work issued before the mark has ended. Returns at once; asked by one thread at a time, and not
        again once it is true.
        """
        ...


class DeviceClock(Protocol):
    """Sets marks in the work of a device."""

    def mark(self) -> Mark:
        """A mark behind the work that this thread has issued so far."""
        ...


@dataclass(frozen=True)
class CudaClock:
    """Marks of a GPU: events on the current stream, each used again once the device has come to it."""

    device: torch.device
    _free: deque[torch.cuda.Event] = field(default_factory=deque, init=False, repr=False)

    def mark(self) -> Mark:
        """An event behind the work of the current stream."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record()
        return _CudaMark(event, self)

    def _has_come_to(self, event: torch.cuda.Event) -> bool:
        # A thread begins on device 0, where a query would make a context.
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
        return self.clock._has_come_to(self.event)


def clock_of(device: torch.device) -> DeviceClock | None:
    """The clock of a device; None of a CPU, whose work has ended when it has been issued."""
    return CudaClock(device) if device.type == "cuda" else None
