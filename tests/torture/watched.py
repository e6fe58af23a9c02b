"""A run of pretrain_vlm.py under our launcher, watched from outside: what it prints, and its processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

PROGRAM = Path(__file__).parents[2] / "pretrain_vlm.py"
_RESUMED = re.compile(r"resumed from \S+, after step (\d+)")
_STEP = re.compile(r"step +(\d+)/\d+ \| loss")


class Off(Exception):
    """Something is not as it must be."""


@dataclass(frozen=True)
class Said:
    """What one start of the ranks printed. `resumed`: the step that it went on after, `steps`: those it trained."""

    resumed: int | None
    steps: tuple[int, ...]

    @classmethod
    def of(cls, lines: Sequence[str]) -> Self:
        found = [int(m[1]) for line in lines if (m := _RESUMED.search(line))]
        return cls(found[-1] if found else None, tuple(int(m[1]) for line in lines if (m := _STEP.match(line))))


class Watched:
    """The launchers of some hosts, and the ranks. A context manager, at whose end all of them are gone."""

    def __init__(self, flags: Sequence[str], ranks: int, log: Path, hosts: int = 1) -> None:
        command = [sys.executable, "-m", "megatron_hetero.run", "--nproc-per-node", str(ranks // hosts)]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        self.ranks_wanted = ranks
        self.log = log
        self.agents = [
            subprocess.Popen(
                [*command, *meeting, str(PROGRAM), *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment | {"OMP_NUM_THREADS": "1"},
            )
            for meeting in _meetings(hosts)
        ]
        self._lines: list[str] = []
        self._copy = open(self.log, "w", encoding="utf-8")  # noqa: SIM115
        self._readers = [threading.Thread(target=self._read, args=(agent,), daemon=True) for agent in self.agents]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.agents, *self.ranks()]:
            process.kill()
        for agent in self.agents:
            agent.wait()
        self._join()
        self._copy.close()

    def _read(self, agent: subprocess.Popen[str]) -> None:
        assert agent.stdout is not None
        for line in agent.stdout:
            self._lines.append(line)
            self._copy.write(line)
            self._copy.flush()

    def _join(self) -> None:
        for reader in self._readers:
            reader.join()

    def said(self) -> Said:
        """What was printed so far."""
        return Said.of(self._lines)

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, by now."""
        return [rank for agent in self.agents for rank in _ranks_of(agent)]

    def running(self) -> bool:
        """Whether any launcher still runs."""
        return any(agent.poll() is None for agent in self.agents)

    def wait_for_ranks(self, deadline: float) -> list[psutil.Process]:
        """All processes that train. Raises `Off` where they do not come."""
        while len(ranks := self.ranks()) < self.ranks_wanted:
            self.require_going_on("start its ranks", deadline)
            time.sleep(0.01)
        return ranks

    def wait_for_step(self, after: int, deadline: float) -> int:
        """The first step of at least `after`, once it is printed. Raises `Off`."""
        while not (steps := [step for step in self.said().steps if step >= after]):
            self.require_going_on(f"train step {after}", deadline)
            time.sleep(0.002)
        return steps[0]

    def require_going_on(self, what: str, deadline: float) -> None:
        """Raises `Off` where the run has ended, or did not do `what` in time."""
        if ended := [agent.returncode for agent in self.agents if agent.poll() is not None]:
            raise Off(f"the run ended with {ended[0]}, expected it to {what}; see {self.log}")
        if time.monotonic() > deadline:
            raise Off(f"the run did not {what} in time; see {self.log}")

    def wait(self, deadline: float) -> int:
        """The largest exit status of the launchers. Raises `Off` where one does not end."""
        try:
            status = max(abs(agent.wait(max(0.0, deadline - time.monotonic()))) for agent in self.agents)
        except subprocess.TimeoutExpired:
            raise Off(f"the launcher did not end in time; see {self.log}") from None
        self._join()
        return status


def _ranks_of(agent: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        children = psutil.Process(agent.pid).children()
        return [child for child in children if PROGRAM.name in " ".join(child.cmdline())]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def _meetings(hosts: int) -> list[list[str]]:
    """Flags with which the launchers of so many hosts, all on this one, find each other."""
    if hosts == 1:
        return [[]]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return [f"--nnodes {hosts} --node-rank {host} --master-port {port}".split() for host in range(hosts)]
