"""Where an export is put together, beside the folder whose place it takes."""

from pathlib import Path


def partial_of(target: Path) -> Path:
    """Where an exported folder is while it is written."""
    return target.parent / f".{target.name}.partial"


def replaced_of(target: Path) -> Path:
    """Where the earlier export is while the new one takes its place."""
    return target.parent / f".{target.name}.replaced"


def lock_of(target: Path) -> Path:
    """What an export has locked while it writes: two would mix what they write."""
    return target.parent / f".{target.name}.lock"
