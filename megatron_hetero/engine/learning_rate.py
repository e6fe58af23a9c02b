"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    peak: float,
    minimum: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup: int,
    total: int,
) -> float:
    """The learning rate of a step.

    In warm-up it rises linearly from ``peak / warmup`` at step 1 to `peak` at step `warmup`. Then it stays, or falls
    along a line or half a cosine wave (SGDR, arXiv 1608.03983, without restarts) to `minimum` at step `total`,
    where it stays.

    Args:
        step: counted from 1.
        peak: highest value.
        minimum: value at the end; unused by the constant schedule.
        schedule: how it decays after warm-up, if at all.
        warmup: number of warm-up steps, may be 0.
        total: number of steps of the run.
    """
    assert step >= 1, f"steps count from 1, not {step}"
    if step <= warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    # Without warm-up, step 0 would be the peak: the first step already falls, and the last reaches the minimum.
    progress = min(1.0, (step - warmup) / (total - warmup)) if total > warmup else 1.0
    share = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return minimum + (peak - minimum) * share
