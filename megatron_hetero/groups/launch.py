"""Start and end of a process under torchrun (or alone): the default process group, and errors reported once.

Ranks find each other in a store that the first of them, or torchrun, serves. The first rank waits for all others and
reports who is missing.

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

# torch is imported where it is needed: until a program has set its signal handlers, any signal ends it.
if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_hetero.groups.platform import Platform

T = TypeVar("T")
INTERRUPTED = 130
STOPPED_FILE = "MEGATRON_HETERO_STOPPED_FILE"
"""The environment variable with which our launcher asks to be informed that the ranks stopped on request."""
FINAL = "final"
"""In the error file of a rank: that the next start would fail in the same way."""
_MAX_SILENT_S = 15.0
"""Longest silent wait for others."""
_SLOWEST_POLL_S = 0.25
_SLOWEST_REPORT_S = 2.0
_LINGERING_S = 1.0
_OTHERS_S = 2.0
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


# ------------------------------------------------------------------------------------------------------- the start


@contextlib.contextmanager
def process_group(timeout_s: float = 300.0, start_s: float = 1800.0) -> Iterator[Platform]:
    """The platform of this process, with the default process group inside the context.

    `timeout_s`: seconds after which the watchdog ends a process; the process groups' own time-out is longer
    (`group_timeout`). `start_s`: seconds within which all ranks must join; missing ones are reported earlier.

    Raises `UserError` if ranks are missing, if the environment does not say how to find them, or if this rank has no
    device.
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
            with contextlib.suppress(Exception):  # The store may be gone, or on a host that has stopped.
                in_background(partial(peers.fail, how), "the end").result(_SLOWEST_REPORT_S)
        raise
    # Only after success: a group that lost a member may hang when it is torn down, and `guarded` leaves without it.
    if peers is not None:  # Not yet by a collective: those of a rank that has not come would pair with it.
        peers.leave(f" `process_group`{main_place()}", timeout.total_seconds())
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads drop the tensors of the last collectives: amid the end of the interpreter they would abort it.
    time.sleep(_DROPPED_S)


def meet(timeout_s: float) -> dist.Store:
    """The store of the ranks, once all have joined. Raises `UserError` if one does not within `timeout_s`."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun on the first host may serve the store of all ranks.
    serves = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = connect(address, port, "MASTER_ADDR and MASTER_PORT", serves=serves, timeout_s=timeout_s)
    # As torch does: plain torchrun keeps its store if it starts the ranks again.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    join(store, "rank", rank(), world_size(), timeout_s)
    return store


def connect(address: str, port: int, setting: str, *, serves: bool, timeout_s: float) -> dist.TCPStore:
    """The store at an address that `setting` names, served by this process or another. Raises `UserError`."""
    from torch.distributed import TCPStore

    # Here, since torch would print the stack trace of each attempt.
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
        raise UserError.at(where, found=found, expected=expected, because="the run meets in it", fix=fix) from None


def join(store: dist.Store, what: str, number: int, size: int, timeout_s: float) -> None:
    """Wait until all `size` hosts or ranks have called this. Raises `UserError`; number 0 names the missing ones."""
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
    """Wait until `done`. Reports what is `missing` at growing intervals. Raises `UserError` after the time-out."""
    start, next_report_s, pause_s = time.monotonic(), min(_MAX_SILENT_S, timeout_s / 4), 0.01
    while not done():
        waited = time.monotonic() - start
        if waited > timeout_s:
            where, found = "start of the run", f"no {missing()} after {waited:.0f} s"
            because = "training begins with all of them"
            fix = "check the output of the missing ones, and whether the network lets them through"
            raise UserError.at(where, found=found, expected="all hosts and ranks to join", because=because, fix=fix)
        if reports and waited > next_report_s:
            next_report_s = 2 * waited
            print(f"waiting for {missing()} since {waited:.0f} s", file=sys.stderr, flush=True)
        time.sleep(pause_s)
        pause_s = min(_SLOWEST_POLL_S, 1.5 * pause_s)


def _listens(address: str, port: int) -> bool:
    """Whether anybody listens there."""
    with contextlib.suppress(OSError, UnicodeError), socket.create_connection((address, port), timeout=5.0):
        return True
    return False


# --------------------------------------------------------------------------------------------------------- the end


def guarded(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Run `main`, and end the process. Any error is reported on one rank and ends the process at once.

    Exit status: 0 if `main` returns, 1 for an error, 130 for Ctrl-C. If torchrun is killed, its ranks end too (on
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
    """Run `main`; end the process if it fails."""
    try:
        require_ranks()
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere if rank() > 0 and "--help" in argv else sys.stdout),
        ):
            main(argv)
    except SystemExit as end:
        if end.code:
            _write_error_file(f"exit status {end.code}", final=True)
        raise
    except KeyboardInterrupt:
        raise
    except UserError as error:
        leave(f"error: {error}" if _is_first(str(error), _OTHERS_S * (rank() > 0)) else "", 1, final=True)
    except BaseException as error:
        if not is_lost_peer(error):
            lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
            first = _is_first(f"{type(error)} {lines}", _OTHERS_S * (rank() > 0))
            leave(f"rank {rank()} failed:\n{traceback.format_exc()}" if first else "", 1)
        first = _is_first("lost rank", 10.0)
        short = "\n".join((f"{type(error).__name__}: {error}".splitlines()[0], *getattr(error, "__notes__", ())))
        leave(f"rank {rank()} lost another rank, whose error is the cause: {short}" if first else "", 1)


def hide_stack_traces() -> None:
    """Have torch's C++ code report errors only, not warnings with a stack trace for each connection that closes. For
    this process and its children, before torch is imported; `TORCH_CPP_LOG_LEVEL=WARNING` shows them.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def ended(work: Callable[[], str | None]) -> int:
    """Run the work of a command that is no rank, and print the text it returns. Returns the exit status: 1 for an
    error, 130 for Ctrl-C.
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
    """Whether this rank is to report an error, which is usually one of all ranks. It leaves an earlier one
    `patience_s` to do so, and torchrun to end the others. Without torchrun, the store knows what has been reported.
    """
    end, first = time.monotonic() + (patience_s := patience_s + 0.5 * (rank() % 16)), True
    with contextlib.suppress(Exception):  # There is no store yet, or no more.
        if "torch" in sys.modules and world_size() > 1:
            from megatron_hetero.groups.peers import Peers

            peers = Peers.of_world()
            assert peers is not None, "there are several ranks"
            found = in_background(partial(peers.is_first, error, patience_s), "report")
            first = found.result(patience_s + _SLOWEST_REPORT_S)
            if rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(_LINGERING_S)  # The store ends with this rank.
    time.sleep(max(0.0, end - time.monotonic()))
    return first


def _end_with_torchrun() -> None:
    """Have the kernel kill this rank when the torchrun that started it dies: nobody else would, and the rank would
    keep running next to those of the next start. SIGTERM is not enough: it may be deferred to the end of a step.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # It died before the call.
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
    """Print `message` and exit without waiting for threads or other ranks. `final`: the next start would fail too."""
    if status:
        _write_error_file(message, final)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # If they cannot be written, the status tells.
        if message:
            print(message, file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(status)


def _write_error_file(message: str, final: bool) -> None:
    """Write the message to torchrun's error file (torch.distributed.elastic.multiprocessing.errors), which shows that
    this rank has reported why it ends.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun prints `py_callstack` in place of a traceback; the message has been printed.
        callstack, now = "see this rank's message above", str(int(time.time()))
        extra = {"py_callstack": callstack, "timestamp": now, FINAL: final}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """The result of `work`, computed on a thread that the process does not wait for at exit."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # Raised to whoever asks for the result.
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
