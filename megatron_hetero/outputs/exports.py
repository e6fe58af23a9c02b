"""Temporary paths of an export, next to the folder that it replaces."""

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
