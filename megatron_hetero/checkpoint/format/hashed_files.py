"""Files that are hashed while they are written, for `torch.distributed.checkpoint` to write into."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from megatron_hetero.distributed.collective import Working
from megatron_hetero.outputs.checkpoints import FileRecord, wait_for


class HashedFiles(FileSystem):
    """A file system that records size and hash of every file as it is written. `records`: by name.

    `working`: around reads and writes.
    """

    def __init__(self, working: Working = nullcontext) -> None:
        self.records: dict[str, FileRecord] = {}
        self._working = working

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """As the base class."""
        with self._working(), super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            with _HashedStream(stream) as hashed:
                yield hashed
                self.records[Path(path).name] = hashed.record()

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Unlike the base class, waits for the folder that the first rank makes. If it does not appear, the ranks do
        not share the disk, or it was removed. Raises `OSError`.
        """
        if not wait_for(Path(path).is_dir):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """As the base class."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashedStream(io.RawIOBase):
    """A file written sequentially and hashed on the way."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """As any file's."""
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        return self._file.write(data)

    def record(self) -> FileRecord:
        """Size and hash so far."""
        return FileRecord(self._size, self._digest.hexdigest())

    def tell(self) -> int:
        """As any file's."""
        return self._size

    def fileno(self) -> int:
        """As any file's."""
        return self._file.fileno()

    def flush(self) -> None:
        """As any file's."""
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        """As any file's."""
        super().close()
        self._file.close()
