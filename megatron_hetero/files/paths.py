"""Paths as users give them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from megatron_hetero.errors import UserError, quoted, reason


def unusable(path: str | os.PathLike[str]) -> str | None:
    """Why no file can have this path: its text, the length of a name, or a link that leads back to itself. None if one
    can.
    """
    try:
        os.path.realpath(path, strict=True)
    except ValueError as error:  # No text of a file system, such as half of a character.
        return str(error)
    except OSError as error:
        return reason(error) if error.errno in (errno.ELOOP, errno.ENAMETOOLONG) else None
    return None


def resolved(path: Path, where: str) -> Path:
    """The path with links resolved. Raises `UserError`, naming `where` it comes from, for a link that leads to itself
    and for a path that no file can have.
    """
    if (why := unusable(path)) is not None:
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
