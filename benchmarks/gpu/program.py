"""`pretrain_vlm.py` as people start it: trained, killed, resumed from its checkpoint, evaluated, exported."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.record import Check, Record
from benchmarks.gpu.reference import Reference
from examples.demo.model import DemoSizes
from examples.make_demo import DemoOptions, make_demo
from megatron_hetero.groups.platform import Platform

PROGRAM = Path(__file__).parents[2] / "pretrain_vlm.py"
STEPS, SAVES, EVALUATES, KILLED_AFTER = 20, 4, 10, 11
"""Steps of the run, steps between its checkpoints and its evaluations, and the step after which it is killed."""
LARGER = DemoSizes(
    vision_layers=8,
    vision_hidden=512,
    vision_heads=8,
    text_layers=6,
    text_hidden=1024,
    text_heads=16,
    text_kv_heads=4,
    initializer_range=0.02,
    rope_theta=10000.0,
)
"""About 90 million parameters."""
LATER = {"cpu": 0.0, "cuda": 1e-2}
"""How far apart, relatively, the losses of steps may be that were done before the kill and again after it. The first of
them begins with the very same weights; after it sums on a GPU have no fixed order.
"""
EXPORTED = {"float32": 1e-5, "bfloat16": 1e-2}
"""How far the exported model's loss under `transformers` may be from the last evaluation's, relatively."""


@dataclass(frozen=True)
class Sizes:
    """What differs between a GPU and a trial on a CPU."""

    shape: DemoSizes
    batch: int
    questions: int
    dtype: str
    rate: float


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """Two starts of the same command."""
    sizes = Sizes(DemoSizes(), 4, 8, "float32", 1e-3) if small else Sizes(LARGER, 32, 64, "bfloat16", 3e-4)
    demo = folder / "demo"
    make_demo(
        demo, DemoOptions(train_pictures=STEPS * sizes.batch, heldout_questions=sizes.questions, shape=sizes.shape)
    )
    before, seconds = _killed(demo, _command(demo, sizes))
    record.put("killed", {"seconds": seconds, "steps": before})
    start = time.monotonic()
    _to_the_end(demo, _command(demo, sizes))
    after = _lines(demo)
    record.put("resumed", {"seconds": time.monotonic() - start, "lines": after})
    _check_resumption(record, before, after)
    _check_export(record, demo, after, sizes)


def _command(demo: Path, sizes: Sizes) -> list[str]:
    flags = (
        f"--config {demo}/config.yaml --model.dtype {sizes.dtype} --vision-parallel dp:1 --text-parallel dp:1 "
        f"--train.iters {STEPS} --train.global_batch_size {sizes.batch} --train.micro_batch_size {sizes.batch // 2} "
        f"--optimizer.lr {sizes.rate} --optimizer.warmup_iters 2 --checkpoint.dir {demo}/checkpoints "
        f"--checkpoint.interval {SAVES} --checkpoint.keep_last 2 "
        f"--eval.datasets demo-heldout --eval.interval {EVALUATES}"
    )
    start = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 1"
    return [sys.executable, *start.split(), str(PROGRAM), *flags.split()]


@contextlib.contextmanager
def _started(demo: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The program; killed at the end if it still runs. Ranks die with the torchrun that started them."""
    with open(demo / "output", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _killed(demo: Path, command: list[str]) -> tuple[list[dict[str, Any]], float]:
    """Start, and kill after some steps. The lines of its steps so far, and the seconds until the first of them."""
    start, first = time.monotonic(), 0.0
    with _started(demo, command) as process:
        while (done := len(steps := _steps(_lines(demo)))) < KILLED_AFTER:
            first = first or (time.monotonic() - start if done else 0.0)
            _require(process.poll() is None, demo, f"the program ended after {done} steps")
            time.sleep(0.002)
    return steps, first


def _to_the_end(demo: Path, command: list[str]) -> None:
    with _started(demo, command) as process:
        _require(process.wait() == 0, demo, "the resumed program failed")


def _require(holds: bool, demo: Path, otherwise: str) -> None:
    if not holds:
        lines = (demo / "output").read_text(encoding="utf-8", errors="replace").splitlines()
        # What torchrun says of a rank that has failed hides what the rank has said.
        said = [*itertools.takewhile(lambda line: "distributed/elastic" not in line, lines)][-15:]
        raise RuntimeError("\n".join([otherwise, *said]))


def _lines(demo: Path) -> list[dict[str, Any]]:
    """The whole lines of the run's log."""
    file = demo / "log/metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of steps, not of evaluations."""
    return [line for line in lines if "step_time_s" in line]


def _check_resumption(record: Record, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    steps = _steps(after)
    record.add(Check.equal("steps in the log", [line["step"] for line in steps], list(range(1, STEPS + 1))))
    record.check("steps that the killed run had done", len(before), STEPS - 1)
    # The resumed log begins with the lines of the checkpoint's steps, as they were.
    again = [(a, b) for a, b in zip(before, steps, strict=False) if a["step_time_s"] != b["step_time_s"]]
    record.add(Check.equal("steps were done again", bool(again), True))
    if again:
        first, second = again[0]
        record.add(Check.equal("steps after a checkpoint when they were", (first["step"] - 1) % SAVES, 0))
        record.add(Check.equal("loss of the first of them", second["loss"], first["loss"]))
        apart = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in again)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        record.check("relative difference of the losses of steps that were done again", apart, LATER[device])
    rest = steps[KILLED_AFTER:]
    record.put("steps", {
        "median ms": 1e3 * median(line["step_time_s"] for line in rest),
        "least and most ms": [1e3 * f(line["step_time_s"] for line in rest) for f in (min, max)],
        "peak GB": max(line["peak_memory_bytes"] for line in steps) / 1e9,
        "tokens of a step": median(line["tokens"] for line in steps),
        "losses": [line["loss"] for line in steps],
    })  # fmt: skip
    record.check("loss of the last steps over that of the first", _mean(steps[-4:]) / _mean(steps[:4]), 0.95)


def _mean(steps: list[dict[str, Any]]) -> float:
    return sum(line["loss"] for line in steps) / len(steps)


def _check_export(record: Record, demo: Path, lines: list[dict[str, Any]], sizes: Sizes) -> None:
    """The last evaluation, and the loss of the exported model under `transformers`."""
    evaluations = [line for line in lines if "step_time_s" not in line]
    record.add(Check.equal("steps with an evaluation", [line["step"] for line in evaluations], [EVALUATES, STEPS]))
    record.put("evaluations", evaluations)
    dtype, platform = getattr(torch, sizes.dtype), Platform.detect()
    reference = Reference.of(demo / "trained", demo / "data/heldout.jsonl", dtype, platform.device)
    expected = evaluations[-1]["eval_loss"]
    loss = reference.loss(sizes.questions)
    record.put("loss of the export", {"transformers": loss, "evaluation": expected})
    off = abs(loss - expected) / expected
    record.check("relative difference of the exported model's loss, in transformers", off, EXPORTED[sizes.dtype])
