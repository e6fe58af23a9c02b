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

from tests.support.pool import Pool
from tests.unit.checkpoint import jobs_checkpoint as jobs
from tests.unit.checkpoint.conftest import Untouched
from tests.unit.checkpoint.jobs_checkpoint import flags

DTYPES = {"": torch.float32, "--model.dtype bfloat16": torch.bfloat16}
Pools = Callable[[int], Pool]


def same(one: Path, other: Path, but: str) -> None:
    """Both checkpoints hold the same bits; tensors that begin with `but` are not looked at."""
    a, b = ({k: v for k, v in jobs.tensors(p).items() if not but or not k.startswith(but)} for p in (one, other))
    assert a.keys() == b.keys()
    assert not [key for key in a if a[key].dtype != b[key].dtype or not torch.equal(a[key], b[key])]


def interrupted(run: Path, other: Path) -> Path:
    """`other` becomes what `run` was after its second step, and had written of the third. Returns its checkpoint."""
    shutil.copytree(run / "checkpoints/step-00000002", other / "checkpoints/step-00000002")
    (other / "log").mkdir()
    history = (run / "log/metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "log/metrics.jsonl").write_text("".join(history[:3]))
    return other / "checkpoints/step-00000002"


def test_the_same_layout_goes_on_bit_by_bit(untouched: Untouched, folders: Path, tmp_path: Path, pools: Pools) -> None:
    whole, cut = untouched.folder, tmp_path / "cut"
    written = interrupted(whole, cut)
    resumed = pools(2).run(jobs.train, flags(folders, cut, "sp:2", "tp:2"))[0]
    assert resumed["from"] == 2 and resumed["losses"] == untouched.found["losses"][2:]
    same(whole / "checkpoints/step-00000004", cut / "checkpoints/step-00000004", but="")
    history = [json.loads(line) for line in (cut / "log/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in history] == untouched.found["losses"]
    assert [line["step"] for line in history] == [1, 2, 3, 4]
    another_layout("dp:1", "dp:1", 1, untouched.found, written, folders, tmp_path, pools, "plain", "")


def test_training_may_go_on_meanwhile(untouched: Untouched, folders: Path, tmp_path: Path, pools: Pools) -> None:
    more = "--checkpoint.async true --checkpoint.interval 1"
    found = pools(2).run(jobs.train, once(flags(folders, tmp_path, "sp:2", "tp:2", more)))[0]
    assert found["losses"] == untouched.found["losses"]
    for step in ("step-00000002", "step-00000004"):
        same(untouched.folder / "checkpoints" / step, tmp_path / "checkpoints" / step, but="")
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "latest", *(f"step-0000000{step}" for step in range(1, 5))
    ]  # fmt: skip
    history = (tmp_path / "checkpoints/step-00000003/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in history] == [1, 2, 3]


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
    written = tmp_path / "whole/checkpoints/step-00000002"
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
    same(written, tmp_path / "copy/step-00000002", but="random/")
    kept = jobs.tensors(written)
    assert all(
        np.array_equal(kept[f"weights/{name}"].to(DTYPES[more]).float().reshape(value.shape).numpy(), value)
        for name, value in found["loaded"].items()
    )
    assert {float(count) for key, count in kept.items() if key.startswith("step/")} == {2.0}
    assert any("layouts were" in note for note in found["notes"])
    np.testing.assert_allclose(found["losses"], untouched["losses"][2:], rtol=0, atol=1e-5 if not more else 3e-2)


def test_type_and_frozen_parts_may_change(untouched: Untouched, folders: Path, tmp_path: Path, pools: Pools) -> None:
    written, first = untouched.folder / "checkpoints/step-00000002", tmp_path / "first/checkpoints/step-00000004"
    more = f"--model.dtype bfloat16 --model.freeze vision --checkpoint.resume {written}"
    found = pools(2).run(jobs.train, flags(folders, tmp_path / "first", "tp:2", "dp:2", more), tmp_path / "copy")[0]
    assert any("vision is frozen now" in note for note in found["notes"])
    before, loaded = jobs.tensors(written), jobs.tensors(tmp_path / "copy/step-00000002")
    assert {key.split("/")[1] for key in before.keys() - loaded.keys() if "exp_avg/" in key} == {
        name.split("/")[1] for name in before if name.startswith("exp_avg/visual.") and "merger" not in name
    }
    kept = [key for key in loaded if not key.startswith(("random/", "weights/visual"))]
    assert kept and all(torch.equal(before[key], loaded[key]) for key in kept)
    assert loaded["weights/visual.blocks.0.norm1.weight"].dtype == torch.bfloat16

    thawed = flags(folders, tmp_path / "second", "tp:2", "dp:2", f"--checkpoint.resume {first} --train.iters 5")
    found = pools(2).run(jobs.train, once(thawed))[0]
    assert any("vision was frozen: the optimizer begins there with moments of zero" in note for note in found["notes"])
    last = jobs.tensors(tmp_path / "second/checkpoints/step-00000005")
    counts = {key: float(count) for key, count in last.items() if key.startswith("step/")}
    assert counts["step/visual.blocks.0.norm1.weight"] == 1 and counts["step/model.norm.weight"] == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_sgd_goes_on_too(dtype: str, folders: Path, tmp_path: Path, pools: Pools) -> None:
    more = f"--optimizer.name sgd --optimizer.weight_decay 0 --model.dtype {dtype} --data.workers 0"
    line = [*once(flags(folders, tmp_path / "whole", "dp:2", "tp:2", more))]
    untouched = pools(2).run(jobs.train, line)[0]
    written = interrupted(tmp_path / "whole", tmp_path / "cut")
    line = [word.replace(str(tmp_path / "whole"), str(tmp_path / "cut")) for word in line]
    assert pools(2).run(jobs.train, line)[0]["losses"] == untouched["losses"][2:]
    same(tmp_path / "whole/checkpoints/step-00000004", tmp_path / "cut/checkpoints/step-00000004", but="")
    assert {v.dtype for k, v in jobs.tensors(written).items() if "weights/" in k} == {torch.float32}


def once(line: list[str]) -> list[str]:
    """A command line in which a flag that comes again wins."""
    values: dict[str, list[str]] = {}
    for word in line:
        if word.startswith("--"):
            values[name := word] = []
        else:
            values[name].append(word)
    return [word for name, words in values.items() for word in (name, *words)]
