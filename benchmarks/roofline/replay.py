"""Steps that `benchmarks.gpu` has recorded of one rank alone on a device, predicted as if they had not been measured.

What the roofline assumes of kernels and of the host was fitted to `share-7b` of one H100 (`devices`), so that the other
shares show what it is worth. Attention, SwiGLU and the copies in place of collectives are those of the recorded code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.honest import ISSUED, STAND_INS, STEP, honest
from benchmarks.roofline.costs import Event
from benchmarks.roofline.devices import GAP, GPUS, HOST, Assumed, Gpu
from benchmarks.roofline.prediction import is_once, phase_times
from tests.fake_cuda.cases import Case
from tests.fake_cuda.rank import BEFORE, REST, SUMS, UPDATE, WEIGHTS

RESULTS = Path(__file__).parents[1] / "results"
RECORDS = {"gpu.json": "h100", "gpu-h200.json": "h200"}
"""Records of shares, and of which GPU."""
FITTED = "gpu.json", "share-7b"
LAUNCH_US = 8.089
"""Time of a launch of a small kernel in the fitted record: a slower host is slower in all it does."""
RECORDED = Assumed(alone=True, flash=True, dynamic=True)
ENCODER, IDLE, PRODUCTS, ATTENTION = "vision forward", "idle", "products", "attention"
OF_KIND = {"host": IDLE, "product": PRODUCTS, "attention": ATTENTION, "stand-ins": STAND_INS}
OTHER_NAMES = {REST: "zero gradients", WEIGHTS: UPDATE}


@dataclass(frozen=True)
class Recorded:
    """A share of a record. `measured`: milliseconds by phase, of the whole step, of what stood in for collectives, of
    products and of attention, and for how long no kernel ran.
    """

    file: str
    section: str
    case: Case
    micro_batches: int
    measured: Mapping[str, float]
    launch: float

    @property
    def gpu(self) -> Gpu:
        """The device."""
        return GPUS[RECORDS[self.file]]

    def __str__(self) -> str:
        return f"{self.gpu.name.upper()}, {self.case.model.upper()} `{self.case.vision}|{self.case.text}`"


def recorded(file: str) -> list[Recorded]:
    """The shares of a record, each of two micro-batches, one picture of 72 by 72 patches and 6,912 tokens in each."""
    sections = json.loads((RESULTS / file).read_text(encoding="utf-8"))["sections"]
    at_best = sections["environment"]["numbers"]["at best"]
    return [_recorded(file, name, sections[name]["numbers"], at_best) for name in ("share-7b", "share-32b")]


def _recorded(file: str, section: str, numbers: Mapping[str, Any], at_best: Mapping[str, float]) -> Recorded:
    layout, trace = numbers["layout"], numbers["trace"]
    layouts, _, world = layout["layout"].removesuffix(" ranks").partition(" on ")
    vision, _, text = layouts.partition("|")
    replicas = dict(axis.split(":") for axis in text.split(",")).get("dp", 1)
    model = layout["model"].rpartition("_")[2]
    case = Case(model, vision, text, int(world), 0, f"--train.global_batch_size {replicas}")
    times = {name: ms for name, ms in numbers["steps"]["milliseconds"].items() if name != ISSUED}
    kinds = {PRODUCTS: trace["kinds"]["gemm"][0], ATTENTION: trace["kinds"]["attention"][0]}
    stand_ins = honest(numbers, at_best["copy on the device GB/s"])[STAND_INS]
    measured = times | kinds | {STAND_INS: stand_ins, IDLE: times[STEP] - trace["ms"]}
    launch = HOST * at_best["launch of a small kernel µs"] / LAUNCH_US
    return Recorded(file, section, case, layout["micro-batches"], measured, launch)


def predicted(share: Recorded, events: Sequence[Event], launch: float) -> dict[str, float]:
    """Milliseconds as in `Recorded.measured`, where the host takes `launch` for an operation."""
    assumed, n = replace(RECORDED, launch=launch), share.micro_batches
    # What the step before has left is measured with that step.
    left = [event for event in events if event.phase != BEFORE]
    milliseconds = dict.fromkeys(share.measured, 0.0)
    for phase, time in phase_times(left, n, share.gpu, assumed).items():
        row = SUMS if phase.startswith(SUMS) else OTHER_NAMES.get(phase, phase)
        times = 1e3 * (1 if is_once(phase) else n)
        for kind, seconds in time.by_kind.items():
            for name in (row, STEP, OF_KIND.get(kind)):
                if name in milliseconds:
                    milliseconds[name] += times * seconds
    # A profiler counts what is between two kernels to neither.
    for event in left:
        if event.ask is not None and event.ask.seconds(share.gpu, assumed):
            gap = 1e3 * GAP * (1 if is_once(event.phase) else n)
            milliseconds[IDLE] += gap
            if (kind := OF_KIND.get(event.ask.kind)) is not None:
                milliseconds[kind] -= gap
    return milliseconds


def own_launch(share: Recorded, events: Sequence[Event]) -> float:
    """Seconds of the host for an operation with which the forward pass of the encoder, that waits for the host, takes
    as long as it did.
    """
    low, high = 0.0, 4 * HOST
    while high - low > 1e-7:
        launch = (low + high) / 2
        short = predicted(share, events, launch)[ENCODER] < share.measured[ENCODER]
        low, high = (launch, high) if short else (low, launch)
    return high
