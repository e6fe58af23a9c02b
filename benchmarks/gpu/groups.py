"""Process groups for one GPU, where NCCL has none: it refuses two ranks on one device.

`staged`: several ranks on the one device. Tensors go through pinned memory of the host, and gloo moves them between the
ranks. The order on the device is that of NCCL: an operation reads what was issued before it on the current stream, and
waiting for it makes the stream that is then current see what arrived. The host is held up where NCCL would not hold it
up, so that times say nothing of NCCL's.

`echo`: one rank of a world whose other ranks are not there. Each of them is taken to have what this one has, so that
numbers stay finite and the device moves about as much memory as after a transfer. (PyTorch's `fake` leaves in memory
what happens to be there.) These stand-ins are contiguous copies, and `EchoGroup.watch` times each of them.

Both know the collectives and point-to-point operations that the project and Megatron-Core call, under the names that
torch 2.11 and later ones have for them.
"""

# PyTorch's stubs declare overloads that its own Python groups do not have either.
# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.phases import Phases


def register() -> None:
    """Make the backends known to `torch.distributed` in this process. Idempotent."""
    for kind in (StagedGroup, EchoGroup):
        if not hasattr(dist.Backend, kind.backend.upper()):
            dist.Backend.register_backend(kind.backend, kind, devices=["cpu", "cuda"])


class _PythonGroup(dist.ProcessGroup):
    """What groups in Python have in common: names, and those operations that others make up."""

    backend = ""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._name = self._description = ""

    # `torch.distributed` keeps these in a group's backends, and these groups have none that it knows.

    def getBackendName(self) -> str:
        return self.backend

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def _get_backend(self, device: torch.device) -> _PythonGroup:
        return self

    # What runs inside `_coalescing_manager` is done one by one. Options hold no tensors.

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        single = dist.AllreduceOptions()
        single.reduceOp = opts.reduceOp
        return _Several([self.allreduce([tensor], single) for tensor in tensors])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return _Several([self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return _Several([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    # What torch 2.11 and 2.12 call these.

    def _allgather_base(self, *args: Any) -> dist.Work:
        return self.all_gather_single(*args)

    def _reduce_scatter_base(self, *args: Any) -> dist.Work:
        return self.reduce_scatter_single(*args)

    def alltoall_base(self, *args: Any) -> dist.Work:
        return self.all_to_all_single(*args)

    def allgather_into_tensor_coalesced(self, *args: Any) -> dist.Work:
        return self.all_gather_single_coalesced(*args)

    def reduce_scatter_tensor_coalesced(self, *args: Any) -> dist.Work:
        return self.reduce_scatter_single_coalesced(*args)


class _Several(dist.Work):
    """Operations that are waited for together; none: one that has ended."""

    def __init__(self, works: Sequence[dist.Work] = ()):
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait() for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


# ---------------------------------------------------------------------------------------------------- staged


class StagedGroup(_PythonGroup):
    """Ranks that share a device; see the head of this file."""

    backend = "staged"

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(store, rank, size, timeout)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._staged(tensors, tensors, lambda given, _: self._gloo.allreduce(given, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._staged(tensors, tensors, lambda given, _: self._gloo.broadcast(given, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._staged(inputs, outputs[0], lambda given, got: self._gloo.allgather([got], given))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._staged([input], [output], lambda given, got: self._gloo._allgather_base(got[0], given[0]))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._staged(
            [input], [output], lambda given, got: self._gloo._reduce_scatter_base(got[0], given[0], opts)
        )

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> dist.Work:
        return self._staged(
            [input], [output], lambda given, got: self._gloo.alltoall_base(got[0], given[0], received, sent)
        )

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        return self._staged(tensors, [], lambda given, _: self._gloo.send(given, rank, tag))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        return self._staged([], tensors, lambda _, got: self._gloo.recv(got, rank, tag))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Of the hosts, each after what it has asked of its device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return _StagedWork(self._gloo.barrier(), [], [])

    def _staged(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[[list[Tensor], list[Tensor]], Any],
    ) -> dist.Work:
        """Start an operation of gloo on copies. `start` gets those of `inputs` and of `outputs`, and starts it; where
        the two are the same tensors, it works in place.
        """
        given = [_on_host(tensor).copy_(tensor, non_blocking=True) for tensor in inputs]
        got = given if outputs is inputs else [_on_host(tensor) for tensor in outputs]
        if any(tensor.is_cuda for tensor in inputs):
            torch.cuda.current_stream().synchronize()
        return _StagedWork(start(given, got), list(zip(outputs, got, strict=True)), [*given, *got])


class _StagedWork(dist.Work):
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


def _on_host(tensor: Tensor) -> Tensor:
    """Memory for a contiguous copy: pinned where the tensor is on a GPU, so that the device copies without the host."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


# ------------------------------------------------------------------------------------------------------ echo


def _stand_in(operation: Callable[..., None]) -> Callable[..., dist.Work]:
    """An operation of an `EchoGroup`, which has ended when it returns, timed by `EchoGroup.watch`."""

    @wraps(operation)
    def run(group: EchoGroup, *args: Any) -> dist.Work:
        with EchoGroup.watch.stand_in() if EchoGroup.watch else nullcontext():
            operation(group, *args)
        return _Several()

    return run


class EchoGroup(_PythonGroup):
    """One rank, and the echo of it in place of all others; see the head of this file. What is added up is left as it
    is, so that values keep their size.

    `watch`: a stopwatch for what stands in for collectives.
    """

    backend = "echo"
    watch: ClassVar[Phases | None] = None

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _Several()

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _Several()

    @_stand_in
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> None:
        for output in outputs[0]:
            output.copy_(inputs[0])

    @_stand_in
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> None:
        _fill(output.view(-1), input.reshape(-1))

    @_stand_in
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> None:
        part = input.view(self.size(), -1)[self.rank()]
        if part.data_ptr() != output.data_ptr():
            output.view(-1).copy_(part)

    @_stand_in
    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> None:
        """Its own rows, over and over, up to as many as it would receive."""
        _fill(output, input)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        return _Several()

    @_stand_in
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        for tensor in tensors:
            tensor.zero_()

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Several()


def _fill(output: Tensor, rows: Tensor) -> None:
    """Fill `output` with `rows` over and over, which may be a part of it, by copies that double what is filled: a copy
    of an expanded tensor would be one kernel, at a third of the bandwidth.
    """
    filled = min(len(output), len(rows))
    if output.data_ptr() != rows.data_ptr():
        output[:filled].copy_(rows[:filled])
    while 0 < filled < len(output):
        more = output[filled : 2 * filled]
        more.copy_(output[: len(more)])
        filled += len(more)
    if not filled:
        output.zero_()
