"""Paths as users give them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from megatron_hetero.errors import UserError, quoted, reason

LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Linux limits, in bytes."""


def is_loop(path: str | os.PathLike[str]) -> bool:
    """Whether a path goes through a link that leads back to itself."""
    try:
        os.path.realpath(path, strict=True)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def resolved(path: Path, where: str) -> Path:
    """The path with links resolved. Raises `UserError`, naming `where` it comes from, for a link that leads to itself
    and for a path that no file can have.
    """
    why = unusable(path.absolute()) or ("a link that leads to itself" if is_loop(path) else None)
    if why is not None:
        raise UserError.at(
            where,
            found=f"{quoted(str(path))} ({why})",
            expected="a usable path",
            fix="remove the link, or correct the path",
        )
    return Path(os.path.realpath(path))


def in_the_way(folder: Path, error: OSError) -> str:
    """Why a folder cannot be made or written."""
    if folder.is_symlink() and not folder.exists():
        return f"a link to {os.readlink(folder)}, which does not exist"
    return reason(error)


def try_to_write(folder: Path) -> None:
    """Check that something can be made in `folder`, which is itself made if necessary. Raises `OSError`."""
    probe = folder / f".probe-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    probe.mkdir()
    probe.rmdir()


def unusable(path: Path) -> str | None:
    """Why no file can have this absolute path; None if one can. Even asking whether such a file exists would fail."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "with half of a character"
    longest = max(map(len, encoded.split(os.sep.encode())))
    if longest > LONGEST_NAME:
        return f"with a name of {longest} bytes, while {LONGEST_NAME} are the most"
    return f"of {len(encoded)} bytes, while {LONGEST_PATH} are the most" if len(encoded) > LONGEST_PATH else None
