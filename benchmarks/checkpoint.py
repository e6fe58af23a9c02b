"""Times checkpoints: `python -m benchmarks.checkpoint [--quick] [--help]`.

Four things, taking turns so that times of the same round are compared:

  1. A save that training waits for, against a plain copy of the same files: bytes per second.
  2. How long a save holds up training: waited for, and beside training, where only a copy to the host's memory is.
  3. How much slower steps are while a thread writes.
  4. Export and import of a checkpoint, against `from_pretrained` and `save_pretrained` of transformers: seconds and
     peak memory, each in a process of its own.

Writes tables and the numbers to `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.checkpoint_report import CheckpointReport
from benchmarks.crew import Crew
from benchmarks.measuring.material import ModelSize, write_samples

RESULTS = Path(__file__).parent / "results"
SIZE = ModelSize(vision_hidden=512, text_hidden=1024, text_layers=12)
"""About 170 million parameters: 2 GB of weights and moments."""
LAYOUT = ("sp:2", "tp:2")
RANKS = 2
SHARD_GB = 0.2
"""Of an export: less than the model, as 5 GB are of models that people train."""
RIVAL = """
import sys, torch
from transformers import Qwen2_5_VLForConditionalGeneration
Qwen2_5_VLForConditionalGeneration.from_pretrained(sys.argv[1], dtype=torch.float32).save_pretrained(sys.argv[2])
"""
IDLE = "import torch, transformers, megatron_hetero"
PEAK = """
import runpy, sys
kind, name, *sys.argv[1:] = sys.argv[1:]
try:
    exec(name, {}) if kind == "-c" else runpy.run_module(name, run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
lines = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""
"""Does what an interpreter does with the same arguments, and prints the most memory that it had resident, in bytes.
(What `wait4` says of a process counts that of the one that started it.)
"""


def main() -> None:
    """Measure, print, write."""
    options = _options()
    size = replace(SIZE, text_layers=2) if options.quick else SIZE
    report = CheckpointReport()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_samples(folder, size, [112] * 2)
        _measure_saves(report, folder, options.rounds)
        _measure_tools(report, folder, options.rounds)
    print(report.text())
    if options.results is not None:
        report.write(options.results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="times that everything is done")
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints go while they are timed; that for temporary files"
    )
    parser.add_argument("--quick", action="store_true", help="one minute: a small model and two rounds; no results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.results = 2, None
    return options


def _measure_saves(report: CheckpointReport, folder: Path, rounds: int) -> None:
    from benchmarks.saving import SavingBench

    crew = Crew(RANKS, folder / "store", SavingBench, folder, *LAYOUT, 2, preload="benchmarks.saving")
    for turn in range(rounds + 1):
        steps = [max(crew.run("step")) for _ in range(3)]
        waited = max(save.held_s for save in crew.run("save", False))
        size = sum(crew.run("own_bytes"))
        copied = max(crew.run("plain_copy", folder / "copy"))
        to_host = max(crew.run("copy_to_host"))
        beside = crew.run("save", True)
        if turn:  # The first round makes room in memory, and does not count.
            held = max(save.held_s for save in beside)
            meanwhile = [max(ranks) for ranks in zip(*(save.steps_s for save in beside), strict=True)]
            report.add_save(size, steps, waited, copied, to_host, held, meanwhile)
    crew.close()


@dataclass(frozen=True)
class Cost:
    """Of one process: seconds, and the most memory that it had resident, in bytes."""

    seconds: float
    peak_bytes: int


def _measure_tools(report: CheckpointReport, folder: Path, rounds: int) -> None:
    [checkpoint] = (folder / "checkpoints").glob("step-*")
    tools = "megatron_hetero.cli"
    ways = {
        "idle": ["-c", IDLE],
        "transformers": ["-c", RIVAL, str(folder / "model"), str(folder / "saved")],
        "export": ["-m", f"{tools}.export", str(checkpoint), str(folder / "exported"), "--shard-gb", str(SHARD_GB)],
        "import": ["-m", f"{tools}.import", str(folder / "model"), str(folder / "imported")],
    }
    report.weight_bytes = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    for turn in range(rounds + 1):
        for name in ("saved", "exported", "imported"):
            subprocess.run(["rm", "-rf", str(folder / name)], check=True)
        costs = {name: _cost(arguments) for name, arguments in ways.items()}
        if turn:
            report.add_tools({name: (cost.seconds, cost.peak_bytes) for name, cost in costs.items()})


def _cost(arguments: Sequence[str]) -> Cost:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    return Cost(time.perf_counter() - start, int(done.stdout.split()[-1]))


if __name__ == "__main__":
    main()
