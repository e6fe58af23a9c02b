"""What torchrun, or whoever else starts the ranks, says of them in the environment. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from megatron_hetero.errors import UserError

LAUNCHER = "python -m megatron_hetero.run"
"""How ranks are started: torchrun with our endings."""
_LEAST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0, "MASTER_PORT": 1}
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


def host_number() -> int:
    """The number of this rank's host under torchrun; 0 without it."""
    return _number("GROUP_RANK", 0)


def has_agent_store() -> bool:
    """Whether the torchrun of the first host keeps a store for all its ranks, through their restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meeting_address() -> tuple[str, int]:
    """Host and port of the store in which the ranks meet."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _number(name: str, default: int) -> int:
    """What a variable says; the default where that is no number, which `require_numbers` tells."""
    text = os.environ.get(name, "")
    return int(text) if _is_number(text) else default


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]{1,9}", text) is not None


def require_numbers(environ: Mapping[str, str] = os.environ) -> None:
    """Check what says which rank this is. Raises `UserError`."""
    for name, least in _LEAST.items():
        text = environ.get(name)
        if text is not None and not (_is_number(text) and int(text) >= least):
            fix = _FIX if "RANK" in environ else f"unset {name}, or {_FIX}"
            raise _wrong(name, f"`{text}`", f"a number of at least {least}", fix)
    size = int(environ.get("WORLD_SIZE", "1"))
    if "RANK" not in environ:
        if size > 1:
            raise _wrong("WORLD_SIZE", f"{size} without RANK", "both or neither", f"unset WORLD_SIZE, or {_FIX}")
    elif "WORLD_SIZE" not in environ:
        raise _wrong("WORLD_SIZE", "nothing beside RANK", "the number of ranks", _FIX)
    elif int(environ["RANK"]) >= size:
        raise _wrong("RANK", environ["RANK"], f"0 to {size - 1}, because WORLD_SIZE is {size}", _FIX)


def require_meeting_place(environ: Mapping[str, str] = os.environ) -> None:
    """Check that it says where the ranks meet, for one that is not alone. Raises `UserError`."""
    require_numbers(environ)
    for name, what in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a free port there")):
        if not environ.get(name):
            raise _wrong(name, "nothing beside RANK", f"{what}, where the ranks meet", _FIX)


def _wrong(name: str, found: str, expected: str, fix: str) -> UserError:
    return UserError.at(f"environment variable {name}", found=found, expected=expected, fix=fix)
