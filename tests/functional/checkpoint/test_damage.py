"""Damaged, unfinished and unsuitable checkpoints: each is told by name, and nothing is trained."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.outputs import damaged, prune, read_manifest, unfinished, verify, whole, without_manifest
from megatron_hetero.checkpoint.convert import OpenCheckpoint
from megatron_hetero.checkpoint.index import INDEX, Entry, index_shapes, read_index
from megatron_hetero.checkpoint.record import OVERRIDABLE, RunRecord, require_tensors
from megatron_hetero.checkpoint.resume import choose
from megatron_hetero.checkpoint.storage import read_entries
from megatron_hetero.config.sections import CheckpointConfig
from megatron_hetero.train.stopping import stop_requests
from megatron_hetero.train.trainer import Trainer
from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.checks import flip
from tests.functional.checkpoint.conftest import Untouched
from tests.functional.checkpoint.runs import calling, error_in, flags, full_disk
from tests.support.pool import Pools
from tests.support.runs import build, build_logged


def asked_to_stop(flags: list[str], rank: int, at: int) -> tuple[int, bool]:
    """One rank gets a signal in the midst of step `at`. Returns the step after which this rank stopped, and whether the
    handlers are as before.
    """
    run, step, before = build_logged(flags), 0, signal.getsignal(signal.SIGUSR1)

    def signalled(in_step: int, *_: object) -> None:
        if in_step == at and run.trainer.topology.rank == rank:
            os.kill(os.getpid(), signal.SIGUSR1)

    with stop_requests() as request, run.writer, calling(Trainer, "issue_step", signalled):
        for step, batch, _ in run.batches():
            metrics = run.trainer.train_step(step, batch, stop=request)
            run.saver.after(step, metrics.stopping)
            if metrics.stopping:
                break
    return step, signal.getsignal(signal.SIGUSR1) == before


def cannot_save(flags: list[str], folder: Path) -> tuple[str, str]:
    """What a save says where one rank's disk is full (a limit on the size of its files stands in for that), and where
    the folder has vanished.
    """
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.trainer.train_step(run.resumed.step + 1, batch)
    with full_disk(run.trainer.topology.rank == 1):
        full = error_in(lambda: run.saver.after(run.resumed.step + 1, stopping=True))
    dist.barrier()
    if run.trainer.topology.rank == 0:
        folder.rename(folder.with_name("elsewhere"))
    dist.barrier()
    return full, error_in(lambda: run.saver.after(run.resumed.step + 1, stopping=True))


def cannot_save_beside(flags: list[str]) -> tuple[list[str], str]:
    """What is said after each step, by a run that saves after each second one while it trains, and whose disk is full
    until the third; and the error that ends it, if one does.
    """
    run, said = build_logged(flags), []
    try:
        with run.writer, full_disk(run.trainer.topology.rank == 1) as disk:
            for step, batch, _ in run.batches():
                run.writer.write(run.trainer.train_step(step, batch))
                said.append(" ".join(run.saver.after(step)))
                if step == 3:
                    # However slow the disk: it fails before the end of this step.
                    while not said[2]:
                        time.sleep(0.01)
                        said[2] = " ".join(run.saver.after(step))
                    disk.close()
    except UserError as error:
        return said, str(error)
    return said, ""


def ended_by_an_error(flags: list[str], folder: Path) -> tuple[list[int], list[str]]:
    """The whole checkpoints, and what is said of them, once an error has ended a run that has just begun to save beside
    training.
    """
    run = build(flags)
    for step, batch, _ in run.batches():
        run.trainer.train_step(step, batch)
        run.saver.after(step)
        if step == 2:
            break
    said = run.saver.settle()
    return list(whole(folder)), said


def truncate(checkpoint: Path) -> str:
    path = checkpoint / "tensors-1-0.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-7])
    return f"1 damaged file (tensors-1-0.safetensors has {size - 7} bytes, not {size})"


def remove(checkpoint: Path) -> str:
    (checkpoint / "tensors-0-0.safetensors").unlink()
    return "1 damaged file (tensors-0-0.safetensors is missing)"


def swap(checkpoint: Path) -> str:
    first, second = checkpoint / "run.json", checkpoint / "metrics.jsonl"
    first.rename(checkpoint / "aside")
    second.rename(first)
    (checkpoint / "aside").rename(second)
    return "2 damaged files (metrics.jsonl has "


def index(checkpoint: Path) -> str:
    (checkpoint / INDEX).write_text("{}")
    return "1 damaged file (tensors.json has 2 bytes"


def manifest(checkpoint: Path) -> str:
    (checkpoint / "manifest.json").write_text("{")
    return "manifest.json: unreadable"


@pytest.mark.parametrize("damage", [truncate, remove, flip, swap, index, manifest])
def test_damage_is_reported_by_name(damage: Callable[[Path], str], run: Path) -> None:
    checkpoint = run / "checkpoints/step-00000004"
    expected = damage(checkpoint)
    with pytest.raises(UserError, match=re.escape(expected)) as error:  # noqa: PT012 (either tells)
        records = read_manifest(checkpoint)
        raise damaged(checkpoint, verify(checkpoint, records, records))
    assert f"--checkpoint.resume {run}/checkpoints/step-00000002" in str(error.value)


@pytest.mark.parametrize("files", [
    '{"a": {"size": Infinity, "sha256": ""}}', '{"a": {"size": 1e999, "sha256": ""}}', "[" * 100_000, "null", '"a"',
    '{"a": null}', '{"../a": {"size": 1, "sha256": ""}}', '{"' + "a" * 300 + '": {"size": 1, "sha256": ""}}',
    '{"\\ud800": {"size": 1, "sha256": ""}}',
], ids=range(9))  # fmt: skip
def test_a_manifest_of_anything_else_is_refused(files: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(f'{{"files": {files}}}')
    with pytest.raises(UserError, match=r"manifest\.json: unreadable \("):
        read_manifest(tmp_path)


def test_damage_stops_every_rank(run: Path, folders: Path, pools: Pools) -> None:
    expected = flip(run / "checkpoints/step-00000004")
    messages = pools(2).run(jobs.error_of, flags(folders, run, "tp:2", "tp:2"))
    assert messages[0] == messages[1] and expected in messages[0]


def test_a_checkpoint_goes_by_the_name_of_its_step(run: Path, folders: Path, pools: Pools) -> None:
    renamed = (run / "checkpoints/step-00000002").rename(run / "checkpoints/step-00000009")
    message = f"{renamed}: found step 9 in the name, expected step-00000002"
    for said in pools(2).run(jobs.error_of, flags(folders, run, "tp:2", "tp:2")):
        assert message in said
    with pytest.raises(UserError, match=re.escape(message)):
        OpenCheckpoint.open(run / "checkpoints")
    assert OpenCheckpoint.open(renamed.rename(run / "best")).record.step == 2


def test_what_was_never_finished_is_reported_and_skipped(run: Path, folders: Path, pools: Pools) -> None:
    folder = run / "checkpoints"
    (folder / "step-00000004/manifest.json").unlink()
    shutil.copytree(folder / "step-00000002", folder / ".step-00000007.partial")
    assert [path.name for path in unfinished(folder)] == [".step-00000007.partial"]
    assert [path.name for path in without_manifest(folder)] == ["step-00000004"]
    resumed = pools(2).run(jobs.train, flags(folders, run, "tp:2", "tp:2"))[0]
    assert resumed["from"] == 2 and len(resumed["losses"]) == 2
    assert sum("is unfinished" in note for note in resumed["notes"]) == 1
    assert sum("has no manifest, ignored" in note for note in resumed["notes"]) == 1
    assert list(whole(folder)) == [2, 4] and unfinished(folder) == without_manifest(folder) == ()
    # What was in the way may be of value to somebody.
    assert (folder / ".step-00000004.aside/run.json").is_file()
    assert (folder / "latest").read_text() == "step-00000004\n"


@pytest.mark.parametrize("settings, message", [
    ({"resume": "RUN/step-9"}, "no such checkpoint.*step-00000004"),
    ({"resume": "never"}, "found step-00000004.*expected no checkpoint"),
    ({"resume": "RUN/step-00000002"}, "found step-00000004.*no checkpoint after"),
])  # fmt: skip
def test_what_is_asked_for_must_be_there(settings: dict[str, str], message: str, run: Path) -> None:
    folder = run / "checkpoints"
    named: dict[str, Any] = {name: value.replace("RUN", str(folder)) for name, value in settings.items()}
    with pytest.raises(UserError, match=message):
        choose(CheckpointConfig(dir=folder, **named))
    assert choose(CheckpointConfig(dir=folder))[0] == folder / "step-00000004"
    assert choose(CheckpointConfig(dir=run / "new"))[0] is None


@pytest.mark.parametrize("change, message", [
    ({"data": {"shuffle": False}}, r"data.shuffle .*found False, expected True.*allow_changes data.shuffle"),
    ({"train": {"global_batch_size": 8}}, "found 8, expected 4.*allow_changes train.global_batch_size"),
    ({"train": {"seed": 1}}, "train.seed .*found 1, expected 0"),
    ({"optimizer": {"name": "sgd"}}, "found sgd, expected adamw, as in .*Restore it.$"),
])  # fmt: skip
def test_what_may_not_change(change: dict[str, dict[str, Any]], message: str, untouched: Untouched) -> None:
    checkpoint = untouched.folder / "checkpoints/step-00000004"
    old = RunRecord.read(checkpoint)
    config = {name: section | change.get(name, {}) for name, section in old.config.items() if isinstance(section, dict)}
    new = replace(old, config=config, world_size=7, layouts={})
    with pytest.raises(UserError, match=message):
        old.require_resumable(new, (), checkpoint)
    if "optimizer" not in change:
        old.require_resumable(new, OVERRIDABLE, checkpoint)
    others = replace(old, datasets=(replace(old.datasets[0], sha256="0" * 64), *old.datasets[1:]))
    with pytest.raises(UserError, match=r"found a%50 \(6 records, 00000000\), b%150 .*expected a%50"):
        old.require_resumable(others, (), checkpoint)


def test_another_model_starts_no_training(untouched: Untouched, folders: Path, pools: Pools) -> None:
    checkpoint = untouched.folder / "checkpoints/step-00000004"
    line = flags(folders, untouched.folder, "tp:2", "tp:2", model="tied")
    [message, _] = pools(2).run(jobs.error_of, line)
    assert "4 unexpected: exp_avg/lm_head.weight, " in message
    found = index_shapes(read_index(checkpoint))
    with pytest.raises(
        UserError, match=r"1 missing: new; 1 of another shape: step/model.norm.weight is \[1\], not \[2\]"
    ):
        require_tensors(checkpoint, found, {**found, "step/model.norm.weight": (2,), "new": (1,)})


PART = {"file": "x", "at": 0, "rows": [0, 2], "columns": [0, 3]}
TENSOR = {"dtype": "F32", "shape": [2, 3], "chunks": [PART]}


@pytest.mark.parametrize("changes, said", [
    ({"dtype": "F8_E4M3"}, "describes no tensor"),
    ({"shape": [2, 3, 1]}, "describes no tensor"),
    ({"shape": [1 << 40, 1 << 40]}, "do not cover the tensor"),
    ({"more": 1}, "unexpected keyword argument"),
    ({"chunks": []}, "do not cover the tensor"),
    ({"chunks": [PART, PART]}, "do not cover the tensor"),
    ({"chunks": [PART | {"rows": [0, 1]}] * 2}, "do not cover the tensor"),
    ({"chunks": [PART | {"rows": [1, 3]}]}, "no place in a file"),
    ({"chunks": [PART | {"columns": [3, 0]}]}, "no place in a file"),
    ({"chunks": [PART | {"rows": [0, 1, 2]}]}, "too many values"),
    ({"chunks": [{"file": "x"}]}, "missing 3 required"),
])  # fmt: skip
def test_an_index_of_anything_but_tensors_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weights/a": TENSOR | changes}))
    with pytest.raises(UserError, match=rf"tensors\.json: cannot be read \(.*{said}"):
        read_index(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weights/a": TENSOR}))
    assert index_shapes(read_index(tmp_path)) == {"weights/a": (2, 3)}


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "tensors-7-0.safetensors"])
def test_an_index_names_no_files_next_to_those_of_the_manifest(
    name: str, run: Path, folders: Path, pools: Pools, tmp_path: Path
) -> None:
    checkpoint = run / "checkpoints/step-00000004"
    found = json.loads((checkpoint / INDEX).read_text())
    shutil.copyfile(checkpoint / "tensors-0-0.safetensors", checkpoint.parent / "elsewhere")
    next(iter(found.values()))["chunks"][0]["file"] = name
    (checkpoint / INDEX).write_text(json.dumps(found))
    jobs.seal(checkpoint)
    message = f"tensors.json: tensors in {name}"
    with pytest.raises(UserError, match=re.escape(message)):
        OpenCheckpoint.open(checkpoint)
    if name == "../elsewhere":
        for said in pools(2).run(jobs.error_of, flags(folders, run, "tp:2", "tp:2")):
            assert message in said


@pytest.mark.parametrize("bytes_left", [0, 5000])
def test_files_that_end_before_their_tensors_are_one_error(
    bytes_left: int, run: Path, folders: Path, pools: Pools
) -> None:
    checkpoint = run / "checkpoints/step-00000004"
    path = checkpoint / "tensors-0-0.safetensors"
    path.write_bytes(path.read_bytes()[:bytes_left])
    jobs.seal(checkpoint)
    message = rf"{checkpoint}: unreadable tensors on rank 0 \(EOFError: {path.name} ends within"
    for said in pools(2).run(jobs.error_of, flags(folders, run, "tp:2", "tp:2")):
        assert re.match(message, said)
    index = read_index(checkpoint)
    entries = [Entry(key, shape, (0,) * len(shape), torch.empty(shape)) for key, shape in index_shapes(index).items()]
    with pytest.raises(UserError, match=message):
        read_entries(checkpoint, index, entries, None)


def test_older_checkpoints_go_once_newer_ones_are_whole(run: Path) -> None:
    prune(run / "checkpoints", 1)
    assert list(whole(run / "checkpoints")) == [4]
    prune(run / "checkpoints", None)
    assert json.loads((run / "checkpoints/step-00000004/manifest.json").read_text())["files"].keys() >= {"run.json"}


def test_what_cannot_be_written_is_reported_on_every_rank(run: Path, folders: Path, pools: Pools) -> None:
    folder = run / "checkpoints"
    shutil.rmtree(folder / "step-00000004")
    [(full, gone), *others] = pools(2).run(cannot_save, flags(folders, run, "tp:2", "tp:2"), folder)
    assert others == [(full, gone)]
    assert f"{folder}/.step-00000003.partial" in full and "file too large on rank 1" in full
    assert gone.startswith(f"{folder}/.step-00000003.partial: ") and "no such file" in gone
    assert all("--checkpoint.dir DIR" in error for error in (full, gone))
    kept = run / "elsewhere/step-00000002"
    records = read_manifest(kept)
    assert list(whole(kept.parent)) == [2] and verify(kept, records, records) == []


def test_what_fails_in_the_background_is_reported_in_a_later_step(folders: Path, tmp_path: Path, pools: Pools) -> None:
    line = flags(folders, tmp_path, "tp:2", "tp:2", "--checkpoint.async true")
    [(said, error), (_, other)] = pools(2).run(cannot_save_beside, line)
    assert f"{tmp_path}/checkpoints/.step-00000002.partial" in error and "file too large on rank 1" in error
    assert error == other and said[:2] == ["", ""] and list(whole(tmp_path / "checkpoints")) == []


def test_an_error_loses_no_save_that_is_under_way(folders: Path, tmp_path: Path, pools: Pools) -> None:
    line = flags(folders, tmp_path, "tp:2", "tp:2", "--checkpoint.async true")
    steps, [said] = pools(2).run(ended_by_an_error, line, tmp_path / "checkpoints")[0]
    assert steps == [2] and said.startswith("checkpoint step-00000002: ")


def test_ranks_agree_on_the_step_to_stop_at(folders: Path, tmp_path: Path, pools: Pools) -> None:
    stopped = pools(2).run(asked_to_stop, flags(folders, tmp_path, "tp:2", "tp:2"), 1, 1)
    assert stopped == [(1, True)] * 2 and list(whole(tmp_path / "checkpoints")) == [1]


def test_a_run_resumes_with_the_same_model(untouched: Untouched, folders: Path, tmp_path: Path, pools: Pools) -> None:
    run, model = shutil.copytree(untouched.folder, tmp_path / "run"), shutil.copytree(folders / "plain", tmp_path / "m")
    line = jobs.flags(folders, run, "tp:2", "tp:2", model=str(model))
    assert RunRecord.read(run / "checkpoints/step-00000004").model_files["model.hf_path"].keys() >= {"tokenizer.json"}
    assert pools(2).run(jobs.error_of, line) == ["no error: it resumes after step 4"] * 2
    content = json.loads((model / "config.json").read_text())
    content["text_config"]["rms_norm_eps"] = 0.5
    (model / "config.json").write_text(json.dumps(content))
    expected = f"{model}/config.json: changed since"
    assert all(expected in said for said in pools(2).run(jobs.error_of, line))
    allowed = [*line, "--checkpoint.allow_changes", "model.hf_path"]
    assert pools(2).run(jobs.error_of, allowed) == ["no error: it resumes after step 4"] * 2
