"""Counts collectives, the bytes that they put on the wire, and their time; and counts what autograd keeps.

Bytes are those that one rank must send with bandwidth-optimal algorithms, p being the ranks of the group:

    all-to-all       everything but its own part
    all-gather       (p - 1) x its own shard
    reduce-scatter   (p - 1) / p of its input
    all-reduce       2 (p - 1) / p of its tensor
    broadcast        (p - 1) / p of its tensor

Time (only with `timed`) is that of the collective alone: the ranks of the group wait for each other before the clock
starts, so that neither uneven work nor a busy machine counts as communication. It slows the step down: time the step
itself without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hetero.models.families.qwen2_5_vl.shapes import VisionShape


@dataclass(frozen=True)
class Collective:
    """One collective of this rank: the `phase` that the meter was in, bytes sent, and seconds inside it."""

    name: str
    phase: str
    sent_bytes: float
    seconds: float


@dataclass
class CollectiveMeter(TorchDispatchMode):
    """Inside, every collective of this process is recorded, whoever starts it: operators are seen, not functions."""

    timed: bool = False
    phase: str = ""
    records: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("c10d::").strip("_")
        if func.namespace != "c10d" or name not in _SENT:
            return func(*args, **kwargs)
        group = _group(args)
        if self.timed:
            group.barrier().wait()
        start = time.perf_counter()
        out = func(*args, **kwargs)
        if self.timed:
            Work.unbox(out[-1] if isinstance(out, tuple | list) else out).wait()
            _wait_for_device(args)
        seconds = time.perf_counter() - start
        self.records.append(Collective(name, self.phase, _SENT[name](args, group), seconds))
        return out

    def of(self, phase: str) -> list[Collective]:
        """The collectives of a phase."""
        return [record for record in self.records if record.phase == phase]


def total_bytes(records: Sequence[Collective]) -> float:
    """Bytes that this rank sent."""
    return sum(record.sent_bytes for record in records)


def total_seconds(records: Sequence[Collective]) -> float:
    """Seconds inside collectives, where they were timed."""
    return sum(record.seconds for record in records)


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))


def _wait_for_device(args: Sequence[Any]) -> None:
    if any(isinstance(a, Tensor) and a.is_cuda for a in args):
        torch.cuda.synchronize()


def _size(value: Any) -> float:
    """Bytes of a tensor, or of all tensors in (nested) lists."""
    return value.nbytes if isinstance(value, Tensor) else sum(_size(v) for v in value)


def _all_to_all(args: Sequence[Any], group: dist.ProcessGroup) -> float:
    given, splits = args[1], args[4] or [len(args[1]) // group.size()] * group.size()
    return given.nbytes // max(1, sum(splits)) * (sum(splits) - splits[group.rank()])


def _gather(args: Sequence[Any], group: dist.ProcessGroup) -> float:
    return _size(args[1]) * (group.size() - 1)


def _reduce_scatter(args: Sequence[Any], group: dist.ProcessGroup) -> float:
    return _size(args[1]) * (group.size() - 1) / group.size()


def _all_reduce(args: Sequence[Any], group: dist.ProcessGroup) -> float:
    return _size(args[0]) * 2 * (group.size() - 1) / group.size()


def _broadcast(args: Sequence[Any], group: dist.ProcessGroup) -> float:
    return _size(args[0]) * (group.size() - 1) / group.size()


_SENT = {
    "alltoall_base": _all_to_all,
    "allgather_base": _gather,
    "allgather": _gather,
    "allgather_into_tensor_coalesced": _gather,
    "reduce_scatter_base": _reduce_scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "allreduce": _all_reduce,
    "broadcast": _broadcast,
}


def predicted_sp_collectives(shape: VisionShape) -> int:
    """All-to-alls of the encoder's forward and backward pass under `sp`: two each way per full-attention layer."""
    return 4 * len(shape.full_layers)


def predicted_sp_bytes(shape: VisionShape, shard_lengths: Sequence[int], element_bytes: int) -> list[int]:
    """Bytes that each `sp` member sends in one forward and backward pass of the encoder (no recomputation), by member.

    Per full-attention layer and way, member r of m, which holds n_r of the N tokens:

        queries, keys, values    n_r tokens, the heads of all others      3 n_r x hidden x (m - 1) / m
        output                   everybody else's tokens, its own heads   (N - n_r) x hidden / m

    The backward pass runs the same exchanges the other way round, so that it sends n_r x hidden x (m - 1) / m and
    3 (N - n_r) x hidden / m. Layers with windows send nothing: shards are cut at windows. `shard_lengths` are patches.
    """
    members, everything = len(shard_lengths), sum(shard_lengths)
    per_head_part = shape.hidden // members * element_bytes * len(shape.full_layers)
    return [4 * per_head_part * (n * (members - 1) + (everything - n)) for n in shard_lengths]


class SavedActivations:
    """Inside, sums the bytes that autograd keeps for the backward pass: each storage once, no parameters."""

    def __init__(self, parameters: Sequence[Tensor]):
        self._storages: dict[int, int] = {}
        self._excluded = {p.untyped_storage().data_ptr() for p in parameters}
        # What is kept stays alive here, so that no address is used twice.
        self._kept: list[Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    @property
    def bytes(self) -> int:
        """Bytes so far."""
        return sum(self._storages.values())

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in self._excluded:
            self._storages[storage.data_ptr()] = storage.nbytes()
            self._kept.append(saved)
        return saved
