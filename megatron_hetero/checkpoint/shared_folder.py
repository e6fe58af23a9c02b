"""Makes sure that only one run writes to a folder, and that all of its ranks see the same one."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_hetero.distributed.collective import FIRST, Working, on_every, on_first
from megatron_hetero.errors import UserError, os_errors_as
from megatron_hetero.files.lock import Lock
from megatron_hetero.outputs.checkpoints import unwritable, wait_for

_FREE_S = 15.0
"""Seconds for which a run that has just died may still hold its lock."""


def lock_folder(
    folder: Path, setting: str, lock: str, mixed: str, unwritable: Callable[[Path, OSError], UserError]
) -> Lock:
    """Lock the folder of a run, which is created if necessary, by the file `lock` in it. `setting`: what names it;
    `mixed`: what of two runs would mix. Raises `UserError`, made by `unwritable` for a folder that cannot be written.
    """
    fix = f"choose another {setting}, or end the other run first"
    with os_errors_as(partial(unwritable, folder)):
        folder.mkdir(parents=True, exist_ok=True)
        return Lock.take(folder / lock, f"{setting}: {folder}", "run", mixed=mixed, fix=fix, wait_s=_FREE_S)


def require_shared(folder: Path, group: dist.ProcessGroup, working: Working = nullcontext) -> None:
    """Check that all ranks of `group` see the same folder. Raises `UserError` on every rank."""
    mark = folder / on_first(group, lambda: _leave_mark(folder), working)
    try:
        on_every(group, lambda: _find(mark), working)
    finally:
        if dist.get_rank(group) == FIRST:
            mark.unlink(missing_ok=True)


def _leave_mark(folder: Path) -> str:
    name = f".seen-{uuid.uuid4().hex}"
    with os_errors_as(partial(unwritable, folder)):
        (folder / name).touch()
    return name


def _find(mark: Path) -> None:
    if not wait_for(mark.exists):
        raise UserError.at(
            f"checkpoint.dir: {mark.parent}",
            problem=f"host {socket.gethostname()} sees another folder than the first rank",
            because="all ranks write to one checkpoint",
            fix="choose a checkpoint.dir on storage that all nodes share",
        )
