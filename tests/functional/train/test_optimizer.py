"""Optimizers on real groups: rates of parameter groups, decay, precision, and plain SGD to rounding."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_hetero.step.number_formats import upper_half
from tests.support import runs as jobs
from tests.support.matrix import thinned
from tests.support.pool import Pools
from tests.support.ranks import on_ranks
from tests.support.runs import MakeFlags

LAYOUTS = [("sp:2,dp:2", "tp:4"), ("dp:4", "tp:2,dp:2")]
RATES = "--optimizer.lr 1e-3 --vision-lr 4e-3 --optimizer.lr_projector 2e-3"


def part_of(name: str) -> str:
    """The parameter group of a stored tensor."""
    return "projector" if name.startswith("visual.merger.") else "vision" if name.startswith("visual.") else "text"


@pytest.mark.parametrize("vision, text", thinned(LAYOUTS, 2))
def test_adamw_steps_each_part_by_its_rate(vision: str, text: str, make_flags: MakeFlags, pools: Pools) -> None:
    got = pools(4).run(jobs.step, make_flags(vision, text, f"--optimizer.name adamw {RATES} --optimizer.eps 1e-12"))[0]
    # From SGD's buffers: the distributed optimizer's hold sums over replicas in each rank's own share only.
    gradients = pools(4).run(jobs.gradients_of_steps, make_flags(vision, text))[0][0]["gradient"]
    rates = {"vision": 4e-3, "projector": 2e-3, "text": 1e-3}
    assert got["lr"] == 1e-3
    for name, before in got["before"].items():
        clear = np.abs(gradients[name]) > 1e-6  # Adam's first step is lr · sign(gradient)
        step = got["after"][name].astype(np.float64) - before
        expected = -rates[part_of(name)] * np.sign(gradients[name][clear])
        np.testing.assert_allclose(step[clear], expected, rtol=1e-2, atol=2e-7, err_msg=name)
        assert clear.any() and not step[gradients[name] == 0].any(), name


SCHEDULE = "--optimizer.schedule linear --optimizer.min_lr 1e-4 --train.iters 5 --optimizer.warmup_iters 2"


@pytest.fixture
def flags(request: pytest.FixtureRequest, make_flags: MakeFlags) -> list[str]:
    """A command line; its parameter are the arguments of `make_flags`."""
    return make_flags(*request.param)


@pytest.mark.parametrize(
    "flags", [("sp:4", "tp:4", f"--optimizer.name adamw {RATES} {SCHEDULE}")], ids=str, indirect=True
)
@on_ranks(4)
def test_schedules_scale_every_group_equally(flags: list[str]) -> None:
    for step, share in ((1, 0.5), (2, 1.0), (5, 0.1)):
        trainer = jobs.build(flags).trainer
        trainer.optimizer.reduce()
        trainer._update(step, torch.ones(()))
        config = trainer.job.config
        assert trainer._rate(step, config.optimizer.lr) == pytest.approx(1e-3 * share), "the reported rate"
        last = config.train.iters
        own = {(group["lr"], trainer._rate(last, group["initial_lr"])) for group in trainer.optimizer.param_groups}
        of_ranks: list[Any] = [None] * 4  # Each has some elements of some parameters.
        dist.all_gather_object(of_ranks, own)
        expected = [(1e-3, 1e-4), (2e-3, 2e-4), (4e-3, 4e-4)]
        assert sorted(set().union(*of_ranks)) == [pytest.approx((peak * share, low)) for peak, low in expected]


FROZEN = {
    "text": "--vision-lr 4e-3 --optimizer.lr_projector 2e-3",
    "vision": "--optimizer.lr_projector 2e-3",
    "projector text": "--vision-lr 4e-3",
    "vision projector": "",
}
"""What is frozen, and the rates of the other parts."""


REPORTED = {
    "the optimizer's": ("--vision-lr 1e-4", 1e-3),
    "its own": ("--text-lr 2e-3 --vision-lr 1e-4", 2e-3),
    "frozen": ("--model.freeze text", 1e-3),
}


@pytest.mark.parametrize("more, rate", REPORTED.values(), ids=REPORTED)
def test_the_rate_that_is_reported_is_that_of_the_text_module(
    more: str, rate: float, make_flags: MakeFlags, pools: Pools
) -> None:
    flags = make_flags("sp:4", "tp:4", f"--optimizer.name adamw --optimizer.lr 1e-3 {more}")
    assert pools(4).run(_reported_rate, flags) == [rate] * 4


def _reported_rate(flags: list[str]) -> float:
    run = jobs.build(flags)
    step, batch, _ = next(iter(run.batches()))
    return run.trainer.train_step(step, batch).lr


@pytest.mark.parametrize("vision, text", thinned(LAYOUTS[::-1], 2))
def test_biases_and_norms_do_not_decay(vision: str, text: str, make_flags: MakeFlags, pools: Pools) -> None:
    common = f"--optimizer.name adamw {RATES}"
    plain = pools(4).run(jobs.step, make_flags(vision, text, common))[0]
    decayed = pools(4).run(jobs.step, make_flags(vision, text, f"{common} --optimizer.weight_decay 0.1"))[0]
    rates = {"vision": 4e-3, "projector": 2e-3, "text": 1e-3}
    for name, before in plain["before"].items():
        difference = decayed["after"][name].astype(np.float64) - plain["after"][name]
        expected = 0.0 if before.ndim == 1 else -rates[part_of(name)] * 0.1 * before
        np.testing.assert_allclose(difference, expected * np.ones_like(before), rtol=1e-3, atol=3e-7, err_msg=name)


@pytest.mark.parametrize("layouts, clip", thinned(product(LAYOUTS, [0.0, 0.5]), 3), ids=str)
def test_sgd_is_weight_minus_rate_times_gradient(
    layouts: tuple[str, str], clip: float, make_flags: MakeFlags, pools: Pools
) -> None:
    more = f"--optimizer.name sgd --optimizer.lr 0.25 --optimizer.clip_grad {clip} --optimizer.lr_projector 0.5"
    got = pools(4).run(jobs.step, make_flags(*layouts, more))[0]
    for name, before in got["before"].items():
        rate = 0.5 if part_of(name) == "projector" else 0.25
        exact = before.astype(np.float64) - rate * got["gradient"][name].astype(np.float64)
        # One rounding of the product and one of the difference: rates are powers of two, so only the latter.
        np.testing.assert_array_equal(got["after"][name], exact.astype(np.float32), err_msg=name)


@pytest.mark.parametrize(
    "flags",
    thinned(
        [
            ((*layouts, f"--optimizer.name {name} --optimizer.lr 1e-3 --model.dtype bfloat16"),)
            for layouts in LAYOUTS
            for name in ("adamw", "sgd")
        ],
        3,
    ),
    ids=str,
    indirect=True,
)
@on_ranks(4)
def test_bf16_has_masters_and_gradients_in_fp32(flags: list[str]) -> None:
    """Parameters are rounded masters."""
    run = jobs.build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.trainer.train_step(1, batch)
    for optimizer in run.trainer.optimizer.sharded.values():
        for name, shard in optimizer.shards.items():
            weights = optimizer.module.weights.values(name)[shard.start : shard.stop]
            master = shard.master.read(0, shard.stop - shard.start)
            assert master.dtype == torch.float32
            assert torch.equal(weights, upper_half(master.view(torch.int32) + (1 << 15)))
    for parameter in (p for module in run.trainer.optimizer.modules for p in module.parameters.values()):
        assert parameter.dtype == torch.bfloat16 and vars(parameter)["main_grad"].dtype == torch.float32
