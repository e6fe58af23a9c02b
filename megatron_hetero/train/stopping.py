"""Handles signals that ask a run to stop: a rank records them on arrival, and all ranks agree at the end of a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from megatron_hetero.groups.launch import FAILED, is_lost_peer, leave, leave_interrupted, rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals sent by a scheduler before it ends a job, by Ctrl-C, and by a closing terminal (such as an ssh session)."""


class StopRequest:
    """Stop flag of this rank: true once a signal has asked it to stop. `seen`: the first such signal."""

    def __init__(self) -> None:
        self.seen: signal.Signals | None = None
        self._handlers: ExitStack | None = None

    def __bool__(self) -> bool:
        return self.seen is not None

    def start(self) -> None:
        """Record signals from now on. SIGTERM still ends the process until `begin`, as there is nothing to save yet."""
        self._handlers = ExitStack()
        for number in SIGNALS[1:]:
            # Leave SIGHUP ignored under nohup, so that the run survives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._handle(self._handlers, number)

    def begin(self) -> None:
        """Install a handler of SIGTERM, which stops the run after the current step."""
        if self._handlers is not None:
            self._handle(self._handlers, signal.SIGTERM)

    def end(self) -> None:
        """Restore the previous signal handlers."""
        if self._handlers is not None:
            self._handlers.close()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record a stop signal; end the process at once if it repeats an earlier one (see `insists`)."""
        if self.seen is not None:
            if insists(self.seen, number):
                leave_interrupted()
            return
        self.seen = signal.Signals(number)
        if rank() == 0:
            again = "; Ctrl-C again ends it without saving" if number == signal.SIGINT else ""
            # Write to the file descriptor, since the interrupted code may be writing to sys.stderr.
            with suppress(OSError):
                os.write(
                    2, f"{self.seen.name}: the run will save and stop after this step or the next{again}\n".encode()
                )

    def _handle(self, handlers: ExitStack, number: int) -> None:
        handlers.callback(signal.signal, number, signal.signal(number, self.note))


def insists(first: int, then: int) -> bool:
    """Return whether a second signal demands an immediate stop: a second Ctrl-C, which torchrun forwards as SIGTERM."""
    return then == signal.SIGINT or (first == signal.SIGINT and then == signal.SIGTERM)


@contextmanager
def stop_requests(wanted: bool = True) -> Iterator[StopRequest]:
    """Return a context in which `SIGNALS` set the stop request instead of ending the process, until its `end`. A second
    Ctrl-C still ends the process, as does SIGTERM before the request's `begin`. Does nothing unless `wanted`.
    """
    request = StopRequest()
    try:
        if wanted:
            request.start()
        yield request
    except Exception as error:
        # torchrun terminates the remaining ranks after one has died, and reports it, so exit without a message.
        if request.seen is signal.SIGTERM and is_lost_peer(error):
            leave("", FAILED)
        raise
    finally:
        request.end()
