"""What the workers of the pool run for the tests of held-out evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.base.errors import UserError
from megatron_hetero.train.held_out import HeldOutEvaluation
from megatron_hetero.train.metrics import EvaluationMetrics
from tests.unit.train.jobs_run import Arrays, LiveBytes, build, stored


def evaluated(flags: list[str]) -> tuple[list[EvaluationMetrics], int]:
    """The evaluation after the last step, of weights that were not trained, and the bytes that it saved for a backward
    pass.
    """
    run, live = build(flags), LiveBytes()
    with live.saving():
        found = list(HeldOutEvaluation.build(run).after(run.config.train.iters))
    return found, live.peak


def trained(flags: list[str]) -> dict[str, Any]:
    """Losses, weights, random state and evaluations of a run as the program does it."""
    run = build(flags)
    evaluation, losses, found, idle = HeldOutEvaluation.build(run), [], [], []
    for step, batch, waited in run.batches():
        metrics = run.train_step(step, batch, waited)
        losses.append(metrics.loss)
        idle.append(metrics.extra["encoder_idle_share"])
        found += evaluation.after(step)
    weights, state = stored(run), torch.get_rng_state().numpy().tobytes()
    return {"losses": losses, "weights": weights, "state": state, "found": found, "idle": idle}


def weights(flags: list[str]) -> Arrays:
    """The weights that training would start from."""
    return stored(build(flags))


def trained_and_exported(flags: list[str], target: Path) -> tuple[float, Arrays]:
    """Train one step and export; returns the loss of the first held-out data set then, and the weights."""
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.train_step(1, batch)
    [found] = HeldOutEvaluation.build(run).after(1)
    run.export(target)
    return found.loss, stored(run)


def refused(flags: list[str]) -> str:
    """The message with which the evaluation stops."""
    try:
        evaluated(flags)
    except UserError as error:
        return str(error)
    return ""


def refused_at_once(flags: list[str]) -> tuple[str, int]:
    """The message with which the building of a run stops, and the process groups that it has made by then."""
    before = dist.get_pg_count()
    try:
        build(flags)
    except UserError as error:
        return str(error), dist.get_pg_count() - before
    return "", -1
