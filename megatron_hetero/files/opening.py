"""Opens files that users name: only regular ones, since reading a pipe or device may never return."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from megatron_hetero.errors import reason

MOST_BYTES = 1 << 27
"""Default limit on files that are read whole: several times the largest tokenizer."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path) -> BufferedReader:
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
    """The content of a file. Raises `OSError`, also for one of more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, over the limit of {most}", str(path))
        return file.read()


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The same as text. Raises `UnicodeDecodeError` too, if it is not UTF-8."""
    return read_bytes(path, most).decode("utf-8")


def is_unfit(path: Path) -> str | None:
    """Why an existing file cannot be read whole; None if it can, and if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return reason(error)
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        return _called(kind)
    return f"a file of {found.st_size} bytes" if found.st_size > MOST_BYTES else None


def _called(kind: int) -> str:
    return f"{_KINDS.get(kind, 'something else')} and not a file"
