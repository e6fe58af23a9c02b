"""A run of pretrain_vlm.py under torchrun, watched from outside: what it prints, and its processes."""

from __future__ import annotations

import os
import re
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
    """torchrun, and its ranks. A context manager, at whose end all of them are gone."""

    def __init__(self, flags: Sequence[str], ranks: int, restarts: int, log: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        self.ranks_wanted = ranks
        self.log = log
        self.agent = subprocess.Popen(
            [*command, "--max-restarts", str(restarts), str(PROGRAM), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [self.agent, *self.ranks()]:  # the agent first: it would start others
            process.kill()
        self.agent.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.agent.stdout is not None
        with open(self.log, "w", encoding="utf-8") as copy:
            for line in self.agent.stdout:
                self._lines.append(line)
                copy.write(line)
                copy.flush()

    @property
    def printed(self) -> int:
        """The number of lines so far."""
        return len(self._lines)

    def said(self, since: int = 0) -> Said:
        """What was printed after the first `since` lines."""
        return Said.of(self._lines[since:])

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, by now."""
        try:
            children = psutil.Process(self.agent.pid).children()
            return [child for child in children if PROGRAM.name in " ".join(child.cmdline())]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return []

    def wait_for_ranks(self, deadline: float) -> list[psutil.Process]:
        """All processes that train. Raises `Off` where they do not come."""
        while len(ranks := self.ranks()) < self.ranks_wanted:
            self.require_going_on("start its ranks", deadline)
            time.sleep(0.01)
        return ranks

    def wait_for_step(self, after: int, since: int, deadline: float) -> int:
        """The first step of at least `after` in the lines from `since` on, once it is printed. Raises `Off`."""
        while not (steps := [step for step in self.said(since).steps if step >= after]):
            self.require_going_on(f"train step {after}", deadline)
            time.sleep(0.002)
        return steps[0]

    def require_going_on(self, what: str, deadline: float) -> None:
        """Raises `Off` where the run has ended, or did not do `what` in time."""
        if self.agent.poll() is not None:
            raise Off(f"the run ended with {self.agent.returncode}, expected it to {what}; see {self.log}")
        if time.monotonic() > deadline:
            raise Off(f"the run did not {what} in time; see {self.log}")

    def wait(self, deadline: float) -> int:
        """torchrun's exit status. Raises `Off` where it does not end."""
        try:
            status = self.agent.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Off(f"torchrun did not end in time; see {self.log}") from None
        self._reader.join()
        return status
