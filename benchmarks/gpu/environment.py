"""What the numbers of the other sections depend on: the device, its software, and its best at simple things."""

from __future__ import annotations

import importlib.metadata
import os
import platform as machine
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.cuda import nccl

from benchmarks.gpu.record import Record
from megatron_hetero.groups.platform import Platform

LIBRARIES = (
    "torch", "triton", "transformers", "megatron-core", "transformer-engine", "flash-attn", "fla-core", "causal-conv1d",
    "apex", "numpy", "pillow",
)  # fmt: skip
VARIABLES = ("CUDA_", "NCCL_", "NVIDIA_TF32", "NVIDIA_VISIBLE", "TORCH_", "PYTORCH_", "OMP_")
"""How the names of variables begin that matter."""


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """Look around, then time a product, copies and launches."""
    platform = Platform.detect()
    record.put("device", describe(platform))
    record.put("machine", {
        "cores": os.cpu_count(), "usable cores": len(os.sched_getaffinity(0)), "memory GiB": _memory_gib(),
        "kernel": machine.release(), "python": machine.python_version(),
    })  # fmt: skip
    record.put("libraries", {name: _version(name) for name in LIBRARIES})
    record.put("variables", {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)})
    record.put("at best", _best(platform, small=small))


def describe(platform: Platform) -> dict[str, Any]:
    """The device, its driver, and the libraries that PyTorch brings for it."""
    if not platform.is_cuda:
        return {"name": machine.processor() or machine.machine(), "backend": "gloo in place of NCCL, a CPU"}
    found = torch.cuda.get_device_properties(platform.device)
    free, total = torch.cuda.mem_get_info(platform.device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory GiB": round(total / 2**30, 1),
        "free memory GiB": round(free / 2**30, 1),
        "devices": torch.cuda.device_count(),
        "driver": _driver(),
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, nccl.version())),
        "backend": "NCCL",
    }


def _driver() -> str | None:
    """As `nvidia-smi` tells it; None where it is not there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()[0]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _best(platform: Platform, *, small: bool) -> dict[str, float]:
    """A bf16 product, copies on the device and from pinned memory of the host, and the launch of a small kernel."""
    size, copied = (256, 2**20) if small else (8192, 2**30)
    left, right = (torch.randn(size, size, device=platform.device).bfloat16() for _ in range(2))
    source = torch.zeros(copied, dtype=torch.uint8, device=platform.device)
    target, host = torch.empty_like(source), torch.zeros(copied, dtype=torch.uint8, pin_memory=platform.is_cuda)
    one = torch.zeros(1, device=platform.device)

    def launches() -> None:
        for _ in range(1000):
            one.add_(1)

    return {
        "bf16 product TFLOP/s": 2 * size**3 / seconds(lambda: left @ right, platform) / 1e12,
        "copy on the device GB/s": 2 * copied / seconds(lambda: target.copy_(source), platform) / 1e9,
        "copy from pinned memory GB/s": copied / seconds(lambda: target.copy_(host, True), platform) / 1e9,
        "launch of a small kernel µs": seconds(launches, platform) * 1e3,
    }


def seconds(work: Callable[[], Any], platform: Platform, rounds: int = 7) -> float:
    """Median time of `work` after two rounds that do not count: of the device's stream, or of the host on a CPU."""
    from megatron_hetero.groups.watchdog import Stopwatch

    watch = Stopwatch(platform)
    for turn in range(rounds + 2):
        if turn == 2:
            platform.synchronize()
            watch.read()
        with watch.lap("work"):
            work()
    platform.synchronize()
    return median(watch.read()["work"])
