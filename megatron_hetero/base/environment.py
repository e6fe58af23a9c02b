"""Environment variables that describe ranks, as torchrun sets them, and variables of CUDA, the allocator and NCCL
(docs/training.md, "Hardware queues", docs/schedules.md, "When a rank is stuck"). Does not import torch.

CUDA reads its variables when its context is created, PyTorch's allocator on first use. Variables that the user has set,
also by their older names, are never changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import socket
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import replacing

LAUNCHER = "python -m megatron_hetero.run"
"""The command that starts ranks: torchrun with different handling of their exit."""
_RANGES = {
    "RANK": range(10**9),
    "LOCAL_RANK": range(10**9),
    "WORLD_SIZE": range(1, 10**9),
    "LOCAL_WORLD_SIZE": range(1, 10**9),
    "MASTER_PORT": range(1, 2**16),
}
_FIX = f"start the ranks with {LAUNCHER} or torchrun, which set it"


def rank() -> int:
    """Return the rank that torchrun gave this process, or 0 without torchrun."""
    return _number("RANK", 0)


def world_size() -> int:
    """Return the number of ranks, or 1 without torchrun."""
    return _number("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return the index of this rank on its host, or 0 without torchrun."""
    return _number("LOCAL_RANK", 0)


def resolves(address: str) -> bool:
    """Return whether this host can resolve the name `address`, which may take seconds."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError):
        return False
    return True


def _number(name: str, default: int) -> int:
    number = _read(name, os.environ)
    return default if number is None else number


def _read(name: str, environ: Mapping[str, str]) -> int | None:
    """Return the value of a variable, or None if it is missing or out of range, which `require_ranks` reports."""
    text = environ.get(name, "")
    number = int(text) if re.fullmatch("[0-9]{1,10}", text) else -1
    return number if number in _RANGES[name] else None


def require_ranks(environ: Mapping[str, str] = os.environ, *, meet: bool = False) -> None:
    """Check the variables with this rank's number, and with `meet` the address where ranks meet. Raises `UserError`."""
    alone = "RANK" not in environ
    for name in ("WORLD_SIZE", *(("MASTER_ADDR", "MASTER_PORT") if meet else ())):
        if not alone and not environ.get(name):
            raise UserError.at(f"environment variable {name}", problem="not set, but RANK is", fix=_FIX)
    for name in _RANGES:
        if name in environ and _read(name, environ) is None:
            expected = "a port" if name == "MASTER_PORT" else "a number"
            raise UserError.at(f"environment variable {name}", found=f"`{environ[name]}`", expected=expected, fix=_FIX)
    rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    if rank >= size or (size > 1 and alone):
        found, expected = f"RANK {environ.get('RANK', 'unset')} of WORLD_SIZE {size}", "ranks from 0 to WORLD_SIZE - 1"
        raise UserError.at("environment variables", found=found, expected=expected, fix=_FIX)


def stay_on_host(environ: MutableMapping[str, str] = os.environ) -> None:
    """Restrict gloo and NCCL to the loopback interface if all ranks are on this host."""
    alone = environ.get("LOCAL_WORLD_SIZE", "1") == environ.get("WORLD_SIZE", "1")
    if alone and "lo" in (name for _, name in socket.if_nameindex()):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environ.setdefault(name, "lo")


def raise_open_files() -> None:
    """Raise this process's soft limit on open files, often 1,024, to the hard limit if permitted: gloo opens a socket
    to each other rank.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_QUEUES, _FEW = "CUDA_DEVICE_MAX_CONNECTIONS", range(8)  # CUDA's default is 8.
_DEFAULTS = {
    (_QUEUES,): "32",
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
}
_TRACES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of CUDA and the allocator that the user has not set. Idempotent; call it before CUDA is
    initialised. Warns on rank 0 if the call is too late, or if the user has set few hardware queues for a GPU.
    """
    missing = {names[0]: value for names, value in _DEFAULTS.items() if not any(name in environ for name in names)}
    environ.update(missing)
    environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # Keep the NCCL backend of PyTorch before 2.15.
    if environ.get("RANK", "0") != "0":
        return
    if missing and _cuda_is_initialized():
        wanted = " ".join(f"{name}={value}" for name, value in missing.items())
        warnings.warn(
            f"CUDA was initialised without {' and '.join(missing)}, which it reads only then. Start the program with "
            f"{wanted}, or call `prepare_environment` first",
            stacklevel=2,
        )
    torch, queues = sys.modules.get("torch"), environ[_QUEUES]
    if queues in map(str, _FEW) and torch is not None and torch.cuda.is_available():
        found = f"{_QUEUES}={queues} makes streams wait for each other: little communication overlaps with computation"
        warnings.warn(f"{found}. Unset it; 32 are used then", stacklevel=1)  # This level shows it only once.


def group_timeout(timeout_s: float, environ: MutableMapping[str, str] = os.environ) -> timedelta:
    """Return the time-out of process groups: longer than the watchdog's `timeout_s`, so that the watchdog reports
    first, or a day without a watchdog (0). NCCL's heartbeat, which ends processes whose CUDA calls hang, gets the same
    time-out. NCCL counts from when an operation is issued, which may be long before it starts.
    """
    timeout = timedelta(days=1)
    if timeout_s > 0:
        longest = 24 * 86400  # torch counts the heartbeat in milliseconds, as a 32-bit integer.
        timeout = timedelta(seconds=min(max(1800.0, 1.5 * timeout_s), longest))
    environ.setdefault(_HEARTBEAT, str(int(timeout.total_seconds())))
    return timeout


def prepare_traces(folder: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Create `folder`, and have NCCL's flight recorder write one file per rank to it."""
    if not any(name in environ for name in _TRACES):
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder, *folder.iterdir()):  # NCCL would follow a link.
            if path.is_symlink():
                raise OSError(errno.ELOOP, f"{path.name} is a symbolic link", str(path))
        environ[_TRACES[0]] = str(folder / "rank")


def write_trace(rank: int, environ: MutableMapping[str, str] = os.environ) -> str:
    """Dump the flight recorder of this rank's NCCL operations, for `torch.distributed.flight_recorder`.

    Returns a note with the file's path, or an empty string without NCCL, without a path, or if writing fails: the
    caller has another error to report anyway.
    """
    prefix = next((environ[name] for name in _TRACES if name in environ), None)
    torch = sys.modules.get("torch")
    if prefix is None or torch is None or not _cuda_is_initialized():
        return ""
    try:
        with replacing(path := Path(f"{prefix}{rank}")) as new:
            new.write_bytes(torch._C._distributed_c10d._dump_nccl_trace())
    except (AttributeError, OSError, RuntimeError):
        return ""
    return f"rank {rank}: wrote its last NCCL operations to {path}"


def _cuda_is_initialized() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
