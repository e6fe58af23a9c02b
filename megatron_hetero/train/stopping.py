"""Signals that ask a run to stop: noted on arrival, agreed on at the end of a step."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from megatron_hetero.groups.launch import is_lost_peer, leave, leave_interrupted, note_stop, rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Sent by a scheduler before it ends a job, by Ctrl-C, and by a closing terminal (the end of ssh)."""
START_S = 1.0
"""Seconds within which torchrun starts all ranks of a host."""


class StopRequest:
    """Whether this rank was asked to stop. `seen`: the first signal that did. `begun`: whether there may be anything to
    save.
    """

    def __init__(self) -> None:
        self.seen: signal.Signals | None = None
        self.begun = False
        self._handlers = ExitStack()

    def __bool__(self) -> bool:
        return self.seen is not None

    def start(self) -> None:
        """Start noting signals."""
        self._handlers.enter_context(_insistence(self))
        # nohup ignores SIGHUP: the run should survive the terminal.
        for number in (number for number in SIGNALS if not _is_ignored_hangup(number)):
            self._handlers.callback(signal.signal, number, signal.signal(number, self.note))

    def begin(self) -> None:
        """From now on SIGTERM ends the process after the current step, not at once."""
        self.begun = True

    def end(self) -> None:
        """Restore the previous signal handlers."""
        self._handlers.close()

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        self.seen = self.seen or signal.Signals(number)


def _is_ignored_hangup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def insists(first: int, then: int) -> bool:
    """Whether a second signal means to stop at once: a second Ctrl-C, which torchrun forwards as SIGTERM."""
    return then == signal.SIGINT or (first == signal.SIGINT and then == signal.SIGTERM)


@contextmanager
def stop_requests(wanted: bool = True) -> Iterator[StopRequest]:
    """Inside, `SIGNALS` are noted instead of ending the process, until the request's `end`. It still ends at once on a
    second Ctrl-C, on SIGTERM after another rank of this host has died, and on SIGTERM before the request's `begin`.
    Does nothing unless `wanted`.
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
def _insistence(request: StopRequest) -> Iterator[None]:
    """Inside, some signals end the process. A thread waits for them, because Python runs handlers between instructions
    of the main thread, which may be blocked on the device or on other ranks.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(reader, request), name="stop-requests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()


def _listen(signals: socket.socket, request: StopRequest) -> None:
    siblings, first = _siblings(), None
    while data := signals.recv(1):
        number = data[0]
        if number not in SIGNALS:
            continue
        if first is not None and insists(first, number):
            leave_interrupted()
        # torchrun sends SIGTERM for two reasons: it was asked to stop, or a rank has died. A rank that waits for the
        # dead one would hang, on a GPU at least, and torchrun with it.
        if number == signal.SIGTERM and not all(map(_lives, siblings)):
            leave("", 1)
        # A starting rank may wait for one on another host that has died, without being notified.
        if number == signal.SIGTERM and not request.begun:
            note_stop()
            leave("SIGTERM: stopped before the first step, nothing to save" if rank() == 0 else "", 1)
        if first is None and rank() == 0:
            # Not through sys.stderr, whose lock a main thread that waits may hold.
            with suppress(OSError):
                os.write(2, acknowledgement(signal.Signals(number)).encode())
        first = first or number


def acknowledgement(number: signal.Signals) -> str:
    """The message printed at once for the first signal."""
    again = "; Ctrl-C again stops it at once" if number == signal.SIGINT else ""
    return f"{number.name}: the run will save and stop after this step{again}\n"


def _siblings() -> frozenset[int]:
    """The process ids of the ranks that torchrun started on this host; empty if unknown. Waits briefly for ranks that
    are still to be started.
    """
    parent, ranks = os.getppid(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    end = time.monotonic() + START_S
    while True:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:
            return frozenset()
        # A parent with other children is not torchrun, or its children are unknown and may end at any time.
        if len(children) >= ranks or time.monotonic() > end:
            return frozenset(map(int, children)) if len(children) == ranks else frozenset()
        time.sleep(0.02)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
