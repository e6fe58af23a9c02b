"""Writes checkpoints whole or not at all, and verifies them; collective over all ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megatron_hetero.checkpoint.format.keys import Entry
from megatron_hetero.checkpoint.format.storage import write_entries
from megatron_hetero.distributed.collective import FIRST, Working, on_every, on_first
from megatron_hetero.errors import UserError, os_errors_as
from megatron_hetero.outputs.checkpoints import (
    FileRecord,
    clean,
    damaged,
    name_of,
    partial_of,
    prune,
    publish,
    read_manifest,
    unwritable,
    verify,
    wait_for,
    write_synced,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its folder, and its size in bytes."""

    path: Path
    size: int


def save(
    entries: Sequence[Entry],
    folder: Path,
    step: int,
    texts: Callable[[], Mapping[str, str]],
    keep_last: int | None,
    group: dist.ProcessGroup,
    working: Working = nullcontext,
) -> Saved:
    """Write the checkpoint after `step` into `folder`: under a temporary name, checked, renamed; then remove older
    ones. Collective over `group`; `texts`, files other than tensors by name, are the first rank's.

    Raises `UserError` on every rank if it cannot be written; older checkpoints are then intact.
    """
    partial, rank = partial_of(folder / name_of(step)), dist.get_rank(group)
    try:
        on_first(group, lambda: _writing(partial, lambda: _make(partial)), working)
        tensors = write_entries(partial, entries, group, working=working)
        own = on_every(
            group,
            lambda: _writing(partial, lambda: tensors | (_write_texts(partial, texts()) if rank == FIRST else {})),
            working,
        )
        records = {name: found for of_rank in own for name, found in of_rank.items()}
        return on_first(group, lambda: _writing(folder, lambda: _finish(partial, records, keep_last)), working)
    except UserError:
        # All ranks have stopped writing; the next checkpoint needs the space.
        if rank == FIRST:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def verified(
    checkpoint: Path, needed: Collection[str], group: dist.ProcessGroup, working: Working = nullcontext
) -> Mapping[str, FileRecord]:
    """Verify sizes and hashes of all files, those `needed` among them, and return them; the ranks divide the files
    among them. Raises `UserError` on every rank, naming all faults.
    """
    manifest = on_first(group, lambda: read_manifest(checkpoint, needed))
    mine = sorted(manifest)[dist.get_rank(group) :: dist.get_world_size(group)]
    faults = on_every(group, lambda: verify(checkpoint, manifest, mine), working)
    if any(faults):
        raise damaged(checkpoint, sorted(fault for of_rank in faults for fault in of_rank))
    return manifest


def _make(partial: Path) -> None:
    clean(partial.parent)
    partial.mkdir()


def _write_texts(partial: Path, texts: Mapping[str, str]) -> dict[str, FileRecord]:
    """Write the files of a checkpoint other than tensors."""
    return {name: write_synced(partial / name, text) for name, text in texts.items()}


def _finish(partial: Path, records: Mapping[str, FileRecord], keep_last: int | None) -> Saved:
    for name, record in records.items():
        if not wait_for(lambda: _size(partial / name) == record.size):  # noqa: B023 (called in this turn)
            raise UserError.at(
                partial / name,
                problem=f"missing or truncated on the first rank ({record.size} bytes written by another)",
                fix="choose a folder on storage that all nodes share (of a run: --checkpoint.dir DIR)",
            )
    target = publish(partial, records)
    prune(target.parent, keep_last, target)
    return Saved(target, sum(record.size for record in records.values()))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _writing(where: Path, work: Callable[[], T]) -> T:
    """The result of `work`. Raises `UserError` for a full disk and the like."""
    with os_errors_as(partial(unwritable, where)):
        return work()
