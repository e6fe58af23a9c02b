"""Symmetric memory of GPUs, emulated on a CPU, so that PyTorch's fused products run there as they do on GPUs: the
same code, with the memory of processes in place of that of GPUs, and everything in one stream. So this shows values,
and which memory ranks read, but not what streams might do in another order.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from megatron_hetero.models.layers import linear


class Memory:
    """The symmetric memory of a group: a file for each rank, which all ranks of the group have mapped."""

    def __init__(self, group: dist.ProcessGroup, size: int, folder: Path):
        self.group, self.size, self.rank, self.world_size = group, size, group.rank(), group.size()
        name = f"{group.group_name}-{dist.get_process_group_ranks(group)[0]}-{size}"
        self.barrier()
        self._files = [
            torch.from_file(str(folder / f"{name}-{rank}"), shared=True, size=size, dtype=torch.uint8)
            for rank in range(self.world_size)
        ]
        self.barrier()
        (folder / f"{name}-{self.rank}").unlink()

    def barrier(self, channel: int = 0) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.group)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """A tensor in the memory of a rank, which begins after so many elements."""
        length, first = torch.Size(sizes).numel() * dtype.itemsize, storage_offset * dtype.itemsize
        assert first + length <= self.size, f"{first + length} bytes of {self.size}"
        return self._files[rank][first : first + length].view(dtype).view(*sizes)


class _Stream(contextlib.nullcontext[None]):
    def wait_stream(self, other: Any) -> None:
        """Everything is in one stream."""


@contextlib.contextmanager
def emulated(memories: dict[str, Memory]) -> Iterator[None]:
    """Inside, linear layers take products of tensors on a CPU for those on a GPU with symmetric memory, which is kept
    in `memories` by name of a group.
    """

    def workspace(name: str, min_size: int) -> Memory:
        if name not in memories or memories[name].size < min_size:
            group: Any = dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportArgumentType]
            memories[name] = Memory(group, min_size, folder)
        return memories[name]

    folder = Path(tempfile.gettempdir(), f"symmetric-memory-{os.getppid()}")
    folder.mkdir(exist_ok=True)
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter, "CPU")
    patches = [
        mock.patch.object(symmetric, "get_symm_mem_workspace", workspace),
        mock.patch.object(symmetric, "_get_backend_stream", _Stream),
        mock.patch.object(torch.cuda, "current_stream", _Stream),
        mock.patch.object(torch.cpu, "current_stream", _Stream),  # Which takes the place of the other in trainers.
        mock.patch.object(torch.cuda, "_sleep"),
        mock.patch.object(linear, "_has_symmetric_memory", return_value=True),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        for patch in patches:
            stack.enter_context(patch)
        yield
