"""A rank's share less the stand-ins for collectives (`groups.EchoGroup`), which a rank among others does not run.

Records say how long stand-ins took in each phase. Older ones do not: there, an all-gather was one copy of an expanded
tensor, a kernel that nothing else used, and a reduce-scatter one plain copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[2] / "examples/models"
GATHER = "direct_copy_kernel_cuda"
"""Part of the name of the kernel that copied expanded tensors."""
STAND_INS, STEP, ISSUED = "stand-ins", "step", "issued"


def honest(numbers: Mapping[str, Any], copied_gb_s: float) -> dict[str, float]:
    """Milliseconds of the step and its phases without stand-ins, and of the stand-ins. When the host had issued the
    step (`issued`) is left out.

    Args:
        numbers: a section `share-...` of a record.
        copied_gb_s: the record's `copy on the device GB/s`, at which stand-ins for reduce-scatters count in a record
            that does not say what stand-ins took.
    """
    steps = numbers["steps"]
    taken = steps.get("stand-ins ms") or _stand_ins(numbers, copied_gb_s)
    left = without(steps["milliseconds"], taken)
    left.pop(ISSUED, None)
    return left | {STAND_INS: sum(taken.values())}


def without(times: Mapping[str, float], stand_ins: Mapping[str, float]) -> dict[str, float]:
    """The times of a step and its phases less `stand_ins`, which are by phase."""
    left = {name: time - stand_ins.get(name, 0.0) for name, time in times.items()}
    return left | {STEP: times[STEP] - sum(stand_ins.values())}


def _stand_ins(numbers: Mapping[str, Any], copied_gb_s: float) -> dict[str, float]:
    """Milliseconds of stand-ins by phase in a record that has them as kernels only.

    With tensors [tokens, hidden] shared by `tp`, a text layer and micro-batch gathers two in the forward pass and four
    in the backward pass (inputs again, gradients), scatters two and two; the head gathers one more each way and
    scatters one. Replicas gather weights after the update. What all gathers took together is known, and divided by the
    bytes that they wrote; scatters are so many bytes read and written.
    """
    layout = numbers["layout"]
    config = json.loads((MODELS / layout["model"] / "config.json").read_text())
    layers, passes = config["num_hidden_layers"], layout["micro-batches"]
    activations = passes * 2 * layout["tokens of a pack"] * config["hidden_size"]
    text = layout["layout"].partition(" on ")[0].partition("|")[2]
    degrees = dict(axis.split(":") for axis in text.split(","))
    gathered = {
        "text forward": (2 * layers + 1) * activations,
        "text backward": (4 * layers + 1) * activations,
        "update": 1e9 * numbers["planned GB"]["weights"] if "dp" in degrees else 0.0,
    }
    scattered = {"boundary": 1, "text forward": 2 * layers, "text backward": 2 * layers + 1}
    gathers_ms = sum(ms for name, ms, _ in numbers["trace"]["top"] if GATHER in name)
    scatter_ms = 2 * activations / int(degrees["tp"]) / copied_gb_s / 1e6
    return {
        phase: gathers_ms * gathered.get(phase, 0.0) / sum(gathered.values()) + scatter_ms * scattered.get(phase, 0)
        for phase in (*gathered, "boundary")
    }
