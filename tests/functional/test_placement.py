"""Modules on ranks of their own: under two agents, and on ranks without an agent that lose a peer."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.dying import arm
from tests.functional.forked import Forked, pretrain
from tests.functional.programs import CONFIG, PROGRAM
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import thinned

DISJOINT = ("--vision-parallel", "dp:1@0", "--text-parallel", "pp:2@1-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placement")
    write_model(folder / "model", ModelChoice(vision_layers=2, text_layers=2, tied=True))
    write_data(folder, 8)
    (folder / "config.yaml").write_text(CONFIG.replace("micro_batch_size: 2", "micro_batch_size: 1"))
    return folder


def losses(log: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (log / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    """The losses of one rank."""
    flags = "--config", str(folder / "config.yaml"), "--vision-parallel", "dp:1", "--text-parallel", "dp:1"
    with Forked(folder / "alone", pretrain, [(*flags, "--log.dir", str(folder / "log of one"))]) as run:
        run.require_success()
    return losses(folder / "log of one")


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def outputs(folder: Path) -> tuple[str, ...]:
    return "--log.dir", str(folder / "log"), "--export.hf_dir", str(folder / "out")


PROFILED = ("--train.profile.start", "2", "--train.profile.steps", "1")


def require_trained(log: Path, expected: list[float]) -> None:
    """The losses are those expected, and each rank has written what it did."""
    assert losses(log) == pytest.approx(expected, rel=1e-5)
    for rank, action in enumerate(("vision.0.F1", "text.0>1.F3", "text.1.B0")):
        trace = json.loads((log / f"trace-rank{rank}.json").read_text())
        assert action in {event.get("name") for event in trace["traceEvents"]}


@pytest.mark.long
def test_two_agents_train_a_disjoint_layout(folder: Path, expected: list[float], tmp_path: Path) -> None:
    port = _free_port()
    agents = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--node-rank",
                str(node),
                "--nproc-per-node",
                str(2 - node),
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                port,
                str(PROGRAM),
                "--config",
                str(folder / "config.yaml"),
                *DISJOINT,
                *PROFILED,
                *outputs(tmp_path),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(),
        )
        for node in range(2)
    ]
    try:
        said = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    require_trained(tmp_path / "log", expected)


def _fails(number: signal.Signals | None, *flags: str) -> None:
    """The program on a rank that gets a signal amid a pipeline, or none."""
    if number is not None:
        arm("pipeline", lambda: os.kill(os.getpid(), number))
    pretrain(*flags)


@pytest.mark.parametrize("number", thinned([signal.SIGSTOP, signal.SIGKILL], 2))
def test_ranks_without_an_agent_name_what_they_wait_for(number: signal.Signals, folder: Path, tmp_path: Path) -> None:
    """Nobody watches ranks that srun started: they end by themselves, and report in which action of which micro-batch
    they waited for whom; at the time-out the first one reports for all.
    """
    flags = ["--config", str(folder / "config.yaml"), *DISJOINT, *outputs(tmp_path)]
    flags += ["--train.iters", "10000", "--schedule.timeout_s", "4"]
    arguments = [[number if rank == 1 else None, *flags] for rank in range(3)]
    with Forked(tmp_path / "ranks", _fails, arguments) as run:
        for rank in (0, 2):
            run.ranks[rank].join(90)
        said = {rank: run.said(rank) for rank in (0, 2)}
        assert [run.ranks[rank].exitcode for rank in (0, 2)] == [70, 70], said
    killed = number == signal.SIGKILL
    reports = [text for rank, text in said.items() if f"rank {rank}" in text]
    assert len(reports) == (2 if killed else 1), said
    for text in reports:
        assert killed or "because rank 1 " in text
        found = re.search(r"action (\S+) of micro-batch (\d), with ranks? ([\d, -]+) ", text)
        assert found is not None and "1" in found[3], text
