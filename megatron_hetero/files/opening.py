"""Opens files that users name: regular ones alone, so that nothing is waited for that never comes or never ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

MOST_BYTES = 1 << 27
"""Of a file that is read as a whole, if not said otherwise: several times the largest tokenizer's."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path) -> IO[bytes]:
    """The file, for reading. Raises `OSError`, also for pipes, devices and folders."""
    # Without waiting: a pipe that nobody writes into would keep `open` itself.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, _called(kind), str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """All that a file holds. Raises `OSError`, also for one of more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, while {most} are the most that can be of use", str(path))
        return file.read()


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The same as text. Raises `UnicodeDecodeError` besides, for what is not UTF-8."""
    return read_bytes(path, most).decode("utf-8")


def is_unfit(path: Path) -> str | None:
    """Why something that is there cannot be read as a whole; None where it can, and where nothing is there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return (error.strerror or str(error)).lower()
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        return _called(kind)
    return f"a file of {found.st_size} bytes" if found.st_size > MOST_BYTES else None


def _called(kind: int) -> str:
    return f"{_KINDS.get(kind, 'something else')} and not a file"
