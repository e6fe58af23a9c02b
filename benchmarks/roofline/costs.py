"""What a step asks of a device, in order: kernels, with their operations and bytes of memory, collectives, and waits.
Logged as they are dispatched to a GPU that computes nothing (`tests.fake_cuda`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import ceil
from typing import Any, Literal, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.roofline.devices import (
    ATTENTION,
    COLLECTIVE,
    CTA,
    DYNAMIC,
    EXPANDED,
    FAST,
    GAP,
    INNER,
    LINKS,
    MEMORY,
    NORMS,
    PRODUCTS,
    QUERIES,
    SHORTEST,
    SUMS,
    Assumed,
    Gpu,
)
from benchmarks.roofline.timeline import works_noted
from megatron_hetero.groups.platform import Platform
from tests.fake_cuda.device import GATHER, SCATTER, FakeGpu, ranks

aten = torch.ops.aten
OF_MATRICES = (aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.baddbmm_, aten._grouped_mm)
IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}
"""Those that write into their first argument, and those that do not."""
KERNELS = {
    aten._flash_attention_forward: "flash forward",
    aten._flash_attention_backward: "flash backward",
    aten._cudnn_attention_forward: "cudnn forward",
    aten._cudnn_attention_backward: "cudnn backward",
}
"""Those of attention."""
SLOWER = {aten.sum: SUMS, aten._fused_rms_norm: NORMS, aten._fused_rms_norm_backward: NORMS}
"""Kernels that reach another share of the memory's bandwidth than most."""
CHOOSING = frozenset("embedding embedding_dense_backward gather index index_select".split())
"""Kernels that read as many elements as they write, wherever these are."""
PLACING = frozenset("index_copy_ index_put_ scatter_add_ index_add_ index_fill_".split())
"""Kernels that write as many elements as they are given, into a larger tensor."""
FILLING = frozenset(
    "zeros ones full zero_ fill_ new_zeros zeros_like ones_like full_like empty_like rand randint".split()
)


@dataclass(frozen=True)
class Ask:
    """One operation. `kind`: "product", "attention", "memory" or "wire"; `flops`; `memory`: bytes read and written,
    for a collective those that a copy in its place would write; `wire`: bytes that this rank sends, by at most `ctas`
    CTAs (None: NCCL's choice). `shape`: rows and columns of a product; `single`: whether it is of matrices in single
    precision; `copies`: whether a collective only copies. `kernel`: which one of attention or SwiGLU; `blocks`: blocks
    of its queries, over heads. `bandwidth`: the share of the memory's that it reaches. `host`: seconds of the host, 0
    for those of any operation. `engine`: whether copy engines send, from one rank at a time.
    """

    kind: str
    flops: float = 0.0
    memory: float = 0.0
    wire: float = 0.0
    shape: tuple[int, int] = (0, 0)
    ctas: int | None = None
    single: bool = False
    copies: bool = False
    kernel: str = ""
    blocks: float = 0.0
    bandwidth: float = MEMORY
    host: float = 0.0
    engine: bool = False

    def held(self, assumed: Assumed) -> int:
        """How many multiprocessors a collective holds, `assumed` that."""
        if self.engine or (self.copies and assumed.copied):
            return 0
        return assumed.held if self.ctas is None else min(assumed.held, self.ctas)

    def seconds(self, gpu: Gpu, assumed: Assumed = FAST) -> float:
        """What a device takes, `assumed` that: as long as what it is slowest at, and until the next operation."""
        if self.kind == "wire":
            return self._copied(gpu) if assumed.alone else self._sent(gpu, assumed)
        moving = self.memory / (self.bandwidth * gpu.memory)
        if assumed.dynamic and self.kernel in DYNAMIC:
            moving = self.memory / DYNAMIC[self.kernel]
        computing = self.flops / (self._share(gpu, assumed) * (gpu.single if self.single else gpu.peak))
        return max(computing, moving, SHORTEST) + GAP

    def _share(self, gpu: Gpu, assumed: Assumed) -> float:
        """Of the peak, that it reaches."""
        if self.kind == "attention":
            kernel = self.kernel.replace("cudnn", "flash") if assumed.flash else self.kernel
            return ATTENTION[kernel].share(self.blocks) * gpu.attention * assumed.attention
        filling = filled(*self.shape, gpu.processors) if assumed.waves else 1.0
        return PRODUCTS * assumed.products * filling

    def _sent(self, gpu: Gpu, assumed: Assumed) -> float:
        """Seconds of a collective."""
        of_ctas = self.wire / (CTA * self.ctas) if self.ctas else 0.0
        ramp = 0.0 if self.engine else assumed.ramp
        return max((self.wire + ramp) / (LINKS * gpu.links), of_ctas) + COLLECTIVE

    def _copied(self, gpu: Gpu) -> float:
        """Seconds of the copy that stands in for a collective in the record; 0 if there is none."""
        rate = EXPANDED if self.copies else MEMORY * gpu.memory / 2
        return max(self.memory / rate, SHORTEST) + GAP if self.memory else 0.0


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


@dataclass(frozen=True)
class Event:
    """What a program does in a `phase` of a step. `what`: it runs an operation on the stream that computes ("kernel"),
    or on another one ("beside"); it issues a collective ("issue") or lets the stream that computes wait for one
    ("wait"), by the number of its `work`; the host waits for the device ("host").
    """

    phase: str
    what: Literal["kernel", "beside", "issue", "wait", "host"]
    ask: Ask | None = None
    work: int = -1
    communicator: str = ""


def written(events: Sequence[Event]) -> dict[str, Any]:
    """Events for JSON: `asks`, each once, and `events` as rows that have the place of theirs."""
    places: dict[Ask | None, int] = {}
    rows = [
        [event.phase, event.what, places.setdefault(event.ask, len(places)), event.work, event.communicator]
        for event in events
    ]
    return {"asks": [ask and asdict(ask) for ask in places], "events": rows}


def read_events(found: Mapping[str, Any]) -> list[Event]:
    """What `written` wrote."""
    asks = [ask and Ask(**ask | {"shape": tuple(ask["shape"])}) for ask in found["asks"]]
    return [Event(phase, what, asks[place], work, group) for phase, what, place, work, group in found["events"]]


class CountingGpu(FakeGpu):
    """A fake device that logs what it is asked for as `events`."""

    def __init__(self) -> None:
        super().__init__()
        self.events = list[Event]()
        self._ctas: dict[str, int | None] = {}  # by name of a process group
        self._compiled = ""
        self._issuing: Ask | None = None

    def start_again(self) -> None:
        """Forget what was logged."""
        self.events, self._issuing = [], None

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
        """Log an operation. What runs outside of any phase is the building of the model."""
        if self.phase and func.overloadpacket in (GATHER, SCATTER):
            self._fused(func.overloadpacket is GATHER, *args)
        elif self.phase:
            ask = ask_of(func.overloadpacket, args, kwargs, out)
            if ask.kind == "wire":
                group = next(each for each in args if isinstance(each, torch.ScriptObject))
                ask = replace(ask, ctas=self._ctas.get(dist.ProcessGroup.unbox(group).group_name))
            self._add(ask)

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """As of a `FakeGpu`, with the name of the function while it runs."""
        run = super().compiled(function, **options)

        def named(*args: Any) -> Any:
            self._compiled = function.__name__
            try:
                return run(*args)
            finally:
                self._compiled = ""

        return named

    def ran_compiled(self, kernels: int, args: Any, out: Any, *, apart: bool) -> None:
        """Log kernels that read all arguments, `apart` a part of them, and write a part of the result each. SwiGLU is
        one kernel in either direction (the record's table of kernels). Norms are taken to be no faster than PyTorch's.
        """
        if not self.phase:
            return
        if kernel := next((name for name in DYNAMIC if name.replace(" ", "_") == self._compiled), ""):
            kernels = 1
        bandwidth = NORMS if "normed" in self._compiled else MEMORY
        for _ in range(kernels):
            memory = _bytes(args) / (kernels if apart else 1) + _bytes(out) / kernels
            self._add(Ask("memory", memory=memory, kernel=kernel, bandwidth=bandwidth))

    def waits_for(self, what: str) -> None:
        """The host waits for the device."""
        super().waits_for(what)
        if self.phase:
            self.events.append(Event(self.phase, "host"))

    def _fused(self, gathers: bool, x: Tensor, matrices: Any, *more: Any) -> None:
        n, group = ranks(more[-1]), more[-1]
        inner, columns = (matrices[0] if gathers else matrices).shape
        sizes = x.numel() // inner // (1 if gathers else n), inner, columns, x.itemsize
        self.events += fused(self.phase, len(self.events), gathers, sizes, n, f"copies {group}")

    def _add(self, ask: Ask) -> None:
        assert self._issuing is None, "a method that issues collectives is missing in COLLECTIVES"
        if ask.kind == "wire" and not self.beside:
            self._issuing = ask
        else:
            self.events.append(Event(self.phase, "beside" if self.beside else "kernel", ask))

    def _issued(self, communicator: str) -> int:
        """The number of a collective; -1 for what its own stream carries, which is in order there."""
        if self._issuing is None:
            return -1
        ask, self._issuing = self._issuing, None
        self.events.append(Event(self.phase, "issue", ask, len(self.events), communicator))
        return self.events[-1].work

    def _wait(self, work: int) -> None:
        if work >= 0 and self.phase:
            self.events.append(Event(self.phase, "wait", work=work))


def fused(
    phase: str, number: int, gathers: bool, sizes: tuple[int, int, int, int], n: int, communicator: str
) -> list[Event]:
    """A product fused with a gather before it, or with a sum over `n` ranks after it, as PyTorch takes it apart
    (`_pipelined_multi_all_gather_and_consume`, `_pipelined_produce_and_all2all` in torch.distributed): by ranks, of
    which one is computed while a copy engine fetches what another one has. Two streams take them in turn: a copy begins
    when the product but one before it has ended.

    Args:
        phase: of the step.
        number: of the first event.
        gathers: whether it is a gather.
        sizes: rows of a rank, inner dim, columns, and bytes of an element.
        n: ranks.
        communicator: stands for the stream of copies.
    """
    rows, inner, columns, itemsize = sizes
    part, result = (rows * width * itemsize for width in (inner, columns))
    moved = part + inner * columns * itemsize + result
    product = Ask("product", 2.0 * rows * inner * columns, moved, shape=(rows, columns), host=INNER)
    barrier, copied = Ask("memory", host=INNER), Ask("memory", memory=2.0 * part, host=INNER)
    # Before and after a sum is fetched ranks wait for each other, too.
    sent = Ask("wire", wire=part if gathers else result, host=INNER * (1 if gathers else 3), engine=True)
    found, copies = [Event(phase, "kernel", replace(barrier, host=0.0))], list[int]()  # The operator itself.

    def run(*asks: Ask) -> None:
        found.extend(Event(phase, "kernel", ask) for ask in asks)

    def send() -> None:
        copies.append(number + len(found))
        found.append(Event(phase, "issue", sent, copies[-1], communicator))

    def wait(copy: int) -> None:
        found.append(Event(phase, "wait", work=copy))

    if gathers:
        run(copied, barrier)
        send()
        run(product)
        for place in range(n - 1):
            if place < n - 2:
                send()
            wait(copies[place])
            run(product)
        run(copied, barrier)
        return found
    for place in range(n - 1):
        if place > 1:  # There is room for two.
            wait(copies[place - 2])
        run(product)
        send()
    last = copies[-2:]
    if n > 2:  # The stream of the rank's own product has every second copy.
        wait(last.pop(n % 2))
    run(product)
    for copy in last:
        wait(copy)
    run(barrier, Ask("memory", memory=float((n + 1) * result), bandwidth=NORMS))
    return found


def ask_of(packet: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Ask:
    """What one call of `packet` takes."""
    name = packet.__name__
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}  # Which `out` is, too.
    if packet in KERNELS:
        flops, blocks = _attention(KERNELS[packet], args)
        return Ask("attention", flops, _moved(args, kwargs, out), kernel=KERNELS[packet], blocks=blocks)
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
        copies = name == "_allgather_base_"
        return Ask("wire", wire=_WIRE[name](args), memory=_stand_in(name, args), copies=copies)
    if name in CHOOSING:
        return Ask("memory", memory=2 * _bytes(out))
    if name in PLACING:
        return Ask("memory", memory=2 * _bytes(list(args[1:])))
    if name in FILLING:
        return Ask("memory", memory=_bytes(out if out is not None else args[0]))
    moved = _moved(args, kwargs, out, writes_into=name.endswith("_"), reads=name != "copy_")
    return Ask("memory", memory=moved, bandwidth=SLOWER.get(packet, MEMORY))


def _attention(kernel: str, args: Any) -> tuple[float, float]:
    """Operations of attention over a pack of segments that are all alike, and its blocks of queries over heads; a
    backward pass has five products in place of two. Dense calls of cuDNN have tokens after heads.
    """
    places = {
        "flash forward": (0, 6, 8),
        "flash backward": (1, 9, 11),
        "cudnn forward": (0, 6, 10),
        "cudnn backward": (1, 11, 14),
    }
    query, longest, causal = (args[place] for place in places[kernel])
    heads, tokens = query.shape[1], query.numel() // query.shape[1] // query.shape[-1]
    flops = 4 * query.numel() * longest * (2.5 if kernel.endswith("backward") else 1) / (2 if causal else 1)
    return flops, heads * tokens / QUERIES


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


def _stand_in(name: str, args: Any) -> int:
    """Bytes that the copy writes that stands in for a collective in the record (`benchmarks.gpu.groups.EchoGroup` as it
    was): all of a gather's result, the rank's own rows of a sum, unless they are there already.
    """
    if name not in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
        return 0
    there = args[0].untyped_storage()._cdata == args[1].untyped_storage()._cdata
    return 0 if there and name == "_reduce_scatter_base_" else args[0].nbytes


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
