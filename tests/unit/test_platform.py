"""The platform of a CPU: what it answers, and what it teaches Megatron-Core."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from megatron_hetero.distributed.platform import CPU, Platform, _CudaMeansCpu
from megatron_hetero.errors import UserError

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
    device = torch.device("cuda", 1)
    Platform(device, "nccl").init_process_group(rank=0)
    assert given == ({"rank": 0} if detail else {"rank": 0, "device_id": device})


def test_a_cpu_answers_everything() -> None:
    assert not PLATFORM.is_cuda and PLATFORM.device_name == "cpu"
    PLATFORM.synchronize()
    block = torch.ones(10_000_000)
    assert block.sum() > 0 and PLATFORM.peak_memory_bytes() > 40_000_000


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
from megatron_hetero.errors import UserError
from megatron_hetero.distributed.platform import CPU, Platform
from megatron_hetero.distributed.megatron import MODEL_PARALLEL_STREAM, prepare_globals
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
platform = Platform(CPU, "gloo")
for _ in range(2):
    platform.prepare_megatron()
    prepare_globals(7)
assert torch.cuda.current_device() == CPU
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
