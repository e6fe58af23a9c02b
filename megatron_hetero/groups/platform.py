"""Platforms: CUDA with NCCL, or a CPU with gloo. No other file distinguishes the two."""

from __future__ import annotations

import contextlib
import mmap
import resource
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, cast
from weakref import finalize

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionMeta, once_differentiable
from torch.overrides import TorchFunctionMode

from megatron_hetero.base.errors import UserError, os_errors_as
from megatron_hetero.groups.collective import FIRST, on_every
from megatron_hetero.layout.communicators import group_of

CPU = torch.device("cpu")

MAX_GRAPHS = 64
"""Maximum compiled graphs of one function: one for each module, local width, number format and padding, with and
without gradients. Beyond this limit PyTorch raises an error, or runs functions of any length eagerly.
"""
HEADROOM = 512 << 20
"""GPU memory in bytes that is left free for kernels that CUDA loads and buffers that NCCL allocates at first use."""


class _OnceDifferentiable(FunctionMeta):
    """Metaclass of `Function`. The backward pass of its classes calls `backward` without wrappers."""

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]):
        super().__init__(name, bases, attributes)
        backward = cls.backward  # pyright: ignore[reportAttributeAccessIssue]
        refusing = once_differentiable(backward)

        def apply(ctx: Any, *grads: Any) -> Any:
            return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

        cls._backward_cls.apply = apply  # pyright: ignore[reportAttributeAccessIssue]


class Function(torch.autograd.Function, metaclass=_OnceDifferentiable):
    """An autograd function whose gradients cannot be differentiated again, as with `once_differentiable`. PyTorch's own
    class spends a few microseconds per pass of each call on transforms of functorch and on changes of the grad mode.
    """

    # The method of the base class in C++, without the wrapper in `torch.autograd.Function`.
    apply = torch._C._FunctionBase.__dict__["apply"]  # pyright: ignore[reportAttributeAccessIssue]


@dataclass
class _Compiler:
    """The state of `torch.compile` in this process."""

    works: bool | None = None
    """Whether GPU kernels can be compiled: on all ranks if they have agreed, else on this rank; None before a test."""
    instead: Callable[..., Any] | None = None
    """Function called as `instead(function, *inputs)` in place of compiled functions, for tensors without values."""


_COMPILER = _Compiler()


def _gpus_compile() -> bool:
    """Return whether `torch.compile` can build kernels for GPUs, which the first call tests."""
    if _COMPILER.works is None:
        problem = compile_problem(torch.device("cuda", torch.cuda.current_device()))
        _COMPILER.works = problem is None
        if problem:
            warnings.warn(_without_compiler(problem), stacklevel=2)
    return _COMPILER.works


def compile_problem(device: torch.device) -> str | None:
    """Compile and run a kernel on the device. Returns the reason if this fails, else None. Compilation requires Triton,
    a C compiler, and Python's headers for the code that launches kernels.
    """
    try:
        compiled(_one_more)(torch.ones(2, device=device)).sum().item()
    except Exception as problem:  # The compiler and its tools may raise any exception.
        return str(problem).strip().partition("\n")[0] or type(problem).__name__
    return None


def _one_more(values: torch.Tensor) -> torch.Tensor:
    return values + 1


def _without_compiler(problem: str) -> str:
    return (
        f"updates and layers take more passes over memory, as PyTorch cannot compile for the GPU: {problem}. Install "
        "Triton, a C compiler and Python's headers (python3-dev) on every host"
    )


def compiles_for(tensor: torch.Tensor) -> bool:
    """Return whether `torch.compile` builds kernels for the device of `tensor`: never for a CPU."""
    return _COMPILER.instead is not None if tensor.is_meta else tensor.is_cuda and _gpus_compile()


@contextlib.contextmanager
def instead_of_compiled(run: Callable[..., Any]) -> Iterator[None]:
    """Call `run(function, *inputs)` in place of compiled functions inside the context, for tensors on `meta`."""
    before, _COMPILER.instead = _COMPILER.instead, run
    try:
        yield
    finally:
        _COMPILER.instead = before


_THREAD = threading.local()
"""Whether PyTorch's limit of graphs is set in a thread (`has_limit`), which takes as long to read as small kernels."""


@cache
def compiled(function: Callable[..., Any], *, dynamic: bool = True) -> Callable[..., Any]:
    """Compile a function with `torch.compile`, once for tensors of any length. Without `dynamic`, all dims have fixed
    sizes except those marked as dynamic, which gives better kernels.
    """
    make = cache(partial(torch.compile, function, dynamic=dynamic, fullgraph=not dynamic))

    def run(*inputs: Any) -> Any:
        if _COMPILER.instead is not None and any(isinstance(x, torch.Tensor) and x.is_meta for x in inputs):
            return _COMPILER.instead(function, *inputs)
        # Settings are per thread, and backward passes run in other threads.
        if not hasattr(_THREAD, "has_limit"):
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
            _THREAD.has_limit = True
        return make()(*inputs)

    return run


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device through pinned memory, without waiting. Returns the tensor itself on a CPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a device tensor to pinned memory without waiting; values are valid once the device has copied them. Returns
    the tensor itself on a CPU.
    """
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory().copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class Platform:
    """The device of this process, and the backends of its collectives."""

    device: torch.device
    backend: str
    """The backend of collectives on tensors of the device."""
    host_backend: str = "gloo"
    """The backend of collectives on tensors in host memory."""
    timeout: timedelta | None = None
    """The time-out of collectives; None for PyTorch's default."""

    @classmethod
    def detect(cls, local_rank: int = 0) -> Platform:
        """Return CUDA if GPUs are visible, else the CPU. Raises `UserError` if there is no GPU for this local rank."""
        if not torch.cuda.is_available():
            return cls(CPU, "gloo")
        if local_rank >= (devices := torch.cuda.device_count()):
            where, expected = f"rank {local_rank} of this host (environment variable LOCAL_RANK)", "one for each rank"
            fix = f"start {devices} ranks there (--nproc-per-node {devices}), or look at CUDA_VISIBLE_DEVICES"
            raise UserError.at(where, found=f"{devices} GPU{'s' * (devices != 1)} on it", expected=expected, fix=fix)
        return cls(torch.device("cuda", local_rank), "nccl")

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def compiles(self) -> bool:
        """Whether `torch.compile` builds kernels for the device: never for a CPU."""
        return self.is_cuda and _gpus_compile()

    def agree_to_compile(self, group: dist.ProcessGroup) -> None:
        """Compile a kernel on each rank of a host `group`. If that fails on any rank, no rank compiles, so that all
        compute the same, and the first rank warns. Does nothing on a CPU.
        """
        if self.is_cuda:
            problems = on_every(group, lambda: compile_problem(self.device))
            failures = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
            _COMPILER.works = not failures
            if failures and dist.get_rank(group) == FIRST:
                warnings.warn(_without_compiler(failures[0]), stacklevel=2)

    def leave_headroom(self) -> None:
        """Limit PyTorch's allocator to the memory that process groups leave free, less `HEADROOM`: it then raises "out
        of memory" before CUDA and NCCL, which allocate memory too, run out. A lower existing limit stays.
        """
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info(self.device)
            share = (free + torch.cuda.memory_reserved(self.device) - HEADROOM) / total
            limit = min(torch.cuda.get_per_process_memory_fraction(self.device), max(0.0, share))
            torch.cuda.set_per_process_memory_fraction(limit, self.device)

    @property
    def device_name(self) -> str:
        """The product name of the accelerator, or `cpu`."""
        return torch.cuda.get_device_name(self.device) if self.is_cuda else "cpu"

    @property
    def connects_late(self) -> bool:
        """Whether ranks connect, and hosts wait for each other, in the first call of each kind on a process group, as
        with NCCL. With gloo, ranks connect when the group is created.
        """
        return self.backend != "gloo"

    @property
    def prefers_all_reduce(self) -> bool:
        """Whether an all-reduce is faster than a reduce-scatter of the same tensor, as with gloo."""
        return self.backend == "gloo"

    def init_process_group(self, **options: Any) -> None:
        """Call `torch.distributed.init_process_group` with this platform's backend, device and options."""
        if self.is_cuda:
            torch.cuda.set_device(self.device)
            # Initialise eagerly, so that groups can be split. With debug level DETAIL, whose wrapper cannot be split
            # (PyTorch 2.11), communicators are created one by one, at first use.
            if dist.get_debug_level() != dist.DebugLevel.DETAIL:
                options["device_id"] = self.device
            # This group is urgent, since modules whose `tp` spans all ranks use it.
            options["pg_options"] = self._options(None, urgent=True)
        dist.init_process_group(self.backend, **options)

    def split(
        self, groups: Sequence[tuple[int, ...]], what: str, *, max_ctas: int | None = None, urgent: bool = False
    ) -> dist.ProcessGroup | None:
        """Create process groups with disjoint ranks for tensors of the device.

        Every rank of the world makes this call, with the same groups. Returns the group of this rank, or None. `what`:
        name of the groups in traces and debuggers. `max_ctas`: maximum CTAs of a kernel; None for NCCL's choice.
        `urgent`: whether kernels run on high-priority streams, concurrently with matrix products.
        """
        options = self._options(max_ctas, urgent)
        if dist.group.WORLD.bound_device_id is not None:  # pyright: ignore[reportOptionalMemberAccess]
            # This is one `ncclCommSplit` of all ranks; `new_group` would need one for each group.
            ranks = list(map(list, groups))
            group = dist.split_group(split_ranks=ranks, timeout=self.timeout, pg_options=options, group_desc=what)
            return group if group_of(groups, dist.get_rank()) else None  # PyTorch 2.14+: -100, not None.
        return self._local_group(groups, self.backend, what, options)

    def _options(self, max_ctas: int | None, urgent: bool) -> Any:
        """Return options of NCCL, which a split does not inherit from its parent; None for other backends."""
        if self.backend != "nccl":
            return None
        nccl: Any = dist.ProcessGroupNCCL  # Builds of PyTorch for CPUs lack it.
        options = nccl.Options(is_high_priority_stream=urgent)
        if self.timeout is not None:  # PyTorch warns if this differs from the group's time-out.
            options._timeout = self.timeout
        if max_ctas is not None:
            options.config.max_ctas = max_ctas
        return options

    def split_hosts(self, groups: Sequence[tuple[int, ...]], what: str) -> dist.ProcessGroup | None:
        """Create process groups like `split`, for tensors in host memory."""
        return self._local_group(groups, self.host_backend, what)

    def host_group(self, what: str) -> dist.ProcessGroup:
        """Create a process group of all ranks for tensors in host memory. Every rank makes this call."""
        group = dist.new_group(backend=self.host_backend, timeout=self.timeout, group_desc=what)
        return cast("dist.ProcessGroup", group)  # This rank is in the group.

    def _local_group(
        self, groups: Sequence[tuple[int, ...]], backend: str, what: str, options: Any = None
    ) -> dist.ProcessGroup | None:
        """Create only this rank's group, together with its other members.

        If all ranks took part (without `use_local_synchronization`), ranks outside a gloo group would split the world's
        NCCL communicator, while its members would not, and the call would hang.
        """
        rank = dist.get_rank()
        members = group_of(groups, rank)
        # PyTorch names a group by its ranks and the rank's number of groups. This number must be equal on all ranks,
        # so a rank without a group creates one that contains only itself.
        group = dist.new_group(
            list(members or (rank,)),
            backend=backend,
            timeout=self.timeout,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=what,
        )
        return None if members is None else cast("dist.ProcessGroup", group)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def mark(self) -> Callable[[], float]:
        """Return a function that waits for the work issued to the current stream until now, and returns the time at
        which the wait has ended, by `time.perf_counter`: on a CPU, the time of this call.
        """
        if not self.is_cuda:
            ended = time.perf_counter()
            return lambda: ended
        event = torch.cuda.Event()
        event.record()

        def wait() -> float:
            event.synchronize()
            return time.perf_counter()

        return wait

    def peak_memory_bytes(self) -> int:
        """Return the peak memory so far in bytes: allocated for tensors on a GPU, resident in the process on a CPU."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def host_zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeros [count] in host memory that a GPU can read and write while it computes."""
        if not self.is_cuda or not count:
            return torch.zeros(count, dtype=dtype)
        # Register separate pages with CUDA: PyTorch would round pinned memory up to a power of two.
        size = count * dtype.itemsize
        with os_errors_as(partial(_no_host_memory, size)):
            pages = mmap.mmap(-1, size)
        view = memoryview(pages)
        zeros = torch.frombuffer(view, dtype=dtype, count=count)
        cuda: Any = torch.cuda.cudart()
        address = zeros.data_ptr()
        code = int(cuda.cudaHostRegister(address, zeros.nbytes, 1))
        if code:
            raise _no_host_memory(size, f"CUDA error {code}")
        # The view lives as long as the last tensor. The finaliser refers to the pages, which would otherwise unmap
        # themselves before it runs. It does not run at exit, when the driver may be gone.
        finalize(view, lambda _: cuda.cudaHostUnregister(address), pages).atexit = False
        return zeros

    def side_streams(self, number: int) -> tuple[torch.cuda.Stream, ...]:
        """Create new streams of the device; return none on a CPU."""
        return tuple(torch.cuda.Stream() for _ in range(number)) if self.is_cuda else ()

    def random_states(self) -> dict[str, torch.Tensor]:
        """Return the states of PyTorch's generators, uint8 [bytes] on the host, by name."""
        states = {"torch": torch.get_rng_state()}
        return states | {"cuda": torch.cuda.get_rng_state(self.device)} if self.is_cuda else states

    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore the states that `random_states` returned."""
        torch.set_rng_state(states["torch"])
        if self.is_cuda:
            torch.cuda.set_rng_state(states["cuda"], self.device)

    def enter_megatron_scope(self) -> None:
        """Make a literal `device="cuda"` and `Tensor.cuda()` mean this platform's device for the rest of the process.
        Does nothing on a GPU. Idempotent.
        """
        modes = torch.overrides._get_current_function_mode_stack()
        if not self.is_cuda and not any(isinstance(mode, _CudaMeansCpu) for mode in modes):
            _CudaMeansCpu().__enter__()

    def megatron_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which Megatron code with a literal `device="cuda"` runs on this platform's device, and
        Megatron's optimizers accept CPU tensors.
        """
        return contextlib.nullcontext() if self.is_cuda else _CudaTypeMeansCpu()


def answer_for_cuda() -> None:
    """Make the functions of `torch.cuda` that Megatron-Core calls work without a GPU for the rest of the process."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment]
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]


class _CudaMeansCpu(TorchFunctionMode):
    """A function mode that redirects `device="cuda"` and `Tensor.cuda()` to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if torch.device(kwargs.get("device") or CPU).type == "cuda":
            kwargs["device"] = CPU
        return func(*args, **kwargs)


class _CudaTypeMeansCpu(_CudaMeansCpu):
    """A `_CudaMeansCpu` in which `Tensor.type()` also returns the CUDA types that Megatron's optimizers check for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.")
        return super().__torch_function__(func, types, args, kwargs)


def _no_host_memory(size: int, error: object) -> UserError:
    return UserError.at(
        "offload",
        problem=f"{size:,} bytes of host memory cannot be pinned ({error})",
        fix="raise the limit of locked memory (ulimit -l unlimited), free host memory, or offload less",
    )
