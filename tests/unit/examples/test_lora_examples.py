"""The configurations in examples/ with adapters: their memory, and what trains."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import pytest

from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.estimate import KINDS, Estimate
from megatron_hetero.estimate.problems import problems_of
from megatron_hetero.layout.names import TEXT
from tests.unit.examples.lists import WITH_ADAPTERS

EXAMPLES = Path(__file__).parents[3] / "examples"
NUMBERS = {1: "one GPU", 2: "two GPUs", 4: "four GPUs"}


@lru_cache
def plan_of(example: str, *more: str) -> Estimate:
    model = example.removesuffix("_lora")
    line = f"--config {EXAMPLES}/{example}.yaml --model.hf_path {EXAMPLES}/models/{model}"
    return Estimate.of(load_config([*line.split(), *more]), WITH_ADAPTERS[example])


@pytest.mark.parametrize("example", WITH_ADAPTERS)
def test_memory_is_planned_as_the_example_says(example: str) -> None:
    text, plan = (EXAMPLES / f"{example}.yaml").read_text(encoding="utf-8"), plan_of(example)
    said = " ".join(text.split("model:\n")[0].replace("#", "").split())
    assert f"planned at {round(plan.totals.max() / 1e9)} GB per GPU, allowance included" in said
    world = WITH_ADAPTERS[example]
    of = re.search(r"on (\w+ GPUs?) of (24|80) GB: torchrun --nproc-per-node (\d)", said)
    assert of and (of[1], int(of[3])) == (NUMBERS[world], world)
    assert plan.job.config.plan.memory_gb == {"24": "l4", "80": "h100"}[of[2]]
    assert plan.assumed.sample.tokens > 0.95 * plan.job.config.data.max_seq_length
    assert problems_of(plan) == ()


@pytest.mark.parametrize("example", WITH_ADAPTERS)
def test_states_are_of_what_trains_alone(example: str) -> None:
    """Two fp32 moments, master weights and fp32 gradients of 16 bytes per trained element, in parts of ranks."""
    plan = plan_of(example)
    text = plan.parameters[TEXT, 0]
    base = plan.job.shapes.text.architecture.in_folder
    assert plan.job.modules[TEXT].frozen == base.keys()
    assert 0.003 < text.trained / text.parameters < 0.012
    of_kind = dict(zip(KINDS, plan.memory[0].tolist(), strict=True))
    trained = sum(each.trained for each in plan.parameters.values())
    assert of_kind["gradients"] == 4 * trained and of_kind["optimizer"] <= 12 * trained


def test_experts_have_adapters_of_their_own() -> None:
    shapes = plan_of("qwen3_vl_30b_a3b_lora").job.shapes
    added = {
        name: size for name, size in shapes.text.architecture.tensors.items() if ".experts." in name and "lora" in name
    }
    assert len(added) == 48 * 4 and {
        size[0] if name.endswith("lora_A.weight") else size[1] for name, size in added.items()
    } == {4 * 128, 4}


def test_7b_does_not_fit_without_adapters() -> None:
    """The encoder and the projector are frozen in both."""
    full = plan_of("qwen2_5_vl_7b_lora", "--text-lora.r", "0", "--text-lora.alpha", "none")
    assert full.totals.max() > 5 * plan_of("qwen2_5_vl_7b_lora").totals.max()


def test_a_backward_pass_takes_as_long_as_a_forward_pass() -> None:
    """But for attention, whose operands all have gradients, and for adapters; without adapters twice as long."""
    times = [
        plan_of("qwen2_5_vl_7b_lora", "--text-recompute", "none", *more).work
        for more in ((), ("--text-lora.r", "0", "--text-lora.alpha", "none"))
    ]
    some, full = (work["text", "B", 0] / work["text", "F", 0] for work in times)
    assert 1.05 < some < 1.07 and full == pytest.approx(2)
    assert [work["vision", "B", 0] for work in times] == [0, 0]
