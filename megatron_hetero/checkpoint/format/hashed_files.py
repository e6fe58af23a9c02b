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
    """Files of which it is known what was written into them, without reading them again. `records`: by name.

    `working`: around what is read and written.
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
        """Not as the base class: the first rank has made the folder. One that is missing here is another one, on a disk
        that ranks do not share, or it has vanished. Raises `OSError`.
        """
        if not wait_for(Path(path).is_dir):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """As the base class."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashedStream(io.RawIOBase):
    """A file that is written from its beginning to its end, and hashed while it is written."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """As any file's."""
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        return self._file.write(data)

    def record(self) -> FileRecord:
        """Size and hash of what was written so far."""
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
