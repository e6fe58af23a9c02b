"""Signals that ask a run to stop: noted on arrival, agreed on at the end of a step."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from megatron_hetero.groups.launch import is_lost_peer, leave, leave_interrupted, rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Sent by a scheduler before it ends a job, by Ctrl-C, and by a closing terminal (the end of ssh)."""


class StopRequest:
    """True once this rank was asked to stop. `seen`: the first signal that asked for it."""

    def __init__(self) -> None:
        self.seen: signal.Signals | None = None
        self._handlers: ExitStack | None = None

    def __bool__(self) -> bool:
        return self.seen is not None

    def start(self) -> None:
        """Note signals from now on. SIGTERM still ends the process, which has nothing to save before `begin`."""
        self._handlers = ExitStack()
        self._handlers.enter_context(_insistence())
        for number in SIGNALS[1:]:
            # nohup ignores SIGHUP: the run should survive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._handle(self._handlers, number)

    def begin(self) -> None:
        """Note SIGTERM too: it ends the process after the current step."""
        if self._handlers is not None:
            self._handle(self._handlers, signal.SIGTERM)

    def end(self) -> None:
        """Restore the previous signal handlers."""
        if self._handlers is not None:
            self._handlers.close()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.seen = self.seen or signal.Signals(number)

    def _handle(self, handlers: ExitStack, number: int) -> None:
        handlers.callback(signal.signal, number, signal.signal(number, self.note))


def insists(first: int, then: int) -> bool:
    """Return whether a second signal means to stop at once: a second Ctrl-C, which torchrun forwards as SIGTERM."""
    return then == signal.SIGINT or (first == signal.SIGINT and then == signal.SIGTERM)


@contextmanager
def stop_requests(wanted: bool = True) -> Iterator[StopRequest]:
    """Note `SIGNALS` inside instead of ending the process, until the request's `end`. A second Ctrl-C still ends it at
    once, as does SIGTERM before the request's `begin`. Does nothing unless `wanted`.
    """
    request = StopRequest()
    try:
        if wanted:
            request.start()
        yield request
    except Exception as error:
        # torchrun ends the remaining ranks when one has died. That was reported; nobody waits for this rank.
        if request.seen is signal.SIGTERM and is_lost_peer(error):
            leave("", 1)
        raise
    finally:
        request.end()


@contextmanager
def _insistence() -> Iterator[None]:
    """End the process on a second Ctrl-C inside. A thread waits for it, because Python runs handlers between
    instructions of the main thread, which may be blocked on the device or on other ranks.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(reader,), name="stop-requests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()


def _listen(signals: socket.socket) -> None:
    first = None
    while data := signals.recv(1):
        number = data[0]
        if number not in SIGNALS:
            continue
        if first is not None and insists(first, number):
            leave_interrupted()
        if first is None and rank() == 0:
            again = "; Ctrl-C again stops it at once" if number == signal.SIGINT else ""
            text = f"{signal.Signals(number).name}: the run will save and stop after this step{again}\n"
            # Not through sys.stderr, whose lock a main thread that waits may hold.
            with suppress(OSError):
                os.write(2, text.encode())
        first = first or number
