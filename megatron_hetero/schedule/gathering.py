"""Which ranks share weights, what each stores, and after which runs of a stage gathered weights stay. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Module

GatherSpan = Literal["run", "wave", "step"]
"""How long gathered weights stay: for one run of a stage, which may be that of several micro-batches; for all runs of a
wave, once forward and once backward; or for all runs of a step.
"""
BUCKET, BUCKETS = 40_000_000, 8
"""Elements of a bucket of gradients, at least, and about the most buckets of a module on a rank."""


def shares_weights(zero: int, ranks: int, trains: bool) -> bool:
    """Whether `ranks` with the same parameters store only shares of them, at a ZeRO stage. `trains`: whether any of the
    parameters trains; without gradients ZeRO-2 shares nothing.
    """
    return ranks > 1 and (zero == 3 or (zero == 2 and trains))


def rows_of_share(rows: int, ranks: int) -> int:
    """Return the rows of a parameter on the first of `ranks` that share it, which has the most."""
    return -(-rows // ranks)


def bucket_elements(trained: int, ranks: int) -> int:
    """Return the elements of parameters at which a bucket of gradients is closed: Megatron's size, or more where there
    would be more than `BUCKETS`. `trained`: elements of all parameters of a module that train on a rank, where `ranks`
    share their sum.
    """
    return max(BUCKET, BUCKET // 40 * ranks, -(-trained // BUCKETS))


def span_of(module: Module, zero: int) -> GatherSpan:
    """Return how long the gathered weights of a module stay at ZeRO stage 2 or 3."""
    if zero == 2:
        return "step"
    return "wave" if module.style == "waves" and module.window > 1 else "run"


def stays_gathered(actions: Iterable[Action], module: Module, zero: int) -> frozenset[Action]:
    """Return a rank's runs of `module` after which its weights stay gathered, for the next run of the stage."""
    span, stays = span_of(module, zero), set[Action]()
    last: dict[int | None, Action] = {}
    for action in actions:
        if action.op != "run" or action.module != module.name:
            continue
        before = last.get(action.stage)
        if before is not None and (span == "step" or (span == "wave" and before.kind == action.kind)):
            stays.add(before)
        last[action.stage] = action
    return frozenset(stays)
