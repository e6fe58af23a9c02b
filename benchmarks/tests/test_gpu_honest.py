"""The recorded shares without stand-ins for collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.honest import honest

RECORD = json.loads((Path(__file__).parents[1] / "results/gpu.json").read_text())["sections"]
COPIED = RECORD["environment"]["numbers"]["at best"]["copy on the device GB/s"]


def numbers(section: str) -> dict[str, Any]:
    return RECORD[section]["numbers"]


@pytest.mark.parametrize("section, gathers, scatters", [("share-7b", 26.94, 2.23), ("share-32b", 69.86, 3.60)])
def test_a_record_that_has_stand_ins_as_kernels(section: str, gathers: float, scatters: float) -> None:
    """Kernels of gathers as recorded, of scatters by their bytes; the phases lose what the step loses."""
    measured, left = numbers(section)["steps"]["milliseconds"], honest(numbers(section), COPIED)
    assert left["stand-ins"] == pytest.approx(gathers + scatters, abs=0.01)
    assert left["step"] == pytest.approx(measured["step"] - left["stand-ins"])
    lost = {phase: measured[phase] - left[phase] for phase in left.keys() & measured.keys() - {"step"}}
    assert sum(lost.values()) == pytest.approx(left["stand-ins"])
    assert lost["text backward"] == pytest.approx(2 * lost["text forward"], rel=0.08)
    assert lost["update"] < measured["update"] / 3 and lost["vision forward"] == 0


def test_a_record_that_has_stand_ins_by_phase() -> None:
    given = numbers("share-7b")
    given = {**given, "steps": {**given["steps"], "stand-ins ms": {"text forward": 8.0, "update": 3.0}}}
    left = honest(given, COPIED)
    assert left["stand-ins"] == 11.0 and left["step"] == pytest.approx(given["steps"]["milliseconds"]["step"] - 11.0)
    assert left["update"] == pytest.approx(given["steps"]["milliseconds"]["update"] - 3.0)
