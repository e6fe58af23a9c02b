"""Two data sets, models, and command lines with everything that makes a resume hard."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.runs import flags
from tests.support.folders import ModelChoice, write_data, write_model, write_transposed
from tests.support.pool import Pools


@dataclass(frozen=True)
class Untouched:
    """A run that nothing interrupted: its folder, and the result of `runs.train`."""

    folder: Path
    found: dict[str, Any]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets and a model of each kind; in `towers`, two that show images to a further encoder, `detail`."""
    root = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("a", "b")):
        write_data(root / name, 6, seed=seed)
        write_data(root / "towers" / name, 6, seed=seed, details=(1, 0, 2))
    small = ModelChoice(vision_layers=2, text_layers=2)
    write_model(root / "plain", small)
    write_model(root / "tied", replace(small, tied=True))
    write_model(root / "deep", replace(small, tied=True, text_layers=4))
    newer = replace(small, family="qwen3_vl", vision_layers=4, text_layers=4, deepstack=(0, 1, 2), head_dim=16, seed=2)
    write_model(root / "qwen3", replace(newer, text_hidden=small.hidden))
    write_model(root / "qwen3-tied", replace(newer, text_hidden=small.hidden, tied=True))
    write_model(root / "moe", replace(newer, family="qwen3_vl_moe", text_hidden=small.hidden, deepstack=(0, 1)))
    write_transposed(root / "moe", root / "moe-published")
    write_model(root / "towers/qwen3", replace(newer, text_hidden=small.hidden))
    write_model(root / "towers/plain", small)
    write_model(root / "towers/detail", replace(small, vision_heads=2, vision_head_dim=12, vision_ffn=44, seed=1))
    return root


@pytest.fixture(scope="session")
def untouched(folders: Path, tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> Untouched:
    """A run with checkpoints after steps 2 and 4, in the layouts sp:2 and tp:2."""
    run = tmp_path_factory.mktemp("untouched")
    return Untouched(run, pools(2).run(jobs.train, flags(folders, run, "sp:2", "tp:2"))[0])


@pytest.fixture
def run(untouched: Untouched, tmp_path: Path) -> Path:
    """A copy of a run."""
    return shutil.copytree(untouched.folder, tmp_path / "run")
