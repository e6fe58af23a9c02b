"""Host memory for the copies that a thread writes while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_hetero.checkpoint.format.keys import Entry
from megatron_hetero.distributed.platform import Platform


class HostCopies:
    """Copies of entries in host memory, which is reused, since allocating costs more than copying. On GPUs it is
    pinned, which makes copies several times faster.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._copies: list[Tensor] = []

    def of(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries with copies of their values, valid until the next call. Waits until they are copied."""
        values = [entry.values for entry in entries]
        if list(map(_kind, values)) != list(map(_kind, self._copies)):
            self._copies = []  # Free them first.
            self._copies = [torch.empty(v.shape, dtype=v.dtype, pin_memory=self._platform.is_cuda) for v in values]
        for copy, entry in zip(self._copies, entries, strict=True):
            copy.copy_(entry.current(), non_blocking=True)
        self._platform.synchronize()
        return [replace(entry, values=copy, load=None) for entry, copy in zip(entries, self._copies, strict=True)]


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
