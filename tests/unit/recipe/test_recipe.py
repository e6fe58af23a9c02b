"""SigLIP of `transformers` with `GPTModel` of Megatron-Core: losses and gradients are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cli.demo.pictures import draw
from megatron_hetero.cli.demo.records import training_samples
from tests.support.ranks import on_ranks

LAYOUTS = [
    ("dp:4", "dp:4"),
    ("dp:4", "tp:4"),
    ("dp:4", "tp:2,dp:2"),
    ("dp:4", "pp:2,dp:2"),
    ("dp:4", "tp:2,pp:2"),
    ("dp:2@0-1", "tp:2@2-3"),
    ("dp:2@0-1", "pp:2@2-3"),
    ("dp:2@2-3", "dp:2@0-1"),
    ("dp:1@0", "pp:3@1-3"),
    ("dp:3@0-2", "dp:1@3"),
    ("dp:3@0-2", "tp:2@2-3"),
    ("dp:4", "pp:2@1-2"),
    ("dp:2@1-2", "tp:2,pp:2"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data, for two steps: samples with one picture, two and none."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").mkdir()
    lines = []
    for number, sample in enumerate(training_samples(24, seed=5)):
        lines.append(json.dumps(sample.record(f"{number}")))
        for name, scene in zip(sample.files(f"{number}"), sample.scenes, strict=True):
            draw(scene).save(folder / "images" / name)
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def train(vision: str, text: str, data: Path, *, fsdp: bool = False) -> None:
    # Here, since it warns of what it imports, and in the tests' own process warnings are errors.
    from examples import megatron_recipe

    first, second = megatron_recipe.train(vision, text, data, steps=2, fsdp=fsdp)
    assert second.loss < first.loss
    assert max(first.loss_apart, second.loss_apart) < 1e-6
    assert first.gradients_apart < 1e-5
    assert second.gradients_apart < 1e-3, "AdamW's first step follows the signs of rounding errors"


@pytest.mark.parametrize("vision, text", LAYOUTS)
@on_ranks(4)
def test_any_layouts_train_as_one_process(vision: str, text: str, data: Path) -> None:
    train(vision, text, data)


@pytest.mark.parametrize("vision, text", [LAYOUTS[4], LAYOUTS[5]])
@on_ranks(4)
def test_a_tower_in_shards(vision: str, text: str, data: Path) -> None:
    train(vision, text, data, fsdp=True)
