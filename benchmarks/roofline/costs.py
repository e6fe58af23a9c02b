"""What a step asks of a device by phase: kernels, operations, bytes of memory and on the wire. Counted as they are
dispatched to a GPU that computes nothing (`tests.fake_cuda`).

Of collectives on the stream that computes, its `wire` is the time for which it waits for them, and the stream "links"
has what they take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.roofline.devices import ASSUMED, BEST, COLLECTIVE, CTA, LINKS, MEMORY, PRODUCTS, Assumed, Gpu
from benchmarks.roofline.timeline import Sharing, Timeline, works_noted
from megatron_hetero.groups.platform import Platform
from tests.fake_cuda.device import FakeGpu
from tests.fake_cuda.rank import BEFORE, SUMS, WEIGHTS

aten = torch.ops.aten
OF_MATRICES = (aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.baddbmm_, aten._grouped_mm)
IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}
"""Those that write into their first argument, and those that do not."""
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
    `wire`: bytes that this rank sends, by at most `ctas` CTAs (None: by NCCL's choice). `shape`: rows and columns of a
    product; `single`: whether it is of matrices in single precision; `copies`: whether a collective only copies.
    """

    kind: str
    flops: float = 0.0
    memory: float = 0.0
    wire: float = 0.0
    shape: tuple[int, int] = (0, 0)
    ctas: int | None = None
    single: bool = False
    copies: bool = False

    def held(self, assumed: Assumed) -> int:
        """How many multiprocessors a collective holds, `assumed` that."""
        if self.copies and assumed.copied:
            return 0
        return assumed.held if self.ctas is None else min(assumed.held, self.ctas)

    def seconds(self, gpu: Gpu, assumed: Assumed = ASSUMED[BEST]) -> float:
        """What a device takes at the least, `assumed` that: as long as what it is slowest at."""
        if self.kind == "wire":
            of_ctas = self.wire / (CTA * self.ctas) if self.ctas else 0.0
            return max((self.wire + assumed.ramp) / (LINKS * gpu.links), of_ctas) + COLLECTIVE
        share = gpu.attention * assumed.attention if self.kind == "attention" else PRODUCTS * assumed.products
        if assumed.waves and self.kind == "product":
            share *= filled(*self.shape, gpu.processors)
        peak = gpu.single if self.single else gpu.peak
        return max(self.flops / (share * peak), self.memory / (MEMORY * gpu.memory))


TILES = {(128, 256): 1.0, (256, 128): 1.0, (128, 128): 0.93, (64, 256): 0.85, (256, 64): 0.85, (64, 64): 0.6}
"""Rows and columns of a result that a multiprocessor computes at a time, and how fast it does so."""
CUTS = {1: 1.0, 2: 0.95, 4: 0.9}
"""Into how many parts, to be added up, a product may be cut along its inner dimension, and how fast it is then."""


@cache
def filled(rows: int, columns: int, processors: int) -> float:
    """How fast a product is whose last wave of tiles may leave multiprocessors idle, 1 if none is: by the best choice
    of tiles.
    """

    def speed(tile: tuple[int, int], cuts: int) -> float:
        tiles = ceil(rows / tile[0]) * ceil(columns / tile[1]) * cuts
        used = rows * columns * cuts / (tile[0] * tile[1])
        return TILES[tile] * CUTS[cuts] * used / (ceil(tiles / processors) * processors)

    return max((speed(tile, cuts) for tile in TILES for cuts in CUTS), default=1.0) if rows and columns else 1.0


@dataclass
class Costs:
    """Kernels of one kind in a phase, on one stream, added up. `seconds`: by what is `ASSUMED`."""

    kernels: int = 0
    flops: float = 0.0
    memory: float = 0.0
    wire: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ASSUMED, 0.0))

    def add(self, ask: Ask, seconds: Mapping[str, float]) -> None:
        """Take one more."""
        self.kernels += 1
        self.flops += ask.flops
        self.memory += ask.memory
        self.wire += ask.wire
        for name, each in seconds.items():
            self.seconds[name] += each


class CountingGpu(FakeGpu):
    """A fake device that adds up what it is asked for: `costs` by phase of a step, stream ("main", "side", "links") and
    kind. `gpu`: whose seconds are counted.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.costs: dict[tuple[str, str, str], Costs] = defaultdict(Costs)
        self._ctas: dict[str, int | None] = {}  # by name of a process group
        self._seconds = cache(lambda ask: {name: ask.seconds(gpu, assumed) for name, assumed in ASSUMED.items()})
        self.start_again()

    def start_again(self) -> None:
        """Forget what was counted."""
        self.costs.clear()
        self._timelines = {name: Timeline(each.queues, self._sharing(each)) for name, each in ASSUMED.items()}
        self._issuing: Ask | None = None

    def _sharing(self, assumed: Assumed) -> Sharing:
        return Sharing(self.gpu.processors, assumed.whole, assumed.product_first, assumed.carved)

    def __enter__(self) -> Self:
        super().__enter__()
        self._stack.enter_context(works_noted(self._issued, self._wait))
        self._stack.enter_context(mock.patch.object(Platform, "split", self._noting(Platform.split)))
        return self

    def _noting(self, split: Callable[..., Any]) -> Callable[..., Any]:
        def noted(platform: Platform, *args: Any, max_ctas: int | None = None, **options: Any) -> Any:
            if (group := split(platform, *args, max_ctas=max_ctas, **options)) is not None:
                self._ctas[group.group_name] = max_ctas
            return group

        return noted

    def ran(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        """Count a kernel. What runs outside of any phase is the building of the model."""
        if self.phase:
            ask = ask_of(func.overloadpacket, args, kwargs, out)
            if ask.kind == "wire":
                group = next(each for each in args if isinstance(each, torch.ScriptObject))
                ask = replace(ask, ctas=self._ctas.get(dist.ProcessGroup.unbox(group).group_name))
            self._add(ask)

    def ran_compiled(self, kernels: int, args: Any, out: Any, *, apart: bool) -> None:
        """Count kernels that read all arguments, `apart` a part of them, and write a part of the result each."""
        if self.phase:
            for _ in range(kernels):
                self._add(Ask("memory", memory=_bytes(args) / (kernels if apart else 1) + _bytes(out) / kernels))

    def _add(self, ask: Ask) -> None:
        assert self._issuing is None, "a method that issues collectives is missing in COLLECTIVES"
        self._issuing = ask if ask.kind == "wire" else None
        stream = "side" if self.beside else "links" if self._issuing else "main"
        seconds = self._seconds(ask)
        self.costs[self.phase, stream, ask.kind].add(ask, seconds)
        if stream == "main":
            for name, timeline in self._timelines.items():
                for link, late in timeline.compute(seconds[name], product=ask.kind == "product").items():
                    self.costs[link or self.phase, "main", "wire"].seconds[name] += late

    def _issued(self, communicator: str) -> dict[str, int]:
        """The number of a collective on each timeline. What its own stream carries ("side") is in order there."""
        ask, self._issuing = self._issuing, None
        if ask is None or self.beside:
            return {}
        # What is done once in a step has a link of its own, named by the phase that what waits for it counts to.
        once = SUMS if SUMS in self.phase else WEIGHTS if self.phase in (WEIGHTS, BEFORE) else ""
        seconds = self._seconds(ask)
        return {
            name: each.issue(seconds[name], once, communicator, ask.held(ASSUMED[name]))
            for name, each in self._timelines.items()
        }

    def _wait(self, works: Mapping[str, int]) -> None:
        for name, work in works.items():
            idle = self._timelines[name].wait(work)
            self.costs[self.phase, "main", "wire"].seconds[name] += idle


def ask_of(packet: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Ask:
    """What one call of `packet` takes."""
    name = packet.__name__
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}  # Which `out` is, too.
    if packet in ATTENTION:
        return Ask("attention", _attention(packet, args), _moved(args, kwargs, out))
    if packet in OF_MATRICES:
        columns, single = out.shape[-1], out.dtype == args[1].dtype == torch.float32
        if packet is aten._grouped_mm:  # Each row of the first factor with one matrix, or each column with one row.
            flops = 2 * args[0].numel() * args[1].shape[-1]
        else:
            factors = [x for x in args if isinstance(x, Tensor)]  # And not the dtype of the result.
            flops = flop_registry[IN_PLACE.get(packet, packet)](*factors, out_val=out)
        shape = out.numel() // max(1, columns), columns
        return Ask("product", flops, _moved(args, kwargs, out), shape=shape, single=single)
    if name in _WIRE:
        return Ask("wire", wire=_WIRE[name](args), copies=name == "_allgather_base_")
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
