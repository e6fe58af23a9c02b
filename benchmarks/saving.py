"""What the processes of the checkpoints' benchmark run: one rank of a run that saves in several ways in turn."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.measuring.scheduling import run_flags
from benchmarks.systems import Memory
from megatron_hetero.checkpoint.saver import HostCopies, Saver
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups.platform import Platform
from pretrain_vlm import build_run

BLOCK = 1 << 22
APART = 1000
"""Steps between those after which it is time to save."""


@dataclass(frozen=True)
class Save:
    """One rank's save. `held_s`: seconds that training waited in the step that began it; `steps_s`: of each step until
    it was whole.
    """

    held_s: float
    steps_s: tuple[float, ...] = ()


class SavingBench:
    """One rank of a run, with its only batch."""

    def __init__(self, platform: Platform, folder: Path, vision: str, text: str, samples: int):
        self.memory = Memory(platform)
        line = f"--checkpoint.dir {folder}/checkpoints --checkpoint.interval {APART} --checkpoint.keep_last 1"
        self.run = build_run(load_config([*run_flags(folder, vision, text, samples), *line.split()]), platform)
        self.batch = self.run.loader.load(1, map)
        self.checkpoints, self.copies = folder / "checkpoints", HostCopies(platform)
        self.savers = {beside: self._saver(beside) for beside in (False, True)}
        self.number = 0

    def _saver(self, beside: bool) -> Saver:
        config, own = self.run.trainer.job.config, self.run.saver
        return Saver(replace(config, checkpoint=replace(config.checkpoint, async_=beside)), own.state, own.record)

    def step(self) -> float:
        """Train once; seconds."""
        dist.barrier()
        start = time.perf_counter()
        self.run.trainer.train_step(1, self.batch)
        return time.perf_counter() - start

    def copy_to_host(self) -> float:
        """Copy all that this rank saves to the host's memory; seconds."""
        entries = self.run.saver.state.entries()
        dist.barrier()
        start = time.perf_counter()
        self.copies.of(entries)
        return time.perf_counter() - start

    def save(self, beside: bool) -> Save:
        """Save; where training goes on meanwhile, train until the checkpoint is whole."""
        saver, steps = self.savers[beside], []
        self.number += APART
        dist.barrier()
        start = time.perf_counter()
        notes = saver.after(self.number)
        held = time.perf_counter() - start
        while not self._all(notes):
            steps.append(self.step())
            notes += saver.after(self.number + 1)
        return Save(held, tuple(steps))

    def _all(self, notes: list[str]) -> bool:
        return bool(self.run.trainer.all_gather([float(bool(notes))]).min())

    def own_bytes(self) -> int:
        """What this rank has written of the newest checkpoint."""
        return sum(path.stat().st_size for path in self._own_files())

    def plain_copy(self, folder: Path) -> float:
        """Copy this rank's files of the newest checkpoint into new ones, and wait for the disk; seconds."""
        folder.mkdir(parents=True, exist_ok=True)
        files = self._own_files()
        dist.barrier()
        start = time.perf_counter()
        for path in files:
            with open(path, "rb") as source, open(folder / path.name, "wb") as target:
                shutil.copyfileobj(source, target, BLOCK)
                target.flush()
                os.fsync(target.fileno())
        dist.barrier()
        seconds = time.perf_counter() - start
        for path in files:
            (folder / path.name).unlink()
        return seconds

    def peak_bytes(self, name: str, *values: Any) -> int:
        """The peak memory of an order."""
        return self.memory.peak(lambda: getattr(self, name)(*values))

    def _own_files(self) -> list[Path]:
        newest = max(self.checkpoints.glob("step-*"))
        return sorted(newest.glob(f"__{self.run.trainer.topology.rank}_*"))
