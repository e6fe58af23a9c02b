"""Encoders that compute the micro-batches of a wave in one call: gradients equal those of one process."""

from __future__ import annotations

import pytest

from tests.parity.cases import UNEVEN, VIRTUAL, WHOLE, Ask, Case, gradients_equal, three_steps_equal
from tests.support.matrix import thinned
from tests.support.pool import Pools

ZERO3 = ("--vision-zero", "3", "--text-zero", "3")
OFFLOADED = ("--vision-offload.activations", "true", "--vision-recompute", "selective")


def waves(size: int, *more: str) -> tuple[str, ...]:
    """Flags of waves of so many micro-batches."""
    return ("--schedule.waves", str(size), *more)


# Of four samples one after the other, the third has no picture: it is the first, in the middle, or the last of a call.
CASES = [
    Case("sp:2", "tp:2", 2, flags=waves(3), given_batch=8),
    Case("dp:2", "dp:2", 2, model="tied", flags=waves(2)),
    Case("sp:4", "tp:2,dp:2", 4, model="one-kv-head", flags=waves(4)),
    Case("sp:2", "tp:2", 2, flags=waves(2), pictures=(0, 0, 1)),
    Case("tp:2,dp:2", "cp:2,tp:2", 4, flags=waves(3, *WHOLE), given_batch=8),
    Case("cp:2,sp:2", "cp:2,dp:2", 4, micro=2, flags=waves(2)),
    Case("sp:4", "pp:4", 4, model="deep", flags=waves(5), given_batch=8),
    Case("sp:2", "pp:2", 2, model="deep", flags=waves(4), given_batch=8),
    Case("sp:2", "pp:2", 2, model="deep", flags=waves(4, *VIRTUAL), given_batch=8),
    Case("dp:4", "pp:2,dp:2", 4, model="deep-tied", flags=waves(4), given_batch=12),
    Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", flags=waves(4), given_batch=8),
    Case("pp:2,sp:2", "pp:2,tp:2", 4, model="deep-tied", flags=waves(4, *UNEVEN), given_batch=8),
    Case("sp:2", "tp:2", 2, model="two-encoders", flags=waves(3), detail="dp:2", given_batch=8),
    Case("dp:2@0-1", "tp:2,pp:2@2-5", 6, model="two-encoders-deep", flags=waves(4), detail="sp:2@2-3", given_batch=8),
    Case("sp:2", "tp:2", 2, model="qwen3", flags=waves(3), given_batch=8),
    Case("sp:2", "pp:2", 2, model="qwen3-deep", flags=waves(4, "--text-layers", "2", "4"), given_batch=8),
    Case("sp:2", "tp:2", 2, model="qwen3-two-encoders", flags=waves(4), detail="dp:2"),
    Case("sp:2,dp:2", "tp:4", 4, flags=waves(3, *ZERO3[:2]), given_batch=8),
    Case("dp:4", "dp:4", 4, flags=waves(2, *ZERO3)),
    Case("sp:2", "tp:2", 2, flags=waves(4, "--vision-recompute", "full")),
    Case("sp:2", "tp:2", 2, flags=waves(4, *OFFLOADED)),
    Case("sp:2", "tp:2", 2, flags=("--schedule.waves", "auto", "--plan.memory_gb", "80"), given_batch=8),
]


@pytest.mark.parametrize("case", thinned(CASES, 7), ids=str)
def test_gradients(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


@pytest.mark.long
@pytest.mark.parametrize("case", [CASES[0], CASES[7], CASES[18]], ids=str)
def test_three_steps(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "adamw", expected(case), pools(case.ranks))
