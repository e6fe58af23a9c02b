"""Sources of bytes that are read on demand at any offset: local files, objects in a store, and ranges of either."""

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
"""A name, a size and further values, at least one of which changes when the bytes change."""
MAX_OPEN = 64
"""Maximum local files that stay open for `StoredFile.read`."""
STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "hf")
"""Supported URL schemes. Other schemes of fsspec open local files and archives or connect to arbitrary hosts."""
_URL = re.compile(r"[^/]*://")
_BUFFER = 1 << 16
"""Buffer size in bytes for reading a byte range: larger than the header of a picture."""


class Content(Protocol):
    """The bytes of a picture, video or other file. Hashable and picklable; `str` names it in messages."""

    @property
    def label(self) -> str:
        """The name of the content within its data set, independent of where the data set is stored."""
        ...

    def open(self) -> BinaryIO:
        """Open the bytes for reading and seeking. Raises `OSError`."""
        ...

    def version(self) -> Version:
        """Return a cache key for values that are computed from the bytes. Raises `OSError`."""
        ...


def is_url(name: str) -> bool:
    """Return whether a name is a URL such as `s3://bucket/name`, also with braces or chained schemes."""
    return _URL.match(name) is not None


def require_store(url: str, where: object) -> None:
    """Check that a URL is in a supported object store. Raises `UserError`, which names the URL's source `where`."""
    scheme = url.partition("://")[0]
    if scheme not in STORES or "::" in url:
        expected = f"the URL of an object in a store ({', '.join(STORES)})"
        fix = "copy the files to one of these stores or to a disk, and name them without `::`"
        raise UserError.at(where, found=quoted(url), expected=expected, fix=fix)


@dataclass(frozen=True)
class StoredFile:
    """A local regular file, given by its path, or an object in a store, given by its URL. `known`: its version, if
    already read. `read` opens a local file once for each version.
    """

    name: str
    known: Version | None = None

    @property
    def label(self) -> str:
        """The path or URL of the file."""
        return self.name

    def __str__(self) -> str:
        return self.name

    def open(self) -> BinaryIO:
        """Open the file for reading and seeking. Raises `OSError`."""
        if is_url(self.name):
            with store(self.name) as (system, path):
                return system.open(path, "rb")
        return open_regular(Path(self.name))

    def version(self) -> Version:
        """Return the name, the size, and the modification time or a store's tag. Raises `OSError`."""
        if self.known is not None:
            return self.known
        if is_url(self.name):
            with store(self.name) as (system, path):
                info = system.info(path)
            tags = (str(info[key]) for key in ("ETag", "etag", "LastModified", "mtime", "updated") if info.get(key))
            return self.name, int(info["size"]), next(tags, "")
        status = Path(self.name).stat()
        return self.name, status.st_size, status.st_mtime_ns

    def read(self, start: int, size: int) -> bytes:
        """Read `size` bytes from `start`, or fewer at the end of the file. Raises `OSError`."""
        if is_url(self.name):
            with store(self.name) as (system, path):
                return system.cat_file(path, start=start, end=start + size) if size else b""
        # This reference keeps the file open if another thread evicts it from the cache meanwhile.
        handle = _cached(self)
        return os.pread(handle.descriptor, size, start)


class _Handle:
    """An open file, which is closed when its last reference is gone."""

    def __init__(self, file: StoredFile) -> None:
        with file.open() as opened:
            self.descriptor = os.dup(opened.fileno())

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.descriptor)


_cached = lru_cache(maxsize=MAX_OPEN)(_Handle)


@contextlib.contextmanager
def store(url: str) -> Generator[tuple[Any, str]]:
    """Yield the fsspec file system of a URL, and the path in it. Raises `UserError` if the scheme is not in `STORES` or
    its driver is not installed. Driver errors inside the context become `OSError`s.
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
class ByteRange:
    """A range of `size` bytes of a file from `start`, such as the member named `label` of a tar file."""

    file: StoredFile
    start: int
    size: int
    label: str

    def __str__(self) -> str:
        return f"{self.label} in {self.file}"

    def open(self) -> BinaryIO:
        """Open the range for reading and seeking. Reading beyond the end of the file raises `OSError`."""
        return cast(BinaryIO, io.BufferedReader(_RangeReader(self), _BUFFER))

    def read(self) -> bytes:
        """Read all bytes of the range. Raises `OSError` if the file ends inside the range."""
        return _whole(self, self.file.read(self.start, self.size), self.size)

    def version(self) -> Version:
        """Return the version of the file, extended by start and size. Raises `OSError`."""
        return *self.file.version(), self.start, self.size


class _RangeReader(io.RawIOBase):
    def __init__(self, range_: ByteRange) -> None:
        self._range, self._at = range_, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._range.size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, "an offset before the beginning")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer)
        wanted = max(0, min(len(view), self._range.size - self._at))
        view[:wanted] = _whole(self._range, self._range.file.read(self._range.start + self._at, wanted), wanted)
        self._at += wanted
        return wanted


def _whole(range_: ByteRange, data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise OSError(errno.EIO, "the file ends in it: it has been cut or replaced", str(range_))
    return data


@dataclass(frozen=True)
class InMemory:
    """Bytes in memory, with the name and the version of their source."""

    data: bytes
    name: str
    label: str
    read_as: Version

    def __str__(self) -> str:
        return self.name

    def open(self) -> BinaryIO:
        """Open the bytes for reading and seeking."""
        return io.BytesIO(self.data)

    def version(self) -> Version:
        """Return the version of the source of the bytes."""
        return self.read_as
