"""Schedules end by the rules of NCCL, and what does not end is refused with the cycle in which it waits."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measuring.actions import parsed
from megatron_hetero.layout.communicators import (
    CTAS,
    DIRECTIONS,
    GRADIENT_CTAS,
    POOL_STREAMS,
    EdgeUse,
    GroupNeeds,
    Link,
    communicators,
)
from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.actions import Action, start
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.check import ScheduleError, check_schedule, local_dependencies, peak_resident
from megatron_hetero.schedule.deadlock import _EventGraph, find_cycle, issues
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from tests.support.work import calls
from tests.unit.schedule.gpus import Gpus
from tests.unit.schedule.shapes import LARGE_AND_SMALL, layouts, schedules
from tests.unit.schedule.wirings import WIRINGS, Wiring

SHARED = Wiring(links="pipeline", boundaries="boundary")
"""What there was before: both directions of a boundary, and all ranks of a pipeline, on one communicator."""


# ------------------------------------------------------------------------------------- what is built ends


@given(schedules(most_ranks=64))
@settings(max_examples=200)
def test_every_schedule_ends(schedule: Schedule) -> None:
    assert find_cycle(schedule) is None


@given(schedules(most_batches=6), st.integers(0, 2**16))
@settings(max_examples=100)
def test_every_schedule_ends_whatever_a_batch_leaves_out(schedule: Schedule, seed: int) -> None:
    """Encoders without images in some micro-batches, and messages of no rows. On its own: no check by role."""
    assert not Gpus(schedule).run()
    units = [(e.name, m) for e in schedule.encoders for m in range(schedule.micro_batches)]
    absent = frozenset(unit for unit in units if Random(f"{seed} {unit}").random() < 0.3)
    left = Gpus(schedule, absent=absent, bare=lambda message: Random(f"{seed} {message}").random() < 0.4).run()
    assert not left, left[0]


@given(schedules(most_batches=4), st.sampled_from(WIRINGS), st.integers(0, 2**16))
@settings(max_examples=40)
def test_what_is_issued_after_work_happens_after_it(schedule: Schedule, wiring: Wiring, seed: int) -> None:
    """So hosts may wait for work, as those of experts do. In any order, and whatever hardware queues there are."""
    schedule = permuted(schedule, Random(seed))
    issued = [issues(schedule, role, wiring) for role in schedule.roles]
    graph = _EventGraph(issued, single_queue=False)
    for first, each in zip(graph.first, issued, strict=False):
        for at, issue in enumerate(each):
            if issue.stream is None and issue.waits is None:
                behind = {
                    first + 2 * later + (other.waits is not None) for later, other in enumerate(each) if later > at
                }
                assert behind <= reached(graph, first + 2 * at + 1)


def reached(graph: _EventGraph, node: int) -> set[int]:
    """Events that follow one."""
    found, left = set[int](), [node]
    while left:
        left += (new := {*graph.followers[left.pop()]} - found)
        found |= new
    return found


@given(schedules(most_batches=3))
@settings(max_examples=100)
def test_the_wiring_is_that_of_the_topology(schedule: Schedule) -> None:
    """Each rank has the communicators that its actions use, and no other ones for links and boundaries."""
    kinds = communicators(
        {module.name: module.layout for module in schedule.modules},
        edges=schedule.edges,
        needs={module.name: GroupNeeds(interleaved=module.virtual > 1) for module in schedule.modules},
    )
    alone = {str(EdgeUse(edge, way)) for edge in schedule.edges for way in DIRECTIONS
             if len({*schedule.sides(edge)[0], *schedule.sides(edge)[1]}) == 1}  # fmt: skip
    for role in schedule.roles:
        used = {issue.stream for issue in issues(schedule, role)} - {None} - alone
        for rank in role.ranks:
            uses = [use for kind in kinds for use in kind.uses_of(rank) if isinstance(use, Link | EdgeUse)]
            made = set(map(str, uses))
            assert used <= made and len(made) == len(uses)
            assert used == made or not all(module.backward for module in schedule.modules)


APART = [("dp:1@0", "dp:1@1"), ("dp:2@0-1", "tp:2@2-3"), ("dp:2@0-1", "pp:2@2-3"), ("pp:2@0-1", "pp:6@2-7")]
INTERLEAVED = [("dp:2@0-1", "pp:2@0-1"), ("dp:3@0-2", "pp:3@0-2"), ("pp:4@0-3", "pp:4@0-3"), ("dp:2@0-1", "pp:2@1-2")]


@pytest.mark.parametrize("batches", [2, 3, 4, 8])
@pytest.mark.parametrize("vision, text", APART)
def test_a_boundary_with_one_communicator_is_refused(vision: str, text: str, batches: int) -> None:
    """The encoder's posted receive of B0 stands before its rows of F1, the text's posted receive of F1 before B0."""
    schedule = build_schedule(layouts(vision=vision, text=text), batches)
    check_schedule(schedule)
    for wiring in (SHARED, Wiring(boundaries="boundary")):
        for single_queue in (True, False):
            assert find_cycle(schedule, wiring, single_queue=single_queue)
    said = "\n".join(each.text for each in find_cycle(schedule, Wiring(boundaries="boundary")) or ())
    assert re.search(r"text.0\): .*on communicator `vision-text` is queued behind `vision>text.F\d`", said)
    assert re.search(
        r"vision.\d\): .*on communicator `vision-text` is queued behind (the gather of )?`text>vision.B\d!?`", said
    )


@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize("vision, text", INTERLEAVED)
def test_virtual_stages_with_one_communicator_are_refused(vision: str, text: str, virtual: int) -> None:
    for batches in (2, 4, 8):
        schedule = build_schedule(layouts(vision=vision, text=text), batches, ScheduleSettings(virtual_stages=virtual))
        check_schedule(schedule)
        for wiring in (SHARED, Wiring(links="pipeline")):
            assert find_cycle(schedule, wiring, single_queue=False)
            cycle = find_cycle(schedule, wiring) or ()
            assert any("on communicator `text forward` is queued behind" in each.text for each in cycle)


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as raised:
        check_schedule(schedule)
    return str(raised.value)


def test_the_whole_cycle_is_described() -> None:
    cycle = find_cycle(build_schedule(layouts(vision="dp:1@0", text="dp:1@1"), 2), SHARED)
    vision, text, on = "rank 0 (vision.0)", "rank 1 (text.0)", "on communicator `vision-text`"
    assert [each.text for each in cycle or ()] == [
        f"{text}: `text>vision.B0` {on} is queued behind `vision>text.F1`",
        f"{text}: `vision>text.F1` {on} waits for {vision} to begin `vision>text.F1`",
        f"{vision}: `vision>text.F1` {on} is queued behind `text>vision.B0`",
        f"{vision}: `text>vision.B0` {on} waits for {text} to begin `text>vision.B0`",
    ]


# ------------------------------------------------------------------------ kernels that fit, and streams of a pool


DEEP = {
    "an encoder whose rows enter three stages": (
        {"vision": "tp:2@0-1", "text": "pp:2@2-3"}, [("vision", None, None), ("vision", 0, 2), ("vision", 0, 4)], 3, 108
    ),
    "three encoders with stages on the text's ranks": (
        {"a": "pp:2@0-1", "vision": "pp:2@0-1", "b": "pp:2@0-1", "text": "pp:2@0-1"},
        [("a", None, None), ("a", 0, 1), ("a", 1, 2), ("vision", None, None), ("b", None, None)], 2, 132
    ),
}  # fmt: skip
"""Layouts, edges into the text module, virtual stages, and SMs on which they do not fit if NCCL chooses."""


@pytest.mark.parametrize("name", DEEP)
def test_kernels_that_wait_fit_beside_each_other(name: str) -> None:
    """Where NCCL chooses, a link of NVLink takes 16 CTAs and an edge 32."""
    texts, edges, virtual, sms = DEEP[name]
    entering = [Edge(source, "text", source_stage=own, target_stage=stage) for source, own, stage in edges]
    schedule = build_schedule(layouts(**texts), 8, ScheduleSettings(virtual_stages=virtual), edges=entering)
    check_schedule(schedule)
    for one_queue in (True, False):
        assert not Gpus(schedule, one_queue=one_queue, sms=108, link_ctas=CTAS, edge_ctas=CTAS).run()
    assert Gpus(schedule, one_queue=False, sms=sms, link_ctas=16, edge_ctas=32).run()


@given(schedules(most_batches=6))
@settings(max_examples=100)
def test_every_schedule_fits_beside_a_collective(schedule: Schedule) -> None:
    """All that the check lets pass, on an H100: beside sums of gradients too."""
    assert not Gpus(schedule, sms=132, link_ctas=CTAS, edge_ctas=CTAS, sum_ctas=GRADIENT_CTAS).run()


def test_sums_of_gradients_of_modules_on_the_same_ranks_count() -> None:
    """Each has a communicator for them, which NCCL would give up to 32 CTAs."""
    names = ["a", "b", "vision", "text"]
    schedule = build_schedule(layouts(**dict.fromkeys(names, "dp:2@0-1")), 8, text="text")
    [role] = schedule.roles
    most = peak_resident(schedule, role)
    assert most.ctas == 4 * GRADIENT_CTAS + 3 * CTAS and {f"{name} sp,cp,dp" for name in names} < {*most.communicators}
    check_schedule(schedule)
    assert not Gpus(schedule, sms=132, link_ctas=CTAS, edge_ctas=CTAS, sum_ctas=GRADIENT_CTAS).run()
    assert Gpus(schedule, sms=132, link_ctas=CTAS, edge_ctas=CTAS, sum_ctas=32).run()
    frozen = build_schedule(layouts(**dict.fromkeys(names, "dp:2@0-1")), 8, text="text", forward_only=names)
    assert peak_resident(frozen, frozen.roles[0]).ctas <= 3 * CTAS, "nothing is trained"
    staged = build_schedule(layouts(**dict.fromkeys(names, "dp:2,pp:2@0-3")), 8, text="text")
    said = refusal(staged)
    assert "100 SMs" in said and "expected at most 80" in said


def test_communication_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_hetero.layout.communicators.CTAS", 24)
    said = refusal(build_schedule(layouts(vision="dp:1@0", text="pp:3@1-3"), 6))
    assert "rank 1 (text.0), at `text.0<1.B1`: found " in said and " 96 SMs " in said
    begun = next(line for line in said.splitlines() if line.startswith("operations that have begun: "))
    assert sorted(begun.removeprefix("operations that have begun: ").split(", ")) == [
        "text backward from stage 1", "text forward from stage 0", "text>vision", "vision>text",
    ]  # fmt: skip


def test_communicators_on_shared_streams() -> None:
    """What happens from the 33rd communicator on, here from the third one."""
    schedule = build_schedule(layouts(vision="pp:2@0-1", text="pp:6@2-7"), 8)
    assert Gpus(schedule, streams=2).run()
    assert not Gpus(schedule, streams=POOL_STREAMS).run()


# ---------------------------------------------------------------------------------- what does not is refused


def permuted(schedule: Schedule, random: Random) -> Schedule:
    """The schedule with some actions elsewhere, each after all that it needs on its rank."""
    roles = [list(role.actions) for role in schedule.roles]
    for _ in range(random.randint(1, 6)):
        index = random.randrange(len(roles))
        actions = roles[index].copy()
        at = random.randrange(len(actions))
        actions.insert(max(0, min(len(actions) - 1, at + random.randint(-8, 8))), actions.pop(at))
        if _keeps_needs(schedule, index, actions):
            roles[index] = actions
    changed = (replace(role, actions=tuple(each)) for role, each in zip(schedule.roles, roles, strict=True))
    return replace(schedule, roles=tuple(changed))


def _keeps_needs(schedule: Schedule, index: int, actions: list[Action]) -> bool:
    done: set[Action] = set()
    for action in actions:
        if not done.issuperset(local_dependencies(schedule, schedule.roles[index], action)):
            return False
        done.add(action)
    return True


@given(schedules(most_batches=5), st.sampled_from(WIRINGS), st.booleans(), st.integers(0, 2**16))
@settings(max_examples=100)
def test_the_verdict_is_that_of_an_execution(schedule: Schedule, wiring: Wiring, one_queue: bool, seed: int) -> None:
    assert_same_verdict(permuted(schedule, Random(seed)), wiring, one_queue)


def assert_same_verdict(schedule: Schedule, wiring: Wiring, one_queue: bool) -> bool:
    """Whether it ends. Who waits in the cycle waits for ever in the execution too."""
    cycle = find_cycle(schedule, wiring, single_queue=one_queue)
    left = Gpus(schedule, wiring.links == "pair", wiring.boundaries == "direction", one_queue).run()
    assert bool(cycle) == bool(left)
    stuck = {(entry.rank, entry.action) for entry in left}
    for each in cycle or ():
        action = each.role.actions[each.at]
        assert {(rank, action) for rank in each.role.ranks} <= stuck, each
        assert re.match(rf"{re.escape(str(each.role))}: [a-z ]*`{re.escape(str(action))}`", each.text)
    return not cycle


@pytest.mark.parametrize("vision, text", [*APART, *INTERLEAVED])
def test_some_orders_end_and_some_do_not(vision: str, text: str) -> None:
    """So that the test above compares both."""
    schedule = build_schedule(layouts(vision=vision, text=text), 4, ScheduleSettings())
    ended = Counter(
        assert_same_verdict(permuted(schedule, Random(seed)), Wiring(), seed % 2 == 0) for seed in range(60)
    )
    assert min(ended[True], ended[False]) >= 5, ended


def with_actions(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    """The schedule with other actions of the role of `rank`."""
    index = schedule.role_index[rank]
    roles = [replace(r, actions=tuple(actions)) if at == index else r for at, r in enumerate(schedule.roles)]
    return replace(schedule, roles=tuple(roles))


def test_a_single_queue_refuses_more() -> None:
    """Rows that leave as soon as they are encoded stand behind others, and keep the encoder's GPU from the backward
    that the text's next gradients wait for, before which the text receives no rows.
    """
    chosen = ScheduleSettings(run_ahead=3, virtual_stages=2)
    schedule = build_schedule(layouts(vision="dp:1@0", text="pp:4@1-4"), 12, chosen)
    assert find_cycle(schedule) is None
    hasty: list[Action] = []
    for action in schedule.actions_of(0):
        if (action.op, action.kind) != ("start", "F"):
            hasty.append(action)
        if (action.op, action.kind) == ("run", "F"):
            hasty.append(start("F", Edge("vision", "text"), action.micro_batch))
    schedule = with_actions(schedule, 0, hasty)
    assert_same_verdict(schedule, Wiring(), one_queue=True)
    assert assert_same_verdict(schedule, Wiring(), one_queue=False)
    said = refusal(schedule)
    assert re.search(r"rank 0 \(vision.0\): `vision>text.F\d+` on communicator `vision>text` is queued behind", said)
    assert re.search(r"rank 0 \(vision.0\): `text>vision.B\d+` on communicator `text>vision` begins after", said)


def test_replicas_of_a_stage_run_in_one_order() -> None:
    """Since layers may exchange tokens over replicas. Those of one role do by construction; rank 0 has an encoder, and
    rank 1 has all rows before it runs and sends gradients when it has run.
    """
    schedule = build_schedule(layouts(vision="dp:1@0", text="dp:2@0-1"), 2, ScheduleSettings(waves=2))
    come, go = ([a for a in schedule.actions_of(1) if a.op != "run" and a.kind == kind] for kind in "FB")
    for order, ends in (("F0 B0 F1 B1", True), ("F1 F0 B0 B1", False)):
        runs = [parsed(f"text.0.{work}") for work in order.split()]
        cycle = find_cycle(with_actions(schedule, 1, [*come, *runs, *go]), single_queue=False)
        assert (cycle is None) == ends
        assert all(each.role.actions[each.at].module == "text" for each in cycle or ())


def test_ranks_of_one_stage_with_different_peers() -> None:
    """The peers of ranks 0 and 1 are 2, which holds an encoder, and 3. Rank 2 waits for F1 before it runs F0, for which
    rank 3 waits before it posts F1. That would be a cycle if rank 2 needed what rank 3 does with F1.
    """
    schedule = build_schedule(layouts(a="dp:1@2", text="tp:2,pp:2@0-3"), 3)
    assert [str(role) for role in schedule.roles] == ["ranks 0-1 (text.0)", "rank 2 (a.0+text.1)", "rank 3 (text.1)"]
    assert [role.ranks for role in schedule.with_split_roles().roles] == [(0,), (1,), (2,), (3,)]
    early = [parsed(text) for text in ("text.1<0.F1", "text.1<0.F1!")]
    actions = [action for action in schedule.actions_of(2) if action not in early]
    at = actions.index(parsed("text.1.F0"))
    schedule = with_actions(schedule, 2, [*actions[:at], *early, *actions[at:]])
    check_schedule(schedule)
    assert assert_same_verdict(schedule, Wiring(), one_queue=True)
    late = [parsed(text) for text in ("text.1.F0", "text.1>0.B0")]
    assert [a for a in schedule.actions_of(3) if a in (*late, early[0])] == [late[0], early[0], late[1]]


@pytest.mark.parametrize("large, small", [LARGE_AND_SMALL[name][:2] for name in ("stages", "apart")])
def test_sixteen_thousand_ranks_are_refused_with_as_little_work(large: dict[str, str], small: dict[str, str]) -> None:
    few, many = (build_schedule(layouts(**shape), 16, ScheduleSettings(virtual_stages=4)) for shape in (small, large))
    assert find_cycle(many, SHARED)
    assert calls(find_cycle, many, SHARED) < 2 * calls(find_cycle, few, SHARED)
