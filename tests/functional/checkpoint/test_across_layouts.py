"""What one layout wrote, another reads: bit by bit, and training goes on as if nothing had happened."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.checks import require_loaded, same
from tests.functional.checkpoint.conftest import Untouched
from tests.functional.checkpoint.runs import flags
from tests.support.matrix import thinned
from tests.support.pool import Pools


def interrupted(run: Path, other: Path) -> Path:
    """`other` becomes what `run` was after its second step, and had written of the third. Returns its checkpoint."""
    shutil.copytree(run / "checkpoints/step-00000002", other / "checkpoints/step-00000002")
    (other / "log").mkdir()
    history = (run / "log/metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "log/metrics.jsonl").write_text("".join(history[:3]))
    return other / "checkpoints/step-00000002"


@pytest.mark.parametrize(
    "more",
    thinned(
        ["--train.micro_batch_size 4", "--vision-parallel dp:1@0 --text-parallel dp:1@1 --checkpoint.async true"], 2
    ),
    ids=["shared", "apart"],
)
def test_the_same_layout_resumes_bit_by_bit(more: str, folders: Path, tmp_path: Path, pools: Pools) -> None:
    """Four steps, and two and two."""
    whole, cut = (
        flags(folders, tmp_path / name, "sp:2", "tp:2", f"{more} --train.iters 4 --checkpoint.interval 100")
        for name in ("whole", "cut")
    )
    untouched = pools(2).run(jobs.train, whole)[0]
    first = pools(2).run(jobs.train, cut, None, 2)[0]
    second = pools(2).run(jobs.train, cut)[0]
    assert (first["from"], second["from"]) == (0, 2)
    assert first["losses"] + second["losses"] == untouched["losses"] and len(untouched["losses"]) == 4
    same(*(tmp_path / name / "checkpoints/step-00000004" for name in ("whole", "cut")), but="")
    assert all(np.array_equal(second["weights"][name], value) for name, value in untouched["weights"].items())
    history = [json.loads(line) for line in (tmp_path / "cut/log/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in history] == list(enumerate(untouched["losses"], 1))


def test_training_may_continue_meanwhile(untouched: Untouched, folders: Path, tmp_path: Path, pools: Pools) -> None:
    more = "--checkpoint.async true --checkpoint.interval 1"
    found = pools(2).run(jobs.train, flags(folders, tmp_path, "sp:2", "tp:2", more))[0]
    assert found["losses"] == untouched.found["losses"]
    for step in ("step-00000002", "step-00000004"):
        same(untouched.folder / "checkpoints" / step, tmp_path / "checkpoints" / step, but="")
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        ".lock", "latest", *(f"step-0000000{step}" for step in range(1, 5))
    ]  # fmt: skip
    history = (tmp_path / "checkpoints/step-00000003/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in history] == [1, 2, 3]


@dataclass(frozen=True)
class Link:
    """How a run of a chain is started."""

    vision: str
    text: str
    ranks: int
    more: str = ""


APART, COMPARED = 3, 4
"""Steps from one resume to the next, and those after it that are compared."""
BUDGET = "--train.tokens_per_micro_batch 200 --data.max_seq_length 200"
ALL, TWO, ONE = (f"--train.micro_batch_size {size}" for size in (4, 2, 1))
UNEVEN, VIRTUAL = "--text-layers 1 3", "--schedule.virtual_stages 2 --schedule.waves 2"
BALANCED = "--model.router_aux_loss_coef 0.05"
DETAIL = "--detail-hf_path TOWERS/detail --detail-token <|video_pad|>"
CHAINS = {
    "one and two ranks": ("deep", [
        Link("sp:2", "tp:2", 2, ALL),
        Link("dp:1", "tp:1", 1, BUDGET),
        Link("sp:2", "dp:2", 2, BUDGET),
        Link("dp:1@0", "dp:1@1", 2, f"{ONE} --schedule.run_ahead 2"),
        Link("dp:2", "pp:2", 2, f"{ONE} {VIRTUAL}"),
    ]),
    "four ranks": ("deep", [
        Link("sp:4", "tp:4", 4, ALL),
        Link("tp:2,dp:2", "tp:2,pp:2", 4, f"{TWO} {UNEVEN}"),
        Link("sp:4", "tp:4", 4, ALL),
    ]),
    "towers": ("plain", [
        Link("sp:2", "tp:2", 2, f"{ALL} --detail-parallel dp:2 {DETAIL}"),
        Link("dp:1@0", "dp:1@2", 3, f"{TWO} --detail-parallel dp:1@1 {DETAIL}"),
        Link("dp:2", "pp:2", 2, f"{TWO} --detail-parallel tp:2 --schedule.kind recompute {DETAIL}"),
    ]),
    "qwen3": ("qwen3-tied", [
        Link("sp:4", "pp:4", 4, f"{TWO} --text-layers 1 1 1 1"),
        Link("pp:2,dp:2", "tp:4", 4, TWO),
        Link("dp:1@0", "pp:2@1-2", 3, f"{ONE} {UNEVEN}"),
        Link("dp:2", "pp:2", 2, f"{ONE} {VIRTUAL}"),
    ]),
    "qwen3, towers": ("qwen3", [
        Link("pp:2", "pp:2", 2, f"{ALL} {UNEVEN} --detail-parallel dp:2 {DETAIL}"),
        Link("dp:1@0", "tp:2@2-3", 4, f"{TWO} --detail-parallel pp:2@0-1 {DETAIL}"),
        Link("sp:2", "pp:2", 2, f"{TWO} {UNEVEN} --detail-parallel tp:2 --schedule.kind recompute {DETAIL}"),
    ]),
    "experts": ("moe", [
        Link("dp:2", "dp:2,ep:2", 2, f"{TWO} {BALANCED}"),
        Link("sp:2", "tp:2,ep:1", 2, f"{ONE} {BALANCED}"),
        Link("dp:2", "pp:2", 2, f"{TWO} {UNEVEN} {BALANCED}"),
        Link("sp:2", "dp:2,ep:1", 2, f"{TWO} {BALANCED} --text-zero 3"),
        Link("sp:4", "tp:2,dp:2,ep:4", 4, f"{TWO} {BALANCED}"),
        Link("dp:4", "dp:4,ep:2", 4, f"{ONE} {BALANCED} --text-zero 3"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(CHAINS, 5))
def test_a_chain_of_layouts(name: str, folders: Path, tmp_path: Path, pools: Pools) -> None:
    """Each run resumes from a checkpoint of the one before, with the same bits, and the next losses are those
    of the one before, to rounding.
    """
    model, links = CHAINS[name]
    root = folders / "towers" if "towers" in name else folders
    total = APART * (len(links) - 1) + COMPARED
    before: dict[str, Any] = {}
    for turn, link in enumerate(links):
        start, run, last = turn * APART, tmp_path / str(turn), turn == len(links) - 1
        written = tmp_path / str(turn - 1) / f"checkpoints/step-{start:08d}"
        more = f"{link.more} --train.iters {total} --checkpoint.interval {APART}".replace("TOWERS", str(root))
        resume = f" --checkpoint.resume {written}" if turn else ""
        line = flags(root, run, link.vision, link.text, more + resume, model)
        copy, until = (run / "copy" if turn else None), (None if last else start + APART + COMPARED)
        found = pools(link.ranks).run(jobs.train, line, copy, until)[0]
        assert found["from"] == start
        if turn:
            require_loaded(written, run / f"copy/step-{start:08d}", found, start)
            np.testing.assert_allclose(found["losses"][:COMPARED], before["losses"][APART:], rtol=0, atol=1e-5)
        before = found


def test_another_layout_in_bfloat16(folders: Path, tmp_path: Path, pools: Pools) -> None:
    more = "--model.dtype bfloat16"
    untouched = pools(4).run(jobs.train, flags(folders, tmp_path / "whole", "dp:4", "tp:2,dp:2", more))[0]
    written = tmp_path / "whole/checkpoints/step-00000002"
    again = flags(folders, tmp_path / "other", "dp:2@0-1", "tp:2@2-3", f"{more} --checkpoint.resume {written}")
    found = pools(4).run(jobs.train, again, tmp_path / "copy")[0]
    require_loaded(written, tmp_path / "copy/step-00000002", found, 2, more)
    np.testing.assert_allclose(found["losses"], untouched["losses"][2:], rtol=0, atol=3e-2)


def test_type_and_frozen_parts_may_change(untouched: Untouched, folders: Path, tmp_path: Path, pools: Pools) -> None:
    written, first = untouched.folder / "checkpoints/step-00000002", tmp_path / "first/checkpoints/step-00000004"
    more = f"--model.dtype bfloat16 --model.freeze vision --checkpoint.resume {written}"
    found = pools(2).run(jobs.train, flags(folders, tmp_path / "first", "tp:2", "dp:2", more), tmp_path / "copy")[0]
    assert any("vision now frozen" in note for note in found["notes"])
    before, loaded = jobs.tensors(written), jobs.tensors(tmp_path / "copy/step-00000002")
    assert {key.split("/")[1] for key in before.keys() - loaded.keys() if "exp_avg/" in key} == {
        name.split("/")[1] for name in before if name.startswith("exp_avg/visual.") and "merger" not in name
    }
    kept = [key for key in loaded if not key.startswith(("random/", "weights/visual"))]
    assert kept and all(torch.equal(before[key], loaded[key]) for key in kept)
    assert loaded["weights/visual.blocks.0.norm1.weight"].dtype == torch.bfloat16

    thawed = flags(folders, tmp_path / "second", "tp:2", "dp:2", f"--checkpoint.resume {first} --train.iters 5")
    found = pools(2).run(jobs.train, thawed)[0]
    assert any("vision no longer frozen: " in note for note in found["notes"])
    last = jobs.tensors(tmp_path / "second/checkpoints/step-00000005")
    counts = {key: float(count) for key, count in last.items() if key.startswith("step/")}
    assert counts["step/visual.blocks.0.norm1.weight"] == 1 and counts["step/model.norm.weight"] == 5


def test_tensors_may_be_frozen_one_by_one(untouched: Untouched, folders: Path, tmp_path: Path, pools: Pools) -> None:
    written = untouched.folder / "checkpoints/step-00000002"
    more = f"--model.freeze model.layers.*.mlp.* projector --checkpoint.resume {written}"
    found = pools(2).run(jobs.train, flags(folders, tmp_path / "first", "tp:2", "dp:2", more), tmp_path / "copy")[0]
    note = next(note for note in found["notes"] if "now frozen" in note)
    assert note.startswith("projector, model.layers.0.mlp.down_proj.weight, ") and "optimizer state" in note
    before, loaded = jobs.tensors(written), jobs.tensors(tmp_path / "copy/step-00000002")
    assert {key.split("/")[1] for key in before.keys() - loaded.keys() if "exp_avg/" in key} == {
        name.split("/")[1] for name in before if re.match(r"exp_avg/(model\.layers\.\d+\.mlp\.|visual\.merger)", name)
    }
    kept = [key for key in loaded if not key.startswith("random/")]
    assert kept and all(torch.equal(before[key].float(), loaded[key].float()) for key in kept)


ZERO = "--vision-zero 2 --text-zero 3"


@pytest.mark.parametrize(
    "dtype, text, zero", thinned([("float32", "tp:2", ""), ("bfloat16", "tp:2", ""), ("float32", "dp:2", ZERO)], 2)
)
def test_plain_sgd_resumes_too(dtype: str, text: str, zero: str, folders: Path, tmp_path: Path, pools: Pools) -> None:
    more = f"--optimizer.name sgd --optimizer.weight_decay 0 --model.dtype {dtype} --data.workers 0 {TWO} {zero}"
    line = flags(folders, tmp_path / "whole", "dp:2", text, more)
    untouched = pools(2).run(jobs.train, line)[0]
    written = interrupted(tmp_path / "whole", tmp_path / "cut")
    line = [word.replace(str(tmp_path / "whole"), str(tmp_path / "cut")) for word in line]
    assert pools(2).run(jobs.train, line)[0]["losses"] == untouched["losses"][2:]
    same(tmp_path / "whole/checkpoints/step-00000004", tmp_path / "cut/checkpoints/step-00000004", but="")
    assert {v.dtype for k, v in jobs.tensors(written).items() if "weights/" in k} == {torch.float32}
