"""Files and paths that users name. Only regular files are opened, since reading a pipe or device may never return. JSON
objects are read as a whole or refused, and checked for unsupported values. Files that this program writes are opened by
`open_own` or `replacing`, since others may have put links to other files into the folder.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from reprlib import Repr
from typing import IO, Any, NamedTuple, TypeAlias

import msgspec

from megatron_hetero.base.errors import UserError, in_short, quoted, reason

MAX_BYTES = 1 << 27
"""Default limit in bytes on files that are read as a whole: several times the largest tokenizer."""
MAX_OWN_BYTES = 1 << 30
"""Default limit in bytes on files that this program writes: metrics of millions of steps."""
_DAY_S = 86_400.0


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Raises `OSError`, also for pipes, devices and folders."""
    # Nonblocking, since opening a pipe without a writer would wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a file. Raises `OSError`, also if it has more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size} bytes, over the limit of {limit}", str(path))
        return file.read()


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file. Raises `OSError` like `read_bytes`, and `UnicodeDecodeError`."""
    return read_bytes(path, limit).decode("utf-8")


def open_own(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file that this program writes, in a binary mode that does not truncate it (see `replacing` for that).
    Raises `OSError`, also for symbolic and hard links, pipes, devices and folders.
    """
    assert "b" in mode and "w" not in mode
    return open(path, mode, buffering, opener=_unlinked)


def read_own(path: Path, limit: int = MAX_OWN_BYTES) -> bytes:
    """Return the content of a file that this program writes, or no bytes if it does not exist. Raises `OSError` like
    `open_own`, and if the file has more than `limit` bytes.
    """
    with suppress(FileNotFoundError), open_own(path, "rb") as file:
        if len(content := file.read(limit + 1)) > limit:
            raise OSError(errno.EFBIG, f"{path.name} has more than {limit} bytes", str(path))
        return content
    return b""


def _unlinked(path: str, flags: int) -> int:
    if Path(path).is_symlink():  # The error of `O_NOFOLLOW` would be misleading.
        raise OSError(errno.EEXIST, f"{Path(path).name} is a symbolic link", path)
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        kind = "a hard link" if stat.S_ISREG(status.st_mode) else "not a regular file"
        raise OSError(errno.EEXIST, f"{Path(path).name} is {kind}", path)
    return descriptor


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield the path of a new file, which replaces `path` unless the body raises. Raises `OSError` like `open_own`."""
    with suppress(FileNotFoundError):
        open_own(path, "rb").close()
    new = path.with_name(f".new-{secrets.token_hex(8)}{path.suffix}")
    open_own(new, "xb").close()
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def mark_used(path: Path) -> None:
    """Update a cached file's time to protect it from `remove_unused`; at most daily, as NFS reloads changed files."""
    with suppress(OSError):
        if path.stat().st_mtime < time.time() - _DAY_S:
            os.utime(path)


def remove_unused(files: Iterable[Path], limit: int) -> None:
    """Remove the oldest files of a cache beyond `limit` files, except those used in the last 30 days."""
    times = dict[Path, float]()
    for path in files:
        with suppress(OSError):
            times[path] = path.stat().st_mtime
    for path in sorted(times, key=times.__getitem__)[:-limit]:
        with suppress(OSError):
            if times[path] < time.time() - 30 * _DAY_S:
                path.unlink()


def is_unfit(path: Path) -> str | None:
    """Return why an existing file cannot be read as a whole, or None if it can or does not exist."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        return reason(error)
    return f"a file of {size} bytes" if size > MAX_BYTES else None


def unusable(path: str | os.PathLike[str]) -> str | None:
    """Return why a path cannot name a file (bad characters, too long a name, a link to itself), or None if it can."""
    try:
        os.path.realpath(path, strict=True)
    except ValueError as error:  # This is for example a lone surrogate.
        return str(error)
    except OSError as error:
        return reason(error) if error.errno in (errno.ELOOP, errno.ENAMETOOLONG) else None
    return None


def resolved(path: Path, where: str) -> Path:
    """Return the path with links resolved. Raises `UserError`, naming its source `where`, if the path is unusable."""
    if (why := unusable(path)) is not None:
        found, fix = f"{quoted(str(path))} ({why})", "remove the link, or correct the path"
        raise UserError.at(where, found=found, expected="a usable path", fix=fix)
    return Path(os.path.realpath(path))


def in_the_way(folder: Path, error: OSError) -> str:
    """Return why a folder could not be created or written, given the `error`."""
    if folder.is_symlink() and not folder.exists():
        return f"a link to {os.readlink(folder)}, which does not exist"
    return reason(error)


MAX_JSON_BYTES = 4 * 2**20
"""Default limit in bytes on JSON objects: larger than any configuration."""
RESTORE = "restore the file as its model was published or saved"
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_IN_JSON = {None: "null", True: "true", False: "false"}

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"
"""A JSON value."""


class Only(NamedTuple):
    """The supported values of a key. `because`, `fix`: see `UserError.at`."""

    values: tuple[object, ...]
    because: str
    fix: str = RESTORE


def shown(value: object) -> str:
    """Return a value as JSON on one short line."""
    return _IN_JSON[value] if value is None or isinstance(value, bool) else _SHORT.repr(value)


def check(path: Path, values: Mapping[str, Json], only: Mapping[str, Only], at: str = "") -> None:
    """Check that the keys in `only` have supported values in a JSON object of the file `path` and in nested objects.
    `at`: the keys of enclosing objects, each followed by a dot. Raises `UserError` with file, key and value.
    """
    for key, value in values.items():
        if key in only and value not in only[key].values:
            values_of_key, because, fix = only[key]
            expected = " or ".join(map(shown, values_of_key))
            raise UserError.at(f"{path}: {at}{key}", found=shown(value), expected=expected, because=because, fix=fix)
        if isinstance(value, dict):
            check(path, value, only, f"{at}{key}.")


def read_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file of at most `limit` bytes.

    Raises:
        UserError: the file is unreadable or malformed, or contains another JSON value.
    """
    where: object = path
    try:
        value: Json = json.loads(read_bytes(path, limit).decode("utf-8"))
    except json.JSONDecodeError as error:
        where, found = f"{path}:{error.lineno}", f"broken JSON at column {error.colno} ({error.msg})"
    except (OSError, ValueError, RecursionError) as error:
        found = f"an unreadable file ({reason(error) if isinstance(error, OSError) else error})"
    else:
        if isinstance(value, dict):
            return value
        found = f"{shown(value)} in place of an object"
    raise UserError.at(where, found=found, expected="a JSON object in UTF-8", fix=RESTORE)


def read_as(path: Path, kind: Any, fix: str) -> Any:
    """Read a JSON file as the msgspec type `kind`. Raises `FileNotFoundError`, and `UserError` with the `fix`."""
    try:
        return msgspec.convert(json.loads(read_text(path)), kind)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        why = reason(error) if isinstance(error, OSError) else in_short(error)
        raise UserError.at(path, problem=f"unreadable ({why})", fix=fix) from None
