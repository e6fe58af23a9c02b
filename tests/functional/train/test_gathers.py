"""Weights that are gathered beside the next forward pass, on real groups."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megatron_hetero.schedule import gathering
from megatron_hetero.step.buffers import BufferedWeights
from megatron_hetero.train.run import Run
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.support.runs import MakeFlags, build, stored

COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_gather_object", "broadcast")


@pytest.fixture
def flags(request: pytest.FixtureRequest, make_flags: MakeFlags, tmp_path: Path) -> list[str]:
    """A command line for two layouts, further flags and numbers of pictures, which are the parameter."""
    vision, text, more, pictures = request.param
    data = write_data(tmp_path, 8, seed=4, pictures=pictures)
    model = write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=4))
    more += f" --model.hf_path {model} --train.iters 3 --train.global_batch_size 2"
    return make_flags(vision, text, more, data=data)


@pytest.mark.parametrize(
    "ranks, flags",
    thinned(
        [
            (
                4,
                (
                    "dp:2@0-1",
                    "pp:2,dp:2",
                    "--optimizer.name adamw --schedule.virtual_stages 2 --text-recompute full",
                    (0, 0, 1),
                ),
            ),
            (2, ("sp:2", "dp:2", "--optimizer.name adamw", (1,))),
        ],
        2,
    ),
    ids=str,
    indirect=["flags"],
)
@on_ranks("ranks")
def test_weights_arrive_before_they_are_read(ranks: int, flags: list[str]) -> None:
    """Each layer's before it runs, others' later; also in steps without pictures; with the same bits as when all arrive
    at the end of the step. Nothing else at that end waits for them.
    """
    beside, weights = train(flags)
    expected = train(flags, wait=True)[1]
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, beside)
    assert "text" in set[str]().union(*of_ranks)
    assert all(np.array_equal(own, expected[name]) for name, own in weights.items())


@pytest.mark.parametrize("flags", [("sp:2", "dp:2", "--train.profile.start 2", (1,))], ids=str, indirect=True)
@on_ranks(2)
def test_a_trace_ends_when_all_weights_have_arrived(flags: list[str]) -> None:
    """Threads of gloo that record what they do meanwhile may end the process."""
    run, left = built(flags), []
    for step, batch, _ in run.batches():
        run.trainer.train_step(step, batch)
        left.append(sum(len(gathers._works) for gathers in _gathers(run).values()))
    assert left[0] > 0 and left[1] == 0 and left[2] > 0


def built(flags: list[str]) -> Run:
    """With small buckets."""
    with mock.patch.object(gathering, "BUCKET", 1000):
        return build(flags)


class LayerRun(NamedTuple):
    """The beginning of a run of a layer. `in_flight`: buckets of its module whose weights have not come; `own`: those
    that its own lie in.
    """

    step: int
    module: str
    in_flight: frozenset[int]
    own: frozenset[int]


def train(flags: list[str], *, wait: bool = False) -> tuple[set[str], Any]:
    """Train all steps, and check when weights are read. `wait`: whether weights are waited for at the end of each step.
    Returns the modules of which a layer ran while weights of others were on the way, and the weights on rank 0.
    """
    run, runs, ranges = built(flags), list[LayerRun](), set[str]()
    now = _note_runs(run, runs)
    for step, batch, _ in run.batches():
        now[0] = step
        with profile(activities=[ProfilerActivity.CPU]) as trace, _behind() as behind:
            run.trainer.issue_step(step, batch)  # Reading it concerns hosts only.
            if wait:
                run.trainer.optimizer.wait_for_weights()
            # A profiler that ends while gloo's threads record what they do may crash.
            while not all(work.is_completed() for each in _gathers(run).values() for work in each._works.values()):
                time.sleep(0.001)
        assert wait or not behind
        run.trainer.read_step()
        ranges = {event.name for event in trace.events() or []}
    left = {name: len(gathers._works) for name, gathers in _gathers(run).items()}
    assert runs and not any(each.in_flight & each.own for each in runs)
    if wait:
        assert not any(each.in_flight for each in runs) and not any(left.values())
    else:
        assert not any(each.in_flight for each in runs if each.step == 1)
        assert all(left.values()) and {f"{name} weights" for name in left} <= ranges
    return {each.module for each in runs if each.in_flight}, stored(run)


@contextlib.contextmanager
def _behind() -> Iterator[list[str]]:
    """What waits for gathers of weights that have begun inside, but for these: collectives of all ranks, and copies to
    the host.
    """
    found, begun, start = list[str](), [False], BufferedWeights.publish

    def starting(gathers: BufferedWeights) -> None:
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
        stack.enter_context(mock.patch.object(BufferedWeights, "publish", starting))
        for where, names in ((dist, COLLECTIVES), (Tensor, ("cpu",))):
            for name in names:
                stack.enter_context(mock.patch.object(where, name, noting(name, getattr(where, name))))
        yield found


def _gathers(run: Run) -> dict[str, BufferedWeights]:
    every: dict[str, Any] = {module.name: module.weights for module in run.trainer.optimizer.modules}
    return {name: weights for name, weights in every.items() if weights.buckets}


def _note_runs(run: Run, runs: list[LayerRun]) -> list[int]:
    """Note each run of a layer from now on, in the step that the list returned says."""
    now = [0]
    for name, gathers in _gathers(run).items():
        [chunks] = [module.chunks for module in run.trainer.optimizer.modules if module.name == name]
        for layer in (layer for chunk in chunks for layer in chunk.layers):
            read = set(map(id, layer.parameters()))
            own = (place for place, of in enumerate(gathers.buckets) if read & set(map(id, of.parameters)))
            layer.register_forward_pre_hook(partial(_note, runs, now, name, gathers, frozenset(own)))
    return now


def _note(
    runs: list[LayerRun], now: list[int], name: str, gathers: BufferedWeights, own: frozenset[int], *_: nn.Module
) -> None:
    runs.append(LayerRun(now[0], name, frozenset(gathers._works), own))
