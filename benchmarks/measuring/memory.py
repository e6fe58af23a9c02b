"""The peak memory of a process."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_hetero.groups.platform import Platform

_MMAP_THRESHOLD, _TENSORS, _DEFAULT = -3, 1 << 16, 1 << 25
"""Of glibc's `mallopt`: which bytes are given back as soon as they are free."""


class Memory:
    """Peak memory of this process above its baseline: of the allocator on a GPU, resident on a CPU."""

    def __init__(self, platform: Platform):
        self._platform = platform
        if not platform.is_cuda:
            ctypes.CDLL(None).malloc_trim(0)
        self._baseline = self._status("VmRSS") if not platform.is_cuda else 0

    def peak(self, work: Callable[[], Any]) -> int:
        """The peak during `work`, in bytes."""
        if self._platform.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            work()
            return torch.cuda.max_memory_allocated()
        with _nothing_kept():
            Path("/proc/self/clear_refs").write_text("5")
            work()
            return self._status("VmHWM") - self._baseline

    def _status(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@contextlib.contextmanager
def _nothing_kept() -> Iterator[None]:
    """Inside, memory of tensors that are freed is no longer resident: what the heap keeps depends on the order of sizes
    more than on what lives.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _TENSORS)
    libc.malloc_trim(0)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _DEFAULT)
