"""Outputs of runs: folders of checkpoints, exports, and names of files in `log.dir`.

checkpoints/
  step-00000010/             a complete checkpoint
    manifest.json            size and SHA-256 of every other file; written last
    tensors.json  tensors-0-0.safetensors  tensors-1-0.safetensors ...  run.json  metrics.jsonl
  .step-00000020.partial/    an unfinished checkpoint: it is being written, or the run died
  .step-00000000.removed/    an older checkpoint that is being removed
  .step-00000030.aside/      an incomplete folder found at a checkpoint's path, renamed for inspection
  latest                     the name of the newest checkpoint, for people and scripts
  .lock                      locked by the run that writes here

Only folders that contain nothing but checkpoint files are removed.

An export has a file that lists its other files and their inodes. A new export replaces a folder only if it contains
exactly these files. A downloaded copy has different inodes and is therefore never replaced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct, defstruct, to_builtins

from megatron_hetero.base.errors import UserError, quoted, reason
from megatron_hetero.base.files import in_the_way, open_own, open_regular, read_as, read_own, replacing, unusable

MANIFEST, LATEST, LOCK = "manifest.json", "latest", ".lock"
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_PARTIAL = re.compile(rf"\.{_NAME.pattern}\.partial")
_REMOVED = re.compile(rf"\.{_NAME.pattern}\.removed")
_FILE = re.compile(r"tensors-\d+-\d+\.safetensors|(manifest|tensors|run|modules)\.json|metrics\.jsonl")
"""Pattern of the names of a checkpoint's files."""
ANOTHER = "use another checkpoint (of a run: --checkpoint.resume PATH)"
SEEN_S = 30.0
"""Maximum seconds until a file that one host has written to a network file system is visible on another host."""


class FileRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The size in bytes and the SHA-256 of a file."""

    size: int
    sha256: str


_MANIFEST = defstruct("Manifest", [("files", dict[str, FileRecord])])


def name_of(step: int) -> str:
    """Return the name of the checkpoint that is saved after `step`."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint, or None for any other name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def is_ours(name: str) -> bool:
    """Return whether `name` is reserved in a folder of checkpoints."""
    return name in (LATEST, LOCK) or re.fullmatch(rf"\.?{_NAME.pattern}(\..*)?", name) is not None


def partial_of(target: Path) -> Path:
    """Return the temporary folder of the checkpoint `target` while it is being written."""
    return target.parent / f".{target.name}.partial"


def whole(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in `folder` by step, ascending."""
    named = {step: path for path in _children(folder) if (step := step_of(path)) is not None}
    return {step: path for step, path in sorted(named.items()) if (path / MANIFEST).is_file()}


def chosen_in(path: Path) -> Path:
    """Return the newest complete checkpoint if `path` is a folder of checkpoints; return any other path unchanged."""
    if (path / MANIFEST).is_file():
        return path
    return next(reversed(whole(path).values()), path)


def advice_to_export(path: Path) -> str | None:
    """Return advice for a user who gave a checkpoint as a model's folder, or None if `path` has no checkpoint."""
    chosen = chosen_in(path)
    if not (chosen / MANIFEST).is_file():
        return None
    return f"export the checkpoint first: python -m megatron_hetero.cli.export {chosen} DIR"


def unfinished(folder: Path) -> tuple[Path, ...]:
    """Return the unfinished checkpoints in `folder`."""
    return tuple(path for path in sorted(_children(folder)) if _PARTIAL.fullmatch(path.name))


def without_manifest(folder: Path) -> tuple[Path, ...]:
    """Return the folders that are named like checkpoints but have no manifest; no run leaves such folders behind."""
    named = [path for path in sorted(_children(folder)) if step_of(path) is not None]
    return tuple(path for path in named if not (path / MANIFEST).is_file())


def wait_for(there: Callable[[], bool]) -> bool:
    """Wait up to `SEEN_S` seconds until `there()`, which checks another process's files. Returns whether it is true."""
    until = time.monotonic() + SEEN_S
    while not there():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def record_file(path: Path) -> FileRecord:
    """Read a file and return its size and hash. Raises `OSError`."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(file.tell(), digest.hexdigest())


def write_synced(path: Path, text: str) -> FileRecord:
    """Write a new text file, sync it to disk, and return its size and hash. Raises `OSError`."""
    content = text.encode("utf-8")
    with open_own(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def publish(partial: Path, records: Mapping[str, FileRecord]) -> Path:
    """Publish a fully written checkpoint: write its manifest, rename its folder, and, if the folder is named after a
    step, update `latest`. Until the rename, readers do not see a checkpoint. Returns its path. Raises `OSError`.
    """
    files = {"files": to_builtins(dict(sorted(records.items())))}
    write_synced(partial / MANIFEST, json.dumps(files, indent=2) + "\n")
    _sync(partial)
    target = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    if (target / MANIFEST).is_file():
        raise FileExistsError(errno.EEXIST, "another checkpoint", str(target))
    if _children(target):
        set_aside(target)
    partial.rename(target)
    _sync(target.parent)
    if step_of(target) is not None:
        if not _is_pointer(latest := target.parent / LATEST):
            set_aside(latest)
        with replacing(latest) as new:
            new.write_text(target.name + "\n", encoding="utf-8")
            _sync(new)
    _sync(target.parent)
    return target


def _is_pointer(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return re.fullmatch(rf"({_NAME.pattern})?\s*", read_own(path, 100).decode("utf-8", "replace")) is not None
    return False


def set_aside(path: Path) -> None:
    """Rename a file or folder that occupies a checkpoint's path to a free `.aside` name. Raises `OSError`."""
    names = (f".{path.name}.aside{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))
    path.rename(next(other for name in names if not os.path.lexists(other := path.with_name(name))))


def prune(folder: Path, keep: int | None, written: Path | None = None) -> None:
    """Remove all complete checkpoints except the newest `keep` (None: keep all) and the one just `written`. Checkpoints
    that contain other files or cannot be removed stay.
    """
    for path in list(whole(folder).values())[: -keep if keep is not None else 0]:
        with contextlib.suppress(OSError):  # Rename first: a partly removed checkpoint must not look complete.
            if path != written and _is_removable(path):
                path.rename(path.with_name(f".{path.name}.removed"))
    clean(folder)


def clean(folder: Path) -> None:
    """Remove unfinished and partly removed checkpoints in `folder`. Only the run that holds its lock may call this."""
    for path in _children(folder):
        if _PARTIAL.fullmatch(path.name) or _REMOVED.fullmatch(path.name):
            discard(path)


def discard(partial: Path) -> None:
    """Remove an unfinished checkpoint if it exists and contains only checkpoint files."""
    with contextlib.suppress(OSError):
        if _is_removable(partial):
            shutil.rmtree(partial)


def _is_removable(checkpoint: Path) -> bool:
    return not checkpoint.is_symlink() and all(
        _FILE.fullmatch(path.name) and path.is_file() and not path.is_symlink() for path in _children(checkpoint)
    )


def read_manifest(checkpoint: Path, needed: Collection[str] = ()) -> dict[str, FileRecord]:
    """Read the size and hash of every file of a checkpoint. Raises `UserError`, also if a `needed` file is missing."""
    path = checkpoint / MANIFEST
    try:
        records = read_as(path, _MANIFEST, _another(checkpoint)).files
    except FileNotFoundError:
        problem = "missing" if checkpoint.is_dir() else "no such checkpoint"
        raise UserError.at(path, problem=problem, fix=_another(checkpoint)) from None
    for name in records:
        if Path(name).name != name or name in ("", "..") or unusable(path.with_name(name)):
            raise UserError.at(path, problem=f"unreadable (the file name {quoted(name)})", fix=_another(checkpoint))
    if absent := [f"{name} is not in the manifest" for name in needed if name not in records]:
        raise damaged(checkpoint, absent)
    return records


def require_own_name(checkpoint: Path, step: int, record: str) -> None:
    """Check that the step in a checkpoint's name, if any, equals the `step` in its `record`: the newest checkpoint and
    those to delete are chosen by name. Raises `UserError`.
    """
    if (named := step_of(checkpoint)) not in (None, step):
        found, expected = f"step {named} in the name", f"{name_of(step)}, as in its {record}"
        because, fix = "the newest checkpoint is found by name", f"rename the folder to {name_of(step)}"
        raise UserError.at(checkpoint, found=found, expected=expected, because=because, fix=fix)


def verify(checkpoint: Path, records: Mapping[str, FileRecord], names: Iterable[str]) -> list[str]:
    """Return one line for each file in `names` that differs from its record or cannot be read."""
    return [fault for name in names if (fault := _fault(checkpoint / name, records[name]))]


def unwritable(where: Path, error: OSError) -> UserError:
    """Return the error for a checkpoint that cannot be written."""
    intact, remedy = "; older ones are intact", "free space or grant access"
    if isinstance(error, FileNotFoundError):
        intact, remedy = "", "see who removes the folder"
    problem = f"cannot write a checkpoint ({in_the_way(where, error)}){intact}"
    fix = f"{remedy}, or choose another folder (of a run: --checkpoint.dir DIR)"
    return UserError.at(error.filename or where, problem=problem, fix=fix)


def damaged(checkpoint: Path, faults: Iterable[str]) -> UserError:
    """Return the error for a checkpoint with damaged files."""
    lines = list(faults)
    problem = f"{len(lines)} damaged {'file' if len(lines) == 1 else 'files'} ({'; '.join(lines)})"
    return UserError.at(checkpoint, problem=problem, fix=_another(checkpoint))


def _fault(path: Path, expected: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size} bytes, not {expected.size}"
        return None if record_file(path) == expected else f"{path.name} has a different SHA-256"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {reason(error)}"


def _another(checkpoint: Path) -> str:
    others = [path for path in whole(checkpoint.parent).values() if path.name != checkpoint.name]
    return ANOTHER.replace("PATH", str(others[-1])) if others else ANOTHER


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ----------------------------------------------------------------------------------------------- exports


def new_beside(target: Path, kind: str) -> Path:
    """Return a new path for a temporary folder of `target`: `partial` for a new export, `replaced` for the old one."""
    return target.parent / f".{target.name}.{kind}-{secrets.token_hex(4)}"


def remove_leftovers(target: Path, kind: str) -> None:
    """Remove temporary folders that killed exports to `target` left. Only the export with the lock may call this."""
    name = re.compile(rf"\.{re.escape(target.name)}\.{kind}-[0-9a-f]{{8}}")
    for path in _children(target.parent):
        with contextlib.suppress(OSError, ValueError):
            if not name.fullmatch(path.name) or path.is_symlink() or _marked(path) is None:
                continue
            # The mark of a partial export does not list all of its files yet.
            if kind == "partial" or what_would_be_lost(path) is None:
                remove_marked(path)


def remove_marked(folder: Path) -> None:
    """Remove an export, if it exists, and its mark last. Stop without an error at a file that cannot be removed."""
    with contextlib.suppress(OSError):
        for path in _children(folder):
            if path.name != MARK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(folder)


def lock_of(target: Path) -> Path:
    """Return the path of the lock file of exports to `target`."""
    return target.parent / f".{target.name}.lock"


MARK = "megatron_hetero_export.json"
_MARK = defstruct("Mark", [("inode", int), ("files", dict[str, list[int]])])


def mark(folder: Path) -> None:
    """Mark a folder as an export that consists of its present files. Raises `OSError`."""
    files = {name: (path.lstat().st_size, path.lstat().st_ino) for name, path in _files(folder)}
    with replacing(folder / MARK) as new:
        new.write_text(json.dumps({"inode": folder.stat().st_ino, "files": files}, indent=2) + "\n", encoding="utf-8")


def _marked(folder: Path) -> Mapping[str, list[int]] | None:
    """Return the files listed in a folder's mark, or None if it marks another folder. Raises `OSError`, `UserError`."""
    marked = read_as(folder / MARK, _MARK, "remove the folder yourself if nobody needs it")
    return marked.files if marked.inode == folder.stat().st_ino else None


def what_would_be_lost(folder: Path) -> str | None:
    """Return what would be lost if an export replaced `folder`, or None if the folder is absent, empty or an unchanged
    export. Raises `OSError` if it cannot be read.
    """
    if not os.path.lexists(folder):
        return None
    if folder.is_symlink() or not folder.is_dir():
        return f"something that is not an exported model (a {'link' if folder.is_symlink() else 'file'})"
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return None
    if MARK not in names:
        return f"something that is not an exported model ({names[0]}, and no {MARK})"
    try:
        written = _marked(folder)
    except UserError as error:
        return f"a {MARK} that cannot be read ({error})"
    if written is None:
        return f"a {MARK} of another folder (a copy, a download, or an export of an earlier version)"
    for name, path in _files(folder):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or written.get(name) != [status.st_size, status.st_ino]:
            return f"{name}, which is not as the export left it"
    return None


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield relative path and path of each file and link below a folder except its mark. Raises `OSError`."""

    def refuse(error: OSError) -> None:
        raise error

    for inside, folders, files in os.walk(folder, onerror=refuse):
        for path in (Path(inside, name) for name in sorted([*folders, *files])):
            if path != folder / MARK and (path.is_symlink() or not path.is_dir()):
                yield str(path.relative_to(folder)), path


# ----------------------------------------------------------------------------------------------- log.dir


METRICS, CONFIG, LOG_LOCK = "metrics.jsonl", "config.yaml", ".metrics.lock"
BAD_RECORDS = "bad_records.jsonl"
WANDB_ID = "wandb-run-id"
"""Name of the file with the ID of the Weights & Biases run, which a resumed run continues."""
OF_A_RUN = (METRICS, CONFIG, BAD_RECORDS, "evaluation.json", WANDB_ID, "events.out.tfevents.*", "trace-rank*.json")
"""Glob patterns of the files that a run writes."""
