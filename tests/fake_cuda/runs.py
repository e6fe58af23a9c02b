"""Cases, measured by two processes side by side; and what is recorded of their kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import torch

from tests.fake_cuda import guard
from tests.fake_cuda.cases import CASES, Case
from tests.fake_cuda.worker import NOTICED

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("kernels.json")
PROCESSES = 2
VERSIONS = {"torch": torch.__version__.partition("+")[0], "megatron-core": megatron.core.__version__}
"""Of what decides how many kernels there are, besides this project."""


@dataclass(frozen=True)
class Found:
    """What the processes found: of each case by its name, see `rank.measure`, and see `faults.noticed`."""

    cases: dict[str, dict[str, Any]]
    noticed: dict[str, dict[str, list[str]]]


def measured(folder: Path, cases: Sequence[Case] = CASES) -> Found:
    """Run the cases, and look at what is noticed. `folder`: for the compiled guard and what the processes write.

    Raises `RuntimeError` with the output of a process that failed.
    """
    library = guard.compiled(folder)
    names = [NOTICED, *(str(CASES.index(case)) for case in cases)]
    shares = [names[first::PROCESSES] for first in range(PROCESSES)]
    started = [_start(library, share, folder / str(first)) for first, share in enumerate(shares)]
    found: dict[str, Any] = {}
    for number, process in enumerate(started):
        if process.wait() != 0:
            for other in started:
                other.kill()
            errors = (folder / f"{number}.err").read_text(encoding="utf-8")
            raise RuntimeError(f"measuring on a GPU that computes nothing failed: {errors}")
        found |= map(json.loads, (folder / f"{number}.out").read_text(encoding="utf-8").splitlines())
    return Found({str(case): found[str(CASES.index(case))] for case in cases}, found[NOTICED])


def _start(library: Path, names: Sequence[str], files: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fake_cuda.worker", str(library), *names]
    # Compiled functions would hide which ops they are made of, and take long to compile.
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(f"{files}.out", "w") as out, open(f"{files}.err", "w") as errors:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=errors, text=True)


def kernels_of(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What is recorded of a case: kernels of its step by phase, and of one layer in one micro-batch, the mean of all
    layers with what comes before and after them.
    """
    per_layer = {}
    for phase, count in found["kernels"].items():
        layers = found["layers"].get(phase.partition(" ")[0])
        if layers:
            per_layer[phase] = round(count / layers / found["micro_batches"], 1)
    return {"of a step": found["kernels"], "of a layer": per_layer}


def recorded() -> dict[str, Any]:
    """The record: `versions`, and `kernels` by the name of the case."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def write(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the record anew."""
    record = {"versions": VERSIONS, "kernels": {name: kernels_of(of_case) for name, of_case in found.items()}}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
