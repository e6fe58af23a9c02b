"""What workers run of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from megatron_hetero.config.schema import load_config
from megatron_hetero.train.start import build_trainer
from tests.support.pool import platform
from tests.support.toy_family.family import known
from tests.unit.train import jobs_run


def step(flags: list[str]) -> dict[str, Any]:
    """A step."""
    with known():
        return jobs_run.step(flags)


def train(flags: list[str], target: Path) -> dict[str, Any]:
    """Train from where the run resumes, save, and export: losses, norms, and the exported weights on the first rank."""
    with known():
        run, losses, norms = build_trainer(load_config(flags), platform()), [], []
        with run.writer:
            for step, batch, _ in run.batches():
                metrics = run.train_step(step, batch)
                run.writer.write(metrics)
                losses.append(metrics.loss)
                norms.append(metrics.grad_norm)
                run.saver.after(step, metrics.stopping)
            run.export(target)
        weights = load_file(target / "model.safetensors") if dist.get_rank() == 0 else {}
        start = run.resumed.step
    return {"from": start, "losses": losses, "norms": norms, "weights": {n: w.numpy() for n, w in weights.items()}}
