"""Opens files that users name: only regular ones, since reading a pipe or device may never return.

Paths as users give them.

JSON objects in files from elsewhere: read whole or refused, and checked for values that cannot be carried out.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple, TypeAlias

from megatron_hetero.base.errors import UserError, quoted, reason

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


MOST_JSON_BYTES = 4 * 2**20
"""Larger than any configuration. Parsed, it takes some thirty times as much memory."""
RESTORE = "restore the file as its model was published or saved"
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_IN_JSON = {None: "null", True: "true", False: "false"}

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"
"""What a file may hold."""


class Only(NamedTuple):
    """The values that a key may have; `because` and `fix` as in `UserError.at`."""

    values: tuple[object, ...]
    because: str
    fix: str = RESTORE


def shown(value: object) -> str:
    """A value as it stands in the file, on one short line."""
    return _IN_JSON[value] if value is None or isinstance(value, bool) else _SHORT.repr(value)


def check(path: Path, values: Mapping[str, Json], only: Mapping[str, Only], at: str = "") -> None:
    """Check the object that the file `path` holds, and those inside it. `at`: the keys above it, with a dot behind
    each.

    Raises:
        UserError: naming file, key and value, for a value that `only` does not have under its key.
    """
    for key, value in values.items():
        if key in only and value not in only[key].values:
            expected = " or ".join(map(shown, only[key].values))
            raise UserError.at(
                f"{path}: {at}{key}",
                found=shown(value),
                expected=expected,
                because=only[key].because,
                fix=only[key].fix,
            )
        if isinstance(value, dict):
            check(path, value, only, f"{at}{key}.")


def read_object(path: Path, most: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """The JSON object that the file `path` holds, of `most` bytes at most.

    Raises:
        UserError: it cannot be read, is broken, or holds no object.
    """
    where: object = path
    try:
        value: Json = json.loads(read_bytes(path, most).decode("utf-8"))
    except json.JSONDecodeError as error:
        where, found = f"{path}:{error.lineno}", f"broken JSON at column {error.colno} ({error.msg})"
    except (OSError, ValueError, RecursionError) as error:
        found = f"an unreadable file ({reason(error) if isinstance(error, OSError) else error})"
    else:
        if isinstance(value, dict):
            return value
        found = f"{shown(value)} in place of an object"
    raise UserError.at(where, found=found, expected="a JSON object in UTF-8", fix=RESTORE)
