"""Both passes of an encoder's layers, issued kernel by kernel, and as one CUDA graph."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import cases, trace
from benchmarks.gpu.hopper.timing import NO_GPU, wall_ms
from benchmarks.gpu.record import Record
from benchmarks.gpu.share import MODELS, RankOnDevice
from benchmarks.measuring.material import write_samples
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups.launch import process_group
from megatron_hetero.groups.platform import Platform

SIDE, SMALL_SIDE = 364, 56
"""Pixels of a picture: 26 × 26 patches, about as many as a rank of `sp:8` has of 5,184."""
ROUNDS = 7
SAME = 1e-2
"""How far apart, relatively, results may be: FlashAttention-2 sums gradients of queries in no fixed order."""


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """The encoder of 7B: its 32 layers on one rank."""
    if small:
        write_samples(folder, cases.SMALL, [])
    else:
        _write_model(folder / "model")
    with process_group() as platform:
        rank = RankOnDevice.build(load_config(_flags(folder / "model", small=small)), platform)
        stage: Any = rank.trainer.runner.modules["vision"].stages[0]
        batch = rank.load(0).inputs["vision"]
        hidden = stage.enter(batch).detach().requires_grad_()
        table, cotangent = stage.shape.rotary.table(batch.positions), torch.randn_like(hidden)

        def both() -> list[torch.Tensor]:
            hidden.grad = None
            out = stage._run(hidden, table, batch.attention, {})
            out.backward(cotangent)
            assert hidden.grad is not None, "it wants a gradient"
            return [out.detach(), hidden.grad]

        record.put("size", {"layers": len(stage.layers), "patches": len(hidden), "dtype": str(hidden.dtype)})
        record.put("kernel by kernel", _times(both, platform))
        seen = trace.of(both, platform, ())
        record.put("kernels", {"number": seen["kernels"], "ms": seen["ms"]})
        if not platform.is_cuda:
            record.put("graph", NO_GPU)
            return
        expected = [x.clone() for x in both()]
        try:
            graph, found = _captured(both)
        except RuntimeError as error:  # What cannot be captured is a result.
            record.put("graph", str(error).partition("\n")[0])
            return
        record.put("graph", _times(graph.replay, platform))
        error = max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))
        record.check("relative difference of what the graph computes", error, SAME)


def _captured(work: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """The graph of `work`, and the tensors that it fills."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    # Other threads, NCCL's watchdog for one, may ask about events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
    return graph, found


def _times(work: Callable[[], object], platform: Platform) -> dict[str, float]:
    """Median milliseconds until the device has finished, and until the host has issued everything."""
    work()
    issued = []
    for _ in range(ROUNDS):
        platform.synchronize()
        start = time.perf_counter()
        work()
        issued.append(1e3 * (time.perf_counter() - start))
    return {"ms": median(wall_ms(work, platform) for _ in range(ROUNDS)), "host ms": median(issued)}


def _write_model(folder: Path) -> None:
    """7B with one text layer."""
    config = json.loads((MODELS / "qwen2_5_vl_7b/config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


def _flags(model: Path, *, small: bool) -> list[str]:
    side, dtype = (SMALL_SIDE, "float32") if small else (SIDE, "bfloat16")
    return (
        f"--model.hf_path {model} --model.dtype {dtype} --model.freeze text --vision-parallel dp:1 "
        f"--text-parallel dp:1 --train.global_batch_size 1 --plan.tokens 256 --plan.images 1 --plan.image_side {side} "
        f"--data.registry.none.annotations {model}/none.json --data.datasets none"
    ).split()
