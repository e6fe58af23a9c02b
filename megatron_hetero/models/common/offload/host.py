"""Host memory that is reused over steps: making it known to a GPU takes far longer than a copy."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import finalize

import torch
from torch import Tensor

from megatron_hetero.distributed.platform import Platform


class HostPool:
    """Blocks of equal size in (pinned) host memory. It has as many as were in use at once."""

    def __init__(self, platform: Platform, block: int):
        self.block, self.made = block, 0
        self._platform = platform
        self._free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return self.made * self.block

    @property
    def lent(self) -> int:
        """Blocks in use."""
        return self.made - len(self._free)

    def take(self) -> Tensor:
        """A block, uint8 [block], with anything in it."""
        if self._free:
            return self._free.pop()
        self.made += 1
        return self._platform.host_zeros(self.block, torch.uint8)

    def give_back(self, blocks: list[Tensor]) -> None:
        """Take blocks back, and empty the list of them. Copies that the device still makes must be ordered before
        those that it is asked for later.
        """
        self._free += blocks
        blocks.clear()


class HostRoom:
    """Room in blocks of a pool, filled byte after byte. Without `free` the blocks return when it is dropped."""

    def __init__(self, pool: HostPool):
        self._pool, self._blocks, self._left = pool, list[Tensor](), 0
        finalize(self, pool.give_back, self._blocks).atexit = False

    def place(self, size: int) -> list[Tensor]:
        """The next `size` bytes, in pieces."""
        return list(self._pieces(size))

    def _pieces(self, size: int) -> Iterator[Tensor]:
        block = self._pool.block
        while size:
            if not self._left:
                self._blocks.append(self._pool.take())
                self._left = block
            start, taken = block - self._left, min(size, self._left)
            yield self._blocks[-1][start : start + taken]
            self._left, size = self._left - taken, size - taken

    def free(self) -> None:
        """Return the blocks."""
        self._pool.give_back(self._blocks)
        self._left = 0
