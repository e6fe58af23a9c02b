"""What runs compute on their ranks, and comparing it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megatron_hetero.train.held_out import HeldOutEvaluation
from megatron_hetero.train.metrics import EvaluationMetrics
from tests.support import runs as jobs
from tests.support.oracle import Oracle
from tests.support.runs import Arrays, LiveBytes, build, stored


def assert_equal_gradients(got: jobs.Arrays, expected: dict[str, torch.Tensor] | jobs.Arrays) -> None:
    """The bound of the parity tests."""
    wide = {name: np.asarray(gradient, np.float64) for name, gradient in expected.items()}
    everything = np.sqrt(sum((gradient**2).sum() for gradient in wide.values()))
    assert got.keys() == wide.keys()
    for name, gradient in wide.items():
        assert np.linalg.norm(got[name] - gradient) <= 1e-4 * np.linalg.norm(gradient) + 1e-7 * everything, name


# {0, 2} in micro-batches of 1 leaves every pack of the first replica empty, {0, 1} of 2 all of a replica's tokens.
EMPTY = [({0, 2}, 1), ({0, 1}, 2)]


def loss_of_record(oracle: Oracle, record: dict) -> tuple[float, int]:
    loss, supervised = oracle._sample(record)
    return float(loss.double()), supervised


@torch.no_grad()
def mean_loss(oracle: Oracle) -> tuple[float, int]:
    """The mean loss of all supervised tokens, and their number."""
    losses, counts = zip(*(loss_of_record(oracle, record) for record in oracle.records), strict=True)
    return sum(losses) / sum(counts), sum(counts)


def evaluated(flags: list[str]) -> tuple[list[EvaluationMetrics], int]:
    """The evaluation after the last step, of weights that were not trained, and the bytes that it saved for a backward
    pass.
    """
    run, live = build(flags), LiveBytes()
    with live.saving():
        found = list(HeldOutEvaluation.build(run).after(run.trainer.job.config.train.iters))
    return found, live.peak


def weights(flags: list[str]) -> Arrays:
    """The weights that training would start from."""
    return stored(build(flags))


def trained_and_exported(flags: list[str], target: Path) -> tuple[float, Arrays]:
    """Train one step and export; returns the loss of the first held-out data set then, and the weights."""
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.trainer.train_step(1, batch)
    [found] = HeldOutEvaluation.build(run).after(1)
    run.export(target)
    return found.loss, stored(run)
