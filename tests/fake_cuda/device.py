"""A GPU that computes nothing: tensors on "cuda" are fake (shape, type and memory, no values), those of the host are
real.

`FakeGpu` is a context in which a program runs as it would on its rank's GPU, up to the values, and which knows what the
device would be asked for: kernels, memory, and every place where the host waits for the device. What the host reads
from the device is made up: ones; for the sizes of an exchange of experts, those that `Sizes.expected` has, and for
where the pairs of each expert end, as many for each.
"""

from __future__ import annotations

import contextlib
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock
from weakref import finalize

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_hetero.groups import platform
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models import language
from megatron_hetero.models.layers import dispatch, mlp, rotary, short_convolution
from megatron_hetero.step.fused import update_
from tests.support import head_passes

GPU = torch.device("cuda", 0)
NAME = "NVIDIA H100 80GB HBM3"
aten = torch.ops.aten

READS = (aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten._assert_async)
"""Ops whose result the host looks at."""
SIZED_BY_VALUES = (aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.unique_dim)
"""Ops that wait for the device to know how large their result is; besides, indexing with booleans."""
COPIES = (aten._to_copy, aten.copy_)
NO_KERNELS = frozenset(
    "_reshape_alias _unsafe_view alias as_strided chunk detach empty empty_like empty_strided expand lift_fresh narrow "
    "new_empty new_empty_strided permute resize_ select set_ slice split split_with_sizes squeeze t transpose unbind "
    "unsafe_split unsqueeze view view_as_real".split()
)
"""Ops that look at memory, or make room in it."""


COMPILED = {
    language._sum_of_exponentials: 1,
    language._gradients_: 1,
    mlp.swiglu_forward: 1,
    mlp.swiglu_backward: 1,
    rotary.turned: 1,
    rotary.turned_back: 1,
    rotary.heads_turned: 3,
    rotary.heads_turned_back: 3,
    head_passes.heads_normed: 1,
    head_passes.heads_normed_back: 3,
    short_convolution.activated: 1,
    short_convolution.gradients: 2,
    update_: 1,
}
"""Functions that are compiled on a GPU, or have kernels there, and how many kernels each is then."""
APART = (rotary.heads_turned, rotary.heads_turned_back, head_passes.heads_normed_back)
"""Those of which each kernel reads a part of its own."""


@dataclass(eq=False)
class Usage:
    """What was asked of a device. `kernels`: by phase, how often each op ran. `live`, `peak`: bytes of its tensors now,
    and at most, of which `at_peak` says in which phase that was. `waits`: by phase and place in the program, how often
    the host waited. `mixed`: ops that were given tensors of both devices. `copied`: bytes to the host ("out") and to
    the device ("back"), on other streams than the one that computes.
    """

    kernels: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    copied: Counter[str] = field(default_factory=Counter)
    live: int = 0
    peak: int = 0
    at_peak: str = ""

    def start_again(self) -> None:
        """Forget all but what is alive."""
        self.kernels.clear()
        self.waits.clear()
        self.mixed.clear()
        self.copied.clear()
        self.peak, self.at_peak = self.live, ""


class FakeGpu:
    """See above. `usage`: since it was made, or started again. To be used once; the guard has to be loaded."""

    def __init__(self) -> None:
        self.usage, self.phase, self.beside, self.inside = Usage(), "", False, False
        self.capability: tuple[int, int] = (9, 0)
        self.written = list[Tensor]()
        self.symmetric = dict[str, Tensor]()  # by name of a group
        self._known, self._sizes = _Memories(), dict[int, int]()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(_cuda_calls(self))
        self._stack.enter_context(_fsdp_calls(self))
        self._stack.enter_context(self._fake)
        self._stack.enter_context(_Dispatch(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What is asked for inside counts as `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def compiled(self, function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        """In place of `torch.compile`: counts the kernels that it makes, which need memory for the result alone."""

        def run(*args: Any) -> Any:
            self.inside = True
            try:
                out = function(*args)
            finally:
                self.inside = False
            self.usage.kernels[self.phase][f"compiled {function.__name__}"] += COMPILED[function]
            self.ran_compiled(COMPILED[function], args, [out, *self.written], apart=function in APART)
            self.written.clear()
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self.holds(tensor)
            return out

        return run

    def waits_for(self, what: str) -> None:
        """The host waits for the device, because of `what`."""
        self.usage.waits[self.phase, f"{_place()}: {what}"] += 1

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        """What is asked for inside runs on a stream of its own, or, with None, on the one that computes."""
        before, self.beside = self.beside, stream is not None
        try:
            yield
        finally:
            self.beside = before

    def copies(self, direction: str, size: int) -> None:
        """Count what is copied beside the computation."""
        self.usage.copied[direction] += size * self.beside

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Called after each kernel: for those who count more than their number."""

    def ran_compiled(self, kernels: int, args: Any, out: Any, *, apart: bool) -> None:
        """Likewise, after those of a compiled function; `out`: also what it has written in place. `apart`: whether each
        reads a part of the arguments.
        """

    def holds(self, tensor: Tensor) -> None:
        """Count the memory of a tensor while it lives."""
        # What a `DTensor` has is that of its part on this rank, which is a tensor of its own.
        if isinstance(tensor, DTensor) or tensor in self._known:
            return
        address = tensor.untyped_storage()._cdata
        self._known.add(tensor, lambda: self._takes(address, 0))
        self._takes(address, tensor.untyped_storage().nbytes())

    def works_in(self, size: int) -> None:
        """A kernel takes memory while it runs."""
        if (most := self.usage.live + size) > self.usage.peak:
            self.usage.peak, self.usage.at_peak = most, self.phase

    def shares(self, group: str, size: int) -> None:
        """A group gets symmetric memory of so many bytes."""
        self.symmetric[group] = torch.empty(size, dtype=torch.uint8, device=GPU)

    def resizes(self, tensor: Tensor, size: int) -> None:
        """A memory gets another size, in bytes."""
        self.holds(tensor)
        self._takes(tensor.untyped_storage()._cdata, size)

    def _takes(self, address: int, size: int) -> None:
        usage = self.usage
        usage.live += size - self._sizes.pop(address, 0)
        if size:
            self._sizes[address] = size
        if usage.live > usage.peak:
            usage.peak, usage.at_peak = usage.live, self.phase


class _Memories:
    """A set of the memories that tensors lie in, as long as they live."""

    def __init__(self) -> None:
        self._alive: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._alive

    def add(self, tensor: Tensor, at_end: Callable[[], None] = lambda: None) -> None:
        """Add one that is not in it; `at_end` is called when it ends."""
        storage = tensor.untyped_storage()
        self._alive.add(storage._cdata)
        finalize(storage, self._end, storage._cdata, at_end)

    def _end(self, address: int, at_end: Callable[[], None]) -> None:
        self._alive.discard(address)
        at_end()


class _Dispatch(TorchDispatchMode):
    """Sends each op to the host or to the fake device, and keeps the books."""

    def __init__(self, gpu: FakeGpu):
        super().__init__()
        self.gpu = gpu
        self.pinned = _Memories()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        packet = func.overloadpacket
        if packet is aten.is_pinned:
            return not isinstance(inputs[0], FakeTensor) and inputs[0] in self.pinned
        if packet is aten._pin_memory:
            with unset_fake_temporarily():
                pinned = inputs[0].clone()
            self.pinned.add(pinned)
            return pinned
        on_gpu = [x for x in inputs if x.device.type == "cuda"]
        device = kwargs.get("device")
        if not on_gpu and (device is None or torch.device(device).type != "cuda"):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        read = self._read(func, args, kwargs, inputs)
        if read is not None:
            return read[0]
        self._check(func, args, kwargs, inputs, on_gpu)
        out = SHAPES[packet](*args) if packet in SHAPES else func(*args, **kwargs)
        if self.gpu.inside and packet is aten.copy_:
            self.gpu.written.append(out)
        self._account(packet, args, out)
        if packet is aten._flash_attention_backward:
            self.gpu.works_in(_flash_workspace(args[1], args[2], args[6]))
        if packet is SCATTER:  # The sums of all ranks, before they are added up.
            self.gpu.works_in(len(args[0]) * out[0].nbytes)
        if packet is aten._cudnn_attention_backward:
            self.gpu.works_in(_cudnn_workspace(args[1], args[2], args[9], args[11]))
        if packet.__name__ not in NO_KERNELS and not self.gpu.inside:
            self.gpu.ran(func, args, kwargs, out)
        return out

    def _read(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[Any] | None:
        """What the host gets, of ops that bring something to it."""
        packet = func.overloadpacket
        if packet in READS:
            self.gpu.waits_for(f"{packet.__name__} of a tensor on the device")
            with unset_fake_temporarily():
                return (torch.ones((), dtype=inputs[0].dtype).item() if packet is aten._local_scalar_dense else True,)
        to_host = packet is aten._to_copy and torch.device(kwargs.get("device") or GPU).type == "cpu"
        if to_host:
            self.gpu.waits_for("a copy to the host")
            with unset_fake_temporarily():
                return (torch.ones(inputs[0].shape, dtype=kwargs.get("dtype") or inputs[0].dtype),)
        if packet is aten.copy_ and inputs[0].device.type == "cpu" and inputs[1].device.type == "cuda":
            if not (inputs[0] in self.pinned and ((len(args) > 2 and args[2]) or kwargs.get("non_blocking"))):
                self.gpu.waits_for("a copy to the host")
            self.gpu.copies("out", inputs[0].nbytes)
            with unset_fake_temporarily():
                return (inputs[0].fill_(1),)
        return None

    def _check(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], on_gpu: list[Tensor]) -> None:
        """Note what a GPU would not do, or not without waiting."""
        packet, values = (
            func.overloadpacket,
            inputs[1] if func.overloadpacket is aten.copy_ else inputs[0] if inputs else None,
        )
        if packet in COPIES and values is not None and values.device.type == "cpu":
            free = kwargs.get("non_blocking", len(args) > 2 and args[2]) and values in self.pinned
            if not free and values.numel():
                self.gpu.waits_for("a copy to the device from memory that is not pinned")
            self.gpu.copies("back", values.nbytes)
            return
        repeats = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in SIZED_BY_VALUES or repeats or _is_masked(packet, args):
            self.gpu.waits_for(f"{packet.__name__}, whose result is as large as the values say")
        # A number in a tensor of the host without dims is passed to a kernel by value.
        if on_gpu and any(x.device.type == "cpu" and x.dim() for x in inputs):
            self.gpu.usage.mixed[f"{_place()}: {func}"] += 1

    def _account(self, packet: Any, args: Any, out: Any) -> None:
        if self.gpu.inside:
            return
        if packet.__name__ not in NO_KERNELS:
            self.gpu.usage.kernels[self.gpu.phase][packet.__name__] += _launches(packet, args)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                self.gpu.holds(tensor)


def _flash_workspace(query: Tensor, key: Tensor, ends: Tensor) -> int:
    """What `mha_varlen_bwd` of FlashAttention-2 (flash_api.cpp) allocates and frees: `dq_accum`, `softmax_d`, and
    `dk_expanded` and `dv_expanded`.
    """
    (tokens, heads, dim), batch = query.shape, len(ends) - 1
    rounded = (dim + 31) // 32 * 32
    sums = (tokens + 128 * batch) * heads * rounded * 4 + heads * (tokens + 128 * batch) * 4
    expanded = 2 * len(key) * heads * dim * key.itemsize if heads != key.shape[1] else 0
    return sums + expanded


def _cudnn_workspace(query: Tensor, key: Tensor, ends: Tensor | None, longest: int) -> int:
    """What cuDNN's backward pass (`CompositeSDPABackwardNode` of cudnn-frontend) allocates and frees: `dQ_accum` and
    `softmax_sum` in fp32, and `dK_fullhead` and `dV_fullhead`, each of as many rows as segments of the longest length.
    """
    heads, of_keys = (x.shape[1] for x in (query, key))  # [T, H, D], or [B, H, S, D]
    rows = (len(query) if ends is None else len(ends) - 1) * longest * heads
    return rows * (4 * (query.shape[-1] + 1) + (2 * query.itemsize * query.shape[-1] if heads != of_keys else 0))


def _cudnn_forward(query: Tensor, key: Tensor, value: Tensor, bias: None, *sizes: Any) -> tuple[Any, ...]:
    """What `_cudnn_attention_forward` returns, which has no shapes for fake tensors."""
    logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    return torch.empty_like(query), logsumexp, *sizes[:4], seed, offset, None


def _cudnn_backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Likewise, of the backward pass: the gradients of queries, keys and values."""
    return tuple(torch.empty_like(x) for x in inputs[:3])


def ranks(group_name: str) -> int:
    """The number of ranks of a group."""
    return dist.distributed_c10d._resolve_process_group(group_name).size()  # pyright: ignore[reportArgumentType]


def _gather_matmul(x: Tensor, matrices: list[Tensor], _: int, group: str) -> tuple[Tensor, list[Tensor]]:
    """What `fused_all_gather_matmul` returns, whose own shapes come from collectives."""
    whole = x.new_empty(ranks(group) * len(x), *x.shape[1:])
    return whole, [x.new_empty(*whole.shape[:-1], each.shape[1]) for each in matrices]


def _matmul_scatter(x: Tensor, matrix: Tensor, _: str, __: int, group: str) -> Tensor:
    """Likewise, `fused_matmul_reduce_scatter`."""
    return x.new_empty(len(x) // ranks(group), *x.shape[1:-1], matrix.shape[1])


def _launches(packet: Any, args: Any) -> int:
    """Kernels and copies of an op: of a fused one a product and a copy for each rank, waits of ranks for each other,
    and, of sums, the sum.
    """
    n = ranks(args[-1]) if packet in (GATHER, SCATTER) else 0
    return {GATHER: 2 * n + 4, SCATTER: 4 * n}.get(packet, 1)


GATHER, SCATTER = torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter
SHAPES = {
    aten._cudnn_attention_forward: _cudnn_forward,
    aten._cudnn_attention_backward: _cudnn_backward,
    GATHER: _gather_matmul,
    SCATTER: _matmul_scatter,
}
"""Ops that have no shapes of their own for fake tensors."""


def _is_masked(packet: Any, args: Any) -> bool:
    """Whether booleans choose what is indexed. One number of the host is filled in where they are true, which is no
    indexing to PyTorch.
    """
    if packet not in (aten.index, aten.index_put, aten.index_put_):
        return False
    filled = packet is not aten.index and args[2].device.type == "cpu" and args[2].numel() == 1
    return not filled and any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _place() -> str:
    """Where in the program, or in Megatron-Core, this happens; in a backward pass nobody knows."""
    for frame in reversed(traceback.extract_stack()):
        for package in ("megatron_hetero/", "megatron/core/"):
            if package in frame.filename:
                return f"{package}{frame.filename.rpartition(package)[2]} {frame.name}"
    return "autograd"


class _Event:
    """An event of a stream that is always idle."""

    def __init__(self, waits_for: Callable[[str], None], **_: Any):
        self._waits_for = waits_for

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        self._waits_for("an event")


class _Stream:
    """A stream that is always idle."""

    def __init__(self, waits_for: Callable[[str], None]):
        self._waits_for = waits_for

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event(self._waits_for)

    def synchronize(self) -> None:
        self._waits_for("a stream")


@contextlib.contextmanager
def _fsdp_calls(gpu: FakeGpu) -> Iterator[None]:
    """Inside, the books are kept of memory that FSDP2 frees and gets again."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    def alloc(tensor: Tensor) -> None:
        gpu.resizes(tensor, tensor.numel() * tensor.itemsize)

    def free(tensor: Tensor) -> None:
        gpu.resizes(tensor, 0)

    with (
        mock.patch.object(_fsdp_param, "alloc_storage", alloc),
        mock.patch.object(_fsdp_param_group, "alloc_storage", alloc),
        mock.patch.object(_fsdp_param, "free_storage", free),
    ):
        yield


def _expected(exchanged: Callable[..., dispatch.Sizes]) -> Callable[..., dispatch.Sizes]:
    """As `dispatch._sizes`, with sizes under uniform routing in place of those that were read."""

    def sizes(owner: Tensor, to_rank: Tensor, group: Any, imbalance: float) -> dispatch.Sizes:
        exchanged(owner, to_rank, group, imbalance)
        return dispatch.Sizes.expected(len(owner), owner.shape[1], to_rank.shape[1], imbalance)

    return sizes


def _read(real: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    """As `dispatch._read`, likewise."""

    def read(ends: Tensor, pairs: int) -> tuple[int, ...]:
        real(ends, pairs)
        return tuple(dispatch.block(pairs, expert, len(ends))[1] for expert in range(len(ends)))

    return read


@contextlib.contextmanager
def _cuda_calls(gpu: FakeGpu) -> Iterator[None]:
    """Inside, what `torch.cuda` and Megatron-Core ask of the driver is answered for the fake device."""
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.tensor_parallel.random as generators

    @contextlib.contextmanager
    def one_by_one(*_: Any, **__: Any) -> Iterator[Any]:
        yield types.SimpleNamespace(wait=lambda: None)

    def alike(gathered: list[Any], mine: Any, *_: Any, **__: Any) -> None:
        gathered[:] = [mine] * len(gathered)

    host_state = torch.get_rng_state
    answers = {
        torch.cuda: {
            "current_device": lambda: 0,
            "set_device": lambda *_: None,
            "Event": lambda **options: _Event(gpu.waits_for, **options),
            "Stream": lambda **_: _Stream(gpu.waits_for),
            "stream": gpu.stream,
            "current_stream": lambda *_: _Stream(gpu.waits_for),
            "synchronize": lambda *_: gpu.waits_for("the whole device"),
            "get_device_name": lambda *_: NAME,
            "get_device_capability": lambda *_: gpu.capability,
            "max_memory_allocated": lambda *_: 0,
            "memory_reserved": lambda *_: 0,
            "mem_get_info": lambda *_: (80 << 30, 80 << 30),
            "get_per_process_memory_fraction": lambda *_: 1.0,
            "set_per_process_memory_fraction": lambda *_: None,
            "get_rng_state": lambda *_, **__: host_state(),
            "set_rng_state": lambda *_, **__: None,
            "manual_seed": lambda *_: None,
        },
        torch: {"compile": gpu.compiled},
        symmetric: {"get_symm_mem_workspace": gpu.shares},
        torch.accelerator: {"current_stream": lambda *_: _Stream(gpu.waits_for)},
        platform: {"_gpus_compile": lambda: True},
        # By Triton, in a kernel each.
        mlp: {"_triton_passes": lambda: tuple(map(gpu.compiled, (mlp.swiglu_forward, mlp.swiglu_backward)))},
        rotary: {
            "_kernels": lambda: types.SimpleNamespace(
                forward=gpu.compiled(head_passes.forward), backward=gpu.compiled(head_passes.backward)
            )
        },
        Tensor: {"record_stream": lambda *_: None},
        # One copy, as of other tensors; theirs reads one element after the other.
        FakeTensor: {"tolist": lambda x: x.cpu().tolist()},
        dispatch: {"_sizes": _expected(dispatch._sizes), "_read": _read(dispatch._read)},
        # Its states are of a generator on the device, of which there is none. Nothing here draws anything.
        generators: {
            "_get_cuda_rng_state": lambda *_, **__: host_state(),
            "_set_cuda_rng_state": lambda *_, **__: None,
        },
        generators.CudaRNGStatesTracker: {"fork": lambda *_, **__: contextlib.nullcontext()},
        # Registered with the driver: there is none.
        Platform: {"host_zeros": lambda _, count, dtype: torch.zeros(count, dtype=dtype).pin_memory()},
        # Objects travel as bytes, which the backend `fake` does not bring.
        torch.distributed: {"all_gather_object": alike},
        # Coalesced collectives have no shapes for fake tensors.
        buffers: {"_coalescing_manager": one_by_one},
    }
    with contextlib.ExitStack() as stack:
        for where, replaced in answers.items():
            for name, answer in replaced.items():
                stack.enter_context(mock.patch.object(where, name, answer))
        yield
