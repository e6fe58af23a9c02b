"""ZeRO stages 2 and 3 (FSDP2): loss, every gradient and the weights after three steps equal plain `transformers` in one
process, in any layout and under any schedule.
"""

from __future__ import annotations

import pytest

from tests.parity.cases import (
    FRUGAL,
    NOT_AHEAD,
    RECOMPUTE,
    RECOMPUTED,
    UNEVEN,
    VIRTUAL,
    WHOLE,
    Ask,
    Case,
    gradients_equal,
    three_steps_equal,
    zero,
)
from tests.support.matrix import thinned
from tests.support.pool import Pools

OFFLOADED = ("--vision-offload.activations", "true", "--text-offload.activations", "true")
WAVES_OF_TWO = ("--schedule.waves", "2")

CASES = [
    Case("dp:2", "dp:2", 2, flags=zero(3, 3), micro=2),
    Case("sp:4", "tp:2,dp:2", 4, flags=zero(3, 3), micro=2),
    Case("sp:4", "pp:2,dp:2", 4, model="deep-tied", flags=zero(3, 3, *WAVES_OF_TWO)),
    Case("dp:4", "tp:2,dp:2", 4, model="tied", flags=zero(2, 2)),
    Case("sp:2,dp:2", "cp:2,dp:2", 4, model="tied", flags=zero(3, 3, *RECOMPUTE), micro=2),
    Case("cp:4", "sp:2,cp:2", 4, flags=zero(3, 2, *FRUGAL), micro=2),
    Case("dp:2@0-1", "dp:2@2-3", 4, flags=zero(3, 3, *NOT_AHEAD)),
    Case("dp:2@0-1", "tp:2,dp:2@2-5", 6, model="one-kv-head", flags=zero(2, 3), micro=2),
    Case("dp:3", "tp:3", 3, model="twelve-heads", flags=("--vision-zero", "3"), micro=2),
    Case("sp:2@0-1", "pp:2,dp:2@1-4", 5, model="deep", flags=zero(3, 2)),
    Case("sp:4", "pp:2,dp:2", 4, model="deep", flags=zero(3, 3, *RECOMPUTED)),
    Case("pp:2,sp:2", "pp:2,dp:2", 4, model="deep-tied", flags=zero(3, 3, *UNEVEN)),
    Case("dp:2@0-1", "pp:2,dp:2@2-5", 6, model="deep", flags=zero(3, 3, *VIRTUAL)),
    Case("dp:4", "tp:2,dp:2", 4, model="one-kv-head", flags=zero(3, 3, *WHOLE)),
    Case("tp:2,sp:2", "tp:2,sp:2", 4, model="one-kv-head", flags=zero(3, 3), micro=2),
    Case("sp:2,dp:3", "tp:3,dp:2", 6, model="twelve-heads", flags=zero(3, 3), micro=2),
    Case("sp:2", "dp:2", 2, model="two-encoders", flags=zero(3, 3), micro=2, detail="dp:2"),
    Case("sp:4", "dp:4", 4, model="qwen3", flags=zero(3, 3), micro=2),
    Case("sp:2", "pp:2", 2, model="qwen3-tied", flags=("--vision-zero", "3", *WAVES_OF_TWO)),
    Case("dp:4", "tp:2,dp:2", 4, model="qwen3-one-kv-head", flags=zero(2, 3, *RECOMPUTE)),
    Case("sp:2", "dp:2", 2, model="qwen3", flags=zero(3, 3, *OFFLOADED), micro=2),
    Case("dp:4", "dp:4", 4, model="qwen3", flags=zero(3, 3), micro=2, pictures=(0, 0, 3, 0)),
    Case("dp:2", "dp:2", 2, flags=zero(2, 3), pictures=(0,)),
    Case("sp:4", "pp:2,dp:2", 4, model="deep", flags=zero(3, 3, *WAVES_OF_TWO, *OFFLOADED, *RECOMPUTE)),
]


@pytest.mark.parametrize("case", thinned(CASES, 7), ids=str)
def test_gradients(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


@pytest.mark.parametrize("case", thinned(CASES, 6), ids=str)
def test_three_adamw_steps(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "adamw", expected(case), pools(case.ranks))


def test_three_sgd_steps(expected: Ask, pools: Pools) -> None:
    case = Case("sp:2", "dp:2", 2, model="tied", flags=zero(3, 2), micro=2)
    three_steps_equal(case, "sgd", expected(case), pools(case.ranks))
