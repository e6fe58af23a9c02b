"""Bytes that are read later and at any place: files of this machine, objects in a store, and parts of either."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias, cast

from megatron_hetero.base.errors import UserError, in_short, quoted
from megatron_hetero.base.files import open_regular

if TYPE_CHECKING:
    from typing_extensions import Buffer

Version: TypeAlias = "tuple[int | str, ...]"
"""Name, size and further values of which one changes with the bytes."""
MAX_OPEN = 64
"""Files of this machine that stay open for `StoredFile.read`."""
STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "hf")
"""Schemes that are read: others of fsspec open files of this machine and archives, or connect to any host."""
_URL = re.compile(r"[^/]*://")
_BUFFER = 1 << 16
"""Bytes that a reader of a part asks for at a time: headers of pictures take less."""


class Content(Protocol):
    """Bytes such as those of a picture. Hashable; can be pickled. As text, what messages call it."""

    @property
    def label(self) -> str:
        """A name within the data set, which does not tell where that is."""
        ...

    def open(self) -> BinaryIO:
        """Open it for reading and seeking. Raises `OSError`."""
        ...

    def version(self) -> Version:
        """A key for what is computed from the bytes. Raises `OSError`."""
        ...


def is_url(name: str) -> bool:
    """Whether a name is, or would be by its braces or chained schemes, a URL such as `s3://bucket/name`."""
    return _URL.match(name) is not None


def require_store(url: str, where: object) -> None:
    """Check that a URL is of an object store. Raises `UserError`, naming `where` it comes from."""
    scheme = url.partition("://")[0]
    if scheme not in STORES or "::" in url:
        expected = f"the URL of an object in a store ({', '.join(STORES)})"
        fix = "copy the files to one of these stores or to a disk, and name them without `::`"
        raise UserError.at(where, found=quoted(url), expected=expected, fix=fix)


@dataclass(frozen=True)
class StoredFile:
    """A regular file of this machine, by its path, or an object in a store, by its URL. `known`: its version, if that
    has been read; `read` opens a file once for each.
    """

    name: str
    known: Version | None = None

    @property
    def label(self) -> str:
        """The path or URL."""
        return self.name

    def __str__(self) -> str:
        return self.name

    def open(self) -> BinaryIO:
        """Open it for reading and seeking. Raises `OSError`."""
        if is_url(self.name):
            with store(self.name) as (system, path):
                return system.open(path, "rb")
        return open_regular(Path(self.name))

    def version(self) -> Version:
        """Name, size, and time of the last change or a store's tag. Raises `OSError`."""
        if self.known is not None:
            return self.known
        if is_url(self.name):
            with store(self.name) as (system, path):
                found = system.info(path)
            tags = (str(found[key]) for key in ("ETag", "etag", "LastModified", "mtime", "updated") if found.get(key))
            return self.name, int(found["size"]), next(tags, "")
        status = Path(self.name).stat()
        return self.name, status.st_size, status.st_mtime_ns

    def read(self, start: int, size: int) -> bytes:
        """So many bytes from `start`; fewer at the end. Raises `OSError`."""
        if is_url(self.name):
            with store(self.name) as (system, path):
                return system.cat_file(path, start=start, end=start + size) if size else b""
        # Referred to until it has been read: another thread may drop it from the cache, which then closes its file.
        handle = _cached(self)
        return os.pread(handle.descriptor, size, start)


class _Handle:
    """An open file, closed when nobody refers to it."""

    def __init__(self, file: StoredFile) -> None:
        with file.open() as opened:
            self.descriptor = os.dup(opened.fileno())

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.descriptor)


_cached = lru_cache(maxsize=MAX_OPEN)(_Handle)


@contextlib.contextmanager
def store(url: str) -> Generator[tuple[Any, str]]:
    """The file system of fsspec for a URL, and the path in it. Raises `UserError` for other schemes than `STORES` and
    without fsspec's driver; inside, a driver's errors become `OSError`s.
    """
    require_store(url, "a data set")
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        problem, because = f"cannot be read ({in_short(error)})", "object stores need their driver for fsspec"
        fix = "install it, for example `pip install s3fs`, or copy the files to a disk"
        raise UserError.at(url, problem=problem, because=because, fix=fix) from error
    try:
        yield system, path
    except (OSError, MemoryError, UserError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, in_short(error), url) from error


@dataclass(frozen=True)
class Part:
    """`size` bytes of a file from `start`, such as a member of a tar file called `label`."""

    file: StoredFile
    start: int
    size: int
    label: str

    def __str__(self) -> str:
        return f"{self.label} in {self.file}"

    def open(self) -> BinaryIO:
        """Open it for reading and seeking. Raises `OSError` when read beyond the end of the file."""
        return cast(BinaryIO, io.BufferedReader(_PartReader(self), _BUFFER))

    def read(self) -> bytes:
        """All bytes. Raises `OSError` if the file ends before."""
        return _whole(self, self.file.read(self.start, self.size), self.size)

    def version(self) -> Version:
        """The file's version, and the place in it. Raises `OSError`."""
        return *self.file.version(), self.start, self.size


class _PartReader(io.RawIOBase):
    def __init__(self, part: Part) -> None:
        self._part, self._at = part, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._part.size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, "a place before the beginning")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer)
        wanted = max(0, min(len(view), self._part.size - self._at))
        view[:wanted] = _whole(self._part, self._part.file.read(self._part.start + self._at, wanted), wanted)
        self._at += wanted
        return wanted


def _whole(part: Part, found: bytes, size: int) -> bytes:
    if len(found) < size:
        raise OSError(errno.EIO, "the file ends in it: it has been cut or replaced", str(part))
    return found


@dataclass(frozen=True)
class InMemory:
    """Bytes in memory, with the name and the version of what they were read from."""

    data: bytes
    name: str
    label: str
    read_as: Version

    def __str__(self) -> str:
        return self.name

    def open(self) -> BinaryIO:
        """Open them for reading and seeking."""
        return io.BytesIO(self.data)

    def version(self) -> Version:
        """The version of their source."""
        return self.read_as
