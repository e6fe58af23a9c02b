"""The same samples in all formats train the same bits, and a run resumes from another layout at an odd step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from tests.functional.checkpoint import runs as jobs
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.formats import FORMATS, write_as
from tests.support.pool import Pools

SAMPLES, BATCH, STEPS = 9, 3, 6
"""Two epochs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("formats")
    write_model(made / "model", ModelChoice(vision_layers=2, text_layers=2))
    write_data(made, SAMPLES)
    return made


def trained(folder: Path, format: str, run: Path, pools: Pools, more: str = "") -> dict[str, Any]:
    """Three steps in one layout and three in another: all losses, and the last weights, and flags of the second."""
    found = write_as(format, folder / "data.jsonl", folder / "images", run / "data")
    settings = " ".join(f"--data.registry.d.{name} {value}" for name, value in found.items())
    common = (
        f"--model.hf_path {folder}/model --model.dtype float32 {settings} --data.datasets d --data.workers 2 "
        f"--train.global_batch_size {BATCH} --train.iters {STEPS} --checkpoint.interval 100 --log.dir {run}/log "
        f"--checkpoint.dir {run}/checkpoints --data.index {run}/index --optimizer.lr 1e-3 {more}"
    )
    first = pools(2).run(jobs.train, f"{common} --vision-parallel sp:2 --text-parallel tp:2".split(), None, 3)[0]
    flags = f"{common} --vision-parallel dp:2 --text-parallel cp:2".split()
    second = pools(2).run(jobs.train, flags)[0]
    assert second["from"] == 3 and len(first["losses"]) == len(second["losses"]) == 3
    return {"losses": first["losses"] + second["losses"], "weights": second["weights"], "flags": flags}


@pytest.fixture(scope="module")
def of_jsonl(folder: Path, tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> dict[str, Any]:
    return trained(folder, "jsonl", tmp_path_factory.mktemp("run"), pools)


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "jsonl"])
def test_all_formats_train_the_same_bits(
    format: str, folder: Path, of_jsonl: dict[str, Any], tmp_path: Path, pools: Pools
) -> None:
    more = "--data.scan true" if format in ("parquet", "webdataset") else ""
    more += " --data.worker_type process" if format == "parquet" else ""  # It has the most that has to be pickled.
    found = trained(folder, format, tmp_path, pools, more)
    assert found["losses"] == of_jsonl["losses"] and len(set(found["losses"])) == STEPS
    assert found["weights"].keys() == of_jsonl["weights"].keys()
    assert all(np.array_equal(found["weights"][name], value) for name, value in of_jsonl["weights"].items())


@pytest.mark.parametrize("format", ["parquet", "energon"])
def test_shuffled_blocks_resume_where_they_were(format: str, folder: Path, tmp_path: Path, pools: Pools) -> None:
    """The same losses without a resume, but for rounding in another layout."""
    cut = trained(folder, format, tmp_path / "cut", pools, "--data.shuffle blocks")
    whole = tmp_path / "whole"
    found = write_as(format, folder / "data.jsonl", folder / "images", whole / "data")
    settings = " ".join(f"--data.registry.d.{name} {value}" for name, value in found.items())
    flags = (
        f"--model.hf_path {folder}/model --model.dtype float32 {settings} --data.datasets d --data.shuffle blocks "
        f"--train.global_batch_size {BATCH} --train.iters {STEPS} --log.dir {whole}/log --data.index {whole}/index "
        "--optimizer.lr 1e-3 --vision-parallel sp:2 --text-parallel tp:2"
    )
    losses = pools(2).run(jobs.train, flags.split())[0]["losses"]
    assert losses[:3] == cut["losses"][:3]
    np.testing.assert_allclose(losses[3:], cut["losses"][3:], rtol=2e-5)
    if format == "parquet":  # The same records in other row groups.
        for file in (tmp_path / "cut/data").iterdir():
            parquet.write_table(parquet.read_table(file), file, row_group_size=3)
        assert "in other blocks" in pools(2).run(jobs.error_of, cut["flags"])[0]
        allowed = [*cut["flags"], "--checkpoint.allow_changes", "data.datasets"]
        assert pools(2).run(jobs.error_of, allowed)[0] == "no error: it resumes after step 6"
