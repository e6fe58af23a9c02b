"""CUDA with NCCL, or a CPU with gloo: the only file that distinguishes them."""

from __future__ import annotations

import contextlib
import mmap
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, cast
from weakref import finalize

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_hetero.base.errors import UserError, os_errors_as
from megatron_hetero.groups.collective import FIRST, on_every
from megatron_hetero.layout.communicators import group_of

CPU = torch.device("cpu")

MAX_GRAPHS = 64
"""The most graphs of one compiled function: for each module, local width, number format and padding, with and without
gradients. Beyond them PyTorch runs it as single operations, each of which takes memory.
"""
HEADROOM = 512 << 20
"""Bytes of a GPU that tensors leave to kernels that CUDA loads, and buffers that NCCL allocates, at first use."""


@dataclass
class _Compiler:
    """Whether `torch.compile` makes kernels for the GPUs of all ranks; None: not tried yet."""

    works: bool | None = None
    instead: Callable[..., Any] | None = None
    """Runs functions on tensors without values, in place of compiled ones, as `instead(function, *inputs)`."""


_COMPILER = _Compiler()


def _gpus_compile() -> bool:
    """Whether `torch.compile` makes kernels for GPUs: on all ranks if they have agreed, else on this one."""
    if _COMPILER.works is None:
        problem = compile_problem(torch.device("cuda", torch.cuda.current_device()))
        _COMPILER.works = problem is None
        if problem:
            warnings.warn(_without_compiler(problem), stacklevel=2)
    return _COMPILER.works


def compile_problem(device: torch.device) -> str | None:
    """Compile and run a kernel on the device. Returns the problem; None if it works.

    Triton and a compiler are not enough: the code that launches kernels is built with Python's headers.
    """
    try:
        compiled(_one_more)(torch.ones(2, device=device)).sum().item()
    except Exception as problem:  # From the compiler, the tools it starts, or the files it writes.
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
    """Whether `torch.compile` makes kernels for the device of `tensor`, which must be a GPU."""
    return _COMPILER.instead is not None if tensor.is_meta else tensor.is_cuda and _gpus_compile()


@contextlib.contextmanager
def instead_of_compiled(run: Callable[..., Any]) -> Iterator[None]:
    """Inside, `run(function, *inputs)` replaces compiled functions for tensors without values (on `meta`)."""
    before, _COMPILER.instead = _COMPILER.instead, run
    try:
        yield
    finally:
        _COMPILER.instead = before


@cache
def compiled(function: Callable[..., Any], *, dynamic: bool = True) -> Callable[..., Any]:
    """`function` by `torch.compile`, once for tensors of any length. Without `dynamic`, one graph with fixed sizes of
    all dims but those marked as dynamic, which makes better kernels.
    """
    make = cache(partial(torch.compile, function, dynamic=dynamic, fullgraph=not dynamic))

    def run(*inputs: Any) -> Any:
        if _COMPILER.instead is not None and any(isinstance(x, torch.Tensor) and x.is_meta for x in inputs):
            return _COMPILER.instead(function, *inputs)
        # Here, as settings belong to a thread, and backward passes run in other threads.
        if torch._dynamo.config.recompile_limit < MAX_GRAPHS:
            torch._dynamo.config.recompile_limit = MAX_GRAPHS
        return make()(*inputs)

    return run


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor on the device, through pinned memory and without waiting; the tensor itself on a CPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


@dataclass(frozen=True)
class Platform:
    """The device of this process, and the backends of collectives on its tensors and on those of the host.

    `timeout`: time-out of collectives; None leaves it to PyTorch.
    """

    device: torch.device
    backend: str
    host_backend: str = "gloo"
    timeout: timedelta | None = None

    @classmethod
    def detect(cls, local_rank: int = 0) -> Platform:
        """CUDA if a GPU is visible, else the CPU. Raises `UserError` if this rank of the host has no GPU."""
        if not torch.cuda.is_available():
            return cls(CPU, "gloo")
        if local_rank >= (devices := torch.cuda.device_count()):
            where, expected = f"rank {local_rank} of this host (environment variable LOCAL_RANK)", "one for each rank"
            fix = f"start {devices} ranks there (--nproc-per-node {devices}), or look at CUDA_VISIBLE_DEVICES"
            raise UserError.at(where, found=f"{devices} GPU{'s' * (devices != 1)} on it", expected=expected, fix=fix)
        return cls(torch.device("cuda", local_rank), "nccl")

    @property
    def is_cuda(self) -> bool:
        """Whether tensors live on a GPU."""
        return self.device.type == "cuda"

    @property
    def compiles(self) -> bool:
        """Whether `torch.compile` makes kernels for the device, which must be a GPU."""
        return self.is_cuda and _gpus_compile()

    def agree_to_compile(self, group: dist.ProcessGroup) -> None:
        """Compile a kernel on each rank of a host `group`. If one cannot, none compiles, so that all compute alike, and
        the first rank warns. Does nothing on a CPU.
        """
        if self.is_cuda:
            problems = on_every(group, lambda: compile_problem(self.device))
            found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
            _COMPILER.works = not found
            if found and dist.get_rank(group) == FIRST:
                warnings.warn(_without_compiler(found[0]), stacklevel=2)

    def leave_headroom(self) -> None:
        """Limit PyTorch's allocator to the memory that process groups leave of the GPU, less `HEADROOM`: it raises "out
        of memory" before CUDA and NCCL, which allocate beside it, run out. A lower limit stays.
        """
        if self.is_cuda:
            free, total = torch.cuda.mem_get_info(self.device)
            most = (free + torch.cuda.memory_reserved(self.device) - HEADROOM) / total
            limit = min(torch.cuda.get_per_process_memory_fraction(self.device), max(0.0, most))
            torch.cuda.set_per_process_memory_fraction(limit, self.device)

    @property
    def device_name(self) -> str:
        """The marketing name of the accelerator, or `cpu`."""
        return torch.cuda.get_device_name(self.device) if self.is_cuda else "cpu"

    @property
    def connects_late(self) -> bool:
        """Whether ranks connect in the first call of each kind on a process group, as with NCCL, and their hosts wait
        for each other then. gloo connects when it creates the group.
        """
        return self.backend != "gloo"

    @property
    def prefers_all_reduce(self) -> bool:
        """Whether an all-reduce is faster than a reduce-scatter of the same tensor, as it is with gloo."""
        return self.backend == "gloo"

    def init_process_group(self, **options: Any) -> None:
        """`torch.distributed.init_process_group` for this platform."""
        if self.is_cuda:
            torch.cuda.set_device(self.device)
            # Eager, so that groups are splits. The wrapper of debug level DETAIL cannot be split (PyTorch 2.11): with
            # it, communicators are created one by one, at first use.
            if dist.get_debug_level() != dist.DebugLevel.DETAIL:
                options["device_id"] = self.device
            # It serves modules whose `tp` spans all ranks.
            options["pg_options"] = self._options(None, urgent=True)
        dist.init_process_group(self.backend, **options)

    def split(
        self, groups: Sequence[tuple[int, ...]], what: str, *, max_ctas: int | None = None, urgent: bool = False
    ) -> dist.ProcessGroup | None:
        """Create process groups with disjoint ranks for tensors of the device.

        Every rank of the world calls it, with the same groups. Returns the one that this rank is in, or None.
        `what` names them in traces and debuggers. `max_ctas`: limit of their kernels on a GPU, if not NCCL's choice.
        `urgent`: they run beside matrix products, on streams of high priority.
        """
        options = self._options(max_ctas, urgent)
        if dist.group.WORLD.bound_device_id is not None:  # pyright: ignore[reportOptionalMemberAccess]
            # One `ncclCommSplit` of all ranks. `new_group` would call it for each group, on all ranks too.
            ranks = list(map(list, groups))
            group = dist.split_group(split_ranks=ranks, timeout=self.timeout, pg_options=options, group_desc=what)
            return group if group_of(groups, dist.get_rank()) else None  # From 2.14 on outsiders get -100.
        return self._own_group(groups, self.backend, what, options)

    def _options(self, max_ctas: int | None, urgent: bool) -> Any:
        """Options of NCCL; None for other backends. A split does not inherit those of its parent."""
        if self.backend != "nccl":
            return None
        nccl: Any = dist.ProcessGroupNCCL  # Builds of PyTorch for CPUs have none.
        options = nccl.Options(is_high_priority_stream=urgent)
        if self.timeout is not None:  # PyTorch warns if it differs from the group's.
            options._timeout = self.timeout
        if max_ctas is not None:
            options.config.max_ctas = max_ctas
        return options

    def split_hosts(self, groups: Sequence[tuple[int, ...]], what: str) -> dist.ProcessGroup | None:
        """Create process groups like `split`, for tensors in host memory."""
        return self._own_group(groups, self.host_backend, what)

    def host_group(self, what: str) -> dist.ProcessGroup:
        """Create a process group of all ranks for tensors in host memory. Every rank calls it."""
        group = dist.new_group(backend=self.host_backend, timeout=self.timeout, group_desc=what)
        return cast("dist.ProcessGroup", group)  # This rank is in it.

    def _own_group(
        self, groups: Sequence[tuple[int, ...]], backend: str, what: str, options: Any = None
    ) -> dist.ProcessGroup | None:
        """Create only this rank's group, with its other members.

        If other ranks had to take part (without `use_local_synchronization`), those outside would split the
        communicator of the world if that is NCCL's, and those inside would not if the group is gloo's: a hang.
        """
        rank = dist.get_rank()
        own = group_of(groups, rank)
        # Members name their group by its ranks and the number of their groups, which must be equal on all ranks: those
        # outside create one by themselves.
        group = dist.new_group(
            list(own or (rank,)),
            backend=backend,
            timeout=self.timeout,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=what,
        )
        return None if own is None else cast("dist.ProcessGroup", group)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        """The highest memory so far: allocated by tensors on a GPU, resident in the process on a CPU."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def host_zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in host memory, [count], that a GPU can read and write while it computes."""
        if not self.is_cuda or not count:
            return torch.zeros(count, dtype=dtype)
        # Separate pages, registered with CUDA: PyTorch rounds pinned memory up to powers of two.
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
        # The view ends with the last tensor. The finaliser owns the pages, which would otherwise unmap themselves
        # before it runs. At exit the driver may be gone.
        finalize(view, lambda _: cuda.cudaHostUnregister(address), pages).atexit = False
        return zeros

    def side_streams(self, number: int) -> tuple[torch.cuda.Stream, ...]:
        """Streams of the device beside the current one; none on a CPU."""
        return tuple(torch.cuda.Stream() for _ in range(number)) if self.is_cuda else ()

    def random_states(self) -> dict[str, torch.Tensor]:
        """The states of PyTorch's generators, uint8 [bytes] on the host, by name."""
        states = {"torch": torch.get_rng_state()}
        return states | {"cuda": torch.cuda.get_rng_state(self.device)} if self.is_cuda else states

    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore the states that `random_states` returned."""
        torch.set_rng_state(states["torch"])
        if self.is_cuda:
            torch.cuda.set_rng_state(states["cuda"], self.device)

    def enter_megatron_scope(self) -> None:
        """For the rest of the process, have a literal `device="cuda"` and `Tensor.cuda()` mean this platform's device.
        Does nothing if that is a GPU. Idempotent.
        """
        modes = torch.overrides._get_current_function_mode_stack()
        if not self.is_cuda and not any(isinstance(mode, _CudaMeansCpu) for mode in modes):
            _CudaMeansCpu().__enter__()

    def megatron_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, Megatron code with a literal `device="cuda"` runs on this platform's device, and its optimizers
        accept tensors of a CPU.
        """
        return contextlib.nullcontext() if self.is_cuda else _CudaTypeMeansCpu()


def answer_for_cuda() -> None:
    """From now on in this process, have what Megatron-Core asks of `torch.cuda` without a GPU answered for the CPU."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment]
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]


class _CudaMeansCpu(TorchFunctionMode):
    """Sends `device="cuda"` and `Tensor.cuda()` to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if torch.device(kwargs.get("device") or CPU).type == "cuda":
            kwargs["device"] = CPU
        return func(*args, **kwargs)


class _CudaTypeMeansCpu(_CudaMeansCpu):
    """Makes `Tensor.type()` return the CUDA types that Megatron's optimizers check for, too."""

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
