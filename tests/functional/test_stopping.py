"""Runs that are asked to stop save and resume; a second Ctrl-C ends them at once; a warned job is queued again."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_hetero.base.outputs import read_manifest, unfinished, verify, whole
from megatron_hetero.groups.launch import INTERRUPTED
from megatron_hetero.run import STOPPED
from tests.functional.programs import CONFIG, PROGRAM, killed_after, started
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import thinned

SCRIPT = PROGRAM.parent / "examples/slurm/requeue.sbatch"
LAUNCHER = "megatron_hetero.run"
AT_ONCE_S = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopping")
    write_model(folder / "model", ModelChoice(vision_layers=2, text_layers=1))
    write_data(folder, 8)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def read_to_a_step(process: subprocess.Popen[str]) -> str:
    """What the run prints up to its first step."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step "):
            break
    return "".join(lines)


def require_whole(checkpoints: Path) -> list[int]:
    """The steps of the checkpoints, none of which is damaged or half."""
    assert not unfinished(checkpoints)
    for path in whole(checkpoints).values():
        records = read_manifest(path)
        assert verify(path, records, records) == []
    return list(whole(checkpoints))


@pytest.mark.parametrize("numbers", thinned([((signal.SIGINT,),), ((signal.SIGTERM, signal.SIGINT),)], 2), ids=str)
def test_a_run_that_is_stopped_saves_and_resumes(
    numbers: tuple[signal.Signals, ...], folder: Path, tmp_path: Path
) -> None:
    flags = f"--train.iters 100000 --log.dir {tmp_path}/log --checkpoint.dir {tmp_path}/checkpoints".split()
    program = "-m", "tests.functional.leaving", str(tmp_path)
    stops = [0]
    for number in numbers:
        with started(folder, *flags, program=program, launcher=LAUNCHER) as agent:
            output = read_to_a_step(agent)
            agent.send_signal(number)
            output += agent.communicate(timeout=60)[0]
        assert output.count(f"{number.name}: the run will save and stop") == 1, "it is told at once, once"
        stopped = re.search(r"stopped after step (\d+)", output)
        assert stopped and agent.returncode == STOPPED and "Traceback" not in output, output
        assert (f"after step {stops[-1]}\n" in output) == (len(stops) > 1)
        stops.append(int(stopped[1]))
        assert require_whole(tmp_path / "checkpoints") == stops[1:]
        for rank in (0, 1):
            (tmp_path / f"ended-{rank}").unlink()  # it was there: the rank had ended well


def test_a_second_ctrl_c_ends_a_run_at_once(folder: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    # A step of a second or more, so that it is still going on when the second Ctrl-C comes.
    flags = f"--train.global_batch_size 192 --log.dir {tmp_path}/log --checkpoint.dir {checkpoints} --train.iters 9"
    with started(folder, *flags.split(), "--checkpoint.interval", "1", launcher=LAUNCHER) as agent:
        read_to_a_step(agent)
        while not whole(checkpoints):
            time.sleep(0.01)
        ranks = psutil.Process(agent.pid).children()
        agent.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert all(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
        agent.send_signal(signal.SIGINT)
        start = time.monotonic()
        output, _ = agent.communicate(timeout=60)
        assert time.monotonic() - start < AT_ONCE_S
    assert agent.returncode == INTERRUPTED
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    assert output.count("interrupted; ") == 1 and "Traceback" not in output
    assert require_whole(checkpoints) == [1]


# ------------------------------------------------------------------------------------------ examples/slurm


SRUN = """\
while [[ $1 == -* ]]; do shift; done
set -m
SLURM_NODEID=0 "$@" &
trap 'kill -USR1 -- -$!' USR1
while :; do wait $!; status=$?; ((status > 128)) && kill -0 $! 2>/dev/null || exit $status; done
"""
"""It passes a signal on to all processes of a task."""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder that jobs are submitted from, on a cluster of one node. Slurm's two programs are stood in for."""
    programs = {
        "srun": SRUN,
        "scontrol": f"case $1 in show) echo localhost;; *) echo $@ >> {tmp_path}/asked;; esac",
        ".venv/bin/python": f'exec {sys.executable} "$@"',
    }
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in (PROGRAM.name, "examples"):
        (tmp_path / name).symlink_to(PROGRAM.with_name(name))
    return tmp_path


def free_port(lowest: int, end: int) -> int:
    """A port that nobody listens at."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port := random.randrange(lowest, end)))
            return port


def job(cluster: Path, *flags: str) -> subprocess.Popen[str]:
    slurm = {
        "JOB_ID": str(free_port(20000, 40000) - 20000),  # from which the script computes its port
        "JOB_NUM_NODES": "1",
        "JOB_NODELIST": "localhost",
        "GPUS_ON_NODE": "2",
        "SUBMIT_DIR": str(cluster),
    }
    environment = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | {"PATH": f"{cluster}:{os.environ['PATH']}", "CHECKPOINTS": "runs/checkpoints"},
    )


def wait_until_ranks_listen(process: subprocess.Popen[str], ranks: int) -> None:
    """Until all ranks have handlers for SIGUSR1: they are about to import what takes long."""
    mask = 1 << (signal.SIGUSR1 - 1)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = 0
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text())
                found += "RANK" in child.environ() and caught is not None and bool(int(caught[1], 16) & mask)
        if found == ranks:
            return
        time.sleep(0.01)
    raise AssertionError("no ranks that listen")


@pytest.mark.long  # `make slurm` submits the same script to a real Slurm.
def test_a_job_that_was_warned_saves_and_is_queued_again(folder: Path, cluster: Path) -> None:
    """Warned as early as can be, while its ranks start: each job comes one step further at least."""
    checkpoints, flags = cluster / "runs/checkpoints", ["--config", f"{folder}/config.yaml", "--log.dir", "runs/log"]
    with killed_after(job(cluster, *flags, "--train.iters", "100000")) as process:
        wait_until_ranks_listen(process, 2)
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=120)
    assert require_whole(checkpoints) == [1], "it stops after its first step"
    assert process.returncode == 0 and "stopped at step-00000001; queued again" in output, output
    assert (cluster / "asked").read_text().startswith("requeue ")
