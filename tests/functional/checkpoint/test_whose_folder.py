"""The folder of checkpoints: one run alone writes there, all ranks see it, and what is not its own stays."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_hetero.base import outputs as folder_module
from megatron_hetero.base.errors import UserError
from megatron_hetero.base.outputs import partial_of, prune, publish, unfinished, whole
from megatron_hetero.checkpoint import resume as shared_folder
from megatron_hetero.checkpoint import storage
from megatron_hetero.checkpoint import storage as writing
from megatron_hetero.checkpoint.resume import choose, started_again
from megatron_hetero.config.sections import CheckpointConfig
from megatron_hetero.groups.platform import Platform
from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.checks import flip
from tests.functional.checkpoint.runs import error_in, error_of, flags, full_disk
from tests.support.locks import HELD_ELSEWHERE
from tests.support.pool import Pools
from tests.support.runs import build, build_logged


def error_at_once(flags: list[str], folder: Path | None = None) -> str:
    """What stops a run from being built that waits for nothing. In `folder` each rank works in one of its own."""
    own = Path.cwd() if folder is None else folder / str(dist.get_rank())
    own.mkdir(exist_ok=True)
    with (
        contextlib.chdir(own),
        mock.patch.object(folder_module, "SEEN_S", 0.3),
        mock.patch.object(shared_folder, "_FREE_S", 0.3),
    ):
        return error_of(flags)


def saves_apart(flags: list[str], folder: Path, where: str) -> str:
    """What a save says where the second rank writes elsewhere: it sees another folder, or nobody sees its file."""
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.trainer.train_step(1, batch)
    if run.trainer.topology.rank == 1 and where == "the folder":
        config = run.trainer.job.config
        config = replace(config, checkpoint=replace(config.checkpoint, dir=folder / "elsewhere"))
        run.saver.config = config
    lost = [] if where == "the folder" or run.trainer.topology.rank == 0 else ["tensors-1-0.safetensors"]
    real = storage.write_entries

    def write(partial: Path, *args: Any, **options: Any) -> Any:
        records = real(partial, *args, **options)
        for name in lost:
            (partial / name).unlink()
        return records

    with mock.patch.object(folder_module, "SEEN_S", 0.3), mock.patch.object(writing, "write_entries", write):
        return error_in(lambda: run.saver.after(2))


def resumes_with_other_generators(flags: list[str]) -> int:
    """The step that a run resumes after which has generators of other kinds, as on a GPU."""
    real = Platform.random_states
    with mock.patch.object(
        Platform, "random_states", lambda self: real(self) | {"other": torch.zeros(3, dtype=torch.uint8)}
    ):
        return build(flags).resumed.step


def loses_the_last(flags: list[str]) -> tuple[list[str], str]:
    """What is said after each step by a run whose disk is full from the third on, and the error in the end."""
    run, said = build_logged(flags), []
    with run.writer, ExitStack() as stack:
        for step, batch, _ in run.batches():
            run.writer.write(run.trainer.train_step(step, batch))
            said.append(" ".join(run.saver.after(step)))
            if step == 3:
                stack.enter_context(full_disk(run.trainer.topology.rank == 1))
    return said, str(run.saver.lost)


def test_what_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    for name in ("step-00001000", "step-00000002", "step-2", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").touch()
    for step in (1, 2, 3):
        (partial := partial_of(tmp_path / f"step-{step:08d}")).mkdir()
        publish(partial, {})
        prune(tmp_path, 1)
    assert list(whole(tmp_path)) == [3]
    kept = {"step-00001000", ".step-00000002.aside", "step-2", "notes"}
    assert {path.parent.name for path in tmp_path.glob("*/model.pt")} == kept
    (partial := partial_of(tmp_path / "step-00000003")).mkdir()
    with pytest.raises(FileExistsError):
        publish(partial, {})


def test_a_damaged_newest_checkpoint_is_no_dead_end(run: Path, folders: Path, pools: Pools) -> None:
    folder = run / "checkpoints"
    flip(folder / "step-00000004")
    [message, _] = pools(2).run(jobs.error_of, flags(folders, run, "tp:2", "tp:2"))
    advice = re.search("--checkpoint.resume [^ ]*step-00000002", message)
    assert advice
    line = flags(folders, run, "tp:2", "tp:2", advice[0].rstrip("."))
    assert "if it is damaged" in pools(2).run(jobs.error_of, line)[0]
    (folder / "step-00000004").rename(folder / "damaged")
    assert pools(2).run(jobs.error_of, line)[0] == "no error: it resumes after step 2"


def test_a_run_that_is_started_again_resumes_wherever_it_began(run: Path) -> None:
    folder, first = run / "checkpoints", run / "checkpoints/step-00000002"
    choices: list[Any] = ["never", first]
    for resume in choices:
        config = CheckpointConfig(dir=folder, resume=resume)
        with pytest.raises(UserError, match="found step-00000004"):
            choose(config)
        chosen, notes = choose(config, again=True)
        assert chosen == folder / "step-00000004" and "restarted" in notes[0]
    assert choose(CheckpointConfig(dir=run / "new", resume=first), again=True)[0] == first
    assert started_again({"SLURM_RESTART_COUNT": "1"}) and started_again({"TORCHELASTIC_RESTART_COUNT": "2"})
    assert not started_again({"SLURM_RESTART_COUNT": "", "TORCHELASTIC_RESTART_COUNT": "0"})


def test_one_run_alone_writes_into_a_folder(run: Path, folders: Path, pools: Pools) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HELD_ELSEWHERE, str(run / "checkpoints/.lock")], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        messages = pools(2).run(error_at_once, flags(folders, run, "tp:2", "tp:2"))
        other.kill()
    assert messages[0] == messages[1] and "(process 1 on elsewhere)" in messages[0]
    assert pools(2).run(jobs.error_of, flags(folders, run, "tp:2", "tp:2"))[0].startswith("no error")


def test_ranks_must_share_the_folder(folders: Path, tmp_path: Path, pools: Pools) -> None:
    """Each sees another one behind the same path, as on disks of their own."""
    line = flags(folders, Path("/proc/self/cwd"), "tp:2", "tp:2")
    messages = pools(2).run(error_at_once, line, tmp_path)
    assert messages[0] == messages[1]
    assert "sees another folder" in messages[0] and "all nodes share" in messages[0]


@pytest.mark.parametrize("where", ["the folder", "a file"])
def test_a_checkpoint_of_which_a_part_is_elsewhere_is_none(
    where: str, folders: Path, tmp_path: Path, pools: Pools
) -> None:
    line = flags(folders, tmp_path, "tp:2", "tp:2")
    [message, other] = pools(2).run(saves_apart, line, tmp_path, where)
    assert message == other and list(whole(tmp_path / "checkpoints")) == []
    lost = "tensors-1-0.safetensors: missing or truncated"
    found = "directory on rank 1" if where == "the folder" else lost
    assert found in message and not unfinished(tmp_path / "checkpoints")


def test_random_states_of_another_kind_of_device_are_left_out(run: Path, folders: Path, pools: Pools) -> None:
    line = flags(folders, run, "tp:2", "tp:2")
    assert pools(2).run(resumes_with_other_generators, line) == [4, 4]


def test_less_steps_than_have_been_trained(run: Path, folders: Path, pools: Pools) -> None:
    [message, _] = pools(2).run(jobs.error_of, flags(folders, run, "tp:2", "tp:2", "--train.iters 3"))
    assert "train.iters" in message and "found 3, expected ≥ 4" in message
    found = pools(2).run(jobs.train, flags(folders, run, "tp:2", "tp:2"))[0]
    assert found["losses"] == [] and any("steps of train.iters are done" in note for note in found["notes"])
    assert any("starts at step 1" in note for note in choose(CheckpointConfig(dir=run / "new"))[1])


def test_a_last_checkpoint_that_is_lost_is_an_error_in_the_end(folders: Path, tmp_path: Path, pools: Pools) -> None:
    line = flags(folders, tmp_path, "tp:2", "tp:2")
    for said, error in pools(2).run(loses_the_last, line):
        assert said[3].startswith("warning: ") and "step 4" in said[3] and "checkpoint.dir" in error
    assert list(whole(tmp_path / "checkpoints")) == [2] and unfinished(tmp_path / "checkpoints") == ()
