"""Files that users name: what is none, or has no end, is refused at once and in a sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import is_unfit, open_regular, read_bytes, read_text
from megatron_hetero.base.outputs import MANIFEST, FileRecord, read_manifest, verify
from megatron_hetero.checkpoint.index import INDEX, read_index
from megatron_hetero.checkpoint.record import RunRecord
from megatron_hetero.config.load import MAX_BYTES, read_yaml
from megatron_hetero.data.tokenizer import check_folder
from tests.support.items import annotated


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def zeros(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


def sparse(path: Path) -> Path:
    with open(path, "wb") as file:
        file.truncate(10**12)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("å".encode())
    with open_regular(tmp_path / "file") as file:
        assert list(file) == ["å".encode()]
    assert read_text(tmp_path / "file") == "å" and read_bytes(tmp_path / "file", 2) == "å".encode()
    assert is_unfit(tmp_path / "file") is None and is_unfit(tmp_path / "none") is None


@pytest.mark.parametrize(
    "make, said",
    [
        (pipe, "not a regular file"),
        (zeros, "not a regular file"),
        (sparse, "1000000000000 bytes"),
        (lambda path: path.mkdir() or path, "a directory|a folder"),
    ],
)
def test_what_is_no_file_or_too_large_is_refused(make: Callable[[Path], Path], said: str, tmp_path: Path) -> None:
    path = make(tmp_path / "x")
    with pytest.raises(OSError, match=said):
        read_bytes(path)
    assert is_unfit(path) is not None


READERS: dict[str, Callable[[Path], Any]] = {
    "--config": read_yaml,
    "annotations": lambda path: annotated("d", path),
    "record": lambda path: RunRecord.read(path.parent),
    "index": lambda path: read_index(path.parent),
    "manifest": lambda path: read_manifest(path.parent),
}
NAMES = {"record": "run.json", "index": INDEX, "manifest": MANIFEST}


@pytest.mark.parametrize("make, said", [(pipe, "not a regular file"), (zeros, "not a regular file")])
@pytest.mark.parametrize("kind", READERS)
def test_readers_refuse_what_is_no_file(kind: str, make: Callable[[Path], Path], said: str, tmp_path: Path) -> None:
    path = make(tmp_path / NAMES.get(kind, "x"))
    with pytest.raises(UserError, match=f"{path}.*{said}"):
        READERS[kind](path)


@pytest.mark.parametrize("kind", ["--config", "record", "index", "manifest"])
def test_readers_refuse_what_is_too_large(kind: str, tmp_path: Path) -> None:
    path = sparse(tmp_path / NAMES.get(kind, "x"))
    with pytest.raises(UserError, match="1000000000000 bytes"):
        READERS[kind](path)


def test_a_long_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# " + "x" * MAX_BYTES)
    with pytest.raises(UserError, match="bytes"):
        read_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"])
@pytest.mark.parametrize(
    "make, said", [(pipe, "not a regular file"), (zeros, "not a regular file"), (sparse, "a file of 10{12}")]
)
def test_a_model_s_folder_with_what_is_no_file(
    name: str, make: Callable[[Path], Path], said: str, tmp_path: Path
) -> None:
    for other in {"config.json", "tokenizer.json", "preprocessor_config.json"} - {name}:
        (tmp_path / other).write_text("{}")
    path = make(tmp_path / name)
    with pytest.raises(UserError, match=f"{path.name}: found {said}"):
        check_folder(tmp_path)


def test_a_manifest_that_names_a_pipe(tmp_path: Path) -> None:
    pipe(tmp_path / "x")
    [fault] = verify(tmp_path, {"x": FileRecord(0, "")}, ["x"])
    assert fault.startswith("x ") and "not a regular file" in fault
