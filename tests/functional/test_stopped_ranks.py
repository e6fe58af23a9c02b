"""A rank that stands still (SIGSTOP) ends the run within about `schedule.timeout_s`, wherever it is, with one message;
one that is only slow outside of steps does not.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.functional.dying import arm
from tests.functional.forked import Forked, pretrain
from tests.functional.programs import CONFIG
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import thinned

TIMEOUT_S = 3.0
WAITED_FOR = {
    "comparison": "the comparison of settings",
    "first-rank": "the creation of process groups",
    "groups": "the creation of process groups",
    "evaluation": "the evaluation of d after step 1",
    "save": "a checkpoint after step 2",
    "export": "the export of the model",
}
FLAGS = f"--train.iters 2 --eval.datasets d --eval.interval 1 --checkpoint.interval 1 --schedule.timeout_s {TIMEOUT_S}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    write_model(folder / "model", ModelChoice(vision_layers=2, text_layers=1))
    write_data(folder, 8)
    (folder / "config.yaml").write_text(CONFIG.replace(", tensorboard: true", ""))
    return folder


def _rank(folder: Path, own: Path, phases: Mapping[str, float | None]) -> None:
    """The program on a rank that stands still in some phases: for so many seconds, or for ever."""
    for phase, seconds in phases.items():
        arm(phase, (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if seconds is None else _slow(seconds, own))
    flags = f"--config {folder}/config.yaml --log.dir {own}/log --checkpoint.dir {own}/c --export.hf_dir {own}/e"
    pretrain(*flags.split(), *FLAGS.split())


def _slow(seconds: float, own: Path) -> Callable[[], None]:
    def stand() -> None:
        with open(own / "stood", "a") as file:
            file.write("once\n")
        time.sleep(seconds)

    return stand


def ranks(folder: Path, own: Path, phases: Sequence[Mapping[str, float | None]]) -> Forked:
    return Forked(own, _rank, [(folder, own, of_rank) for of_rank in phases])


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(
    "phases", thinned([(("evaluation", "save", "export"),), (("comparison", "groups", "first-rank"),)], 2)
)
def test_a_stopped_rank_ends_the_run_in_time(phases: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """Rank 1, but for "first-rank": with that the store of all stands still, too, and nobody knows who else waits."""
    victims = {phase: 0 if phase == "first-rank" else 1 for phase in phases}
    runs = {}
    for phase, victim in victims.items():
        stands: dict[str, float | None] = {"groups" if phase == "first-rank" else phase: None}
        runs[phase] = ranks(folder, tmp_path / phase, (stands, {}) if victim == 0 else ({}, stands))
    try:
        stopped: dict[str, float] = {}
        while len(stopped) < len(runs):
            time.sleep(0.02)
            for phase, run in runs.items():
                victim, other = run.ranks[victims[phase]], run.ranks[1 - victims[phase]]
                both_live = other.is_alive() and victim.is_alive()
                assert both_live or phase in stopped, (phase, run.said(0), run.said(1))
                if phase not in stopped and _is_stopped(victim.pid):
                    stopped[phase] = time.monotonic()
        for phase, run in runs.items():
            other = 1 - victims[phase]
            run.ranks[other].join(20)
            assert run.ranks[other].exitcode == 70 and time.monotonic() - stopped[phase] < 4 * TIMEOUT_S, phase
            said = run.said(other)
            assert said.count("found ") == 1 and WAITED_FOR[phase] in said, said
            who = "a rank " if phase == "first-rank" else "rank 1 "
            assert f"because {who}" in said
    finally:
        for run in runs.values():
            run.close()


def test_slow_files_are_waited_for(folder: Path, tmp_path: Path) -> None:
    """Longer than `schedule.timeout_s`, each: the start of one rank, a file of a checkpoint, the end of an export."""
    slow = 1.3 * TIMEOUT_S
    run = ranks(folder, tmp_path / "run", ({"export, written": slow}, {"open": slow, "save, written": slow}))
    try:
        for rank in run.ranks:
            rank.join(60)
        assert [rank.exitcode for rank in run.ranks] == [0, 0], run.said(0) + run.said(1)
        assert (run.own / "stood").read_text().count("once") == 3 and (run.own / "e/config.json").is_file()
    finally:
        run.close()
