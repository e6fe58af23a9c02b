"""Where ranks share weights, and gather them to run a stage: after which runs they keep them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Module

Span = Literal["run", "wave", "step"]
"""How long gathered weights stay: for one run of a stage; for all micro-batches of a wave, once forward and once
backward; or for all runs of a step.
"""


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
