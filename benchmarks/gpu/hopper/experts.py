"""Experts on the device: ranks that share it, some without tokens and some whose experts get none, and steps of a small
model with experts, both beside `transformers`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu import cases
from benchmarks.gpu.record import Record
from benchmarks.gpu.reference import Reference
from benchmarks.tests.expert_ranks import ROWS, crew
from megatron_hetero.groups.launch import process_group
from megatron_hetero.groups.platform import Platform

BLOCK, LOSS = 1e-5, 1e-5
"""Largest relative differences in fp32: of a block's outputs and gradients, and of the losses of steps."""
EXPERTS = 8


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """Blocks on four ranks, then steps on one."""
    ranks = crew(folder, start="spawn" if torch.cuda.device_count() else "forkserver")
    rows = []
    for row in ROWS:
        found = [max(of_rank.values()) for of_rank in ranks.run("differences", row) if of_rank]
        rows.append({"layout": row.layout, "tokens": row.tokens, "an expert idle": row.idle, "difference": max(found)})
        record.put("blocks", rows)
        record.check(f"{row.layout}, tokens {row.tokens}: largest relative difference", max(found), BLOCK)
    ranks.close()
    with process_group() as platform:
        _steps(record, folder, platform, small=small)


def _steps(record: Record, folder: Path, platform: Platform, *, small: bool) -> None:
    """Losses of steps of AdamW: those after the first depend on every gradient."""
    cases.write(folder, small=small, experts=EXPERTS)
    expected, _ = Reference.load(folder, torch.float32, platform.device).train(cases.STEPS)
    run = cases.build(platform, cases.flags(folder, "dp:1", "dp:1", "float32"))
    losses = [metrics.loss for metrics in run.steps(stop=False)]
    record.put("steps", {"losses": losses, "losses of transformers": expected})
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    record.check(f"largest relative difference of the losses of {cases.STEPS} steps with experts", worst, LOSS)
