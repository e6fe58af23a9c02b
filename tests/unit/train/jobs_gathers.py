"""What the workers of the pool run for the tests of weights that are gathered beside the forward pass."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megatron_hetero.schedule import gathering
from megatron_hetero.step.buffers import WeightGathers
from megatron_hetero.train.trainer import Trainer
from tests.unit.train.jobs_run import build, stored

COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_gather_object", "broadcast")


class Run(NamedTuple):
    """The beginning of a run of a layer. `in_flight`: buckets of its module whose weights have not come; `own`: those
    that its own lie in.
    """

    step: int
    module: str
    in_flight: frozenset[int]
    own: frozenset[int]


class Trained(NamedTuple):
    """What steps did on this rank. `runs`: of layers; `behind`: what each step did, once its gathers had begun, that
    waits for these: collectives of all ranks, and copies to the host; `left`: buckets in flight behind the last step,
    by module, before anyone read a weight; `weights`: on rank 0. `ranges`: what a trace of the last step calls its
    parts.
    """

    runs: list[Run]
    behind: list[list[str]]
    left: Mapping[str, int]
    weights: Mapping[str, np.ndarray]
    ranges: Collection[str]


def train(flags: list[str], at_once: bool = False) -> Trained:
    """Train all steps, with small buckets. `at_once`: whether weights are waited for at the end of each step."""
    with mock.patch.object(gathering, "BUCKET", 1000):
        run = build(flags)
    runs, behind, ranges = list[Run](), list[list[str]](), set[str]()
    now = _note_runs(run, runs)
    for step, batch, _ in run.batches():
        now[0] = step
        with profile(activities=[ProfilerActivity.CPU]) as trace, _behind() as found:
            run.train_step(step, batch)
            if at_once:
                run.optimizer.wait_for_weights()
            # A profiler that ends while gloo's threads record what they do may crash.
            while not all(work.is_completed() for each in _gathers(run).values() for work in each._works.values()):
                time.sleep(0.001)
        behind.append(found)
        ranges = {event.name for event in trace.events() or []}
    left = {name: len(gathers._works) for name, gathers in _gathers(run).items()}
    return Trained(runs, behind, left, stored(run), ranges)


def left_behind_traces(flags: list[str]) -> list[int]:
    """Buckets in flight behind each step, of which `train.profile` traces some."""
    with mock.patch.object(gathering, "BUCKET", 1000):
        run = build(flags)
    left = []
    for step, batch, _ in run.batches():
        run.train_step(step, batch)
        left.append(sum(len(gathers._works) for gathers in _gathers(run).values()))
    return left


@contextlib.contextmanager
def _behind() -> Iterator[list[str]]:
    """What waits for gathers of weights that have begun inside, but for these: see `Trained`."""
    found, begun, start = list[str](), [False], WeightGathers.start

    def starting(gathers: WeightGathers) -> None:
        begun[0] = False
        start(gathers)
        begun[0] = True

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if begun[0] and (name == "cpu" or kwargs["group"].size() == dist.get_world_size()):
                found.append(name)
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(WeightGathers, "start", starting))
        for where, names in ((dist, COLLECTIVES), (Tensor, ("cpu",))):
            for name in names:
                stack.enter_context(mock.patch.object(where, name, noting(name, getattr(where, name))))
        yield found


def _gathers(run: Trainer) -> dict[str, WeightGathers]:
    every: dict[str, Any] = {module.name: module.data_parallel for module in run.modules}
    return {name: each.gathers for name, each in every.items() if each.gathers is not None}


def _note_runs(run: Trainer, runs: list[Run]) -> list[int]:
    """Note each run of a layer from now on, in the step that the list returned says."""
    now = [0]
    for name, gathers in _gathers(run).items():
        [chunks] = [module.chunks for module in run.modules if module.name == name]
        for layer in (layer for chunk in chunks for layer in chunk.layers):
            read = set(map(id, layer.parameters()))
            own = (place for place, of in enumerate(gathers.buckets) if read & set(map(id, of.parameters)))
            layer.register_forward_pre_hook(partial(_note, runs, now, name, gathers, frozenset(own)))
    return now


def _note(
    runs: list[Run], now: list[int], name: str, gathers: WeightGathers, own: frozenset[int], *_: nn.Module
) -> None:
    runs.append(Run(now[0], name, frozenset(gathers._works), own))
