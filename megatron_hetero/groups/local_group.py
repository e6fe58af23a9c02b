"""Process groups without a communicator: groups of one rank, and those used for their size and rank only."""

# PyTorch's stubs declare overloads that its own Python groups do not have either.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class LocalGroup(dist.ProcessGroup):
    """The `ranks` of a group, ascending, as `rank` sees them, without a communicator.

    Collectives of one rank copy their input to their output; those of several ranks raise `RuntimeError`. Tensors may
    be on any device.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, what: str):
        super().__init__(ranks.index(rank), len(ranks))  # pyright: ignore[reportCallIssue]
        self._ranks, self._what = ranks, what
        # `dist.get_rank(group)`, `dist.get_process_group_ranks(group)` and `dist.get_backend(group)` read these.
        registry = dist.distributed_c10d._world
        registry.pg_group_ranks[self] = {member: at for at, member in enumerate(ranks)}
        registry.pg_map[self] = self.getBackendName(), None  # pyright: ignore[reportArgumentType]
        registry.pg_backend_config[self] = self.getBackendName()  # what a profiler lists of every group

    @property
    def group_name(self) -> Any:
        """The name by which PyTorch finds the group once it is registered; equal for equal ranks."""
        return f"local:{','.join(map(str, self._ranks))}"

    def register(self) -> None:
        """Make PyTorch find the group by its name."""
        dist.distributed_c10d._world.pg_names[self] = self.group_name
        # One of the same ranks may be registered: any of them will do.
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._register_process_group(self.group_name, self)

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "local"

    def _copied(self, outputs: list[Tensor], tensors: list[Tensor]) -> dist.Work:
        if len(self._ranks) > 1:
            raise RuntimeError(
                f"{self._what}: found a collective over ranks {self._ranks}, expected none, because no communicator is "
                "created for that group: ask it for its size and ranks only, or communicate along an axis by itself"
            )
        for output, tensor in zip(outputs, tensors, strict=True):
            if not _same_memory(output, tensor):
                output.view(-1).copy_(tensor.reshape(-1))
        return _Done(outputs)

    def _in_place(self, tensors: Any = (), *_: Any, **options: Any) -> dist.Work:
        outputs = tensors if isinstance(tensors, list) else []
        return self._copied(outputs, outputs)

    def _into_one(self, output: Tensor, tensor: Tensor, *_: Any, **options: Any) -> dist.Work:
        return self._copied([output], [tensor])

    def _in_lists(self, outputs: list[Any], tensors: list[Any], *_: Any, **options: Any) -> dist.Work:
        """One of both may have a list of the ranks' tensors for each tensor."""
        mine = [[each[0] if isinstance(each, list) else each for each in side] for side in (outputs, tensors)]
        return self._copied(*mine)

    allreduce = allreduce_coalesced = broadcast = reduce = barrier = _in_place
    allgather = gather = scatter = reduce_scatter = alltoall = _in_lists
    all_gather_single = reduce_scatter_single = all_to_all_single = _into_one
    all_gather_single_coalesced = reduce_scatter_single_coalesced = _in_lists
    # Names in PyTorch 2.12 and earlier.
    _allgather_base = _reduce_scatter_base = alltoall_base = _into_one
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _in_lists


def _same_memory(one: Tensor, other: Tensor) -> bool:
    # Not by address, which fake tensors do not have.
    return one.untyped_storage() is other.untyped_storage() and one.storage_offset() == other.storage_offset()


class SilentGroup(LocalGroup):
    """A group of `size` ranks, this one the first, whose collectives leave outputs unchanged: for tensors without
    values.
    """

    def __init__(self, size: int):
        super().__init__(tuple(range(size)), 0, "measured group")

    def _copied(self, outputs: list[Tensor], tensors: list[Tensor]) -> dist.Work:
        return _Done(outputs)


class _Done(dist.Work):
    """Work that has ended, with its results."""

    def __init__(self, results: list[Tensor]):
        super().__init__()
        self._results = results

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:  # What PyTorch's DDP waits for.
        future = torch.futures.Future(devices=list({each.device for each in self._results if each.is_cuda}))
        future.set_result(self._results)
        return future
