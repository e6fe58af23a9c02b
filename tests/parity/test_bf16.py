"""In bf16 the loss curve over 50 steps hardly depends on the layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.parity import runs
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import long, thinned
from tests.support.pool import Pools

STEPS = 50
MODELS = {
    "qwen2_5_vl": ModelChoice(vision_layers=2, text_layers=2),
    "qwen3_vl": ModelChoice(family="qwen3_vl", vision_layers=3, text_layers=4, deepstack=(0, 1), head_dim=16),
    "qwen3_vl_moe": ModelChoice(family="qwen3_vl_moe", vision_layers=3, text_layers=2, head_dim=16),
    "qwen3_5": ModelChoice(family="qwen3_5", vision_layers=2, text_layers=4, head_dim=16, attention_every=4),
}
CASES = [
    ("qwen2_5_vl", 2, "sp:2", "tp:2", ""),
    ("qwen3_vl", 2, "sp:2", "pp:2", "--text-layers 1 3"),
    ("qwen3_vl", 3, "pp:2@0-1", "tp:2@1-2", ""),
    ("qwen3_vl_moe", 2, "dp:2", "dp:2,ep:2", ""),
    ("qwen3_vl_moe", 2, "sp:2", "tp:2,ep:2", "--text-precision.master split --text-precision.moments 8bit"),
    ("qwen3_5", 2, "sp:2", "cp:2", ""),
    ("qwen3_5", 2, "sp:2", "tp:2", "--text-recompute selective"),
]
Curve = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of each family, and data for four different steps."""
    found = {name: tmp_path_factory.mktemp("bf16") for name in MODELS}
    for name, folder in found.items():
        write_model(folder / "model", MODELS[name])
        write_data(folder, 16, seed=11)
    return found


@pytest.fixture(scope="module")
def curve(folders: dict[str, Path], pools: Pools) -> Curve:
    """`curve(family, ranks, vision layout, text layout, more flags)`: the losses of all steps."""

    @cache
    def get(family: str, ranks: int, vision: str, text: str, more: str = "--model.dtype bfloat16") -> np.ndarray:
        folder = folders[family]
        flags = (
            f"--model.hf_path {folder}/model --data.registry.d.annotations {folder}/data.jsonl "
            f"--data.registry.d.images {folder}/images --data.datasets d --data.shuffle false --data.workers 0 "
            f"--train.global_batch_size 4 --train.micro_batch_size 2 --train.iters {STEPS} --log.dir {folder}/log "
            f"--optimizer.lr 2e-3 --optimizer.warmup_iters 5 --vision-parallel {vision} --text-parallel {text} {more}"
        )
        results = pools(ranks).run(runs.train, flags.split())
        assert all(result["replicas_equal"] for result in results)
        return np.array(results[0]["losses"])

    return get


@pytest.mark.parametrize("family, ranks, vision, text, more", long(CASES))
def test_bf16_curves_are_close(family: str, ranks: int, vision: str, text: str, more: str, curve: Curve) -> None:
    alone = curve(family, 1, "dp:1", "dp:1")
    got = curve(family, ranks, vision, text, f"--model.dtype bfloat16 {more}")
    assert len(got) == len(alone) == STEPS and np.isfinite(got).all()
    assert got[-4:].mean() < 0.8 * got[:4].mean(), "nothing was learnt, so that equal curves say little"
    assert np.abs(got - alone).mean() <= 0.01 * alone[0]


@pytest.mark.parametrize("family", thinned(MODELS, 3))
def test_bf16_follows_fp32(family: str, curve: Curve) -> None:
    """A wide net for errors that all layouts share: bf16 on one rank is not far from fp32."""
    in_fp32 = curve(family, 1, "dp:1", "dp:1", "--model.dtype float32")
    assert np.abs(curve(family, 1, "dp:1", "dp:1") - in_fp32).mean() <= 0.03 * in_fp32[0]
