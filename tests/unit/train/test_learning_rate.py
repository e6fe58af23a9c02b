"""The learning rate: warm-up, the three schedules, and their ends."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megatron_hetero.step.algorithms import learning_rate


def rates(schedule: str, warmup: int, total: int, steps: int | None = None) -> list[float]:
    return [
        learning_rate(step, peak=8.0, minimum=2.0, schedule=schedule, warmup=warmup, total=total)  # pyright: ignore[reportArgumentType]
        for step in range(1, (steps or total) + 1)
    ]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [2, 4, 6, 8, 8, 8, 8, 8]),
        ("linear", [2, 4, 6, 8, 6.5, 5, 3.5, 2]),
        ("cosine", [2, 4, 6, 8, 5 + 3 * 0.5**0.5, 5, 5 - 3 * 0.5**0.5, 2]),
    ],
)
def test_by_hand(schedule: str, expected: list[float]) -> None:
    assert rates(schedule, warmup=4, total=8) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_without_warmup_the_first_step_is_below_the_peak(schedule: str) -> None:
    found = rates(schedule, warmup=0, total=10)
    assert 8 > found[0] > found[1]
    assert found[-1] == pytest.approx(2)
    assert all(a > b for a, b in pairwise(found))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_warmup_only_ends_at_the_peak(schedule: str) -> None:
    assert rates(schedule, warmup=4, total=4) == pytest.approx([2, 4, 6, 8])


def test_after_the_end_the_rate_stays() -> None:
    assert rates("linear", warmup=0, total=3, steps=5)[2:] == pytest.approx([2, 2, 2])
    assert rates("cosine", warmup=0, total=1) == [2]
