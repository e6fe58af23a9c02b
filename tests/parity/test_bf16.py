"""In bf16 the loss curve over 50 steps hardly depends on the layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.parity import jobs
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.pool import Pool

STEPS = 50
CASES = [(2, "sp:2", "tp:2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and data for four different steps."""
    folder = tmp_path_factory.mktemp("bf16")
    write_model(folder / "model", ModelChoice(vision_layers=2, text_layers=2))
    write_data(folder, 16, seed=11)
    return folder


def curve(pool: Pool, folder: Path, vision: str, text: str, dtype: str = "bfloat16") -> np.ndarray:
    """The losses of all steps."""
    flags = (
        f"--model.hf_path {folder}/model --model.dtype {dtype} --data.registry.d.annotations {folder}/data.jsonl "
        f"--data.registry.d.images {folder}/images --data.datasets d --data.shuffle false --data.workers 0 "
        f"--train.global_batch_size 4 --train.micro_batch_size 1 --train.iters {STEPS} --log.dir {folder}/log "
        f"--optimizer.lr 2e-3 --optimizer.warmup_iters 5 --vision-parallel {vision} --text-parallel {text}"
    )
    results = pool.run(jobs.train, flags.split())
    assert all(result["replicas_equal"] for result in results)
    return np.array(results[0]["losses"])


@pytest.fixture(scope="module")
def alone(folder: Path, pools: Callable[[int], Pool]) -> np.ndarray:
    """The curve of one rank in bf16."""
    return curve(pools(1), folder, "dp:1", "dp:1")


@pytest.mark.parametrize("ranks, vision, text", CASES)
def test_bf16_curves_are_close(
    ranks: int, vision: str, text: str, folder: Path, alone: np.ndarray, pools: Callable[[int], Pool]
) -> None:
    got = curve(pools(ranks), folder, vision, text)
    assert len(got) == len(alone) == STEPS and np.isfinite(got).all()
    assert got[-4:].mean() < 0.8 * got[:4].mean(), "nothing was learnt, so that equal curves say little"
    assert np.abs(got - alone).mean() <= 0.01 * alone[0]


def test_bf16_follows_fp32(folder: Path, alone: np.ndarray, pools: Callable[[int], Pool]) -> None:
    """A wide net for errors that all layouts share: bf16 on one rank is not far from fp32."""
    assert np.abs(curve(pools(1), folder, "dp:1", "dp:1", "float32") - alone).mean() <= 0.03 * alone[0]
