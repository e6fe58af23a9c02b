"""Paths as users give them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from megatron_hetero.errors import UserError


def is_loop(path: str | os.PathLike[str]) -> bool:
    """Whether a path goes through a link that leads back to itself."""
    try:
        os.path.realpath(path, strict=True)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def resolved(path: Path, where: str) -> Path:
    """The path without links. Raises `UserError` that names `where` it is from, for a link that leads to itself."""
    if is_loop(path):
        raise UserError.at(
            where,
            found=f"{path}, a link that leads to itself",
            expected="a path that leads somewhere",
            fix="remove the link, or correct the path",
        )
    return Path(os.path.realpath(path))
