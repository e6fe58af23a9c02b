"""Ranks that were started with different settings, files or flags do not train; the message says what differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hetero.train.inputs import fingerprint
from tests.functional import jobs
from tests.functional.test_bad_input import flags, merged
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.pool import Pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, with another model and other annotations beside the right ones."""
    folder = tmp_path_factory.mktemp("unlike")
    write_model(folder / "model", ModelChoice(vision_layers=2, text_layers=1))
    write_data(folder, 8)
    shutil.copytree(folder / "model", folder / "other")
    weights = load_file(folder / "other/model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, folder / "other/model.safetensors")
    records = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    (folder / "other.jsonl").write_text("\n".join(map(json.dumps, records[:-1])) + "\n")
    return folder


CASES = {
    "another rate": ("--optimizer.lr 0.5", "optimizer.lr: found 1e-05 on rank 0 and 0.5 on rank 1"),
    "another clipping": ("--optimizer.clip_grad 7", "optimizer.clip_grad: found 1.0 on rank 0 and 7.0 on rank 1"),
    "shuffling": ("--data.shuffle true", "data.shuffle: found False on rank 0 and True on rank 1"),
    "checkpoints on one rank": ("--checkpoint.dir DIR/c", "checkpoint.dir: found none on rank 0 and DIR/c on rank 1"),
    "an export on one rank": ("--export.hf_dir DIR/e", "export.hf_dir: found none on rank 0 and DIR/e on rank 1"),
    "another model": ("--model.hf_path DIR/other", "model.hf_path: found DIR/model on rank 0 and DIR/other on rank 1"),
    "other annotations": (
        "--data.registry.d.annotations DIR/other.jsonl",
        "annotations: found DIR/data.jsonl on rank 0",
    ),
    "another layout": ("--text-parallel dp:2", "parallel.text: found tp:2 on rank 0 and dp:2 on rank 1"),
    "a layout that does not fit": ("--text-parallel tp:3", "parallel.text: found tp:2 on rank 0 and tp:3 on rank 1"),
    "a device for itself": ("--log.dir DIR/log-1", None),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_with_different_flags(name: str, folder: Path, pools: Callable[[int], Pool]) -> None:
    more, said = CASES[name]
    other = merged(flags(folder), more.replace("DIR", str(folder)).split())
    messages = pools(2).run(jobs.refusal_of_each, [flags(folder), other], timeout_s=30)
    if said is None:
        assert messages == [None, None]
    else:
        assert messages[0] == messages[1] and said.replace("DIR", str(folder)) in messages[0]


def test_files_that_differ_under_one_path(folder: Path, pools: Callable[[int], Pool], tmp_path: Path) -> None:
    """As on nodes with disks of their own: what is below `/proc/self/cwd` is another folder for each rank."""
    for node in ("0", "1"):
        (tmp_path / node).mkdir()
        for name in ("model", "data.jsonl", "images"):
            (tmp_path / node / name).symlink_to(folder / name)
    ours = merged(flags(Path("/proc/self/cwd")), ["--log.dir", str(tmp_path / "log")])
    nodes = [str(tmp_path / node) for node in ("0", "1")]
    assert pools(2).run(jobs.refusal_in, nodes, ours) == [None, None]
    for name, other in (("model", "other"), ("data.jsonl", "other.jsonl")):
        (tmp_path / "1" / name).unlink()
        (tmp_path / "1" / name).symlink_to(folder / other)
    message, same = pools(2).run(jobs.refusal_in, nodes, ours)
    assert message == same and "/proc/self/cwd/model/model.safetensors: found " in message
    (tmp_path / "1" / "model").unlink()
    (tmp_path / "1" / "model").symlink_to(folder / "model")
    message, same = pools(2).run(jobs.refusal_in, nodes, ours)
    assert message == same and "/proc/self/cwd/data.jsonl (data set d): found 8 records, " in message
    assert " and 7 records, " in message
    (tmp_path / "1" / "data.jsonl").unlink()
    message, same = pools(2).run(jobs.refusal_in, nodes, ours)
    assert message == same and message.startswith("on rank 1: /proc/self/cwd/data.jsonl: no such file")


def test_the_hash_of_weights_distinguishes_them(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.randn(300, 300, generator=torch.Generator().manual_seed(i)) for i in range(8)}
    found = set()
    for number, changed in enumerate(({}, {"w0": weights["w0"] * 1.001}, {"w7": weights["w7"] * 1.001})):
        save_file(weights | changed, tmp_path / f"{number}.safetensors")
        found.add(fingerprint(tmp_path / f"{number}.safetensors"))
    save_file({f"x{name[1:]}": weight for name, weight in weights.items()}, tmp_path / "x.safetensors")
    assert len(found | {fingerprint(tmp_path / "x.safetensors")}) == 4
