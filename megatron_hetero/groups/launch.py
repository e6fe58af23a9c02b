"""How the hosts of a run, and then its ranks, find each other: in a store that the first host serves.

Each enters its number; the first waits for all of them and says so. Whoever waits reports for whom, and gives up after
a time-out.

Start and end of a process under torchrun (or alone): the default process group, and errors reported once.

However a run ends, one rank says why and all ranks go: a rank that fails exits without waiting for anyone, and
torchrun stops the others.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch.distributed as dist

from megatron_hetero.base.environment import (
    group_timeout,
    has_agent_store,
    local_rank,
    meeting_address,
    named_place,
    prepare_environment,
    raise_open_files,
    rank,
    require_meeting_place,
    require_numbers,
    resolves,
    stay_on_host,
    world_size,
)
from megatron_hetero.base.errors import UserError
from megatron_hetero.base.terminal import prepare_outputs
from megatron_hetero.layout.grammar import format_ranks

# torch is imported where it is needed: until a program has set its signal handlers, any signal ends it.

if TYPE_CHECKING:
    from megatron_hetero.groups.platform import Platform

T = TypeVar("T")
MOST_SILENT_S = 15.0
"""Longest silent wait for others."""
AGENT_S = 60.0
"""Longest wait for torchrun's store, which exists before the ranks do."""
_SLOWEST_POLL_S = 0.25
_STORE_S = 1800.0


class Patience:
    """Waits for others: reports who is missing, at growing intervals, and gives up after `timeout_s`."""

    def __init__(self, timeout_s: float, *, reports: bool):
        self._start = time.monotonic()
        self._timeout_s, self._reports = timeout_s, reports
        self._next_word_s = min(MOST_SILENT_S, timeout_s / 4)
        self._poll_s = 0.01

    def wait(self, missing: Callable[[], str]) -> None:
        """Wait a little for what `missing` names. Raises `UserError` after the time-out."""
        waited = time.monotonic() - self._start
        if waited > self._timeout_s:
            raise UserError.at(
                "start of the run",
                found=f"no {missing()} after {waited:.0f} s",
                expected="all hosts and ranks to come",
                because="training begins with all of them",
                fix="check the output of the missing ones, and whether the network lets them through",
            )
        if self._reports and waited > self._next_word_s:
            self._next_word_s = 2 * waited
            print(f"waiting for {missing()} since {waited:.0f} s", file=sys.stderr, flush=True)
        time.sleep(self._poll_s)
        self._poll_s = min(_SLOWEST_POLL_S, 1.5 * self._poll_s)


def meet(timeout_s: float) -> dist.Store:
    """The store of the ranks, once all have come. Raises `UserError` if one does not within `timeout_s`, or if the
    environment does not say where to meet.
    """
    require_meeting_place()
    address, port = meeting_address()
    where = f"MASTER_ADDR and MASTER_PORT, {address}:{port}"
    who, patience_s = ("torchrun", min(timeout_s, AGENT_S)) if has_agent_store() else ("rank 0", timeout_s)
    # One rank of each host reports.
    place = Place(address, port, where, who, patience_s, reports=local_rank() == 0 or rank() == 1)
    # As torch does: plain torchrun keeps its store if it starts the ranks again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", place.connect(serves=rank() == 0 and not has_agent_store()))
    gather(store, "rank", rank(), world_size(), timeout_s)
    return store


def gather(store: dist.Store, what: str, number: int, size: int, timeout_s: float) -> None:
    """Wait until all `size` hosts or ranks have called this. Raises `UserError` naming those that have not."""
    room = dist.PrefixStore("meeting", store)
    room.set(f"{what} {number}", "here")
    if number == 0:
        missing, patience = set(range(1, size)), Patience(timeout_s, reports=True)
        while missing := {other for other in missing if not room.check([f"{what} {other}"])}:
            patience.wait(lambda: _named(what, missing))
        room.set("all", "here")
    patience = Patience(timeout_s + 5.0, reports=False)  # Number 0 reports first.
    while not room.check(["all"]):
        patience.wait(lambda: f"confirmation from {what} 0 that all have joined")


def _named(what: str, numbers: Collection[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {format_ranks(sorted(numbers))}"


@dataclass(frozen=True)
class Place:
    """Address of a store. `where`: the settings that name it; `who` serves it; `reports`: whether to report waiting."""

    address: str
    port: int
    where: str
    who: str
    timeout_s: float
    reports: bool = True

    def connect(self, *, serves: bool) -> dist.TCPStore:
        """The store there; `serves`: of this process. Raises `UserError`."""
        there = partial(resolves, self.address) if serves else self.listens
        patience = Patience(self.timeout_s, reports=self.reports or serves)
        while not there():
            patience.wait(lambda: f"{self.who} at {named_place(self.address, self.port)}")
        # On a thread: torch asks whatever listens there whether it is a store, and another service may never answer.
        connected = in_background(lambda: self._store(serves), "connects to the store")
        patience = Patience(self.timeout_s, reports=True)
        while not connected.done():
            patience.wait(lambda: f"TCPStore at {self.address}:{self.port}, where another service may listen,")
        try:
            return connected.result()
        except (RuntimeError, ValueError) as error:
            raise UserError.at(
                self.where,
                found=str(error).splitlines()[0],
                expected="to open a port there" if serves else "a store there",
                because="the run meets in it",
                fix="choose another port" if "EADDRINUSE" in str(error) else "correct them, or choose another port",
            ) from None

    def listens(self) -> bool:
        """Whether anybody listens there."""
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=5.0):
            return True
        return False

    def _store(self, serves: bool) -> dist.TCPStore:
        timeout = timedelta(seconds=_STORE_S)
        return dist.TCPStore(self.address, self.port, None, serves, timeout, wait_for_workers=False, multi_tenant=True)


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """The result of `work`, computed on a thread that the process does not wait for at exit."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # Whoever asks for the result gets it.
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


__all__ = ["FINAL", "INTERRUPTED", "STOPPED_FILE", "ended", "guarded", "leave", "process_group", "rank", "world_size"]

INTERRUPTED = 130
STOPPED_FILE = "MEGATRON_HETERO_STOPPED_FILE"
"""The environment variable with which our launcher asks to be informed that the ranks stopped on request."""
FINAL = "final"
"""In the error file of a rank: that the next start would fail in the same way."""
_PR_SET_PDEATHSIG = 1
_DROPPED_S = 0.2
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Socket closed",
    "Connection was likely closed",  # of the store
    # NCCL: c10d/NCCLUtils.cpp, and ncclGetErrorString. ncclSystemError may be this rank's own.
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "remote process exited or there was a network error",
)


@contextlib.contextmanager
def process_group(timeout_s: float = 300.0, start_s: float = 1800.0) -> Iterator[Platform]:
    """The platform of this process, with the default process group inside the context.

    `timeout_s`: what the interpreter is given, seconds after which its watchdog ends a process. The process groups' own
    time-out is longer (`group_timeout`). `start_s`: seconds within which all ranks must come; who is missing is said
    before.

    Raises `UserError` where ranks do not come, where the environment does not say how to find them, or where this rank
    has no device.
    """
    alone = "RANK" not in os.environ
    require_numbers() if alone else require_meeting_place()
    stay_on_host()
    raise_open_files()
    prepare_environment()
    import torch.distributed as dist

    # MERGED
    from megatron_hetero.groups.platform import Platform

    timeout = group_timeout(timeout_s)
    platform = replace(Platform.detect(local_rank()), timeout=timeout)
    store = dist.HashStore() if alone else meet(start_s)
    platform.init_process_group(store=store, rank=rank(), world_size=world_size(), timeout=timeout)
    yield platform
    # Only after success: a group that lost a member may hang when it is torn down, and `guarded` leaves without it.
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads drop the tensors of the last collectives: amid the end of the interpreter they would abort it.
    time.sleep(_DROPPED_S)


def guarded(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Run `main`, and end the process. Whatever goes wrong is reported on one rank and ends it at once.

    Exit status: 0 where `main` returns, 1 for an error, 130 for Ctrl-C. Where torchrun is killed, its ranks end too (on
    Linux).
    """
    _end_with_torchrun()
    prepare_outputs()
    hide_stack_traces()
    prepare_environment()
    try:
        _run(main, argv)
        _leave_well()
    except KeyboardInterrupt:
        leave_interrupted()


def _run(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Run `main`, and leave where it fails."""
    try:
        require_numbers()
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere if rank() > 0 and "--help" in argv else sys.stdout),
        ):
            main(argv)
    except SystemExit as end:
        if end.code:
            _leave_word(f"exit status {end.code}", final=True)
        raise
    except KeyboardInterrupt:
        raise
    except UserError as error:
        # What one rank found, the others usually found too: they leave the first one time to report it.
        if rank() > 0:
            _wait_for_torchrun(2.0)
        leave(f"error: {error}", 1, final=True)
    except BaseException as error:
        if not is_lost_peer(error):
            leave(f"rank {rank()} failed:\n{traceback.format_exc()}", 1)
        _wait_for_torchrun(10.0)
        leave(f"rank {rank()} lost another rank, whose error is the cause: {_in_short(error)}", 1)


def hide_stack_traces() -> None:
    """Have torch's C++ code report errors alone, not warnings with a stack trace for each connection that closes. For
    this process and its children, before torch is imported; `TORCH_CPP_LOG_LEVEL=WARNING` shows them.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def ended(work: Callable[[], str | None]) -> int:
    """The exit status of a command that is no rank, and the one message that it ends with: what `work` returns, if
    anything; 1 for an error, 130 for Ctrl-C.
    """
    prepare_outputs()
    try:
        if text := work():
            print(text)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing is left half-written", file=sys.stderr)
        return INTERRUPTED
    return 0


def _wait_for_torchrun(patience_s: float) -> None:
    """Wait for torchrun to end this rank, which it does once the rank that is the cause has reported it and left."""
    time.sleep(patience_s + 0.5 * (rank() % 16))


def _in_short(error: BaseException) -> str:
    """Its first line, and what was noted of where it came."""
    return "\n".join((f"{type(error).__name__}: {error}".splitlines()[0], *getattr(error, "__notes__", ())))


def _end_with_torchrun() -> None:
    """Have the kernel kill this rank when the torchrun that started it dies: nobody else would, and the rank would
    keep running next to that of the next start. SIGTERM is not enough: it may be deferred to the end of a step.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # It died before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error only means that another rank is gone."""
    return any(sign in str(error) for sign in _LOST_PEER)


def leave_interrupted() -> None:
    """End the process at once, with the exit status of Ctrl-C."""
    leave("interrupted; nothing more is written" if rank() == 0 else "", INTERRUPTED)


def note_stop() -> None:
    """Inform the launcher, if it is ours, that this rank ended before the last step as requested."""
    if path := os.environ.get(STOPPED_FILE):
        Path(path).touch()


def _leave_well() -> NoReturn:
    """Exit with status 0 after other threads and exit handlers, without tearing the interpreter down: a thread of
    gloo's that drops the tensors of the last collective meanwhile would abort the process, with "terminate called
    without an active exception" (https://github.com/pytorch/pytorch/issues/190489).
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    leave("", 0)


def leave(message: str, status: int, *, final: bool = False) -> NoReturn:
    """Say `message` and exit without waiting for threads or for other ranks. `final`: the next start would fail too."""
    if status:
        _leave_word(message, final)
    with contextlib.suppress(OSError, ValueError):  # Where they cannot be written, the status says so.
        if message:
            print(message, file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(status)


def _leave_word(message: str, final: bool) -> None:
    """Leave what was said where torchrun looks for it (torch.distributed.elastic.multiprocessing.errors): it then knows
    that this rank has reported why it ends.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # What torchrun prints itself in the place of a traceback; the message has been printed.
        callstack, now = "see above what this rank has said", str(int(time.time()))
        extra = {"py_callstack": callstack, "timestamp": now, FINAL: final}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
