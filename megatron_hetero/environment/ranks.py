"""The environment variables by which torchrun, or another launcher, describes the ranks. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from collections.abc import Mapping, MutableMapping

from megatron_hetero.errors import UserError

LAUNCHER = "python -m megatron_hetero.run"
"""Starts the ranks: torchrun, with our handling of their exit."""
MOST_PORT = 65535
_LEAST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
_FIX = f"start the ranks with {LAUNCHER} or torchrun, which set it"


def rank() -> int:
    """The rank that torchrun gave this process; 0 for a process alone."""
    return _number("RANK", 0)


def world_size() -> int:
    """The number of ranks that torchrun started; 1 for a process alone."""
    return _number("WORLD_SIZE", 1)


def local_rank() -> int:
    """The number of this rank on its host."""
    return _number("LOCAL_RANK", 0)


def has_agent_store() -> bool:
    """Whether torchrun on the first host serves the store of all ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meeting_address() -> tuple[str, int]:
    """Host and port of the rendezvous store."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def resolves(address: str) -> bool:
    """Whether this host can resolve the name. It may take seconds."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError):
        return False
    return True


def named_place(address: str, port: int) -> str:
    """Host and port for a message, with a note if the name does not resolve."""
    return f"{address}:{port}" + ("" if resolves(address) else " (whose name does not resolve)")


def _number(name: str, default: int) -> int:
    """The value of a variable; the default if it is not a number, which `require_numbers` reports."""
    text = os.environ.get(name, "")
    return int(text) if _is_number(text) else default


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]{1,9}", text) is not None


def require_numbers(environ: Mapping[str, str] = os.environ) -> None:
    """Check the variables that identify this rank. Raises `UserError`."""
    for name, least in _LEAST.items():
        text = environ.get(name)
        if text is not None and not (_is_number(text) and int(text) >= least):
            # An empty one counts as unset.
            fix = _FIX if environ.get("RANK") else f"unset {name}, or {_FIX}"
            raise _wrong(name, f"`{text}`", f"a number of at least {least}", fix)
    if int(environ.get("MASTER_PORT", "1")) > MOST_PORT:
        found, fix = environ["MASTER_PORT"], "choose a free port of the host of rank 0, such as 29500"
        raise _wrong("MASTER_PORT", found, f"1 to {MOST_PORT}", fix)
    size = int(environ.get("WORLD_SIZE", "1"))
    if "RANK" not in environ:
        if size > 1:
            raise _wrong("WORLD_SIZE", f"{size} without RANK", "both or neither", f"unset WORLD_SIZE, or {_FIX}")
    elif "WORLD_SIZE" not in environ:
        raise _unset("WORLD_SIZE", "the number of ranks")
    elif int(environ["RANK"]) >= size:
        raise _wrong("RANK", environ["RANK"], f"0 to {size - 1}, because WORLD_SIZE is {size}", _FIX)


def require_meeting_place(environ: Mapping[str, str] = os.environ) -> None:
    """Check that the rendezvous address is set, for a process that is not alone. Raises `UserError`."""
    require_numbers(environ)
    for name, what in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a free port there")):
        if not environ.get(name):
            raise _unset(name, what)


def stay_on_host(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo and NCCL listen on the loopback interface alone if all ranks are on this host, unless the user names
    interfaces.
    """
    alone = environ.get("LOCAL_WORLD_SIZE", "1") == environ.get("WORLD_SIZE", "1")
    if alone and "lo" in (name for _, name in socket.if_nameindex()):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environ.setdefault(name, "lo")


def raise_open_files() -> None:
    """Raise this process's limit of open files to the hard one, where that may be: host groups have a socket for each
    other rank, and the limit is often 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _unset(name: str, what: str) -> UserError:
    return UserError.at(f"environment variable {name}", problem=f"not set, but RANK is; it is {what}", fix=_FIX)


def _wrong(name: str, found: str, expected: str, fix: str) -> UserError:
    return UserError.at(f"environment variable {name}", found=found, expected=expected, fix=fix)
