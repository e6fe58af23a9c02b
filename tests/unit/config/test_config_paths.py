"""What a run writes takes the place of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import Config, load_config


def config(folder: Path, more: str = "") -> Config:
    text = (
        f"--model.hf_path {folder}/models/base --data.registry.d.annotations {folder}/data/train.json "
        f"--data.registry.d.images {folder}/data/images --data.datasets d --log.dir {folder}/runs/log "
        f"--checkpoint.dir {folder}/runs/checkpoints {more}"
    )
    values: dict[str, str] = dict(zip(text.split()[::2], text.split()[1::2], strict=True))
    return load_config([word for pair in values.items() for word in pair])


@pytest.mark.parametrize("target, setting", [
    ("runs/log", "log.dir"),
    ("runs", "(log|checkpoint).dir"),
    ("runs/checkpoints", "checkpoint.dir"),
    ("runs/checkpoints/step-00000003", "checkpoint.dir"),
    ("runs/checkpoints/latest/model", "checkpoint.dir"),
    ("models", "model.hf_path"),
    ("models/base", "model.hf_path"),
    ("models/base/trained", "model.hf_path"),
    ("data", "data.registry.d"),
    ("data/images", "data.registry.d.images"),
    ("data/train.json", "data.registry.d.annotations"),
    ("linked/log", "log.dir"),
    ("runs/../models/base/", "model.hf_path"),
])  # fmt: skip
def test_an_export_replaces_nothing_of_the_run(target: str, setting: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "runs")
    with pytest.raises(UserError, match=rf"export\.hf_dir .*separate from {setting}"):
        config(tmp_path, f"--export.hf_dir {tmp_path}/{target}")


@pytest.mark.parametrize("target", ["runs/log/model", "runs/checkpoints/model", "runs/model", "data/images/out", "out"])
def test_an_export_may_lie_next_to_the_rest(target: str, tmp_path: Path) -> None:
    assert config(tmp_path, f"--export.hf_dir {tmp_path}/{target}").export.hf_dir == tmp_path / target


@pytest.mark.parametrize("flag", [
    "--model.hf_path", "--data.registry.d.annotations", "--data.registry.d.images", "--log.dir", "--checkpoint.dir",
    "--export.hf_dir", "--checkpoint.resume", "--config", "--model.hf_path_vision",
])  # fmt: skip
@pytest.mark.parametrize("below", ["", "/deep/er"])
def test_a_link_to_itself_is_one_message(flag: str, below: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "pool")
    (tmp_path / "pool").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="too many levels of symbolic links"):
        config(tmp_path, f"{flag} {tmp_path}/loop{below}")


def test_the_default_may_be_a_link_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").symlink_to("runs")
    monkeypatch.chdir(tmp_path)
    line = "--model.hf_path m --data.registry.d.annotations a.json --data.datasets d"
    with pytest.raises(UserError, match="log.dir: found .*runs.* .too many levels"):
        load_config(line.split())


def test_logs_are_in_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log\.dir .*separate from checkpoint\.dir .*step-00000001"):
        config(tmp_path, f"--log.dir {tmp_path}/runs/checkpoints/step-00000001/log")
