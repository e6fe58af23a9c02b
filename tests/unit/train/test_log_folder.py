"""The folder of a run's metrics: what an earlier run left is kept, one run alone writes, and no line is lost."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest

from megatron_hetero.base.errors import BadSample, UserError
from megatron_hetero.base.outputs import unwritable
from megatron_hetero.checkpoint import resume as shared_folder
from megatron_hetero.checkpoint.resume import lock_folder
from megatron_hetero.train import log
from megatron_hetero.train.log import LogFolder
from tests.support.locks import HELD_ELSEWHERE

A, B, C, D = (f'{{"step": {n}}}\n' for n in (1, 2, 3, 4))


def write(folder: Path, *lines: str, history: str = "", config: str = "a: 1\n") -> tuple[str, ...]:
    """What is said of a folder that a run writes these lines into."""
    log = LogFolder(folder, history, config)
    for line in lines:
        log.append(line)
    log.close()
    return log.notes


def text(path: Path) -> str:
    return path.read_text() if path.exists() else "nothing"


def test_an_earlier_run_is_kept(tmp_path: Path) -> None:
    assert write(tmp_path, A) == ()
    (tmp_path / "events.out.tfevents.1.host").touch()
    (tmp_path / "notes.txt").touch()
    [note] = write(tmp_path, B, config="a: 2\n")
    assert f" from {tmp_path} to {tmp_path}/earlier-1: metrics.jsonl, config.yaml, e" in note
    write(tmp_path, C, config="a: 3\n")
    found = [text(tmp_path / name / "metrics.jsonl") for name in ("earlier-1", "earlier-2", ".")]
    assert found == [A, B, C] and text(tmp_path / "earlier-2/config.yaml") == "a: 2\n"
    assert {path.name for path in (tmp_path / "earlier-1").iterdir()} >= {"events.out.tfevents.1.host"}
    assert (tmp_path / "notes.txt").exists()


def test_a_run_that_goes_on_keeps_its_lines(tmp_path: Path) -> None:
    write(tmp_path, A, B, C)
    assert write(tmp_path, B, history=A) == () and text(tmp_path / "metrics.jsonl") == A + B
    [note] = write(tmp_path, C, history=A + C)  # another run's
    assert "earlier-1" in note and text(tmp_path / "earlier-1/metrics.jsonl") == A + B
    assert text(tmp_path / "metrics.jsonl") == A + C + C
    [note] = write(tmp_path, history=A + C + C, config="a: 2\n")
    assert note.endswith(": config.yaml") and text(tmp_path / "earlier-2/config.yaml") == "a: 1\n"


def test_a_configuration_of_the_users_own_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# mine")
    write(tmp_path, A)
    assert text(tmp_path / "earlier-1/config.yaml") == "# mine"


def test_bad_records_are_named_once_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_NAMED", 3)
    path = tmp_path / "bad_records.jsonl"

    def name(*records: int, history: str = "") -> list[int]:
        folder = LogFolder(tmp_path, history, "a: 1\n")
        for k in records:
            folder.name([BadSample("d", k, f"a.jsonl:{k + 1}", "text", "bad")])
        folder.append(A)
        folder.close()
        return [json.loads(line)["record"] for line in text(path).splitlines()]

    assert name(4, 1, 4) == [4, 1]
    assert name(1, 7, 8, history=A) == [4, 1, 7], "a run that goes on names each record once, too"
    assert name(8) == [8] and (tmp_path / "earlier-1/bad_records.jsonl").exists()
    (tmp_path / "metrics.jsonl").unlink()
    assert name(1) == [1], "an earlier run that stopped before its first step is kept apart"


def test_one_run_alone_writes(tmp_path: Path) -> None:
    write(tmp_path, A)
    command = [sys.executable, "-c", HELD_ELSEWHERE, str(tmp_path / ".metrics.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other, mock.patch.object(shared_folder, "_FREE_S", 0.1):
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=r"log\.dir: .*\(process 1 on elsewhere\)"):
            write(tmp_path, B)
        other.kill()
    assert text(tmp_path / "metrics.jsonl") == A
    assert len(write(tmp_path, B)) == 1


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    log = LogFolder(tmp_path / "log", "", "a: 1\n")
    log.append(A)
    shutil.rmtree(tmp_path / "log")
    assert log.history() == ""
    log.append(B)
    assert text(tmp_path / "log/metrics.jsonl") == log.history() == B
    log.close()


@contextmanager
def room(size: int) -> Iterator[None]:
    """Inside, files cannot grow beyond `size` bytes, as on a full disk."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def append_in_vain(log: LogFolder, *lines: str) -> None:
    for line in lines:
        with pytest.raises(OSError, match="too large"):
            log.append(line)


def test_lines_wait_for_room(tmp_path: Path) -> None:
    log = LogFolder(tmp_path, "", "")
    with room(len(A) + 4):
        log.append(A)
        append_in_vain(log, B, C)
    log.append("")
    assert text(tmp_path / "metrics.jsonl") == A + B + C
    log.close()


def test_a_file_that_cannot_be_read_prevents_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system whose handle is stale."""

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "stale file handle")

    log = LogFolder(tmp_path, "", "")
    log.append(A)
    monkeypatch.setattr(Path, "stat", stale)
    monkeypatch.setattr("builtins.open", stale)
    with pytest.raises(OSError, match="stale"):
        log.append(B)
    assert log.history() == B
    log.close()


@pytest.mark.parametrize("room_left", [0, 4, len(B), len(B) + 4])
def test_a_run_resumes_with_all_lines_after_a_full_disk(tmp_path: Path, room_left: int) -> None:
    log = LogFolder(tmp_path, "", "")
    with room(len(A) + room_left):
        log.append(A)
        with suppress(OSError):
            log.append(B)
        append_in_vain(log, C)
        history = log.history()
        log.close()
        assert history == A + B + C and text(tmp_path / "metrics.jsonl") == history[: len(A) + room_left]
        with pytest.raises(UserError, match=r"log\.dir: .*cannot be written \(file too large\)"):
            LogFolder(tmp_path, history, "")
    again = LogFolder(tmp_path, history, "")
    again.append(D)
    assert again.history() == text(tmp_path / "metrics.jsonl") == A + B + C + D and not again.notes
    again.close()


def test_a_link_that_leads_nowhere_is_called_one(tmp_path: Path) -> None:
    """`mkdir` says of it that a file exists."""
    (tmp_path / "log").symlink_to("/nowhere/x")
    with pytest.raises(UserError, match=r"log\.dir.*a link to /nowhere/x, which does not exist"):
        LogFolder(tmp_path / "log", "", "")
    with pytest.raises(UserError, match=r".a link to /nowhere/x"):
        lock_folder(tmp_path / "log", "checkpoint.dir", ".lock", "their checkpoints", unwritable)
