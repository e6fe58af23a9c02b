"""What the check of a schedule says of it is what happens on a process group with NCCL's rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.deadlock import find_cycle
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from tests.support.pool import Pool
from tests.support.schedule_run import Wiring, runs_to_the_end
from tests.unit.schedule.shapes import layouts, schedules

Pools = Callable[[int], Pool]
RANKS = 6
ONE_FOR_BOTH = Wiring(boundaries="boundary")
ONE_FOR_ALL = Wiring(links="pipeline")
WIRINGS = [Wiring(), ONE_FOR_ALL, ONE_FOR_BOTH, Wiring("pipeline", "boundary")]


def test_two_directions_of_a_boundary(rules_pools: Pools) -> None:
    """What was true of every disjoint placement while its boundary had one communicator."""
    schedule = build_schedule(layouts(vision="dp:1@0", text="dp:1@1"), 3, ScheduleSettings())
    assert runs_to_the_end(schedule, rules_pools(RANKS)) is None
    said = runs_to_the_end(schedule, rules_pools(RANKS), ONE_FOR_BOTH)
    assert said is not None and said.startswith("deadlock: ranks wait for each other\n")
    # One rank's receive of what it needs later stands before its send of what the other needs now.
    assert "cannot begin before" in said or "would come to it behind" in said
    for rank in (0, 1):
        assert any(
            line.startswith(f"  rank {rank}") and "on 'vision-text' (0, 1)" in line for line in said.splitlines()
        )


@pytest.mark.parametrize("text", ["pp:2@0-1", "pp:4@0-3"])
def test_virtual_stages(text: str, rules_pools: Pools) -> None:
    schedule = build_schedule(
        layouts(vision=text.replace("pp", "dp"), text=text), 8, ScheduleSettings(virtual_stages=2)
    )
    assert runs_to_the_end(schedule, rules_pools(RANKS)) is None
    said = runs_to_the_end(schedule, rules_pools(RANKS), ONE_FOR_ALL)
    assert said is not None and "cannot begin before" in said


def fits(schedule: Schedule) -> bool:
    """Whether the pool has its ranks."""
    return max(schedule.role_index) < RANKS


@given(schedules(most_batches=5).filter(fits), st.sampled_from(WIRINGS), st.booleans())
@settings(max_examples=30, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_the_check_says_what_happens(
    rules_pools: Pools, one_connection_pools: Pools, schedule: Schedule, wiring: Wiring, one_queue: bool
) -> None:
    pool = (one_connection_pools if one_queue else rules_pools)(RANKS)
    said, cycle = runs_to_the_end(schedule, pool, wiring), find_cycle(schedule, wiring, single_queue=one_queue)
    assert (said is None) == (cycle is None), f"{said}\n{cycle}"
