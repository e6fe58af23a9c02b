"""Process groups without a communicator: groups of one rank, and groups of which only size and rank are used."""

# PyTorch's stubs declare overloads that PyTorch's own Python groups lack too.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class LocalGroup(dist.ProcessGroup):
    """A process group of the given `ranks` (ascending) on the rank `rank`, without a communicator.

    In a group of one rank collectives copy their input to their output; in a larger one they raise `RuntimeError`.
    Tensors may be on any device.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, what: str):
        super().__init__(ranks.index(rank), len(ranks))  # pyright: ignore[reportCallIssue]
        self._ranks, self._what = ranks, what
        # `dist.get_rank(group)`, `dist.get_process_group_ranks(group)` and `dist.get_backend(group)` read these.
        registry = dist.distributed_c10d._world
        registry.pg_group_ranks[self] = {member: at for at, member in enumerate(ranks)}
        registry.pg_map[self] = self.getBackendName(), None  # pyright: ignore[reportArgumentType]
        registry.pg_backend_config[self] = self.getBackendName()  # Profilers list the backend of every group.

    @property
    def group_name(self) -> Any:
        """The name by which PyTorch finds the group once it is registered; equal for equal ranks."""
        return f"local:{','.join(map(str, self._ranks))}"

    def register(self) -> None:
        """Register the group with PyTorch under its name."""
        dist.distributed_c10d._world.pg_names[self] = self.group_name
        # A group of the same ranks may be registered already, and serves the same purpose.
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._register_process_group(self.group_name, self)

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "local"

    def _copied(self, outputs: list[Tensor], tensors: list[Tensor]) -> dist.Work:
        if len(self._ranks) > 1:
            raise RuntimeError(
                f"{self._what}: found a collective over ranks {self._ranks}, expected none, because that group has no "
                "communicator: use its size and ranks only, or communicate along one axis at a time"
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
        """Run a collective in which outputs or inputs are lists with a tensor for each rank."""
        local = [[each[0] if isinstance(each, list) else each for each in side] for side in (outputs, tensors)]
        return self._copied(*local)

    allreduce = allreduce_coalesced = broadcast = reduce = barrier = _in_place
    allgather = gather = scatter = reduce_scatter = alltoall = _in_lists
    all_gather_single = reduce_scatter_single = all_to_all_single = _into_one
    all_gather_single_coalesced = reduce_scatter_single_coalesced = _in_lists
    # PyTorch 2.12 and earlier use these names.
    _allgather_base = _reduce_scatter_base = alltoall_base = _into_one
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _in_lists


def _same_memory(one: Tensor, other: Tensor) -> bool:
    # Compare storages rather than addresses, which fake tensors lack.
    return one.untyped_storage() is other.untyped_storage() and one.storage_offset() == other.storage_offset()


class SilentGroup(LocalGroup):
    """A group of `size` ranks on its first rank, for tensors without values: collectives leave outputs unchanged."""

    def __init__(self, size: int):
        super().__init__(tuple(range(size)), 0, "measured group")

    def _copied(self, outputs: list[Tensor], tensors: list[Tensor]) -> dist.Work:
        return _Done(outputs)


class _Done(dist.Work):
    """A completed collective with its results."""

    def __init__(self, results: list[Tensor]):
        super().__init__()
        self._results = results

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:  # PyTorch's DDP waits for it.
        future = torch.futures.Future(devices=list({each.device for each in self._results if each.is_cuda}))
        future.set_result(self._results)
        return future
