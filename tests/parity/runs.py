"""Runs of the program on workers, for tests of parity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.measuring.gradients import whole_gradient
from megatron_hetero.config.schema import load_config
from megatron_hetero.job.job import JobSpec
from megatron_hetero.schedule import gathering
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from megatron_hetero.step.gradients import scale_gradients
from megatron_hetero.train.run import Run
from megatron_hetero.train.trainer import Trainer
from pretrain_vlm import build_run
from tests.support.pool import platform
from tests.support.runs import stored


def train(flags: list[str]) -> dict[str, Any] | None:
    """Run the configured number of steps as the program does; rank 0 returns losses, norms and the final weights."""
    run = build(flags)
    metrics = [run.trainer.train_step(step, batch) for step, batch, _ in run.batches()]
    weights = stored(run)
    replicas_equal = _replicas_equal(run.trainer)
    return {
        "losses": [m.loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "weights": weights,
        "replicas_equal": replicas_equal,
    }


def gradients(flags: list[str]) -> dict[str, Any]:
    """One step's loss, gradient norm and every gradient, before clipping and update (plain SGD, so that gradients are
    whole).
    """
    run = build([*flags, "--optimizer.name", "sgd", "--train.iters", "1"])
    _, batch, _ = next(iter(run.batches()))
    summary = run.trainer.gradients(batch)
    scale_gradients(run.trainer.optimizer.modules, 1.0 / batch.supervised)
    return {
        "loss": summary.loss_sum / batch.supervised,
        "norm": summary.norm / batch.supervised,
        "gradients": stored(run, whole_gradient),
    }


def losses(flags: list[str], others: list[ScheduleSettings]) -> list[tuple[float, float]]:
    """Loss and gradient norm of one step under the configured schedule, then under others."""
    run = build([*flags, "--optimizer.name", "sgd"])
    trainer, own, found = run.trainer, run.trainer.job.schedule, []
    layouts, micro_batches = trainer.topology.layouts, own.micro_batches
    rebuilt = [build_schedule(layouts, micro_batches, settings, edges=own.edges) for settings in others]
    for schedule in [own, *rebuilt]:
        runs = {name: schedule.in_one_call(name) for name in run.loader.partitioner.encoders}
        partitioner = replace(run.loader.partitioner, runs=lambda _, runs=runs: runs)
        batch = replace(run.loader, partitioner=partitioner).load(1, map)
        with mock.patch.object(JobSpec, "schedule_of", lambda *_, schedule=schedule: schedule):
            summary = trainer.gradients(batch)
        found.append((summary.loss_sum / batch.supervised, summary.norm / batch.supervised))
    return found


def losses_in_buckets(flags: list[str]) -> tuple[float, float]:
    """Loss and gradient norm of one step with small buckets: it begins while weights are gathered, and sums of
    gradients amid backward passes.
    """
    with mock.patch.object(gathering, "BUCKET", 1000):
        run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    for optimizer in run.trainer.optimizer.sharded.values():
        optimizer.module.weights.publish()
    summary = run.trainer.gradients(batch)
    return summary.loss_sum / batch.supervised, summary.norm / batch.supervised


def build(flags: list[str]) -> Run:
    """Build the run of a command line."""
    run = build_run(load_config(flags), platform())
    run.writer.close()  # Workers outlive their runs: those of another pool could not write to the same log.dir.
    return run


def _replicas_equal(trainer: Trainer) -> bool:
    """Whether the ranks that hold the same parameters hold the same bits."""
    equal = True
    for module in trainer.optimizer.modules:
        if module.gradients.reduces_early:
            continue  # Each weight is on one of them.
        flat = torch.cat([p.detach().flatten() for p in module.parameters.values()])
        first = flat.clone()
        group = module.replicas
        dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
        equal = equal and bool(torch.equal(first, flat))
    return equal
