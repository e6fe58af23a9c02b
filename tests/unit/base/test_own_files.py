"""Files that the program writes, in folders that a stranger has prepared: no other file is written, read or lost."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from megatron_hetero.base import outputs
from megatron_hetero.base.environment import prepare_traces
from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import open_own, read_as, read_own, replacing
from megatron_hetero.base.lock import Lock, alone
from megatron_hetero.base.outputs import LATEST, MANIFEST, clean, partial_of, prune, publish, whole
from megatron_hetero.schedule.drawing import write_plot
from megatron_hetero.train.log import LogFolder
from tests.unit.base.alarms import at_once

__all__ = ["at_once"]  # a fixture: opening a pipe may wait


def link(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def hard_link(path: Path, precious: Path) -> None:
    os.link(precious, path)


def dangling(path: Path, precious: Path) -> None:
    path.symlink_to(precious.with_name("absent"))


def pipe(path: Path, precious: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, precious: Path) -> None:
    path.mkdir()


Kind = Callable[..., None]
KINDS: dict[Kind, str] = {
    link: "is a symbolic link", hard_link: "is a hard link", dangling: "is a symbolic link",
    pipe: "is not a regular file", folder: "is a directory|is not a regular file",
}  # fmt: skip


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file elsewhere that stays as it is."""
    path = tmp_path / "elsewhere"
    path.mkdir()
    (path / "precious").write_text("thesis")
    yield path / "precious"
    assert (path / "precious").read_text() == "thesis" and names(path) == {"precious"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def take(path: Path) -> Lock:
    return Lock.take(path, "here", "run", mixed="steps", fix="wait for it")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["ab", "rb", "a+b"])
def test_only_files_of_their_own_are_opened(kind: Kind, mode: str, tmp_path: Path, precious: Path) -> None:
    kind(tmp_path / "x", precious)
    with pytest.raises(OSError, match=f"(?i){KINDS[kind]}|no such device"):
        open_own(tmp_path / "x", mode)
    with pytest.raises(FileExistsError):
        open_own(tmp_path / "x", "xb")
    assert os.path.lexists(tmp_path / "x")


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_is_a_file_of_its_own(kind: Kind, tmp_path: Path, precious: Path) -> None:
    kind(tmp_path / ".lock", precious)
    with pytest.raises(OSError, match=f"(?i){KINDS[kind]}"):
        take(tmp_path / ".lock")
    assert os.path.lexists(tmp_path / ".lock")


THESES = ["thesis", "process of law", "process 1 on a\nthesis", "process 1 on a\n" * 90, "process 1 on my host: thesis",
          "process 1 on " + "x" * 1000 + "\nthesis"]  # fmt: skip


@pytest.mark.parametrize("text", THESES)
def test_a_lock_takes_no_file_of_others(text: str, tmp_path: Path) -> None:
    (tmp_path / ".export.lock").write_text(text)
    held = alone(tmp_path / ".export.lock", tmp_path / "export", "export")
    with pytest.raises(OSError, match=r"\.export\.lock is not a lock file of this program"), held:
        raise AssertionError
    assert (tmp_path / ".export.lock").read_text() == text


@pytest.mark.parametrize("text", ["", "process 1 on elsewhere", "process 12 on a.b\n"])
def test_a_lock_takes_what_was_left(text: str, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(text)
    lock = take(tmp_path / ".lock")
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    (tmp_path / ".lock").rename(tmp_path / "moved")
    (tmp_path / ".lock").write_text("thesis")
    lock.release(remove=True)
    assert (tmp_path / ".lock").read_text() == "thesis"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_a_file_is_replaced(kind: Kind, tmp_path: Path, precious: Path) -> None:
    kind(tmp_path / "plot.svg", precious)
    before = os.lstat(tmp_path / "plot.svg")
    with pytest.raises(OSError, match=f"(?i){KINDS[kind]}"), replacing(tmp_path / "plot.svg"):
        raise AssertionError
    with pytest.raises(UserError, match=f"plot.svg.* {KINDS[kind]}"):
        write_plot(None, tmp_path / "plot.svg")
    assert os.path.samestat(before, os.lstat(tmp_path / "plot.svg"))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("thesis")
    with contextlib.suppress(KeyError), replacing(tmp_path / "x") as new:
        new.write_text("half")
        raise KeyError
    assert (tmp_path / "x").read_text() == "thesis"
    with replacing(tmp_path / "x") as new:
        new.write_text("new")
    assert (tmp_path / "x").read_text() == "new" and names(tmp_path) == {"x"}


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", ".metrics.lock"])
@pytest.mark.parametrize("kind", [link, dangling, pipe, folder])
def test_a_log_folder_with_links(name: str, kind: Kind, tmp_path: Path, precious: Path) -> None:
    (tmp_path / "log").mkdir()
    kind(tmp_path / "log" / name, precious)
    with pytest.raises(UserError, match=rf"log\.dir: .*cannot be written \(.*({name}|absent)|is a directory"):
        LogFolder(tmp_path / "log", "", "a: 1\n")
    (tmp_path / "log" / name).rmdir() if kind is folder else (tmp_path / "log" / name).unlink()
    (tmp_path / "linked").symlink_to(tmp_path / "log")  # A folder may be a link of the user's.
    LogFolder(tmp_path / "linked", "", "a: 1\n").close()


def test_traces_of_nccl_follow_no_links(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "nccl").mkdir()
    link(tmp_path / "nccl/rank0", precious)
    with pytest.raises(OSError, match="rank0 is a symbolic link"):
        prepare_traces(tmp_path / "nccl", {})


# ------------------------------------------------------------------------------------------- checkpoints


def published(path: Path, step: int) -> Path:
    partial = partial_of(path / f"step-{step:08d}")
    partial.mkdir(parents=True)
    return publish(partial, {})


@pytest.mark.parametrize("kind", [link, hard_link, dangling, pipe, folder])
def test_a_pointer_of_others_is_moved(kind: Kind, tmp_path: Path, precious: Path) -> None:
    for name in (LATEST, ".latest.new"):
        kind(tmp_path / name, precious)
    before = os.lstat(tmp_path / LATEST)
    for step in (1, 2):
        published(tmp_path, step)
        assert (tmp_path / LATEST).read_text() == f"step-0000000{step}\n" and not (tmp_path / LATEST).is_symlink()
    assert os.path.samestat(before, os.lstat(tmp_path / ".latest.aside"))
    assert len([name for name in names(tmp_path) if "latest" in name]) == 3


def test_a_checkpoint_with_files_of_others_stays(tmp_path: Path) -> None:
    for step in range(1, 6):
        published(tmp_path, step)
    notes = tmp_path / "step-00000001/notes.txt", tmp_path / ".step-00000007.partial/run.json/thesis.txt"
    notes[1].parent.mkdir(parents=True)
    for path in notes:
        path.write_text("thesis")
    (tmp_path / ".step-00000008.partial").symlink_to(tmp_path / "step-00000005")
    (tmp_path / ".step-00000009.partial").mkdir()
    (tmp_path / ".step-00000009.partial" / MANIFEST).write_text("")
    prune(tmp_path, 2)
    clean(tmp_path)
    assert list(whole(tmp_path)) == [1, 4, 5] and all(path.read_text() == "thesis" for path in notes)
    assert (tmp_path / ".step-00000008.partial").is_symlink() and not (tmp_path / ".step-00000009.partial").exists()


# ------------------------------------------------------------------------------------------- kinds of values


@pytest.mark.parametrize("value, kind", [
    (True, int), (1, bool), (1.0, int), (1, str), (float("nan"), int), (None, int), ("c", Literal["a"]),
    ([1, "x"], list[int]), ({"a": 1}, list[int]), ([1], str | None), ("c", Mapping[str, int]),
    ({}, msgspec.defstruct("Kind", [("a", int)])),
])  # fmt: skip
def test_values_of_another_kind(value: Any, kind: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=r"a\.json: unreadable \(.*Restore it"):
        read_as(tmp_path / "a.json", kind, "restore it")


def test_values_of_a_kind(tmp_path: Path) -> None:
    values = {"a": [1, 2], "b": None, "c": {"x": 10**40}, "d": float("inf")}
    (tmp_path / "a.json").write_text(json.dumps(values))
    assert read_as(tmp_path / "a.json", dict[str, Any], "") == values
    kind = msgspec.defstruct("Kind", [("a", list[int]), ("b", str | None), ("e", str | None, None)])
    assert msgspec.to_builtins(read_as(tmp_path / "a.json", kind, "")) == {"a": [1, 2], "b": None, "e": None}


def test_files_of_our_own_have_a_limit(tmp_path: Path) -> None:
    with (tmp_path / LATEST).open("wb") as file:
        file.truncate(1 << 40)
    assert not outputs._is_pointer(tmp_path / LATEST)
    with pytest.raises(OSError, match="latest has more than 1000 bytes"):
        read_own(tmp_path / LATEST, 1000)
