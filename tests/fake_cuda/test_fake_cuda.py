"""One rank's step of layouts of models of 7B to 32B on a GPU that computes nothing: what it would wait for, what it
would mix up, what it would need, and what it would launch. `make test` runs models of fewer layers, which are as wide.

What the fake device cannot show: time, values, memory of the driver and of NCCL, fragmentation. Functions that a GPU
compiles count as the kernels that the compiler makes of them (`device.COMPILED`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hetero.models.layers import rotary
from megatron_hetero.models.layers.compiled import run
from tests.fake_cuda import device, guard, runs
from tests.fake_cuda.cases import CASES, LONG, Case
from tests.support.matrix import long

END = "rest", "megatron_hetero/groups/platform.py wait: an event"
"""Where the host waits for the device, once a step: for its end. A training loop has issued the next step before that.
"""
SIZES = "text forward", "megatron_hetero/models/layers/dispatch.py _sizes: a copy to the host"
"""Once in each sparse layer and micro-batch where experts are on several ranks, and in no backward pass."""
READ = "text forward", "megatron_hetero/models/layers/dispatch.py _read: a copy to the host"
"""Likewise where products are no single kernel or experts pass in chunks."""

why_not = guard.missing()
pytestmark = pytest.mark.skipif(why_not is not None, reason=str(why_not))
each = pytest.mark.parametrize("case", [*(case for case in CASES if case not in LONG), *long(LONG)], ids=str)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> runs.Found:
    """What each case took, without the long ones where none of these is asked for; and what the device notices."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    asked = {call.params.get("case") for call in calls if call is not None}
    some = [case for case in CASES if case not in LONG]
    return runs.measured(tmp_path_factory.mktemp("guard"), some if asked.isdisjoint(LONG) else CASES)


def test_the_fake_device_notices_what_it_has_to_and_nothing_else(found: runs.Found) -> None:
    assert {name for name, kinds in found.noticed["waits"].items() if kinds != ["waits"]} == set()
    assert {name for name, kinds in found.noticed["mixed"].items() if kinds != ["mixed"]} == set()
    assert {name for name, kinds in found.noticed["passes"].items() if kinds} == set()


@each
def test_no_op_takes_tensors_of_both_devices(case: Case, found: runs.Found) -> None:
    assert found.cases[str(case)]["mixed"] == {}


@each
def test_the_host_waits_for_the_device_once_a_step(case: Case, found: runs.Found) -> None:
    of_case = found.cases[str(case)]
    expected: dict[tuple[str, str], int] = {END: 1}
    if case.model.endswith("_a3b"):
        if "ep:1" not in case.text.split(","):
            expected[SIZES] = of_case["layers"]["text"] * of_case["micro_batches"]
        if "--text-chunk" in case.more or case.capability[0] not in (9, 10):
            expected[READ] = of_case["layers"]["text"] * of_case["micro_batches"]
    assert {(phase, place): times for phase, place, times in of_case["waits"]} == expected


@each
def test_memory_is_what_the_plan_says(case: Case, found: runs.Found) -> None:
    planned = sum(found.cases[str(case)]["planned"].values())
    assert planned == pytest.approx(found.cases[str(case)]["peak"], rel=0.05), found.cases[str(case)]


@each
def test_activations_are_copied_beside_the_computation(case: Case, found: runs.Found) -> None:
    """Out and back once each; the plan has whole blocks of host memory."""
    of_case = found.cases[str(case)]
    if "activations true" not in case.more:
        assert of_case["host"] == 0
        return
    out, back, steps = (*(of_case["copied"][way] for way in ("out", "back")), of_case["micro_batches"])
    assert out == back and 0.8 * of_case["host"] <= out / steps <= of_case["host"]


@each
def test_kernels_are_those_recorded(case: Case, found: runs.Found) -> None:
    """Where a change is wanted: `make kernels` writes the record anew."""
    record = runs.recorded()
    if record["versions"] != runs.VERSIONS:
        pytest.skip(f"recorded with {record['versions']}, this is {runs.VERSIONS}")
    assert runs.kernels_of(found.cases[str(case)]) == record["kernels"][str(case)]


def rotated(function: Callable[..., Any], tokens: int) -> list[Any]:
    """What one of `layers.rotary` takes, of so many tokens: groups of 3 queries, with padding in the forward pass. In
    gradients it would be one more kernel.
    """
    cosines, sines = torch.randn(2, tokens, 8)
    if function is rotary.heads_turned:
        return [torch.randn(tokens + 4, 1, 2, 5 * 8), cosines, sines, 8]
    if function is rotary.heads_turned_back:
        return [*(torch.randn(tokens, heads, 8) for heads in (6, 2, 2)), cosines, sines, torch.empty(tokens, 0)]
    return [torch.randn(tokens, 6, 8), cosines, sines]


@pytest.mark.long
@pytest.mark.parametrize(
    "function",
    [function for function in device.COMPILED if function.__module__ == rotary.__name__],
    ids=lambda function: function.__name__,
)
def test_rotations_are_as_many_kernels_as_are_counted(function: Callable[..., Any]) -> None:
    """Likewise."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    inputs = rotated(function, 16)
    torch.testing.assert_close(run(function, *inputs), function(*inputs))
    assert metrics.generated_kernel_count == device.COMPILED[function]
    counters.clear()
    for tokens in (2, 7, 60):
        inputs = rotated(function, tokens)
        torch.testing.assert_close(run(function, *inputs), function(*inputs))
    assert counters["stats"]["unique_graphs"] == 0


def test_the_record_has_the_cases_there_are() -> None:
    assert list(runs.recorded()["kernels"]) == [str(case) for case in CASES]
