"""Ranks that were started with different settings, files or flags do not train; the message says what differs."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from megatron_hetero.hf.peft_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, Target, config_text
from megatron_hetero.train.inputs import sampled
from tests.functional.refusals import flags, refusal
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.formats import write_parquet
from tests.support.ranks import on_ranks


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
    write_parquet(folder / "data.parquet", records, folder / "images")
    parquet.write_table(parquet.read_table(folder / "data.parquet"), folder / "other.parquet", row_group_size=3)
    for name, value in (("adapter", 1.0), ("other-adapter", 2.0)):
        _write_adapter(folder / name, value)
    return folder


def _write_adapter(folder: Path, value: float) -> None:
    path = "model.language_model.layers.0.self_attn.q_proj"
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_text(config_text([Target(path, 2, 1.0)], [], "", None))
    shapes = {f"{PREFIX}{path}.lora_A.weight": (2, 48), f"{PREFIX}{path}.lora_B.weight": (48, 2)}
    save_file({key: torch.full(shape, value) for key, shape in shapes.items()}, folder / ADAPTER_WEIGHTS)


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
    "another layout": ("--text-parallel dp:2", "modules.text.parallel: found tp:2 on rank 0 and dp:2 on rank 1"),
    "a layout that does not fit": (
        "--text-parallel tp:3",
        "modules.text.parallel: found tp:2 on rank 0 and tp:3 on rank 1",
    ),
    "a device for itself": ("--log.dir DIR/log-1", None),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=30)
def test_ranks_with_different_flags(name: str, folder: Path) -> None:
    more, found = CASES[name]
    own = more.replace("DIR", str(folder)).split() if dist.get_rank() else []
    message = refusal(flags(folder, *own))
    if found is None:
        assert message is None
    else:
        assert message is not None and found.replace("DIR", str(folder)) in message


NODES = {
    "alike": ({}, None),
    "another model": ({"model": "other"}, "/proc/self/cwd/model/model.safetensors: found "),
    "other data": ({"data.jsonl": "other.jsonl"}, "/proc/self/cwd/data.jsonl (data set d): found 8 records, "),
    "other row groups": (
        {"data.parquet": "other.parquet"},
        "/proc/self/cwd/data.parquet (data set p): found 8 records, ",
    ),
    "another adapter": ({"adapter": "other-adapter"}, "/proc/self/cwd/adapter/adapter_model.safetensors: found "),
    "no data": ({"data.jsonl": None}, "on rank 1: /proc/self/cwd/data.jsonl: no such file"),
}


PARQUET = "--data.registry.p.files /proc/self/cwd/data.parquet --data.datasets p --data.shuffle blocks".split()
ADAPTER = "--text-lora.hf_path /proc/self/cwd/adapter".split()


@pytest.fixture
def nodes(name: str, folder: Path, tmp_path: Path) -> Path:
    """A folder for each rank, of which the second one has other files, or lacks them."""
    changed, _ = NODES[name]
    for node in ("0", "1"):
        (tmp_path / node).mkdir()
        for link in ("model", "adapter", "data.jsonl", "data.parquet", "images"):
            if target := changed.get(link, link) if node == "1" else link:
                (tmp_path / node / link).symlink_to(folder / target)
    return tmp_path


@pytest.mark.parametrize("name", NODES)
@on_ranks(2)
def test_files_that_differ_under_one_path(name: str, nodes: Path) -> None:
    """As on nodes with disks of their own: what is below `/proc/self/cwd` is another folder for each rank."""
    with contextlib.chdir(nodes / str(dist.get_rank())):
        more = {"other row groups": PARQUET, "another adapter": ADAPTER}.get(name, [])
        message = refusal(flags(Path("/proc/self/cwd"), "--log.dir", str(nodes / "log"), *more))
    _, found = NODES[name]
    assert message is None if found is None else message is not None and found in message
    assert name != "other data" or " and 7 records, " in str(message)
    assert name != "other row groups" or str(message).count(" in blocks ") == 2


def test_the_hash_of_weights_distinguishes_them(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.randn(300, 300, generator=torch.Generator().manual_seed(i)) for i in range(8)}
    found = set()
    for number, changed in enumerate(({}, {"w0": weights["w0"] * 1.001}, {"w7": weights["w7"] * 1.001})):
        save_file(weights | changed, tmp_path / f"{number}.safetensors")
        found.add(sampled(tmp_path / f"{number}.safetensors"))
    save_file({f"x{name[1:]}": weight for name, weight in weights.items()}, tmp_path / "x.safetensors")
    assert len(found | {sampled(tmp_path / "x.safetensors")}) == 4
