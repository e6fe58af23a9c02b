"""A rank that is killed takes all others along, whatever they are doing."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from megatron_hetero.base.outputs import unfinished, whole
from tests.functional.dying import main as dying
from tests.functional.forked import Forked
from tests.functional.programs import CONFIG, started
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import long, thinned

LAYOUTS = {
    "disjoint": ("dp:1@0", "pp:2@1-2", 3),
    "mixed": ("sp:2@0-1", "pp:2@1-2", 3),
    "colocated": ("sp:2", "pp:2", 2),
}
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    write_model(folder / "model", ModelChoice(vision_layers=2, text_layers=2))
    write_data(folder, 8)
    (folder / "config.yaml").write_text(CONFIG.replace("micro_batch_size: 2", "micro_batch_size: 1"))
    return folder


@pytest.mark.parametrize(
    "layout, phase, victim",
    long([("disjoint", "pipeline", 1), ("mixed", "backward", 2), ("colocated", "boundary back", 0)]),
)
def test_a_killed_rank_leaves_no_process(layout: str, phase: str, victim: int, folder: Path) -> None:
    assert seconds_until_all_are_gone(folder, layout, phase, victim) < LIMIT_S


BF16 = "--model.dtype bfloat16 --optimizer.name adamw"
STATES = {
    "fp32": "",
    "split, bf16 moments": f"{BF16} --text-precision.master split --text-precision.moments bfloat16",
    "ZeRO 3": f"{BF16} --vision-zero 3",
    "8 bits on the host": f"{BF16} --text-precision.master none --text-precision.moments 8bit "
    "--text-offload.states true",
}


@pytest.mark.parametrize("states", thinned(STATES, 5))
def test_the_next_start_of_a_killed_run_resumes(states: str, folder: Path, tmp_path: Path) -> None:
    """From the last whole checkpoint and without help: the rank dies while the next is written."""
    checkpoints = tmp_path / "checkpoints"
    flags = f"--config {folder}/config.yaml --vision-parallel sp:2 --text-parallel pp:2 --train.iters 3"
    flags += f" --log.dir {tmp_path}/again --export.hf_dir none --checkpoint.dir {checkpoints} --checkpoint.interval 1"
    start = [str(tmp_path / "died once"), "1", "save, written", *flags.split(), *STATES[states].split()]
    with Forked(tmp_path / "first", dying, [start] * 2) as run:
        for rank in run.ranks:
            rank.join(60)
        assert [rank.exitcode for rank in run.ranks] == [70, -signal.SIGKILL], run.said(0)
    with Forked(tmp_path / "next", dying, [start] * 2) as run:
        run.require_success()
        output = run.said(0)
    assert f"{checkpoints}/.step-00000002.partial is unfinished" in output
    assert f"resumed from {checkpoints}/step-00000001" in output
    assert list(whole(checkpoints)) == [1, 2, 3] and not unfinished(checkpoints)
    lines = (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def seconds_until_all_are_gone(folder: Path, layout: str, phase: str, victim: int) -> float:
    """From the death of rank `victim` in `phase` until torchrun and all ranks are gone; infinite where some stay, or
    the run ends as if nothing had happened.
    """
    vision, text, ranks = LAYOUTS[layout]
    died = folder / "died"
    died.unlink(missing_ok=True)
    flags = ["--vision-parallel", vision, "--text-parallel", text]
    program = "-m", "tests.functional.dying", str(died), str(victim), phase
    with started(folder, *flags, ranks=ranks, program=program) as agent:
        family = {psutil.Process(agent.pid)}
        while not died.exists():
            if agent.poll() is not None:
                raise AssertionError(f"rank {victim} did not come to {phase!r}:\n{agent.communicate()[0]}")
            family |= _descendants(family)
            time.sleep(0.02)
        death = time.monotonic()
        family |= _descendants(family)
        try:
            agent.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return float("inf")
        left = psutil.wait_procs(list(family), timeout=max(0.0, LIMIT_S - (time.monotonic() - death)))[1]
        return float("inf") if left or agent.returncode == 0 else time.monotonic() - death


def _descendants(family: set[psutil.Process]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for process in family:
        try:
            found.update(process.children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    return found
