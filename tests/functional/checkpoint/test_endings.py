"""However a run ends, what was trained is on disk somewhere, the message says where, and all ranks say the same."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import pretrain_vlm
from megatron_hetero.base.errors import UserError
from megatron_hetero.base.outputs import MARK, unfinished, whole
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups import collective
from megatron_hetero.step.gradients import GradientSummary
from megatron_hetero.train.stopping import StopRequest
from megatron_hetero.train.trainer import Trainer
from tests.functional.checkpoint.runs import flags, once
from tests.support.pool import Pools, platform

Harm = Callable[[int, Path], object]
"""Is done by each rank, given with a folder."""


def program_harmed(flags: list[str], step: int, harm: Harm, folder: Path) -> tuple[bool, str]:
    """What the program does, from its start to the export, where something is harmed in the midst of `step`: whether it
    was finished, and the error that ended it.
    """
    original = Trainer._refuse_faults

    def before_update(self: Trainer, number: int, summary: GradientSummary) -> None:
        if number == step:
            harm(dist.get_rank(), folder)
            collective.on_every(self.topology.files, lambda: None)  # done everywhere
        original(self, number, summary)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(Trainer, "_refuse_faults", before_update):
        try:
            return pretrain_vlm.train(load_config(flags), platform(), StopRequest()), ""
        except UserError as error:
            return False, str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def exit_codes(flags: list[str], folder: Path) -> list[int]:
    """What Weights & Biases is told when the program has done all that."""
    package = mock.MagicMock()
    with mock.patch.dict(sys.modules, wandb=package):
        program_harmed([*flags, "--log.wandb", "mine"], 1, nothing, folder)
    return [call.kwargs["exit_code"] for call in package.init.return_value.finish.call_args_list]


def nothing(rank: int, folder: Path) -> None:
    """Harms nothing."""


def folders_vanish(rank: int, folder: Path) -> None:
    """Somebody removes what is in a list of the folder."""
    if rank == 0:
        for path in (folder / "vanish").read_text().split():
            shutil.rmtree(path)


def place_is_taken(rank: int, folder: Path) -> None:
    """Somebody puts something where the model is to go."""
    if rank == 0:
        (folder / "out").mkdir()
        (folder / "out/thesis.txt").write_text("thesis")


def vanish_and_taken(rank: int, folder: Path) -> None:
    """Both."""
    folders_vanish(rank, folder)
    place_is_taken(rank, folder)


def disk_of_second_rank_is_full(rank: int, folder: Path) -> None:
    """A limit on the size of its files stands in for that."""
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def all_disks_are_full(rank: int, folder: Path) -> None:
    """The same on every rank."""
    disk_of_second_rank_is_full(1, folder)


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
    run = pools(2).run(program_harmed, without_checkpoints(line), 3, vanish_and_taken, tmp_path)
    (finished, message), other = run
    assert not finished and other == (finished, message)
    place = tmp_path / "log/trained-model"
    assert "thesis.txt" in message
    assert f"model is in {place}." in message
    assert {"config.json", "tokenizer.json", "model.safetensors", MARK} <= {path.name for path in place.iterdir()}
    assert (tmp_path / "out/thesis.txt").read_text() == "thesis"
    assert steps_of(tmp_path)[-1] == 4


def test_a_checkpoint_has_the_model_where_its_place_is_taken(line: list[str], tmp_path: Path, pools: Pools) -> None:
    message = pools(2).run(program_harmed, line, 3, place_is_taken, tmp_path)[0][1]
    last = tmp_path / "checkpoints/step-00000004"
    assert f"`python -m megatron_hetero.cli.export {last} HF_DIR`" in message
    assert not (tmp_path / "log/trained-model").exists() and list(whole(last.parent)) == [4]


def test_a_last_checkpoint_that_is_lost_does_not_lose_the_model(line: list[str], tmp_path: Path, pools: Pools) -> None:
    runs = pools(2).run(program_harmed, line, 4, disk_of_second_rank_is_full, tmp_path)
    assert runs[0] == runs[1] and not runs[0][0]
    assert "file too large on rank 1" in runs[0][1] and f"model is in {tmp_path}/out." in runs[0][1]
    assert (tmp_path / "out" / MARK).is_file() and not whole(tmp_path / "checkpoints")


def test_a_lost_checkpoint_midway_does_not_lose_the_model(line: list[str], tmp_path: Path, pools: Pools) -> None:
    (tmp_path / "vanish").write_text(f"{tmp_path}/checkpoints")
    often = once([*line, "--checkpoint.interval", "2"])
    runs = pools(2).run(program_harmed, often, 2, folders_vanish, tmp_path)
    (finished, message), other = runs
    assert not finished and other == (finished, message) and "removes the folder" in message
    where = rf"after step \d is in {tmp_path}/log/trained-model\."
    assert re.search(rf"Step \d could not be saved\..* starts over\. .*{where}", message)
    assert (tmp_path / "log/trained-model" / MARK).is_file() and not (tmp_path / "out").exists()


def test_a_model_that_is_lost_is_reported(line: list[str], tmp_path: Path, pools: Pools) -> None:
    short = once([*without_checkpoints(line), "--train.iters", "1"])
    runs = pools(2).run(program_harmed, short, 1, all_disks_are_full, tmp_path)
    assert runs[0] == runs[1] and runs[0][1].count("cannot be written (") == 2
    assert runs[0][1].endswith("is lost.")


def test_weights_that_may_be_at_fault_do_not_become_the_newest_checkpoint(
    line: list[str], tmp_path: Path, pools: Pools
) -> None:
    """The same command would fail with them again and again."""
    folder = tmp_path / "checkpoints"
    blown_up = once([*line, "--optimizer.lr", "1e30", "--optimizer.clip_grad", "0"])
    runs = pools(2).run(program_harmed, blown_up, 1, nothing, tmp_path)
    assert runs[0] == runs[1] and "Step 1 was not saved" in runs[0][1]
    assert runs[0][1].endswith("starts over.")
    assert not whole(folder)
    pools(2).run(program_harmed, once([*line, "--train.iters", "2"]), 1, nothing, tmp_path)
    shutil.rmtree(tmp_path / "out")
    message = pools(2).run(program_harmed, blown_up, 1, nothing, tmp_path)[0][1]
    assert f"The newest checkpoint is {folder}/step-00000002; " in message
    assert list(whole(folder)) == [2] and not unfinished(folder)


def test_trackers_are_told_whether_the_run_has_failed(line: list[str], tmp_path: Path, pools: Pools) -> None:
    """On the rank that has them."""
    short = once([*without_checkpoints(line), "--train.iters", "2"])
    assert pools(2).run(exit_codes, short, tmp_path) == [[0], []]
    blown_up = [*short, "--optimizer.lr", "1e30", "--optimizer.clip_grad", "0"]
    assert pools(2).run(exit_codes, once(blown_up), tmp_path) == [[1], []]


def a_link_appears(rank: int, folder: Path) -> None:
    if rank == 0:
        (folder / "log/metrics.jsonl").unlink()
        (folder / "log/metrics.jsonl").symlink_to(folder / "precious")


def test_metrics_that_cannot_be_written_fail_a_run_in_the_end(line: list[str], tmp_path: Path, pools: Pools) -> None:
    (tmp_path / "precious").write_text("")
    wrong = f"log.dir: {tmp_path}/log/metrics.jsonl: cannot be written (metrics.jsonl is a symbolic link)"
    runs = pools(2).run(program_harmed, once([*line, "--train.iters", "2"]), 1, a_link_appears, tmp_path)
    assert runs[0] == runs[1] and not runs[0][0] and wrong in runs[0][1] and not (tmp_path / "precious").read_text()
    assert (tmp_path / "out" / MARK).is_file() and list(whole(tmp_path / "checkpoints")) == [2]

    (tmp_path / "log/metrics.jsonl").unlink()  # Now it can be written again, and no line is lost.
    shutil.rmtree(tmp_path / "out")
    assert pools(2).run(program_harmed, line, 4, nothing, tmp_path)[0][0]
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
    runs = pools(2).run(program_harmed, moved, 2, folders_vanish, tmp_path)
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
    runs = pools(2).run(program_harmed, once([*without_checkpoints(line), *more.split()]), 1, folders_vanish, tmp_path)
    assert runs[0] == runs[1] and "evaluation of held" in runs[0][1]
    assert f"model is in {tmp_path}/out." in runs[0][1] and (tmp_path / "out" / MARK).is_file()
