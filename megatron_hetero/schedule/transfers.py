"""Puts the transfers between pipeline stages around the work of each role.

An output is sent right after its work. A receive is posted one work earlier than the one that uses it, so that it
arrives meanwhile, and taken directly before that. Posts keep the order in which the sender sends: what comes before it
from the same rank is posted with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_hetero.schedule.actions import Action, irecv, send, wait
from megatron_hetero.schedule.program import Module, Role, Schedule

Source = tuple[str, int]
"""A module and the pipeline coordinate that sends."""


def source_stage(module: Module, work: Action) -> int | None:
    """The stage whose output `work` of the module uses, if there is one."""
    assert work.stage is not None
    source = work.stage + (1 if work.kind == "B" else -1)
    return source if 0 <= source < module.stages else None


def target_stage(module: Module, work: Action) -> int | None:
    """The stage that uses the output of `work` of the module, if there is one."""
    assert work.stage is not None
    target = work.stage - (1 if work.kind == "B" else -1)
    return target if 0 <= target < module.stages else None


def input_of(module: Module, work: Action) -> tuple[Action, Action] | None:
    """The `post` and the `take` of what `work` uses, if it uses another stage's output."""
    source = source_stage(module, work)
    if source is None:
        return None
    assert work.stage is not None
    where = work.kind, work.module, work.stage, source, work.micro_batch
    return irecv(*where), wait(*where)


def output_of(module: Module, work: Action) -> Action | None:
    """The `send` of what `work` computes, if another stage uses it."""
    target = target_stage(module, work)
    if target is None:
        return None
    assert work.stage is not None
    return send(work.kind, work.module, work.stage, target, work.micro_batch)


def with_transfers(schedule: Schedule, orders: Sequence[Sequence[Action]]) -> tuple[Role, ...]:
    """The schedule's roles with their orders of work and crossings, and the transfers that these need."""
    sent = _sent(schedule, orders)
    return tuple(
        replace(role, actions=tuple(_completed(schedule, role, order, sent)))
        for role, order in zip(schedule.roles, orders, strict=True)
    )


def _sent(schedule: Schedule, orders: Iterable[Sequence[Action]]) -> dict[tuple[Source, int], list[Action]]:
    """What each source sends to each coordinate of its module, as the posts of the receiver, in order."""
    found: dict[tuple[Source, int], list[Action]] = {}
    known: set[Source] = set()
    for role, order in zip(schedule.roles, orders, strict=True):
        # Ranks of one stage run the module in one order, whichever other modules they hold.
        new = {_source(schedule, name, stage) for name, stage in role.held_stages} - known
        known |= new
        for work in order:
            if work.op != "run" or _source(schedule, work.module, work.stage) not in new:
                continue
            module = schedule.module[work.module]
            target = target_stage(module, work)
            if target is not None:
                assert work.stage is not None
                arriving = irecv(work.kind, work.module, target, work.stage, work.micro_batch)
                source = _source(schedule, work.module, work.stage)
                found.setdefault((source, module.coordinate(target)), []).append(arriving)
    return found


def _source(schedule: Schedule, module: str, stage: int | None) -> Source:
    assert stage is not None
    return module, schedule.module[module].coordinate(stage)


def _completed(
    schedule: Schedule, role: Role, order: Sequence[Action], sent: dict[tuple[Source, int], list[Action]]
) -> Iterator[Action]:
    queues: dict[Source, deque[Action]] = {}
    for name, stage in role.held_stages:
        module = schedule.module[name]
        for coordinate in {(module.coordinate(stage) + by) % module.layout.pp for by in (1, -1)}:
            arriving = sent.get(((name, coordinate), module.coordinate(stage)), ())
            queues[name, coordinate] = deque(arriving)
    posted: set[Action] = set()
    works = [action for action in order if action.op == "run"]
    following = iter([*works[1:], None])
    for action in order:
        if action.op != "run":
            yield action
            continue
        for work in (action, next(following)):
            yield from _posts(schedule, work, queues, posted)
        module = schedule.module[action.module]
        if arriving := input_of(module, action):
            yield arriving[1]
        yield action
        if leaving := output_of(module, action):
            yield leaving


def _posts(
    schedule: Schedule, work: Action | None, queues: dict[Source, deque[Action]], posted: set[Action]
) -> Iterator[Action]:
    """Post what `work` uses, after all that its sender sends before."""
    arriving = work and input_of(schedule.module[work.module], work)
    if not arriving:
        return
    assert isinstance(arriving[0].peer, int)
    queue = queues[_source(schedule, arriving[0].module, arriving[0].peer)]
    while arriving[0] not in posted:
        posted.add(queue[0])
        yield queue.popleft()
