"""What the workers of the pool run for the tests of weights that are gathered beside the forward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from torch import nn
from torch.profiler import ProfilerActivity, profile

from megatron_hetero.engine.weight_gathers import WeightGathers
from megatron_hetero.execution import gathering
from megatron_hetero.training.trainer import Trainer
from tests.unit.training.jobs_run import build, stored


class Run(NamedTuple):
    """The beginning of a run of a layer. `in_flight`: buckets of its module whose weights have not come; `own`: those
    that its own lie in.
    """

    step: int
    module: str
    in_flight: frozenset[int]
    own: frozenset[int]


class Trained(NamedTuple):
    """What steps did on this rank. `runs`: of layers; `left`: buckets in flight behind the last step, by module, before
    anyone read a weight; `weights`: on rank 0. `ranges`: what a trace of the last step calls its parts.
    """

    runs: list[Run]
    left: Mapping[str, int]
    weights: Mapping[str, np.ndarray]
    ranges: Collection[str]


def train(flags: list[str]) -> Trained:
    """Train all steps, with small buckets."""
    with mock.patch.object(gathering, "BUCKET", 1000):
        run = build(flags)
    runs, ranges = list[Run](), set[str]()
    now = _note_runs(run, runs)
    for step, batch, _ in run.batches():
        now[0] = step
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            run.train_step(step, batch)
        ranges = {event.name for event in trace.events() or []}
    left = {name: len(gathers._works) for name, gathers in _gathers(run).items()}
    return Trained(runs, left, stored(run), ranges)


def _gathers(run: Trainer) -> dict[str, WeightGathers]:
    every: dict[str, Any] = {module.name: module.data_parallel for module in run.modules}
    return {name: each.gathers for name, each in every.items() if each.gathers is not None}


def _note_runs(run: Trainer, runs: list[Run]) -> list[int]:
    """Note each run of a layer from now on, in the step that the list returned says."""
    now = [0]
    for name, gathers in _gathers(run).items():
        [chunks] = [module.chunks for module in run.modules if module.name == name]
        for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
            read = set(map(id, layer.parameters()))
            own = (place for place, of in enumerate(gathers.buckets) if read & set(map(id, of.parameters)))
            layer.register_forward_pre_hook(partial(_note, runs, now, name, gathers, frozenset(own)))
    return now


def _note(
    runs: list[Run], now: list[int], name: str, gathers: WeightGathers, own: frozenset[int], *_: nn.Module
) -> None:
    runs.append(Run(now[0], name, frozenset(gathers._works), own))
