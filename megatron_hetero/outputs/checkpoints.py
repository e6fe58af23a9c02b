"""The folder of checkpoints: what is whole, what is newest, what is removed, and whether files are what was written.

checkpoints/
  step-00000010/             a whole checkpoint
    manifest.json            size and SHA-256 of every other file; written last
    .metadata  __0_0.distcp  __1_0.distcp ...  run.json  metrics.jsonl
  .step-00000020.partial/    one that is being written, or was when the run died
  .step-00000000.removed/    an older one that is being removed, or was
  .step-00000030.aside/      what was in the way of a checkpoint and was none that is whole: for people to look at
  step-00000031.unsound/     what was trained before a step that was not finite: no run goes on from it by itself
  latest                     the name of the newest one, for people and scripts
  .lock                      held by the run that writes here
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.errors import UserError, quoted
from megatron_hetero.files.opening import open_regular, read_text
from megatron_hetero.files.paths import in_the_way, unusable

MANIFEST, LATEST = "manifest.json", "latest"
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_UNSOUND = ".unsound"
_PARTIAL = re.compile(rf"\.{_NAME.pattern}({_UNSOUND})?\.partial")
_REMOVED = re.compile(rf"\.{_NAME.pattern}({_UNSOUND})?\.removed")
SEEN_S = 30.0
"""Seconds after which a network's file system shows to one host what another has written."""
_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


def name_of(step: int) -> str:
    """What the checkpoint after `step` is called."""
    return f"step-{step:08d}"


def unsound_name_of(step: int) -> str:
    """What the one after `step` is called where it may not be taken for the newest: its weights may be past mending."""
    return name_of(step) + _UNSOUND


def step_of(checkpoint: Path) -> int | None:
    """The step that the name of a checkpoint says, if it says one."""
    found = _NAME.fullmatch(checkpoint.name)
    return int(found[1]) if found else None


def is_ours(name: str) -> bool:
    """Whether a folder of checkpoints keeps something of its own under that name."""
    return name in (LATEST, ".lock") or re.fullmatch(rf"\.?{_NAME.pattern}(\..*)?", name) is not None


def partial_of(checkpoint: Path) -> Path:
    """Where a checkpoint is while it is written."""
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def whole(folder: Path) -> dict[int, Path]:
    """The whole checkpoints in `folder` by step, ascending."""
    found = {int(m[1]): path for path in _children(folder) if (m := _NAME.fullmatch(path.name))}
    return {step: found[step] for step in sorted(found) if (found[step] / MANIFEST).is_file()}


def chosen_in(path: Path) -> Path:
    """`path` itself, or the newest whole checkpoint in it where it is a folder of some."""
    if (path / MANIFEST).is_file():
        return path
    return next(reversed(whole(path).values()), path)


def advice_to_export(path: Path) -> str | None:
    """What to do with a folder of ours that is taken for a model's; None where it holds no checkpoint."""
    chosen = chosen_in(path)
    if not (chosen / MANIFEST).is_file():
        return None
    return f"export the checkpoint first: python -m megatron_hetero.cli.export {chosen} DIR"


def unfinished(folder: Path) -> tuple[Path, ...]:
    """What was never finished in `folder`: half-written checkpoints."""
    return tuple(path for path in sorted(_children(folder)) if _PARTIAL.fullmatch(path.name))


def without_manifest(folder: Path) -> tuple[Path, ...]:
    """What has the name of a checkpoint in `folder`, and no manifest: whatever it is, no run has left it so."""
    named = [path for path in sorted(_children(folder)) if _NAME.fullmatch(path.name)]
    return tuple(path for path in named if not (path / MANIFEST).is_file())


def wait_for(there: Callable[[], bool], seconds: float | None = None) -> bool:
    """Whether something becomes true, in `SEEN_S` if not said otherwise, that another process does to files."""
    until = time.monotonic() + (SEEN_S if seconds is None else seconds)
    while not there():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def record_file(path: Path) -> FileRecord:
    """Read a file to the end. Raises `OSError`."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while block := file.read(_CHUNK):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def write_synced(path: Path, text: str) -> FileRecord:
    """Write a file and wait until the disk has it. Raises `OSError`."""
    content = text.encode("utf-8")
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def publish(partial: Path, records: Mapping[str, FileRecord]) -> Path:
    """Make a checkpoint that has been written whole visible: manifest, then its name, then `latest` where it is named
    after its step. Raises `OSError`.

    Until the rename nothing can take it for a checkpoint; afterwards nothing is missing.
    """
    files = {name: {"size": r.size, "sha256": r.sha256} for name, r in sorted(records.items())}
    write_synced(partial / MANIFEST, json.dumps({"files": files}, indent=2) + "\n")
    _sync_folder(partial)
    target = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    if (target / MANIFEST).is_file():
        raise FileExistsError(errno.EEXIST, "another checkpoint", str(target))
    if _children(target):
        set_aside(target)
    partial.rename(target)
    _sync_folder(target.parent)
    if _NAME.fullmatch(target.name):
        pointer = target.parent / f".{LATEST}.new"
        write_synced(pointer, target.name + "\n")
        pointer.replace(target.parent / LATEST)
    _sync_folder(target.parent)
    return target


def set_aside(path: Path) -> Path:
    """Give what is in the way of a checkpoint another name, which is returned. Raises `OSError`."""
    names = (f".{path.name}.aside{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))
    other = next(place for name in names if not os.path.lexists(place := path.with_name(name)))
    path.rename(other)
    return other


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` whole checkpoints (None: nothing). What cannot be removed stays."""
    for path in list(whole(folder).values())[: -keep if keep is not None else 0]:
        with contextlib.suppress(OSError):
            _doom(path)
    clean(folder)


def remove(checkpoint: Path) -> None:
    """Remove one, if it is there. Raises `OSError` where it cannot be moved out of the way."""
    if os.path.lexists(checkpoint):
        _doom(checkpoint)
        clean(checkpoint.parent)


def _doom(checkpoint: Path) -> None:
    # Another name first: what is removed by half is not whole.
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.removed"))


def clean(folder: Path) -> None:
    """Remove what was never finished in `folder`, and what was to be removed. For the run that holds its lock alone."""
    for path in _children(folder):
        if _PARTIAL.fullmatch(path.name) or _REMOVED.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink() if path.is_symlink() else shutil.rmtree(path)


def read_manifest(checkpoint: Path, needed: Collection[str] = ()) -> dict[str, FileRecord]:
    """Size and hash of every file of a checkpoint, the `needed` ones among them. Raises `UserError`."""
    path = checkpoint / MANIFEST
    try:
        files = json.loads(read_text(path))["files"]
        records = {name: FileRecord(int(r["size"]), str(r["sha256"])) for name, r in files.items()}
        for name in records:
            if Path(name).name != name or name in ("", "..") or "\0" in name or unusable(path.with_name(name)):
                raise ValueError(f"the file name {quoted(name)}")
        if absent := [f"{name} is not in the manifest" for name in needed if name not in records]:
            raise damaged(checkpoint, absent)
        return records
    except UserError:
        raise
    except FileNotFoundError:
        found = "none" if checkpoint.is_dir() else "no such checkpoint"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        found = f"one that cannot be read ({error})"
    raise UserError.at(
        path,
        found=found,
        expected="the manifest of a checkpoint",
        because="it is written last, and without it nothing says that the checkpoint is whole",
        fix=_another(checkpoint),
    )


def verify(checkpoint: Path, records: Mapping[str, FileRecord], names: Iterable[str]) -> list[str]:
    """What is wrong with those files of a checkpoint, a line for each."""
    return [fault for name in names if (fault := _fault(checkpoint / name, records[name]))]


def unwritable(where: Path, error: OSError) -> UserError:
    """The error that says why a checkpoint cannot be written."""
    gone = isinstance(error, FileNotFoundError)
    remedy = "see who removes the folder" if gone else "free space or grant access"
    return UserError.at(
        f"checkpoint.dir: {error.filename or where}",
        found=in_the_way(where, error),
        expected="a folder that can be written",
        because="a checkpoint goes there" if gone else "a checkpoint goes there; older ones are as they were",
        fix=f"{remedy}, or choose another folder with --checkpoint.dir DIR",
    )


def damaged(checkpoint: Path, faults: Iterable[str]) -> UserError:
    """The error that says which files of a checkpoint are not what was written."""
    lines = list(faults)
    return UserError.at(
        checkpoint,
        found=f"{len(lines)} damaged {'file' if len(lines) == 1 else 'files'} ({'; '.join(lines)})",
        expected="the sizes and hashes of its manifest",
        because="nothing may train on what was not saved",
        fix=_another(checkpoint),
    )


def _fault(path: Path, expected: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size} bytes, not {expected.size}"
        return None if record_file(path) == expected else f"{path.name} has another SHA-256"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {(error.strerror or str(error)).lower()}"


def _another(checkpoint: Path) -> str:
    others = [path for path in whole(checkpoint.parent).values() if path.name != checkpoint.name]
    return (
        f"take another checkpoint (a run goes on from it with --checkpoint.resume {others[-1] if others else 'PATH'})"
    )


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
