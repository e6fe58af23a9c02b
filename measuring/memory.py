"""The peak memory of a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_hetero.distributed.platform import Platform


class Memory:
    """Peak memory of this process above its baseline: of the allocator on a GPU, resident on a CPU."""

    def __init__(self, platform: Platform):
        self._platform = platform
        self._baseline = self._status("VmRSS") if not platform.is_cuda else 0

    def peak(self, work: Callable[[], Any]) -> int:
        """The peak during `work`, in bytes."""
        if self._platform.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            work()
            return torch.cuda.max_memory_allocated()
        Path("/proc/self/clear_refs").write_text("5")
        work()
        return self._status("VmHWM") - self._baseline

    def _status(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
