"""What one layout wrote, another reads: bit by bit, and training goes on as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.pool import Pool
from tests.unit.checkpoint import jobs_checkpoint as jobs

DTYPES = {"": torch.float32, "--model.dtype bfloat16": torch.bfloat16}
Pools = Callable[[int], Pool]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets and a model of each kind."""
    root = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("a", "b")):
        write_data(root / name, 6, seed=seed)
    write_model(root / "plain", ModelChoice(vision_layers=2, text_layers=2))
    write_model(root / "tied", ModelChoice(vision_layers=2, text_layers=2, tied=True))
    return root


def flags(folders: Path, run: Path, vision: str, text: str, more: str = "", model: str = "plain") -> list[str]:
    """A command line with everything that makes a resume hard: AdamW, two data sets with rates, shuffling, workers."""
    common = (
        f"--model.hf_path {folders / model} --data.registry.a.annotations {folders}/a/data.jsonl "
        f"--data.registry.a.images {folders}/a/images --data.registry.b.annotations {folders}/b/data.jsonl "
        f"--data.registry.b.images {folders}/b/images --data.datasets a%50 b%150 --data.workers 2 "
        f"--train.global_batch_size 4 --train.iters 5 --checkpoint.interval 3 --log.dir {run}/log "
        f"--checkpoint.dir {run}/checkpoints "
        f"--optimizer.lr 1e-3 --optimizer.weight_decay 0.1 "
        f"--vision-parallel {vision} --text-parallel {text} {more}"
    )
    return common.split() if "--model.dtype" in more else [*common.split(), "--model.dtype", "float32"]


def same(one: Path, other: Path, but: str) -> None:
    """Both checkpoints hold the same bits; tensors that begin with `but` are not looked at."""
    a, b = ({k: v for k, v in jobs.tensors(p).items() if not but or not k.startswith(but)} for p in (one, other))
    assert a.keys() == b.keys()
    assert not [key for key in a if a[key].dtype != b[key].dtype or not torch.equal(a[key], b[key])]


def interrupted(run: Path, other: Path) -> Path:
    """`other` becomes what `run` was after its third step, and had written of the fourth. Returns its checkpoint."""
    shutil.copytree(run / "checkpoints/step-00000003", other / "checkpoints/step-00000003")
    (other / "log").mkdir()
    history = (run / "log/metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "log/metrics.jsonl").write_text("".join(history[:4]))
    return other / "checkpoints/step-00000003"


def test_the_same_layout_goes_on_bit_by_bit(folders: Path, tmp_path: Path, pools: Pools) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    untouched = pools(2).run(jobs.train, flags(folders, whole, "sp:2", "tp:2"))[0]
    written = interrupted(whole, cut)
    resumed = pools(2).run(jobs.train, flags(folders, cut, "sp:2", "tp:2"))[0]
    assert resumed["from"] == 3 and resumed["losses"] == untouched["losses"][3:]
    same(whole / "checkpoints/step-00000005", cut / "checkpoints/step-00000005", but="")
    history = [json.loads(line) for line in (cut / "log/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in history] == untouched["losses"]
    assert [line["step"] for line in history] == [1, 2, 3, 4, 5]
    another_layout("dp:1", "dp:1", 1, untouched, written, folders, tmp_path, pools, "plain", "")


@pytest.mark.parametrize("before, after, model, more", [
    (("sp:4", "tp:4"), ("tp:2,dp:2", "tp:2,pp:2"), "plain", ""),
    (("tp:2,pp:2", "tp:2,pp:2"), ("dp:4", "tp:4"), "tied", ""),
    (("dp:4", "tp:2,dp:2"), ("dp:2@0-1", "tp:2@2-3"), "plain", "--model.dtype bfloat16"),
    (("dp:2@0-1", "tp:2@2-3"), ("sp:2,dp:2", "dp:4"), "tied", ""),
])  # fmt: skip
def test_another_layout_goes_on(
    before: tuple[str, str],
    after: tuple[str, str],
    model: str,
    more: str,
    folders: Path,
    tmp_path: Path,
    pools: Pools,
) -> None:
    untouched = pools(4).run(jobs.train, flags(folders, tmp_path / "whole", *before, more, model))[0]
    written = tmp_path / "whole/checkpoints/step-00000003"
    another_layout(*after, 4, untouched, written, folders, tmp_path, pools, model, more)


def another_layout(
    vision: str,
    text: str,
    ranks: int,
    untouched: dict[str, Any],
    written: Path,
    folders: Path,
    tmp_path: Path,
    pools: Pools,
    model: str,
    more: str,
) -> None:
    """What is loaded has the same bits, and the losses go on as those of the `untouched` run."""
    again = flags(folders, tmp_path / "other", vision, text, f"{more} --checkpoint.resume {written}", model)
    found = pools(ranks).run(jobs.train, again, tmp_path / "copy")[0]
    same(written, tmp_path / "copy/step-00000003", but="random/")
    kept = jobs.tensors(written)
    assert all(
        np.array_equal(kept[f"weights/{name}"].to(DTYPES[more]).float().reshape(value.shape).numpy(), value)
        for name, value in found["loaded"].items()
    )
    assert {float(count) for key, count in kept.items() if key.startswith("step/")} == {3.0}
    assert any("layouts were" in note for note in found["notes"])
    np.testing.assert_allclose(found["losses"], untouched["losses"][3:], rtol=0, atol=1e-5 if not more else 3e-2)
