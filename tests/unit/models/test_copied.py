"""Tensors that a family leaves to others: read past, and copied by exports, unchanged, with a line that says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.checkpoint.convert import OpenCheckpoint, export_checkpoint, import_folders
from megatron_hetero.checkpoint.record import ModelSources
from megatron_hetero.hf.model_files import CONFIG, INDEX, SINGLE
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.families.qwen3_vl.family import Qwen3VL
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import open_modules
from tests.support.folders import ModelChoice, write_model

AHEAD = {"mtp.fc.weight": torch.randn(6, 12).bfloat16(), "mtp.layers.0.norm.weight": torch.randn(6).bfloat16()}


@contextmanager
def copied(*patterns: str) -> Iterator[None]:
    with mock.patch.object(Qwen3VL, "copied", patterns):
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("copied") / "model", ModelChoice(family="qwen3_vl"))


def with_more(plain: Path, folder: Path, more: dict[str, Tensor]) -> Path:
    folder.mkdir()
    for file in plain.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(load_file(folder / SINGLE) | more, folder / SINGLE, {"format": "pt"})
    return folder


def opened(folder: Path) -> Any:
    folders = ModelFolders.read(folder)
    return open_modules(folders, ModelShapes.of(folders), 0)[TEXT]


def test_they_are_expected_of_a_family_that_names_them(plain: Path, tmp_path: Path) -> None:
    folder = with_more(plain, tmp_path / "more", AHEAD)
    with pytest.raises(UserError, match=r"unexpected: mtp\.fc\.weight, mtp\.layers\.0\.norm\.weight"):
        opened(folder)
    with copied("mtp.*"):
        assert opened(folder).unchanged == {name: tuple(tensor.shape) for name, tensor in AHEAD.items()}
        assert opened(folder).notice.startswith("exports have mtp.fc.weight, mtp.layers.0.norm.weight of")
        assert opened(plain).unchanged == {} and opened(plain).notice == ""
        other = with_more(plain, tmp_path / "other", AHEAD | {"next.weight": torch.zeros(2)})
        with pytest.raises(UserError, match=r"\(1 unexpected: next\.weight\)"):
            opened(other)
        quantised = with_more(plain, tmp_path / "quantised", AHEAD | {"mtp.q": torch.zeros(2, dtype=torch.int8)})
        with pytest.raises(UserError, match=r"unsupported types: mtp\.q is I8"):
            opened(quantised)


@pytest.mark.parametrize("dtype, limit", [("stored", 10**9), ("float32", 40_000)])
def test_import_and_export_write_them(plain: Path, tmp_path: Path, dtype: str, limit: int) -> None:
    folder, target = with_more(plain, tmp_path / "more", AHEAD), tmp_path / "export"
    with copied("mtp.*"):
        done = import_folders(ModelSources(folder), tmp_path / "checkpoints" / "step-00000000")
        checkpoint = OpenCheckpoint.open(tmp_path / "checkpoints")
        written = export_checkpoint(checkpoint, target, ModelSources(folder), dtype, limit)
    assert written.tensors == done.tensors and "mtp.fc.weight" in written.notice and str(folder) in written.notice
    found = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = load_file(folder / SINGLE)
    assert found.keys() == expected.keys() and AHEAD.keys() < found.keys()
    for name, tensor in expected.items():
        wanted = tensor if dtype == "stored" or name in AHEAD else tensor.float()
        assert torch.equal(found[name], wanted) and found[name].dtype == wanted.dtype
    if dtype == "float32":
        assert json.loads((target / CONFIG).read_text())["dtype"] == "float32", "that of the model"
        assert json.loads((target / INDEX).read_text())["weight_map"].keys() == found.keys()


def test_an_export_needs_the_folder_they_come_from(plain: Path, tmp_path: Path) -> None:
    folder = with_more(plain, tmp_path / "more", AHEAD)
    with copied("mtp.*"):
        import_folders(ModelSources(folder), tmp_path / "checkpoints" / "step-00000000")
        (folder / SINGLE).unlink()
        checkpoint = OpenCheckpoint.open(tmp_path / "checkpoints")
        with pytest.raises(UserError, match="found no safetensors weights"):
            export_checkpoint(checkpoint, tmp_path / "export", ModelSources(folder))
    assert not (tmp_path / "export").exists()
