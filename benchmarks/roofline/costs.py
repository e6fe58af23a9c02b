"""What a step asks of a device by phase: kernels, operations, bytes of memory and on the wire. Counted as they are
dispatched to a GPU that computes nothing (`tests.fake_cuda`).

Of collectives on the stream that computes, its `wire` is the time for which it waits for them, and the stream "links"
has what they take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.roofline.devices import COLLECTIVE, GPUS, LINKS, MEMORY, PRODUCTS, Gpu
from benchmarks.roofline.timeline import Timeline, works_noted
from tests.fake_cuda.device import FakeGpu
from tests.fake_cuda.rank import BEFORE, SUMS, WEIGHTS

aten = torch.ops.aten
OF_MATRICES = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
ATTENTION = (aten._flash_attention_forward, aten._flash_attention_backward)
CHOOSING = frozenset("embedding embedding_dense_backward gather index index_select".split())
"""Kernels that read as many elements as they write, wherever these are."""
PLACING = frozenset("index_copy_ index_put_ scatter_add_ index_add_ index_fill_".split())
"""Kernels that write as many elements as they are given, into a larger tensor."""
FILLING = frozenset(
    "zeros ones full zero_ fill_ new_zeros zeros_like ones_like full_like empty_like rand randint".split()
)


@dataclass(frozen=True)
class Ask:
    """One kernel. `kind`: "product", "attention", "memory" or "wire"; `flops`; `memory`: bytes read and written;
    `wire`: bytes that this rank sends.
    """

    kind: str
    flops: float = 0.0
    memory: float = 0.0
    wire: float = 0.0

    def seconds(self, gpu: Gpu) -> float:
        """The least that a device takes: as long as what it is slowest at."""
        rate = gpu.attention * gpu.peak if self.kind == "attention" else PRODUCTS * gpu.peak
        sending = self.wire / (LINKS * gpu.links) + COLLECTIVE if self.kind == "wire" else 0.0
        return max(self.flops / rate, self.memory / (MEMORY * gpu.memory), sending)


@dataclass
class Costs:
    """Kernels of one kind in a phase, on one stream, added up. `seconds`: by GPU."""

    kernels: int = 0
    flops: float = 0.0
    memory: float = 0.0
    wire: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(GPUS, 0.0))

    def add(self, ask: Ask) -> None:
        """Take one more."""
        self.kernels += 1
        self.flops += ask.flops
        self.memory += ask.memory
        self.wire += ask.wire
        for gpu in GPUS.values():
            self.seconds[gpu.name] += ask.seconds(gpu)


class CountingGpu(FakeGpu):
    """A fake device that adds up what it is asked for: `costs` by phase of a step, stream ("main", "side", "links") and
    kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[tuple[str, str, str], Costs] = defaultdict(Costs)
        self._timelines = {name: Timeline() for name in GPUS}
        self._ends: dict[str, float] | None = None  # by GPU, when the collective that was issued last ends

    def __enter__(self) -> Self:
        super().__enter__()
        self._stack.enter_context(works_noted(self._issued, self._wait))
        return self

    def ran(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        """Count a kernel. What runs outside of any phase is the building of the model."""
        if self.phase:
            self._add(ask_of(func.overloadpacket, args, kwargs, out))

    def ran_compiled(self, kernels: int, args: Any, out: Any, *, apart: bool) -> None:
        """Count kernels that read all arguments, `apart` a part of them, and write a part of the result each."""
        if self.phase:
            for _ in range(kernels):
                self._add(Ask("memory", memory=_bytes(args) / (kernels if apart else 1) + _bytes(out) / kernels))

    def _add(self, ask: Ask) -> None:
        assert self._ends is None, "a method that issues collectives is missing in COLLECTIVES"
        if self.beside:  # What its own stream carries is in order.
            self._ends = {} if ask.kind == "wire" else None
            self.costs[self.phase, "side", ask.kind].add(ask)
            return
        self.costs[self.phase, "links" if ask.kind == "wire" else "main", ask.kind].add(ask)
        for name, timeline in self._timelines.items():
            seconds = ask.seconds(GPUS[name])
            if ask.kind == "wire":
                self._ends = self._ends or {}
                once = SUMS in self.phase or self.phase in (WEIGHTS, BEFORE)
                self._ends[name] = timeline.issue(seconds, "once" if once else "")
            else:
                timeline.compute(seconds)

    def _issued(self) -> dict[str, float]:
        ends, self._ends = self._ends or {}, None
        return ends

    def _wait(self, ends: Mapping[str, float]) -> None:
        for name, end in ends.items():
            idle = self._timelines[name].wait(end)
            self.costs[self.phase, "main", "wire"].seconds[name] += idle


def ask_of(packet: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Ask:
    """What one call of `packet` takes."""
    name = packet.__name__
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}  # Which `out` is, too.
    if packet in ATTENTION:
        return Ask("attention", _attention(packet, args), _moved(args, kwargs, out))
    if packet in OF_MATRICES:
        factors = [x for x in args if isinstance(x, Tensor)]  # And not the dtype of the result.
        return Ask("product", flop_registry[packet](*factors, out_val=out), _moved(args, kwargs, out))
    if name in _WIRE:
        return Ask("wire", wire=_WIRE[name](args))
    if name in CHOOSING:
        return Ask("memory", memory=2 * _bytes(out))
    if name in PLACING:
        return Ask("memory", memory=2 * _bytes(list(args[1:])))
    if name in FILLING:
        return Ask("memory", memory=_bytes(out if out is not None else args[0]))
    return Ask("memory", memory=_moved(args, kwargs, out, writes_into=name.endswith("_"), reads=name != "copy_"))


def _attention(packet: Any, args: Any) -> float:
    """Operations of flash attention over a pack of segments that are all alike; a backward pass has five products in
    place of two.
    """
    backward = packet is aten._flash_attention_backward
    query, longest, causal = (args[1], args[9], args[11]) if backward else (args[0], args[6], args[8])
    tokens, heads, width = query.shape
    return 4 * tokens * longest * heads * width * (2.5 if backward else 1) / (2 if causal else 1)


def _moved(args: Any, kwargs: Mapping[str, Any], out: Any, *, writes_into: bool = False, reads: bool = True) -> int:
    """Bytes that are read and written, each tensor once. `writes_into`: the first argument is written; `reads`: and
    read before.
    """
    first = args[0] if args else ()
    read = _bytes([args if reads else args[1:], dict(kwargs)])
    if not writes_into:
        return read + _bytes(out)
    # Of the fused AdamW all but the gradients, the second of its four lists, are written.
    lists = [first, *args[2:4]] if len(args) > 3 and isinstance(args[3], (list, tuple)) else first
    return read + _bytes(lists)


def _bytes(tensors: Any) -> int:
    """Of the memory of tensors of the device; what is expanded is read once."""
    found = [x for x in tree_leaves(tensors) if isinstance(x, Tensor) and x.device.type == "cuda"]
    return sum(min(x.numel() * x.itemsize, x.untyped_storage().nbytes()) for x in found)


def _gathered(args: Any) -> float:
    return args[0].nbytes - args[1].nbytes


def _scattered(args: Any) -> float:
    return args[1].nbytes - args[0].nbytes


def _exchanged(args: Any) -> float:
    ranks = _ranks(args[2])
    return args[1].nbytes * (ranks - 1) / ranks


def _reduced(args: Any) -> float:
    ranks = _ranks(args[1])
    return 2 * _bytes(args[0]) * (ranks - 1) / ranks


def _sent(args: Any) -> float:
    return _bytes(args[0])


def _ranks(group: Any) -> int:
    return dist.ProcessGroup.unbox(group).size()


_WIRE: Mapping[str, Callable[[Any], float]] = {
    "_allgather_base_": _gathered,
    "_reduce_scatter_base_": _scattered,
    "alltoall_base_": _exchanged,
    "allreduce_": _reduced,
    "send": _sent,
    "recv_": lambda _: 0.0,
    "broadcast_": _sent,
}
"""Bytes that a rank sends in rings and direct exchanges."""
