"""Links in model folders: a downloaded folder reads nothing else, and a Hugging Face cache works."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.tokenizer import check_folder
from megatron_hetero.hf.model_files import read_companions, weight_files
from megatron_hetero.models.folders import ModelFolders
from tests.support.folders import ModelChoice, write_model

BLOB = "0123456789abcdef" * 4
READERS: dict[str, Callable[[Path], Any]] = {
    "check": check_folder, "configuration": ModelFolders.read, "weights": weight_files,
    "exports": read_companions, "processor": Processor.from_folder,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("links") / "model", ModelChoice(text_layers=1, vision_layers=1))


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "models--org--name/snapshots/rev", copy_function=os.link))


def link(path: Path, to: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(to, path.parent))


NAMES = ["vocab.txt", "config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/a.jinja",
         "model.safetensors", "generation_config.json", "preprocessor_config.json", "encoders/a/x"]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_link_out_of_a_model_folder(reader: str, name: str, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("{}")
    link(copy / name, tmp_path / "id_rsa")
    with pytest.raises(UserError, match=f"{name}: found a link to {tmp_path}/id_rsa, expected a file in"):
        READERS[reader](copy)


@pytest.mark.parametrize("place", [
    "id_rsa", "models--org--name/refs/" + BLOB, "models--org--other/blobs/" + BLOB, "models--org--name/blobs/id_rsa",
    "models--org--name/blobs/sub/" + BLOB, "models--org--name/snapshots/other/vocab.txt", "blobs/" + BLOB, "absent",
    "models--org--name/snapshots/rev2/vocab.txt",
])  # fmt: skip
def test_what_is_no_blob_of_the_cache(place: str, copy: Path, tmp_path: Path) -> None:
    if place != "absent":
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("secret")
    link(copy / "vocab.txt", tmp_path / place)
    with pytest.raises(UserError, match=r"vocab\.txt: found a link to"):
        read_companions(copy)


def test_links_to_folders_and_of_blobs(copy: Path, tmp_path: Path) -> None:
    for name in ("outside", "outside/deep"):
        (tmp_path / name).mkdir()
    link(copy / "additional_chat_templates", tmp_path / "outside")
    with pytest.raises(UserError, match="additional_chat_templates: found a link to"):
        check_folder(copy)
    (copy / "additional_chat_templates").unlink()
    (tmp_path / f"outside/{BLOB}").write_text("secret")
    link(tmp_path / "models--org--name/blobs", tmp_path / "outside")
    link(copy / "vocab.txt", tmp_path / f"models--org--name/blobs/{BLOB}")
    with pytest.raises(UserError, match="vocab.txt: found a link to"):
        check_folder(copy)


def test_no_link_leads_to_a_hidden_folder(copy: Path, tmp_path: Path) -> None:
    """Links in there are not looked at."""
    (tmp_path / "secret").write_text("secret")
    link(copy / ".hidden/default.jinja", tmp_path / "secret")
    for name, place in {"additional_chat_templates": ".hidden", "vocab.txt": ".hidden/default.jinja"}.items():
        (copy / name).symlink_to(place)
        with pytest.raises(UserError, match=f"{name}: found a link to"):
            check_folder(copy)
        (copy / name).unlink()


def test_a_snapshot_of_a_cache_is_read(copy: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "models--org--name/blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(copy.iterdir())):
        path.rename(blob := blobs / f"{number:064x}")
        link(path, blob)
    link(copy / "encoders/a/config.json", blobs / f"{0:064x}")
    (copy / "LICENSE").symlink_to("README.md")
    (copy / "README.md").write_text("")
    link(copy / ".venv/python", Path("/usr/bin/env"))
    (tmp_path / "linked").symlink_to(copy)
    for read in READERS.values():
        read(copy)
        read(tmp_path / "linked")
    assert json.loads(read_companions(copy)["config.json"])["model_type"]
