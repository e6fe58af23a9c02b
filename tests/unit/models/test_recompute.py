"""Recomputation changes no result: `selective`, whole layers, and MLPs in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_hetero.layout.names import ROWS
from megatron_hetero.models.layers.recompute import Recompute, not_saving, recompute
from tests.support import stages
from tests.support.folders import write_model
from tests.support.matrix import thinned
from tests.support.pool import Pools
from tests.support.ranks import on_ranks
from tests.support.stages import Case
from tests.unit.models import qwen3_vl_stages
from tests.unit.models.choices import CHOICES, assert_equal, flags_of
from tests.unit.models.steps import train

OUTPUTS = (ROWS, "deepstack.0", "deepstack.1", "deepstack.2")
SIZES = ((1, 4, 6), (1, 2, 2), (1, 10, 2))
SEEDS = (0, 1, 2, 3)
WHOLE = {"sequence_parallel": False}
RULES: list[dict[str, Any]] = [
    {"recompute": "selective"},
    {"recompute": 1},
    {"recompute": 3},
    {"recompute": "full"},
    {"chunk": 8},
    {"recompute": "selective", "chunk": 5},
    {"recompute": 2, "chunk": 4},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp(name) / "model", choice) for name, choice in CHOICES.items()}


def run(pools: Pools, family: str, module: str, case: Case) -> list[dict[str, Any]]:
    """A forward and a backward pass: what the ranks found."""
    ranks = pools(prod(int(part.split(":")[1]) for part in case.layouts[module].split(",")))
    if family == "qwen3_vl":
        job, given = (qwen3_vl_stages.vision, SIZES) if module == "vision" else (qwen3_vl_stages.text, OUTPUTS)
        return ranks.run(job, case, given)
    return ranks.run(stages.vision, case) if module == "vision" else ranks.run(stages.text, case, SEEDS)


TEXT = [
    ("dp:1", {}),
    ("tp:2", {}),
    ("tp:2", WHOLE),
    ("sp:2", {}),
    ("cp:2", {}),
    ("tp:2,cp:2", {}),
    ("dp:1", {"freeze": ("text",)}),
    ("tp:2", {"freeze": ("text",)}),
    ("pp:2", {"split": (3, 1)}),
    ("pp:2", {"stages_per_rank": 2}),
]
VISION = [
    ("dp:1", {}),
    ("tp:2", {}),
    ("tp:2", WHOLE),
    ("sp:2", {}),
    ("cp:2", {}),
    ("dp:1", {"freeze": ("vision",)}),
    ("tp:2", {"freeze": ("projector",)}),
    ("pp:2", {"split": (1, 3)}),
]
CASES = [("qwen2_5_vl", "text", *row) for row in TEXT] + [("qwen2_5_vl", "vision", *row) for row in VISION]
# Its jobs run all stages on each rank.
CASES += [("qwen3_vl", "text", *row) for row in [*TEXT[:6], ("tp:2", {"split": (1, 3)})]]
CASES += [("qwen3_vl", "vision", *row) for row in [*VISION[:6], ("tp:2", {"split": (3, 1)})]]


@pytest.mark.parametrize("family, module, layout, more", thinned(CASES, 9), ids=str)
def test_it_changes_nothing(
    family: str, module: str, layout: str, more: dict[str, Any], models: dict[str, Path], pools: Pools
) -> None:
    kept = Case(models[family], {module: layout}, **more)
    expected = run(pools, family, module, kept)
    for rule in RULES:
        found = run(pools, family, module, replace(kept, **rule))
        # In float32, where it is no copy, the input of a norm has its gradients added up in another order.
        exactly = rule.get("recompute") != "selective" and "chunk" not in rule
        assert_equal(found, expected, exactly, str(rule))


# --------------------------------------------------------------------------------------------- whole steps

STEPS = [
    ("qwen2_5_vl", "sp:2", "tp:2", 2, ""),
    ("qwen2_5_vl", "dp:2", "pp:2", 2, "--schedule.virtual_stages 2"),
    ("qwen2_5_vl", "cp:2", "cp:2", 2, "--schedule.kind recompute"),
    ("qwen2_5_vl", "dp:1", "dp:1", 1, "--model.freeze text"),
    ("qwen3_vl", "tp:2", "tp:2", 2, ""),
    ("qwen3_vl", "sp:2", "pp:2", 2, "--text-layers 3 1 --schedule.waves 2"),
    ("qwen3_vl", "dp:1@0", "sp:2@1-2", 3, "--model.freeze vision"),
]


@pytest.mark.parametrize("family, vision, text, ranks, more", thinned(STEPS, 7))
@on_ranks("ranks")
def test_steps_in_bfloat16(family: str, vision: str, text: str, ranks: int, more: str, models: dict[str, Path]) -> None:
    flags = flags_of(models[family], vision, text, more)
    expected = train(flags, 2)
    both = "--vision-recompute {0} --text-recompute {0}"
    for rule in (both.format("selective"), both.format("1"), "--text-recompute selective"):
        found = train([*flags, *rule.split()], 2)
        assert_equal(found, expected, exactly=True, name=rule)
    chunked = [*flags, *"--vision-chunk 8 --text-chunk 8 --text-recompute selective".split()]
    np.testing.assert_allclose(train(chunked, 2)[0], expected[0], rtol=2e-2)


# ------------------------------------------------------------------------------------- single operations


def square(x: Tensor) -> Tensor:
    return x * x


def kept_by(compute: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What `compute` gives, and what autograd keeps of it."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        return compute(), kept


def test_only_inputs_are_saved() -> None:
    """What is not recomputed goes to outer hooks: the weight."""
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def through(x: Tensor) -> Tensor:
        made = recompute(lambda x: square(x).exp(), x)
        with not_saving(made):
            return made.view(12)[:8].view(2, 4) @ weight

    out, kept = kept_by(lambda: through(x))
    assert [k.data_ptr() for k in kept] == [x.data_ptr(), weight.data_ptr()]
    out.sum().backward()
    expected = torch.autograd.grad((square(x).exp()[:2] @ weight).sum(), (x, weight))
    for found, wanted in zip((x.grad, weight.grad), expected, strict=True):
        assert found is not None and torch.equal(found, wanted)


def test_it_is_recomputed_once_and_not_in_evaluation() -> None:
    calls = []

    def make(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(torch.is_grad_enabled())
        return square(x), x.exp()

    x = torch.randn(3, requires_grad=True)
    one, other = recompute(make, x)
    with not_saving(one, other):
        out = (one * other).sum()
    out.backward()
    assert calls == [False, True]
    with torch.no_grad():
        recompute(make, x)
    assert len(calls) == 3
    assert not_saving(x, square(x)).__class__.__name__ == "nullcontext"


@pytest.mark.parametrize(
    "how, layers, whole", [("none", 4, 0), ("selective", 4, 0), ("full", 4, 4), (1, 4, 1), (4, 4, 4), (6, 4, 4)]
)
def test_how_many_layers_are_recomputed(how: Any, layers: int, whole: int) -> None:
    assert Recompute(how).whole_layers(layers) == whole


def test_tokens_within_a_chunk_pass_at_once() -> None:
    assert [Recompute(chunk=8).chunks(tokens) for tokens in (0, 8, 9)] == [False, False, True]
    assert not Recompute().chunks(1 << 20)
