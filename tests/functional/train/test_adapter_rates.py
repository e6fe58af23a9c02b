"""Learning rates and weight decay of adapters in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.config.schema import load_config
from megatron_hetero.groups.platform import CPU, Platform
from pretrain_vlm import build_run
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.ranks import on_ranks

FLAGS = (
    "--vision-parallel dp:1 --text-parallel dp:1 --optimizer.lr 1e-4 --optimizer.lr_projector 3e-4 "
    "--optimizer.weight_decay 0.1 --train.global_batch_size 2 --train.iters 1 --data.workers 0 --data.datasets d "
    "--text-lora.r 2 --text-lora.lr_ratio 16 --text-lr 2e-4 --vision-lora.r 2"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rates")
    write_model(folder / "model", ModelChoice())
    write_data(folder, 4)
    return folder


@on_ranks(1)
def test_both_matrices_decay_and_have_rates_of_their_own(folder: Path) -> None:
    files = f"--model.hf_path {folder}/model --data.registry.d.annotations {folder}/data.jsonl "
    files += f"--data.registry.d.images {folder}/images --log.dir {folder}/log"
    run = build_run(load_config([*files.split(), *FLAGS.split()]), Platform(CPU, "gloo"))
    run.writer.close()
    found = {
        module: {name: (group["lr"], group["weight_decay"]) for group in part.param_groups for name in group["names"]}
        for module, part in run.trainer.optimizer.by_module.items()
    }
    text, vision = found["text"], found["vision"]
    assert {name[-6:] for name in text} == {"lora.A", "lora.B"} and len(text) == 2 * 2 * 4
    assert {value for name, value in text.items() if name.endswith("A")} == {(2e-4, 0.1)}
    assert {value for name, value in text.items() if name.endswith("B")} == {(32e-4, 0.1)}
    assert {value for name, value in vision.items() if "lora" in name} == {(1e-4, 0.1)}
    assert {value for name, value in vision.items() if "lora" not in name} == {(3e-4, 0.1), (3e-4, 0)}, "the projector"
