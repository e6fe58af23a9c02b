"""Which processes are killed, and when: drawn beforehand, described afterwards by what the kill left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from megatron_hetero.base.outputs import LATEST, name_of, read_manifest, unfinished, verify, whole
from tests.torture.watched import Off, Said, Watched

Aim = Literal["start-up", "step", "save", "rename"]
Victims = Literal["one rank", "all ranks", "torchrun and all ranks"]
SHARES: dict[Aim, int] = {"start-up": 2, "step": 6, "save": 9, "rename": 3}
"""Of twenty kills, so many are aimed at each phase."""


@dataclass(frozen=True)
class Kill:
    """`steps`: how many steps of this start are trained before; `late`: a share of the phase's duration."""

    victims: Victims
    aim: Aim
    steps: int
    late: float


@dataclass(frozen=True)
class Durations:
    """Seconds of the phases of a run, that kills are spread over."""

    start_up: float
    step: float
    save: float


@dataclass(frozen=True)
class Killed:
    """What came of a kill. `newest`: the step of the newest whole checkpoint afterwards, 0 without one; `seconds`:
    until no rank was left.
    """

    kill: Kill
    who: str
    phase: str
    newest: int
    seconds: float

    def __str__(self) -> str:
        place = f"after step {self.newest}" if self.newest else "from scratch"
        return f"{self.who} killed {self.phase}: all gone after {self.seconds:.1f} s, goes on {place}"


def draw(rng: random.Random, number: int) -> list[Kill]:
    """So many kills, in a random order."""
    deck: list[Aim] = [aim for aim, share in SHARES.items() for _ in range(share)]
    whole_decks, rest = divmod(number, len(deck))
    aims = deck * whole_decks + rng.sample(deck, rest)
    rng.shuffle(aims)
    victims: tuple[Victims, ...] = ("one rank", "one rank", "all ranks", "torchrun and all ranks")
    return [Kill(rng.choice(victims), aim, rng.randint(1, 3), rng.random()) for aim in aims]


def wait_for_moment(
    kill: Kill, run: Watched, trained: int, checkpoints: Path, durations: Durations, deadline: float
) -> list[psutil.Process]:
    """Wait until it is time. `trained`: the step that this start goes on after. Returns the ranks. Raises `Off`."""
    ranks = run.wait_for_ranks(deadline)  # in the order in which torchrun started them
    if kill.aim == "start-up":
        time.sleep(kill.late * durations.start_up)
        return ranks
    step = run.wait_for_step(trained + kill.steps, deadline)
    if kill.aim == "step":
        time.sleep(kill.late * durations.step)
        return ranks
    while not (found := [path for path in unfinished(checkpoints) if _step_of(path) >= step]):
        run.require_going_on(f"save after step {step}", deadline)
    if kill.aim == "save":
        time.sleep(kill.late * durations.save)
        return ranks
    target = checkpoints / name_of(_step_of(found[0]))
    while not target.exists():
        run.require_going_on(f"finish {target.name}", deadline)
    return ranks


def strike(
    kill: Kill, run: Watched, ranks: Sequence[psutil.Process], rng: random.Random, limit_s: float
) -> tuple[str, float]:
    """Kill. Returns who was, and the seconds until no rank was left. Raises `Off` where one stays."""
    if kill.aim == "rename":
        chosen = list(ranks) if kill.victims != "one rank" else [ranks[0]]  # that one renames: there is no time to lose
    else:
        chosen = rng.sample(ranks, 1 if kill.victims == "one rank" else len(ranks))
    if kill.victims == "torchrun and all ranks":
        for agent in run.agents:
            os.kill(agent.pid, signal.SIGKILL)
    for process in chosen:
        os.kill(process.pid, signal.SIGKILL)
    start = time.monotonic()
    while left := [process for process in ranks if _lives(process)]:
        if time.monotonic() - start > limit_s:
            raise Off(f"{len(left)} ranks live {limit_s:.0f} s after {kill.victims} were killed; see {run.log}")
        time.sleep(0.01)
    who = f"rank {ranks.index(chosen[0])}" if kill.victims == "one rank" else kill.victims
    return who, time.monotonic() - start


def phase_of(said: Said, checkpoints: Path) -> str:
    """Where the kill came, as far as it shows: by what this start of the run printed, and left behind."""
    if not said.steps:
        return "before its first step"
    last, halves = said.steps[-1], [_step_of(path) for path in unfinished(checkpoints)]
    if saving := [step for step in halves if step in said.steps and step > max(whole(checkpoints), default=0)]:
        return f"inside the save of step {saving[0]}"
    latest, newest = checkpoints / LATEST, max(whole(checkpoints), default=0)
    if newest in said.steps and (not latest.is_file() or latest.read_text() != f"{name_of(newest)}\n"):
        return f"between the rename and `{LATEST}` of step {newest}"
    return f"after step {last}"


def newest_whole(checkpoints: Path) -> int:
    """The step of the newest whole checkpoint, 0 without one. Raises `Off` where any is damaged."""
    for path in whole(checkpoints).values():
        records = read_manifest(path)
        if faults := verify(path, records, records):
            raise Off(f"{path} counts as whole: {'; '.join(faults)}")
    return max(whole(checkpoints), default=0)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(".").removesuffix(".partial").removeprefix("step-"))
