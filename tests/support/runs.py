"""What the workers of the pool run for the tests of gradients, optimizers, the loader and whole steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.measuring.gradients import whole_gradient
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.step.gradients import scale_gradients
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.train.hf_export import Value, assemble, gather_parameters
from megatron_hetero.train.run import Run
from pretrain_vlm import build_run
from tests.support.pool import platform

Arrays = dict[str, np.ndarray]
MakeFlags = Callable[..., list[str]]
"""The fixture `make_flags`."""


def build(flags: list[str]) -> Run:
    """The run that the program would build, without its metrics: workers outlive their runs, and those of another pool
    could not write to the same log.dir.
    """
    run = build_logged(flags)
    run.writer.close()
    return run


def build_logged(flags: list[str]) -> Run:
    """The run that the program would build. Close its writer."""
    return build_run(load_config(flags), platform())


def fp32_weight(module: TrainedModule, name: str) -> torch.Tensor:
    """A parameter, whole, in fp32."""
    return module.whole_weight(name).float()


def stored(run: Run, value: Value = fp32_weight) -> Arrays:
    """A value of every parameter by stored name, on rank 0."""
    parts = gather_parameters(run.trainer.optimizer.modules, run.trainer.topology, value)
    return {name: tensor.numpy().copy() for name, tensor in assemble(parts, stored_shapes(run.trainer.job.shapes))}


def gradient(run: Run) -> Arrays:
    """The gradients in the buffers, zero where a parameter is frozen."""
    return stored(run, whole_gradient)


def step(flags: list[str]) -> dict[str, Any]:
    """One training step: weights before and after, the gradient that was applied, and what was reported."""
    run = build(flags)
    before = stored(run)
    _, batch, _ = next(iter(run.batches()))
    metrics = run.trainer.train_step(1, batch)
    return {
        "before": before,
        "after": stored(run),
        "gradient": gradient(run),
        "loss": metrics.loss,
        "norm": metrics.grad_norm,
        "lr": metrics.lr,
        "tokens": metrics.tokens,
        "images": metrics.images,
    }


def gradients_of_steps(flags: list[str]) -> list[dict[str, Any]]:
    """Loss and gradients (scaled by 1/N, not clipped) of each configured step; nothing is updated."""
    run, results = build([*flags, "--optimizer.name", "sgd"]), []
    for _, batch, _ in run.batches():
        summary = run.trainer.gradients(batch)
        scale_gradients(run.trainer.optimizer.modules, 1.0 / batch.supervised)
        results.append(
            {
                "loss": summary.loss_sum / batch.supervised,
                "norm": summary.norm / batch.supervised,
                "gradient": gradient(run),
                "tokens": batch.tokens,
                "lengths": batch.sample_lengths,
            }
        )
    return results


def losses(flags: list[str]) -> list[float]:
    """Train all configured steps."""
    run = build(flags)
    return [run.trainer.train_step(number, batch).loss for number, batch, _ in run.batches()]


def error_of(flags: list[str]) -> tuple[int, str]:
    """How many steps were trained before the data or the numbers stopped the run, and what it said."""
    done = 0
    try:
        run = build(flags)
        for number, batch, _ in run.batches():
            run.trainer.train_step(number, batch)
            done = number
    except UserError as error:
        return done, str(error)
    return done, ""


class LiveBytes:
    """What is saved for backward inside `saving`, until it is let go: bytes now and at most."""

    def __init__(self) -> None:
        self.now, self.peak = 0, 0

    def saving(self) -> Any:
        """The context in which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved.tensor)

    def _save(self, tensor: torch.Tensor) -> Any:
        self.now += tensor.nbytes
        self.peak = max(self.peak, self.now)
        return _Saved(tensor, self)


class _Saved:
    def __init__(self, tensor: torch.Tensor, counter: LiveBytes):
        self.tensor, self.counter = tensor, counter

    def __del__(self) -> None:
        self.counter.now -= self.tensor.nbytes
