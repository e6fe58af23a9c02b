"""Which ranks share weights, what each keeps, and after which runs of a stage what is gathered stays. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Module

Span = Literal["run", "wave", "step"]
"""How long gathered weights stay: for one run of a stage, which may be that of several micro-batches; for all runs of a
wave, once forward and once backward; or for all runs of a step.
"""
BUCKET, BUCKETS = 40_000_000, 8
"""Elements of a bucket of gradients, at least, and about the most buckets of a module on a rank."""


def shares_weights(zero: int, ranks: int, trains: bool) -> bool:
    """Whether `ranks` that hold the same parameters keep only shares of them, at a ZeRO stage. `trains`: whether any
    of these does; without gradients ZeRO-2 shares nothing.
    """
    return ranks > 1 and (zero == 3 or (zero == 2 and trains))


def rows_of_share(rows: int, ranks: int) -> int:
    """Rows of a parameter on the first of `ranks` that share it, which has the most."""
    return -(-rows // ranks)


def bucket_elements(trained: int, ranks: int) -> int:
    """Elements of parameters that a bucket of gradients is closed at. `trained`: of all parameters that train of a
    module on a rank, where `ranks` share their sum. Megatron's size, and at most so many buckets.
    """
    return max(BUCKET, BUCKET // 40 * ranks, -(-trained // BUCKETS))


def span_of(module: Module, zero: int) -> Span:
    """That of a module whose weights are shared at a ZeRO stage: 2 or 3."""
    if zero == 2:
        return "step"
    return "wave" if module.style == "waves" and module.window > 1 else "run"


def stays_gathered(actions: Iterable[Action], module: Module, zero: int) -> frozenset[Action]:
    """Those of a rank's runs of `module` after which its weights stay gathered, for the next run of the stage."""
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
