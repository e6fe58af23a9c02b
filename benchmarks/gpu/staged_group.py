"""Process groups of several ranks on one GPU: `backend="staged"`.

NCCL refuses two ranks on one device. Here tensors go through pinned memory of the host, and gloo moves them between the
ranks. The order on the device is that of NCCL: an operation reads what was issued before it on the current stream, and
waiting for it makes the stream that is then current see what arrived. The host is held up where NCCL would not hold it
up, so that times say nothing of NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "staged"


def register() -> None:
    """Make the backend known to `torch.distributed` in this process. Idempotent."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", "cuda"])


class StagedWork(dist.Work):
    """An operation of gloo on copies, and the tensors that want what arrives in them."""

    def __init__(self, gloo: Any, arrivals: Sequence[tuple[Tensor, Tensor]], copies: Sequence[Tensor]):
        super().__init__()
        self._gloo, self._arrivals = gloo, list(arrivals)
        self._copies = copies  # gloo reads them until the operation has ended

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for gloo, and have the current stream copy what arrived."""
        self._gloo.wait()
        for tensor, copy in self._arrivals:
            tensor.copy_(copy, non_blocking=True)
        self._arrivals.clear()
        return True

    def is_completed(self) -> bool:
        """Whether nothing is left to wait for. What arrives does so in `wait`."""
        return not self._arrivals and self._gloo.is_completed()


class StagedGroup(dist.ProcessGroup):
    """The collectives and the point-to-point operations that the project and Megatron-Core call, under the names of
    torch 2.11 and of later ones.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = self._description = ""

    # `torch.distributed` keeps these in a group's backends, and this one has none that it knows.

    def getBackendName(self) -> str:
        """As `register` calls it."""
        return BACKEND

    def setGroupName(self, name: str) -> None:
        """By which `torch.distributed` finds it."""
        self._name = name

    def getGroupName(self) -> str:
        """What was set."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """For people."""
        self._description = description

    def getGroupDesc(self) -> str:
        """What was set."""
        return self._description

    # Options of a collective hold no tensors: gloo gets them as they are.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """In place."""
        return self._staged(tensors, tensors, lambda given, _: self._gloo.allreduce(given, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """In place."""
        return self._staged(tensors, tensors, lambda given, _: self._gloo.broadcast(given, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Of one tensor into a list."""
        return self._staged(inputs, outputs[0], lambda given, got: self._gloo.allgather([got], given, opts))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Of one tensor into one."""
        return self._staged(
            [input], [output], lambda given, got: self._gloo._allgather_base(got[0], given[0], opts)
        )  # fmt: skip

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Of one tensor into one."""
        return self._staged(
            [input], [output], lambda given, got: self._gloo._reduce_scatter_base(got[0], given[0], opts)
        )

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> dist.Work:
        """Even or uneven."""
        return self._staged(
            [input], [output], lambda given, got: self._gloo.alltoall_base(got[0], given[0], received, sent, opts)
        )

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """To a rank of the group."""
        return self._staged(tensors, [], lambda given, _: self._gloo.send(given, rank, tag))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """From a rank of the group."""
        return self._staged([], tensors, lambda _, got: self._gloo.recv(got, rank, tag))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Of the hosts, each after what it has asked of its device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return StagedWork(self._gloo.barrier(), [], [])

    # What runs inside `_coalescing_manager`, one after the other.

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """In place."""
        single = dist.AllreduceOptions()
        single.reduceOp = opts.reduceOp
        return _Several([self.allreduce([tensor], single) for tensor in tensors])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Of each tensor into one."""
        return _Several([self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Of each tensor into one."""
        return _Several([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _staged(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[[list[Tensor], list[Tensor]], Any],
    ) -> StagedWork:
        """Start an operation of gloo on copies. `start` gets those of `inputs` and of `outputs`, and starts it; where
        the two are the same tensors, it works in place.
        """
        given = [_on_host(tensor).copy_(tensor, non_blocking=True) for tensor in inputs]
        got = given if outputs is inputs else [_on_host(tensor) for tensor in outputs]
        if any(tensor.is_cuda for tensor in inputs):
            torch.cuda.current_stream().synchronize()
        return StagedWork(start(given, got), list(zip(outputs, got, strict=True)), [*given, *got])


class _Several(dist.Work):
    """Operations that are waited for together."""

    def __init__(self, works: Sequence[dist.Work]):
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for each in turn."""
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)


def _on_host(tensor: Tensor) -> Tensor:
    """Memory for a contiguous copy: pinned where the tensor is on a GPU, so that the device copies without the host."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
