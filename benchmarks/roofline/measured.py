"""What `benchmarks.gpu` has measured of a rank's share, in place of what is predicted of the same step.

One GPU computes what a rank computes, while collectives copy what the rank itself has: so the time of its kernels is
measured, less these copies, and what it waits for its links stays predicted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.honest import honest
from benchmarks.roofline.cases import Step
from benchmarks.roofline.devices import Gpu
from benchmarks.roofline.prediction import DIRECTIONS, MODULES, Prediction

UPDATE = "update"
"""Which is once in a step, the other phases in each micro-batch. (`benchmarks.gpu` begins no sum of gradients within a
backward pass, so that its time of these is another.)
"""


@dataclass(frozen=True)
class Share:
    """A measured step of a rank. `layouts`: of vision and text. `patches`, `tokens`: of a pack. `seconds`: by phase, of
    a micro-batch or once in a step.
    """

    model: str
    layouts: str
    patches: int
    tokens: int
    seconds: Mapping[str, float]

    def of(self, step: Step) -> dict[str, float]:
        """The seconds that are those of `step`, none where it is another one. Where the measured rank has more replicas
        beside it these share the update out: what a module takes is the same.
        """
        lengths = step.samples * step.picture.patches, step.samples * step.picture.length
        if step.recomputed or (self.model, self.patches, self.tokens) != (step.model, *lengths):
            return {}
        if self.layouts == str(step.layouts):
            return dict(self.seconds)
        alike = re.sub(r",dp:\d+", "", self.layouts) == str(step.layouts)
        return {phase: seconds for phase, seconds in self.seconds.items() if alike and phase != UPDATE}


def read(file: Path, gpu: Gpu) -> tuple[Share, ...]:
    """Those in `gpu.json`, a record of `benchmarks.gpu`. Raises `ValueError` where there are none of `gpu`."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        sections: Mapping[str, Any] = {name: of["numbers"] for name, of in record["sections"].items()}
        device = sections.get("environment", {}).get("device", {}).get("name", "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no record of benchmarks.gpu: {error}") from error
    if gpu.name.split("-")[0] not in device.lower():
        raise ValueError(f"{file} is of the device {device or '(not looked at)'!r}, not of --gpu {gpu.name}")
    copied = sections["environment"].get("at best", {}).get("copy on the device GB/s", float("inf"))
    found = tuple(
        _share(numbers, copied)
        for name, numbers in sections.items()
        if {"layout", "steps"} <= numbers.keys() and not name.endswith("-before")  # Those with kernels of no choice.
    )
    if not found:
        raise ValueError(f"{file} has no section that ended among share-7b and share-32b: run these")
    return found


def _share(numbers: Mapping[str, Any], copied_gb_s: float) -> Share:
    of, milliseconds = numbers["layout"], honest(numbers, copied_gb_s)
    modules = {f"{module} {direction}" for module in MODULES for direction in DIRECTIONS}
    times = {**dict.fromkeys(modules, int(of["micro-batches"])), UPDATE: 1}
    return Share(
        of["model"].rpartition("_")[2],
        of["layout"].partition(" on ")[0],
        of["patches of its image"],
        of["tokens of a pack"],
        {phase: milliseconds[phase] / 1e3 / count for phase, count in times.items() if phase in milliseconds},
    )


def with_measured(step: Step, predicted: Prediction, shares: Sequence[Share]) -> tuple[Prediction, dict[str, float]]:
    """The prediction with what was measured of `step`, and the seconds by phase that it has in place of its own."""
    seconds = {phase: value for share in shares for phase, value in share.of(step).items() if phase in predicted.phases}
    return predicted.with_computing(seconds), seconds
