"""Start and end of a process under torchrun (or alone): the default process group, and errors reported once.

Ranks find each other in a store that rank 0 or torchrun serves. Rank 0 waits for all others and reports missing ones.

However a run ends, one rank reports why and all ranks exit: a rank that fails exits without waiting for others, and
torchrun ends the others.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from megatron_hetero.base.environment import (
    group_timeout,
    local_rank,
    prepare_environment,
    raise_open_files,
    rank,
    require_ranks,
    resolves,
    stay_on_host,
    world_size,
)
from megatron_hetero.base.errors import UserError, main_place, place
from megatron_hetero.base.terminal import prepare_outputs
from megatron_hetero.layout.grammar import format_ranks

# Functions import torch when they need it: until a program has set its signal handlers, a signal ends it at once.
if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_hetero.groups.platform import Platform

T = TypeVar("T")
FAILED = 70
"""Exit status of a rank that failed for a reason that may not recur at the next start (EX_SOFTWARE)."""
INTERRUPTED = 130
"""Exit status after Ctrl-C."""
STOPPED_FILE = "MEGATRON_HETERO_STOPPED_FILE"
"""Environment variable with the path of a file that a rank creates to inform our launcher of a requested stop."""
_MAX_SILENT_S = 15.0
"""Maximum seconds of waiting for other ranks or hosts before the first report."""
_MAX_POLL_S = 0.25
_MAX_REPORT_S = 2.0
"""Time-out in seconds of a call to a store that may be gone."""
_LINGERING_S = 1.0
_OTHERS_S = 2.0
"""Seconds that other ranks wait for rank 0 to report an error that all ranks have."""
_LOST_PEER_S = 10.0
"""Seconds that a rank waits for a lost rank to report the cause."""
_PR_SET_PDEATHSIG = 1
_DROPPED_S = 0.2
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Socket closed",
    "Connection was likely closed",  # The store raises this.
    # NCCL's messages in c10d/NCCLUtils.cpp and ncclGetErrorString, except ncclSystemError, whose cause may be local.
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "remote process exited or there was a network error",
)


# ------------------------------------------------------------------------------------------------------- the start


@contextlib.contextmanager
def process_group(timeout_s: float = 300.0, start_s: float = 1800.0) -> Iterator[Platform]:
    """Initialise the default process group for the context, and yield the platform of this process.

    Args:
        timeout_s: time-out of the watchdog in seconds; process groups have a longer one (`group_timeout`).
        start_s: time-out of the start, within which all ranks must join; missing ones are reported earlier.

    Raises:
        UserError: ranks are missing, environment variables are missing or wrong, or this rank has no device.
    """
    alone = "RANK" not in os.environ
    require_ranks(meet=True)
    stay_on_host()
    raise_open_files()
    prepare_environment()
    import torch.distributed as dist

    from megatron_hetero.groups.peers import Peers
    from megatron_hetero.groups.platform import Platform

    timeout = group_timeout(timeout_s)
    platform = replace(Platform.detect(local_rank()), timeout=timeout)
    store = dist.HashStore() if alone else meet(start_s)
    platform.init_process_group(store=store, rank=rank(), world_size=world_size(), timeout=timeout)
    peers = Peers.of_world()
    try:
        yield platform
    except BaseException as error:
        if peers is not None:
            how = f" by {type(error).__name__}{place(reversed([*traceback.walk_tb(error.__traceback__)]))}"
            with contextlib.suppress(Exception):  # The store may be unreachable.
                in_background(partial(peers.fail, how), "the end").result(_MAX_REPORT_S)
        raise
    # Destroy the group only after success: without all members this may hang, and `guarded` exits without it.
    if peers is not None:  # A collective could pair with another rank's unrelated collective.
        peers.leave(f" `process_group`{main_place()}", timeout.total_seconds())
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads free the tensors of the last collectives; if the interpreter ends meanwhile, the process aborts.
    time.sleep(_DROPPED_S)


def meet(timeout_s: float) -> dist.Store:
    """Return the store of all ranks once they have joined. Raises `UserError` if one does not within `timeout_s`."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun on the first host may serve the store.
    serves = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = connect(address, port, "MASTER_ADDR and MASTER_PORT", serves=serves, timeout_s=timeout_s)
    # Use a new prefix for each attempt, as torch does: torchrun keeps its store when it restarts the ranks.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    join(store, "rank", rank(), world_size(), timeout_s)
    return store


def connect(address: str, port: int, setting: str, *, serves: bool, timeout_s: float) -> dist.TCPStore:
    """Connect to the store at an address, or serve it there. Raises `UserError`, which quotes the `setting`."""
    from torch.distributed import TCPStore

    # Wait here, since torch prints a stack trace for each failed attempt.
    ready = (lambda: resolves(address)) if serves else (lambda: _listens(address, port))
    _wait(
        ready,
        lambda: f"store at {address}:{port}{'' if resolves(address) else ' (whose name does not resolve)'}",
        timeout_s,
    )
    try:
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(address, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError) as error:
        where, found = f"{setting}, {address}:{port}", str(error).splitlines()[0]
        expected, fix = "to open a port there" if serves else "a store there", "correct them, or choose another port"
        raise UserError.at(where, found=found, expected=expected, because="ranks meet there", fix=fix) from None


def join(store: dist.Store, what: str, number: int, size: int, timeout_s: float) -> None:
    """Wait until all `size` hosts or ranks have joined; number 0 reports missing ones. Raises `UserError`."""
    store.set(f"{what} {number} joined", "")
    if number == 0:
        missing = set(range(1, size))

        def all_joined() -> bool:
            missing.difference_update([other for other in missing if store.check([f"{what} {other} joined"])])
            return not missing

        _wait(all_joined, lambda: f"{what}{'s' * (len(missing) > 1)} {format_ranks(sorted(missing))}", timeout_s)
        store.set(f"all {what}s joined", "")
    else:
        confirmed = f"confirmation from {what} 0 that all have joined"
        _wait(lambda: store.check([f"all {what}s joined"]), lambda: confirmed, timeout_s + 5.0, reports=False)


def _wait(done: Callable[[], bool], missing: Callable[[], str], timeout_s: float, *, reports: bool = True) -> None:
    """Wait until `done()`, and print what is `missing` at growing intervals. Raises `UserError` after the time-out."""
    start, next_report_s, pause_s = time.monotonic(), min(_MAX_SILENT_S, timeout_s / 4), 0.01
    while not done():
        waited = time.monotonic() - start
        if waited > timeout_s:
            where, found = "start of the run", f"no {missing()} after {waited:.0f} s"
            fix = "check the output of the missing ones, and whether the network lets them through"
            raise UserError.at(where, found=found, expected="all hosts and ranks to join", fix=fix)
        if reports and waited > next_report_s:
            next_report_s = 2 * waited
            print(f"waiting for {missing()} since {waited:.0f} s", file=sys.stderr, flush=True)
        time.sleep(pause_s)
        pause_s = min(_MAX_POLL_S, 1.5 * pause_s)


def _listens(address: str, port: int) -> bool:
    """Return whether a process listens on a port."""
    with contextlib.suppress(OSError, UnicodeError), socket.create_connection((address, port), timeout=5.0):
        return True
    return False


# --------------------------------------------------------------------------------------------------------- the end


def guarded(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Run `main` and end the process. An error is reported on one rank and ends the process at once.

    Exit status: 0 if `main` returns, 1 for a `UserError`, 70 for other exceptions, 130 for Ctrl-C. If torchrun is
    killed, its ranks end too (on Linux).
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
    """Run `main`, and end the process if it raises an error."""
    try:
        require_ranks()
        main(argv)
    except SystemExit as end:
        if end.code:
            _write_error_file(f"exit status {end.code}")
        raise
    except KeyboardInterrupt:
        raise
    except UserError as error:
        leave(f"error: {error}" if _is_first(str(error), _OTHERS_S * (rank() > 0)) else "", 1)
    except BaseException as error:
        if is_lost_peer(error):
            summary = "\n".join((f"{type(error).__name__}: {error}".splitlines()[0], *getattr(error, "__notes__", ())))
            message = f"rank {rank()} lost another rank, whose error is the cause: {summary}"
            is_first = _is_first("lost rank", _LOST_PEER_S)
        else:
            message = f"rank {rank()} failed:\n{traceback.format_exc()}"
            lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
            is_first = _is_first(f"{type(error)} {lines}", _OTHERS_S * (rank() > 0))
        leave(message if is_first else "", FAILED)


def hide_stack_traces() -> None:
    """Have torch's C++ code log errors only: its warnings have a stack trace for each connection that closes. Call this
    before torch is imported. Child processes inherit the level, and `TORCH_CPP_LOG_LEVEL=WARNING` overrides it.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def ended(work: Callable[[], str | None]) -> int:
    """Run the work of a command that is not a rank, and print the text that it returns. Returns the exit status: 0 on
    success, 1 for a `UserError`, 130 for Ctrl-C.
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


def _is_first(error: str, patience_s: float) -> bool:
    """Return whether this rank is to report an error that all ranks may have. Waits up to `patience_s`, plus a delay
    that differs between ranks, for another rank to report it first. The store records reported errors.
    """
    patience_s += 0.5 * (rank() % 16)
    end, is_first = time.monotonic() + patience_s, True
    with contextlib.suppress(Exception):  # The store may not exist yet, or no longer.
        if "torch" in sys.modules and world_size() > 1:
            from megatron_hetero.groups.peers import Peers

            peers = Peers.of_world()
            assert peers is not None, "there are several ranks"
            answer = in_background(partial(peers.is_first, error, patience_s), "report")
            is_first = answer.result(patience_s + _MAX_REPORT_S)
            if rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(_LINGERING_S)  # The store ends with this rank.
    time.sleep(max(0.0, end - time.monotonic()))
    return is_first


def _end_with_torchrun() -> None:
    """Have the kernel kill this rank when the torchrun that started it dies. Otherwise it would keep running next to
    the ranks of the next start. SIGTERM is not enough: it may be deferred to the end of a step.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # torchrun died before the call.
        os.kill(os.getpid(), signal.SIGKILL)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error only means that another rank is gone."""
    return any(sign in str(error) for sign in _LOST_PEER)


def leave_interrupted() -> None:
    """End the process at once, with the exit status of Ctrl-C."""
    leave("interrupted; nothing more is written" if rank() == 0 else "", INTERRUPTED)


def note_stop() -> None:
    """Inform our launcher, if it started this rank, that the rank stopped before the last step, as requested."""
    if path := os.environ.get(STOPPED_FILE):
        Path(path).touch()


def _leave_well() -> NoReturn:
    """Wait for other threads, run exit handlers, and exit with status 0 without finalizing the interpreter: during
    that, a gloo thread that frees tensors of the last collective would abort the process with "terminate called
    without an active exception" (https://github.com/pytorch/pytorch/issues/190489).
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    leave("", 0)


def leave(message: str, status: int) -> NoReturn:
    """Print `message` and exit without waiting for threads or other ranks."""
    if status:
        _write_error_file(message)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # The exit status remains if printing fails.
        if message:
            print(message, file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(status)


def _write_error_file(message: str) -> None:
    """Write the message to torchrun's error file (torch.distributed.elastic.multiprocessing.errors), which shows that
    this rank has reported why it ends.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun prints `py_callstack` in place of a traceback; the message has been printed.
        extra = {"py_callstack": "see this rank's message above", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` on a thread for which the process does not wait at exit. Returns a future of the result."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # Raised by `Future.result`.
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
