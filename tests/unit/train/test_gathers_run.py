"""Weights that are gathered beside the next forward pass, on real groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.pool import Pool
from tests.unit.train import jobs_gathers as jobs
from tests.unit.train.jobs_run import MakeFlags

Pools = Callable[[int], Pool]


@pytest.mark.parametrize(
    "ranks, vision, text, more, pictures",
    [
        (2, "sp:2", "dp:2", "", (1,)),
        (4, "dp:2@0-1", "pp:2,dp:2", "--schedule.virtual_stages 2 --model.recompute.text full", (0, 0, 1)),
    ],
    ids=str,
)
def test_weights_come_before_they_are_read(
    ranks: int,
    vision: str,
    text: str,
    more: str,
    pictures: tuple[int, ...],
    make_flags: MakeFlags,
    pools: Pools,
    tmp_path: Path,
) -> None:
    """Each layer's before it runs, others' later; also in steps without pictures; with the same bits as when all come
    at the end of the step. Nothing else at that end waits for them.
    """
    data = write_data(tmp_path, 8, seed=4, pictures=pictures)
    model = write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=4))
    more += f" --model.hf_path {model} --train.iters 3 --train.global_batch_size 2 --optimizer.name adamw"
    flags = make_flags(vision, text, more, data=data)
    found: list[jobs.Trained] = pools(ranks).run(jobs.train, flags)
    later: list[jobs.Trained] = pools(ranks).run(jobs.train, flags, True)
    beside = set[str]()
    for trained, at_once in zip(found, later, strict=True):
        assert trained.runs and not any(run.in_flight & run.own for run in trained.runs)
        assert not any(run.in_flight for run in trained.runs if run.step == 1)
        assert trained.behind == [[], [], []]
        beside |= {run.module for run in trained.runs if run.in_flight}
        assert all(trained.left.values()) and {f"{name} weights" for name in trained.left} <= set(trained.ranges)
        assert not any(run.in_flight for run in at_once.runs) and not any(at_once.left.values())
    assert "text" in beside
    assert all(np.array_equal(weights, later[0].weights[name]) for name, weights in found[0].weights.items())


def test_a_trace_ends_when_all_weights_have_come(make_flags: MakeFlags, pools: Pools, tmp_path: Path) -> None:
    """Threads of gloo that record what they do meanwhile may end the process."""
    model = write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=4))
    more = f"--model.hf_path {model} --train.iters 3 --train.global_batch_size 2 --train.profile.start 2"
    flags = make_flags("sp:2", "dp:2", more, data=write_data(tmp_path, 8, seed=4, pictures=(1,)))
    for left in pools(2).run(jobs.left_behind_traces, flags):
        assert left[0] > 0 and left[1] == 0 and left[2] > 0
