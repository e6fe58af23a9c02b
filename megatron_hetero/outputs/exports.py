"""Folders of exports: temporary paths next to the folder that one replaces, and the mark that it has.

Recognises folders that hold an export of ours and nothing else, by a file in each that lists what was written.

A folder that merely looks like a model is never replaced, since one downloaded or trained elsewhere looks the same. Nor
is an export with added files, or one that another program has saved over.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


def partial_of(target: Path) -> Path:
    """Where an export is written before it takes its place."""
    return target.parent / f".{target.name}.partial"


def replaced_of(target: Path) -> Path:
    """Where an earlier export is moved while the new one takes its place."""
    return target.parent / f".{target.name}.replaced"


def lock_of(target: Path) -> Path:
    """The lock file of an export, so that two never write the same folder."""
    return target.parent / f".{target.name}.lock"


MARK = "megatron_hetero_export.json"


def mark(folder: Path) -> None:
    """Mark a folder as a complete export. Raises `OSError`."""
    files = {name: entry.stat().st_size for name, entry in _files(folder) if name != MARK}
    (folder / MARK).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def what_would_be_lost(folder: Path) -> str | None:
    """Why a folder must not be replaced: what it holds other than an export of ours. None if nothing is there, or it
    may be replaced. Raises `OSError` if it cannot be read.
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
        written = _listed(folder / MARK)
    except ValueError as error:
        return f"a {MARK} that cannot be read ({error})"
    strange = next((name for name, entry in _files(folder) if name != MARK and not _is_as(entry, written, name)), None)
    return strange and f"{strange}, which is not as the export left it"


def _listed(path: Path) -> Mapping[str, int]:
    """The sizes of files by name. Raises `ValueError`."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {str(name): int(size) for name, size in files.items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _is_as(entry: os.DirEntry[str], written: Mapping[str, int], name: str) -> bool:
    return entry.is_file(follow_symlinks=False) and written.get(name) == entry.stat(follow_symlinks=False).st_size


def _files(folder: Path, inside: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All files below a folder, by path relative to it."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), f"{inside}{entry.name}/")
        else:
            yield inside + entry.name, entry
