"""Settings of layers, and comparing runs with and without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.folders import ModelChoice

CHOICES = {
    "qwen2_5_vl": ModelChoice(text_layers=4, vision_layers=4, full_layers=(1, 2)),
    "qwen3_vl": ModelChoice(
        family="qwen3_vl", vision_layers=4, text_layers=4, vision_head_dim=12, head_dim=24, deepstack=(0, 1, 2), seed=20
    ),
}


def assert_equal(found: Any, expected: Any, exactly: bool, name: str = "") -> None:
    """All arrays and numbers of a nested value, bit by bit or to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_equal(found[key], value, exactly, f"{name} {key}")
    elif isinstance(expected, tuple | list):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other, exactly, name)
    elif exactly:
        np.testing.assert_array_equal(found, expected, name)
    elif isinstance(expected, np.ndarray):
        scale = float(np.abs(expected).max(initial=0.0))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 + 1e-5 * scale, err_msg=name)
    else:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7), name


def flags_of(folder: Path, vision: str, text: str, more: str) -> list[str]:
    """The command line of a run in bfloat16, of a picture and 13 tokens in each of two samples."""
    common = (
        f"--model.hf_path {folder} --data.registry.d.annotations {folder}/none.json --data.datasets d "
        f"--train.global_batch_size 2 --plan.image_side 84 --plan.tokens 13 --vision-parallel {vision} "
        f"--text-parallel {text} --optimizer.lr 1e-3 --log.dir {folder}/log"
    )
    return [*common.split(), *more.split()]
