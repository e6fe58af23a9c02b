"""All cases, measured in two processes side by side; and what is recorded of their kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megatron.core
import torch

from tests.fake_cuda import guard
from tests.fake_cuda.cases import CASES

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("kernels.json")
PROCESSES = 2
VERSIONS = {"torch": torch.__version__.partition("+")[0], "megatron-core": megatron.core.__version__}
"""Of what decides how many kernels there are, besides this project."""


def measured(folder: Path) -> dict[str, dict[str, Any]]:
    """What `rank.measure` says of each case, by its name. `folder`: for the compiled guard.

    Raises `RuntimeError` with the output of a process that failed.
    """
    library = guard.compiled(folder)
    started = [_start(library, range(first, len(CASES), PROCESSES)) for first in range(PROCESSES)]
    found: dict[int, dict[str, Any]] = {}
    for process in started:
        out, errors = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"measuring on a GPU that computes nothing failed: {errors}")
        found |= {line.pop("number"): line for line in map(json.loads, out.splitlines())}
    return {str(case): found[number] for number, case in enumerate(CASES)}


def noticed(folder: Path) -> dict[str, dict[str, list[str]]]:
    """See `faults.noticed`."""
    out, errors = _start(guard.compiled(folder), ()).communicate()
    if not out:
        raise RuntimeError(f"a GPU that computes nothing failed: {errors}")
    return json.loads(out)


def _start(library: Path, numbers: Sequence[int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fake_cuda.worker", str(library), *map(str, numbers)]
    # Compiled functions would hide which ops they are made of, and take long to compile.
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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
