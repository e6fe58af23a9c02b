"""Files that are hashed while they are written."""

from __future__ import annotations

import hashlib
import os
from typing import IO

from megatron_hetero.outputs.checkpoints import FileRecord


class HashedFile:
    """A file that is written in order."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        """As any file's."""
        self._digest.update(data)
        self._size += len(data)
        self._file.write(data)

    def record(self) -> FileRecord:
        """Size and hash, once the disk has all of it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(self._size, self._digest.hexdigest())
