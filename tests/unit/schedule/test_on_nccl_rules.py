"""What the check of a schedule says of it is what happens on a process group with NCCL's rules."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.deadlock import find_cycle
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from tests.support.pool import Pool, Pools, world
from tests.unit.schedule.gpus import Entry, Gpus
from tests.unit.schedule.shapes import layouts, schedules
from tests.unit.schedule.wirings import WIRINGS, Wiring

RANKS = 6


def refusal(pool: Pool, schedule: Schedule, wiring: Wiring) -> str | None:
    """What the process group says of a schedule that does not end."""
    failures = {outcome.failure for outcome in pool.attempt(execute, schedule, wiring)} - {None}
    if not failures:
        return None
    said = [str(failure).split("RuntimeError: ")[-1] for failure in failures]
    text = min(said, key=len)
    assert text.startswith("deadlock") and all(other.startswith(text.rstrip()) for other in said), said
    return text


def execute(schedule: Schedule, wiring: Wiring) -> None:
    """Communicate what this rank issues, one number for each rank at the other end, on ranks that have connected."""
    world().client.takes_as_connected = True
    gpus, rank = Gpus(schedule, wiring.links == "pair", wiring.boundaries == "direction"), dist.get_rank()
    issued = {each: gpus.issued(each) for each in schedule.role_index}
    links: dict[str, list[set[int]]] = {}
    for entry in (entry for entries in issued.values() for entry in entries if not entry.waits):
        links.setdefault(entry.queue, []).append({entry.rank, *entry.others})
    parts = {name: connected(each) for name, each in sorted(links.items())}
    groups = {name: dist.split_group(split_ranks=each, group_desc=name) for name, each in parts.items() if each}
    begun = {}
    for entry in issued.get(rank, ()):
        if entry.waits and entry.after in begun:
            begun[entry.after].wait()
        elif not entry.waits and entry.others:
            calls = [call for call, does in zip((dist.isend, dist.irecv), directions(gpus, entry), strict=True) if does]
            group, others = groups[entry.queue], sorted(entry.others)
            messages = [dist.P2POp(call, torch.ones(1), other, group) for other in others for call in calls]
            begun[entry] = dist.batch_isend_irecv(messages)[0]
            if entry.queue == "compute":  # The host of a CPU computes.
                begun[entry].wait()
    for each in begun.values():
        each.wait()


def connected(links: Iterable[set[int]]) -> list[list[int]]:
    """The ranks that are linked, directly or by others."""
    parts: list[set[int]] = []
    for link in links:
        touched = [part for part in parts if not part.isdisjoint(link)]
        parts = [part for part in parts if part not in touched] + [link.union(*touched)]
    return [sorted(part) for part in parts if len(part) > 1]


def directions(gpus: Gpus, entry: Entry) -> tuple[bool, bool]:
    """Whether the rank sends and whether it receives. Both in a collective, and where one side gathers or sums."""
    if entry.action.op in ("send", "irecv"):
        return entry.action.op == "send", entry.action.op == "irecv"
    if isinstance(entry.tag, tuple) and isinstance(entry.tag[0], tuple) and entry.tag[0][0] == "rows":
        receives = gpus.sides(entry.rank, entry.action)[2]
        return not receives, receives
    return True, True


def test_two_directions_of_a_boundary(rules_pools: Pools) -> None:
    """With one communicator, one rank's receive of what it needs later is before its send of what the other needs."""
    schedule = build_schedule(layouts(vision="dp:1@0", text="dp:1@1"), 3)
    assert refusal(rules_pools(RANKS), schedule, Wiring()) is None
    said = refusal(rules_pools(RANKS), schedule, Wiring(boundaries="boundary"))
    assert said is not None and ("cannot begin before" in said or "would come to it behind" in said)
    for rank in (0, 1):
        assert any(
            line.startswith(f"  rank {rank}") and "on 'vision>text' (0, 1)" in line for line in said.splitlines()
        )


@pytest.mark.parametrize("text", ["pp:2@0-1", "pp:4@0-3"])
def test_virtual_stages(text: str, rules_pools: Pools) -> None:
    model = layouts(vision=text.replace("pp", "dp"), text=text)
    schedule = build_schedule(model, 8, ScheduleSettings(virtual_stages=2))
    assert refusal(rules_pools(RANKS), schedule, Wiring()) is None
    said = refusal(rules_pools(RANKS), schedule, Wiring(links="pipeline"))
    assert said is not None and "cannot begin before" in said


def may_wait(schedule: Schedule) -> bool:
    """Whether ranks may wait for each other, and the pool has them."""
    return 1 < len(schedule.role_index) <= max(schedule.role_index) + 1 <= RANKS and schedule.micro_batches > 2


@given(schedules(most_batches=5).filter(may_wait), st.sampled_from(WIRINGS), st.booleans())
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_the_check_says_what_happens(
    rules_pools: Pools, one_connection_pools: Pools, schedule: Schedule, wiring: Wiring, one_queue: bool
) -> None:
    pool = (one_connection_pools if one_queue else rules_pools)(RANKS)
    said, cycle = refusal(pool, schedule, wiring), find_cycle(schedule, wiring, single_queue=one_queue)
    assert (said is None) == (cycle is None), f"{said}\n{cycle}"
