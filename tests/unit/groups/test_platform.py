"""The platform of a CPU: what it answers, and what it teaches Megatron-Core."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.config import cpp
from torch._inductor.utils import fresh_inductor_cache

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups import megatron
from megatron_hetero.groups import platform as module
from megatron_hetero.groups.platform import CPU, HEADROOM, Platform, _Compiler, _CudaMeansCpu, compiled
from tests.support.pool import world
from tests.support.ranks import on_ranks

PLATFORM = Platform(CPU, "gloo")


def test_detection_follows_the_machine() -> None:
    platform = Platform.detect(0)
    assert platform.is_cuda == torch.cuda.is_available()
    assert platform.backend == ("nccl" if platform.is_cuda else "gloo")
    with pytest.raises(dataclasses.FrozenInstanceError):
        platform.backend = "mpi"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Platform.detect(1).device == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"rank 2 of this host .*LOCAL_RANK\): found 2 GPUs .*--nproc-per-node 2"):
        Platform.detect(2)


@pytest.mark.parametrize("detail", [False, True])
def test_communicators_are_made_eagerly_unless_they_cannot_be_split(
    detail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = torch.distributed.DebugLevel.DETAIL if detail else torch.distributed.DebugLevel.OFF
    given: dict = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "get_debug_level", lambda: level)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: given.update(options))
    nccl = SimpleNamespace(Options=SimpleNamespace)  # Builds of PyTorch for CPUs have none.
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
    device = torch.device("cuda", 1)
    Platform(device, "nccl").init_process_group(rank=0)
    assert given.pop("pg_options").is_high_priority_stream, "exchanges over tp run beside products"
    assert given == ({"rank": 0} if detail else {"rank": 0, "device_id": device})


def test_a_cpu_answers_everything() -> None:
    assert not PLATFORM.is_cuda and PLATFORM.device_name == "cpu"
    PLATFORM.synchronize()
    block = torch.ones(10_000_000)
    assert block.sum() > 0 and PLATFORM.peak_memory_bytes() > 40_000_000


@pytest.mark.parametrize("before, limit", [(1.0, 0.75), (0.5, 0.5)])
def test_tensors_leave_headroom_to_what_allocates_beside_them(
    before: float, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is free once groups are made, and what PyTorch holds already; a lower limit of the user stays."""
    answers = {"mem_get_info": (11 * HEADROOM, 16 * HEADROOM), "memory_reserved": 2 * HEADROOM}
    answers["get_per_process_memory_fraction"] = before
    given: list[float] = []
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda value, _: given.append(value))
    Platform(torch.device("cuda", 0), "nccl").leave_headroom()
    assert given == [limit]


def test_a_function_may_be_compiled_for_more_than_eight_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond PyTorch's limit it would be computed in single operations, without a word."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=8):
        function = compiled(lambda x: x + 1)
        for dims in range(1, 12):
            function(torch.ones([2] * dims))
    assert counters["stats"]["unique_graphs"] == 11


@pytest.mark.long
@on_ranks(2)
def test_ranks_compile_together_or_not_at_all() -> None:
    """The second one has no compiler. Its kernels are those of the CPU, which takes the place of a GPU."""
    tried = _Compiler()
    with (
        mock.patch.object(Platform, "is_cuda", True),
        mock.patch.object(module, "_COMPILER", tried),
        mock.patch.object(cpp, "cxx", ("/no/compiler",) if dist.get_rank() else cpp.cxx),
        fresh_inductor_cache(),
        warnings.catch_warnings(record=True) as said,
    ):
        torch._dynamo.reset()
        PLATFORM.agree_to_compile(world())
        assert tried.works is False and not PLATFORM.compiles
    torch._dynamo.reset()
    ours = [str(each.message) for each in said if "PyTorch cannot compile" in str(each.message)]
    assert len(ours) == (dist.get_rank() == 0) and all("rank 1: " in text for text in ours)


class Driver:
    """What CUDA's driver is asked for; `unregistered`: whether each memory was mapped when it was taken back."""

    def __init__(self) -> None:
        self.unregistered: list[bool] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped = (map(partial(int, base=16), line.split()[0].split("-")) for line in lines)
        self.unregistered.append(any(first <= address < last for first, last in mapped))


def test_host_memory_is_taken_back_from_the_driver_while_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = Platform(torch.device("cuda", 0), "nccl").host_zeros(1 << 24, torch.uint8)
    part = memory[5:7].fill_(3)
    del memory
    assert part.tolist() == [3, 3] and not driver.unregistered
    del part
    assert driver.unregistered == [True]


def test_inside_the_scope_cuda_means_the_cpu() -> None:
    with PLATFORM.megatron_scope():
        assert torch.zeros(2, device="cuda").device == CPU
        assert torch.tensor([1.0], dtype=torch.float32, device=torch.device("cuda", 1)).device == CPU
        assert torch.zeros(2).cuda().device == CPU
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(2).type(torch.float64).dtype == torch.float64
        assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with Platform(torch.device("cuda", 0), "nccl").megatron_scope():
        assert torch.zeros(2).type() == "torch.FloatTensor"
    assert issubclass(_CudaMeansCpu, torch.overrides.TorchFunctionMode)


MEGATRON = """
import torch
from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.megatron import MODEL_PARALLEL_STREAM, prepare, prepare_globals
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
platform = Platform(CPU, "gloo")
for _ in range(2):
    prepare(platform)
    prepare_globals(7)
assert torch.cuda.current_device() == CPU
torch.cuda.current_stream().wait_stream(torch.cuda.current_stream())
torch.cuda.synchronize()
tracker = get_cuda_rng_tracker()
torch.manual_seed(0)
outside = torch.get_rng_state()
with tracker.fork(MODEL_PARALLEL_STREAM):
    a = torch.rand(3)
assert torch.equal(torch.get_rng_state(), outside), "the stream outside moved"
with tracker.fork(MODEL_PARALLEL_STREAM):
    b = torch.rand(3)
assert not torch.equal(a, b), "the stream inside did not move"
prepare_globals(7)
with tracker.fork(MODEL_PARALLEL_STREAM):
    assert torch.equal(a, torch.rand(3)), "the seed does not decide"
try:
    with tracker.fork(MODEL_PARALLEL_STREAM):
        raise ValueError
except ValueError:
    assert torch.equal(torch.get_rng_state(), outside)
"""


def test_megatrons_random_states_work_on_a_cpu() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEGATRON], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_megatron_decorates_is_compiled_by_its_first_call() -> None:
    made: list[tuple[str, dict[str, bool]]] = []

    def compile_now(function: Any = None, **options: bool) -> Any:
        if function is None:
            return partial(compile_now, **options)
        made.append((function.__name__, options))
        return function

    later = partial(megatron._compile_later, compile_now=compile_now)

    @later
    def plain(x: int, *, more: int = 0) -> int:
        return x + more

    dynamic = later(plain, dynamic=True)
    assert not made and plain.__name__ == "plain"
    assert [plain(1, more=2), plain(3), dynamic(5)] == [3, 3, 5] and len(made) == 2
    assert [options for _, options in made] == [{}, {"dynamic": True}]
    assert later(fullgraph=True)(plain)(7) == 7 and made[-1] == ("plain", {"fullgraph": True}), "a decorator compiles"
