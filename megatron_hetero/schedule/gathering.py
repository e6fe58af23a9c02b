"""Rules of sharded weights (ZeRO 2, 3): the ranks that share them, shard sizes, and how long gathered weights stay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Module

GatherSpan = Literal["run", "wave", "step"]
"""How long gathered weights stay in memory: for one run of a stage, possibly over several micro-batches; for all
forward or all backward runs of a wave; or for all runs of a step.
"""
BUCKET, BUCKETS = 40_000_000, 8
"""Minimum number of elements in a gradient bucket, and approximate maximum number of buckets of a module on a rank."""


def shares_weights(zero: int, ranks: int, trains: bool) -> bool:
    """Return whether `ranks` with the same parameters store only shards of the parameters at ZeRO stage `zero`.
    `trains`: whether any of the parameters trains; without gradients ZeRO 2 shards nothing.
    """
    return ranks > 1 and (zero == 3 or (zero == 2 and trains))


def rows_of_share(rows: int, ranks: int) -> int:
    """Return the maximum number of rows on any of the `ranks` that share a parameter of `rows` rows."""
    return -(-rows // ranks)


def bucket_elements(trained: int, ranks: int) -> int:
    """Return the number of elements at which a gradient bucket is closed: Megatron's bucket size, or more if there
    would be more than `BUCKETS` buckets. `trained`: the number of elements of all trained parameters of a module on a
    rank; `ranks`: the number of ranks that sum their gradients.
    """
    return max(BUCKET, BUCKET // 40 * ranks, -(-trained // BUCKETS))


def span_of(module: Module, zero: int) -> GatherSpan:
    """Return how long the gathered weights of a module stay in memory at ZeRO stage 2 or 3."""
    if zero == 2:
        return "step"
    return "wave" if module.style == "waves" and module.window > 1 else "run"


def stays_gathered(actions: Iterable[Action], module: Module, zero: int) -> frozenset[Action]:
    """Return the runs of `module` on a rank after which weights stay gathered for the next run of the same stage."""
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
