"""Experts on the device: ranks that share it, some without tokens and some whose experts get none, and steps of a small
model with experts, both beside `transformers`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.crew import Crew
from benchmarks.gpu import cases
from benchmarks.gpu.record import Record
from benchmarks.gpu.reference import Reference
from benchmarks.gpu.sharing import join
from megatron_hetero.groups.launch import process_group
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.layers.recompute import Recompute
from tests.support.expert_blocks import EMPTY, Row, differences

ROWS = (*EMPTY, Row("tp:2,cp:2,ep:4", recompute=Recompute("none", chunk=5)))
BLOCK, LOSS = 1e-5, 1e-5
"""Largest relative differences in fp32: of a block's outputs and gradients, and of the losses of steps."""
EXPERTS = 8


class Ranks:
    """What each rank runs."""

    def __init__(self, platform: Platform):
        self.platform = platform

    def differences(self, row: Row) -> dict[str, float]:
        """Relative differences of a block from `transformers`, by tensor; none on ranks without a part of it."""
        return differences(row, self.platform)


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """Blocks on four ranks, then steps on one."""
    start = "spawn" if torch.cuda.device_count() else "forkserver"
    crew = Crew(4, folder / "store", Ranks, preload="benchmarks.gpu.hopper.experts", join=join, start=start)
    rows = []
    for row in ROWS:
        found = [max(of_rank.values()) for of_rank in crew.run("differences", row) if of_rank]
        rows.append({"layout": row.layout, "tokens": row.tokens, "an expert idle": row.idle, "difference": max(found)})
        record.put("blocks", rows)
        record.check(f"{row.layout}, tokens {row.tokens}: largest relative difference", max(found), BLOCK)
    crew.close()
    with process_group() as platform:
        _steps(record, folder, platform, small=small)


def _steps(record: Record, folder: Path, platform: Platform, *, small: bool) -> None:
    """Losses of steps of AdamW: those after the first depend on every gradient."""
    cases.write(folder, small=small, experts=EXPERTS)
    expected, _ = Reference.load(folder, torch.float32, platform.device).train(cases.STEPS)
    run = cases.build(platform, cases.flags(folder, "dp:1", "dp:1", "float32"))
    losses = [run.trainer.train_step(step, batch).loss for step, batch, _ in run.batches()]
    record.put("steps", {"losses": losses, "losses of transformers": expected})
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    record.check(f"largest relative difference of the losses of {cases.STEPS} steps with experts", worst, LOSS)
