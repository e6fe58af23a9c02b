"""Start and end of a process under torchrun (or alone): the default process group, and errors told once.

However a run ends, one rank says why and all ranks go: a rank that fails exits without waiting for anyone, and
torchrun stops the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_hetero.cuda_environment import group_timeout, prepare_environment
from megatron_hetero.errors import UserError

# torch is imported where it is needed: until a program has set its signal handlers, any signal ends it.
if TYPE_CHECKING:
    from megatron_hetero.platform import Platform

INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1
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


def rank() -> int:
    """The rank that torchrun gave this process; 0 for a process alone."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """The number of ranks that torchrun started; 1 for a process alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def process_group(timeout_s: float = 1800.0) -> Iterator[Platform]:
    """The platform of this process, with the default process group inside the context.

    `timeout_s`: what the interpreter is given, seconds after which its watchdog ends a process. The process groups' own
    time-out is longer (`group_timeout`).
    """
    prepare_environment()
    import torch.distributed as dist

    from megatron_hetero.platform import Platform

    timeout = group_timeout(timeout_s)
    platform = replace(Platform.detect(int(os.environ.get("LOCAL_RANK", "0"))), timeout=timeout)
    if "RANK" in os.environ:
        platform.init_process_group(**_meeting_place(timedelta(seconds=1800)), timeout=timeout)
    else:
        platform.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield platform
    # Only after success: a group that lost a member may hang when it is torn down, and `guarded` leaves without it.
    dist.barrier()
    dist.destroy_process_group()


def _meeting_place(timeout: timedelta) -> dict[str, Any]:
    """The store in which ranks find each other, with this process's rank and the number of ranks.

    torchrun keeps one store for all restarts. Without a prefix of its own a restarted rank would find the addresses of
    processes that have died.
    """
    import torch.distributed as dist

    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.PrefixStore(f"attempt {attempt}", store), "rank": rank, "world_size": world_size}


def guarded(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Run `main`. Whatever goes wrong is told on one rank and ends the process at once.

    Exit status: 1 for an error, 130 for Ctrl-C. Where torchrun is killed, its ranks end too (on Linux).
    """
    _end_with_torchrun()
    prepare_environment()
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere if _repeats_help(argv) else sys.stdout),
        ):
            main(argv)
    except SystemExit:
        raise
    except KeyboardInterrupt:
        leave_interrupted()
    except UserError as error:
        # What one rank found, the others mostly found too: they give the first one time to tell it.
        time.sleep(0.0 if rank() == 0 else 2.0 + 0.5 * (rank() % 16))
        leave(f"error: {error}", 1)
    except BaseException as error:
        if is_lost_peer(error):
            time.sleep(10.0)  # somebody else's error; torchrun ends this process before it speaks
        leave(f"rank {rank()} failed:\n{traceback.format_exc()}", 1)


def _end_with_torchrun() -> None:
    """Have the kernel kill this rank when the torchrun that started it dies: nobody else would, and the rank would go
    on beside one that is started later. SIGTERM would not do: it may only be noted.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # It died before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)


def is_lost_peer(error: BaseException) -> bool:
    """Whether it says no more than that another rank has gone."""
    return any(sign in str(error) for sign in _LOST_PEER)


def leave_interrupted() -> None:
    """End the process at once, with the exit status of Ctrl-C."""
    leave("interrupted; nothing more is written" if rank() == 0 else "", INTERRUPTED)


def _repeats_help(argv: Sequence[str]) -> bool:
    """Whether this rank would print the help text that rank 0 prints."""
    return rank() != 0 and "--help" in argv


def leave(message: str, status: int) -> None:
    """Say `message` and exit without waiting for threads or for other ranks."""
    for say in (
        lambda: print(message, end="\n" if message else "", file=sys.stderr),
        sys.stderr.flush,
        sys.stdout.flush,
    ):
        with contextlib.suppress(OSError):  # a full disk, or a pipe that nobody reads
            say()
    os._exit(status)
