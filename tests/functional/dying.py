"""`pretrain_vlm.py` on a rank that is killed in a chosen phase: `-m tests.functional.dying FILE RANK PHASE FLAGS...`.

The rank leaves FILE behind as it dies; where FILE is there already, it lives: this is the next start.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pretrain_vlm
from megatron_hetero.groups.launch import guarded, rank
from megatron_hetero.groups.watchdog import Stopwatch

CALLS = {
    "open": ("megatron_hetero.train.inputs", "open_mixture", 1),
    "comparison": ("megatron_hetero.train.inputs", "on_every", 1),
    "groups": ("torch.distributed", "new_group", 3),
    "evaluation": ("megatron_hetero.train.trainer", "Trainer.all_reduce", 1),
    "save": ("megatron_hetero.checkpoint.storage", "write_entries", 2),
    "save, written": ("megatron_hetero.checkpoint.storage", "FileRecord", 2),
    "export": ("megatron_hetero.train.hf_export", "gather_parameters", 1),
    "export, written": ("megatron_hetero.hf.model_files", "FolderWriter.finish", 1),
}
"""Phases that are the n-th call of a function."""
ACTIONS = {
    "pipeline": r"\w+\.\d[<>]\d\.[FB]1!?",
    "backward": r"\w+\.\d\.B1",
    "boundary back": r"\w+>\w+\.B1",
}
"""Phases that are an action of the schedule, in the second step."""


def arm(phase: str, die: Callable[[], None]) -> None:
    """Have this process `die` when it comes to `phase`."""
    if phase in CALLS:
        module, name, times = CALLS[phase]
        *path, last = name.split(".")
        owner: Any = importlib.import_module(module)
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, _dying(getattr(owner, last), times, die))
    else:
        setattr(Stopwatch, "lap", _dying_lap(Stopwatch.lap, ACTIONS[phase], die))  # noqa: B010


def _dying(function: Callable[..., Any], times: int, die: Callable[[], None]) -> Callable[..., Any]:
    calls = Counter[str]()

    def called(*args: Any, **kwargs: Any) -> Any:
        calls["all"] += 1
        if calls["all"] == times:
            die()
        return function(*args, **kwargs)

    return called


def _dying_lap(lap: Callable[..., Any], pattern: str, die: Callable[[], None]) -> Callable[..., Any]:
    seen = Counter[str]()

    @contextlib.contextmanager
    def watched(self: Stopwatch, name: str, label: str = "") -> Iterator[None]:
        seen[label] += 1
        if seen[label] == 2 and re.fullmatch(pattern, label):
            die()
        with lap(self, name, label):
            yield

    return watched


def main(file: str, victim: str, phase: str, *flags: str) -> None:
    """Run the program; die in it where this is the victim."""

    def die() -> None:
        Path(file).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if rank() == int(victim) and not Path(file).exists():
        arm(phase, die)
    guarded(pretrain_vlm.main, flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
