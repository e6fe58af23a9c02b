"""However a run ends, what was trained is on disk somewhere, the message says where, and all ranks say the same."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_hetero.base.outputs import MARK, unfinished, whole
from tests.support.pool import Pool
from tests.unit.checkpoint import jobs_endings as jobs
from tests.unit.checkpoint.jobs_checkpoint import flags, once

Pools = Callable[[int], Pool]


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "log/metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def line(folders: Path, tmp_path: Path) -> list[str]:
    """With an export, and checkpoints at the end only."""
    more = f"--export.hf_dir {tmp_path}/out --checkpoint.interval 100 --model.hf_path {tmp_path}/model"
    shutil.copytree(folders / "plain", tmp_path / "model")
    return flags(folders, tmp_path, "tp:2", "tp:2", more)


def without_checkpoints(line: list[str]) -> list[str]:
    at = [i for i, word in enumerate(line) if word.startswith("--checkpoint.")]
    return [word for i, word in enumerate(line) if i not in at and i - 1 not in at]


def test_a_trained_model_goes_elsewhere_where_its_place_is_taken(line: list[str], tmp_path: Path, pools: Pools) -> None:
    """There is no checkpoint; the model's folder and that of the metrics have been removed besides."""
    (tmp_path / "vanish").write_text(f"{tmp_path}/model {tmp_path}/log")
    run = pools(2).run(jobs.program, without_checkpoints(line), 3, jobs.vanish_and_taken, tmp_path)
    (finished, message), other = run
    assert not finished and other == (finished, message)
    place = tmp_path / "trained-model"
    assert "out: found something that is not an exported model (thesis.txt, and no" in message
    assert f"The trained model is in {place}." in message
    assert {"config.json", "tokenizer.json", "model.safetensors", MARK} <= {path.name for path in place.iterdir()}
    assert (tmp_path / "out/thesis.txt").read_text() == "thesis"
    assert steps_of(tmp_path)[-1] == 4


def test_a_checkpoint_has_the_model_where_its_place_is_taken(line: list[str], tmp_path: Path, pools: Pools) -> None:
    message = pools(2).run(jobs.program, line, 3, jobs.place_is_taken, tmp_path)[0][1]
    last = tmp_path / "checkpoints/step-00000004"
    assert f"{last} has the trained model: `python -m megatron_hetero.cli.export {last} HF_DIR`" in message
    assert not (tmp_path / "trained-model").exists() and list(whole(last.parent)) == [4]


def test_a_last_checkpoint_that_is_lost_does_not_lose_the_model(line: list[str], tmp_path: Path, pools: Pools) -> None:
    """Though `checkpoint.on_failure` is `stop`."""
    runs = pools(2).run(jobs.program, line, 4, jobs.disk_of_second_rank_is_full, tmp_path)
    assert runs[0] == runs[1] and not runs[0][0]
    assert "file too large on rank 1" in runs[0][1] and f"The trained model is in {tmp_path}/out." in runs[0][1]
    assert (tmp_path / "out" / MARK).is_file() and not whole(tmp_path / "checkpoints")


def test_a_lost_checkpoint_midway_does_not_lose_the_model(line: list[str], tmp_path: Path, pools: Pools) -> None:
    (tmp_path / "vanish").write_text(f"{tmp_path}/checkpoints")
    often = once([*line, "--checkpoint.interval", "2"])
    runs = pools(2).run(jobs.program, often, 2, jobs.folders_vanish, tmp_path)
    (finished, message), other = runs
    assert not finished and other == (finished, message) and "see who removes the folder" in message.lower()
    assert re.search(rf"Step \d could not be saved\. There is no earlier .*step 1\. The model after step \d is in "
                     rf"{tmp_path}/trained-model\.", message)  # fmt: skip
    assert (tmp_path / "trained-model" / MARK).is_file() and not (tmp_path / "out").exists()


def test_a_model_that_is_lost_is_reported(line: list[str], tmp_path: Path, pools: Pools) -> None:
    short = once([*without_checkpoints(line), "--train.iters", "1"])
    runs = pools(2).run(jobs.program, short, 1, jobs.all_disks_are_full, tmp_path)
    assert runs[0] == runs[1] and runs[0][1].count("cannot be written (") == 3
    assert runs[0][1].endswith("The trained model could not be written and is lost.")


def test_weights_that_may_be_at_fault_do_not_become_the_newest_checkpoint(
    line: list[str], tmp_path: Path, pools: Pools
) -> None:
    """The same command would fail with them again and again."""
    folder = tmp_path / "checkpoints"
    blown_up = once([*line, "--optimizer.lr", "1e30", "--optimizer.clip_grad", "0"])
    runs = pools(2).run(jobs.program, blown_up, 1, jobs.nothing, tmp_path)
    assert runs[0] == runs[1] and "in this step. Step 1 was not saved, since its weights may be at fault." in runs[0][1]
    assert runs[0][1].endswith("There is no earlier checkpoint; the same command starts over at step 1.")
    assert not whole(folder)
    pools(2).run(jobs.program, once([*line, "--train.iters", "2"]), 1, jobs.nothing, tmp_path)
    shutil.rmtree(tmp_path / "out")
    message = pools(2).run(jobs.program, blown_up, 1, jobs.nothing, tmp_path)[0][1]
    assert f"The newest checkpoint is {folder}/step-00000002; " in message
    assert list(whole(folder)) == [2] and not unfinished(folder)


def test_trackers_are_told_whether_the_run_has_failed(line: list[str], tmp_path: Path, pools: Pools) -> None:
    """On the rank that has them."""
    short = once([*without_checkpoints(line), "--train.iters", "2"])
    assert pools(2).run(jobs.exit_codes, short, tmp_path) == [[0], []]
    blown_up = [*short, "--optimizer.lr", "1e30", "--optimizer.clip_grad", "0"]
    assert pools(2).run(jobs.exit_codes, once(blown_up), tmp_path) == [[1], []]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_log_folder_fails_a_run_in_the_end(line: list[str], tmp_path: Path, pools: Pools) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log/metrics.jsonl").symlink_to("/dev/full")
    full = f"log.dir: {tmp_path}/log/metrics.jsonl: cannot be written (no space left on device)"
    runs = pools(2).run(jobs.program, once([*line, "--train.iters", "2"]), 1, jobs.nothing, tmp_path)
    assert runs[0] == runs[1] and not runs[0][0] and full in runs[0][1]
    assert (tmp_path / "out" / MARK).is_file() and list(whole(tmp_path / "checkpoints")) == [2]

    (tmp_path / "log/metrics.jsonl").unlink()  # There is space again, and no line is lost.
    shutil.rmtree(tmp_path / "out")
    assert pools(2).run(jobs.program, line, 4, jobs.nothing, tmp_path)[0][0]
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    last = (tmp_path / "checkpoints/step-00000004/metrics.jsonl").read_text()
    assert last == (tmp_path / "log/metrics.jsonl").read_text()


def test_pictures_that_vanish_lose_no_step(line: list[str], folders: Path, tmp_path: Path, pools: Pools) -> None:
    for name in ("a", "b"):
        shutil.copytree(folders / name, tmp_path / name)
    (tmp_path / "vanish").write_text(f"{tmp_path}/a/images {tmp_path}/b/images")
    moved = [
        word.replace(f"{folders}/a/", f"{tmp_path}/a/").replace(f"{folders}/b/", f"{tmp_path}/b/") for word in line
    ]
    moved = once([*moved, "--train.iters", "8"])
    runs = pools(2).run(jobs.program, moved, 2, jobs.folders_vanish, tmp_path)
    assert runs[0] == runs[1] and "no such file" in runs[0][1]
    step = re.match(r"step (\d+), data of rank", runs[0][1])
    assert step is not None and list(whole(tmp_path / "checkpoints")) == [int(step[1]) - 1]
    assert f"is saved in {tmp_path}/checkpoints/step-0000000{int(step[1]) - 1}; the same command resumes" in runs[0][1]
    assert not unfinished(tmp_path / "checkpoints")


def test_an_evaluation_that_fails_in_the_end_does_not_lose_the_model(
    line: list[str], folders: Path, tmp_path: Path, pools: Pools
) -> None:
    shutil.copytree(folders / "a", tmp_path / "held")
    (tmp_path / "vanish").write_text(f"{tmp_path}/held/images")
    held = f"--data.registry.held.annotations {tmp_path}/held/data.jsonl "
    held += f"--data.registry.held.images {tmp_path}/held/images"
    more = f"{held} --eval.datasets held --eval.interval 100 --train.iters 2"
    runs = pools(2).run(
        jobs.program, once([*without_checkpoints(line), *more.split()]), 1, jobs.folders_vanish, tmp_path
    )
    assert runs[0] == runs[1] and "evaluation of held" in runs[0][1]
    assert f"The trained model is in {tmp_path}/out." in runs[0][1] and (tmp_path / "out" / MARK).is_file()
