"""Adds the transfers between pipeline stages to the work of each role.

An output is sent right after its work. A receive is posted one work before the one that uses it, so that they overlap,
and waited for directly before its use. Receives are posted in the order in which the sender sends: those that precede
it from the same rank are posted with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_hetero.schedule.actions import Action, irecv, send, wait
from megatron_hetero.schedule.program import Module, Role, Schedule

Source = tuple[str, int]
"""A module and the sender's pipeline coordinate."""


def input_of(module: Module, work: Action) -> tuple[Action, Action] | None:
    """Return the `irecv` and the `wait` of the input of `work`, if it comes from another stage."""
    source = work.own_stage + (1 if work.kind == "B" else -1)
    if not 0 <= source < module.stages:
        return None
    where = work.kind, work.module, work.own_stage, source, work.micro_batch
    return irecv(*where), wait(*where)


def output_of(module: Module, work: Action) -> Action | None:
    """Return the `send` of the output of `work`, if another stage uses it."""
    target = work.own_stage - (1 if work.kind == "B" else -1)
    if not 0 <= target < module.stages:
        return None
    return send(work.kind, work.module, work.own_stage, target, work.micro_batch)


def receive_of(sending: Action) -> Action:
    """Return the `irecv` of what is sent."""
    return irecv(sending.kind, sending.module, sending.peer_stage, sending.own_stage, sending.micro_batch)


def with_transfers(schedule: Schedule, orders: Sequence[Sequence[Action]]) -> tuple[Role, ...]:
    """Return the roles with actions: `orders`, the work and crossings of each, and the transfers between stages."""
    sent = _sent(schedule, orders)
    return tuple(
        replace(role, actions=tuple(_completed(schedule, role, order, sent)))
        for role, order in zip(schedule.roles, orders, strict=True)
    )


def _sent(schedule: Schedule, orders: Iterable[Sequence[Action]]) -> dict[tuple[Source, int], list[Action]]:
    """Collect the messages from each source to each coordinate of its module, in order, as the receiver's `irecv`."""
    found: dict[tuple[Source, int], list[Action]] = {}
    known: set[Source] = set()
    for role, order in zip(schedule.roles, orders, strict=True):
        # All ranks of a stage run the module in one order, whatever other modules they hold.
        new = {_source(schedule, name, stage) for name, stage in role.held_stages} - known
        known |= new
        for work in order:
            if work.op != "run" or (source := _source(schedule, work.module, work.own_stage)) not in new:
                continue
            module = schedule.module[work.module]
            if sending := output_of(module, work):
                to = module.coordinate(sending.peer_stage)
                found.setdefault((source, to), []).append(receive_of(sending))
    return found


def _source(schedule: Schedule, module: str, stage: int) -> Source:
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
            yield from _irecvs(schedule, work, queues, posted)
        module = schedule.module[action.module]
        if arriving := input_of(module, action):
            yield arriving[1]
        yield action
        if sending := output_of(module, action):
            yield sending


def _irecvs(
    schedule: Schedule, work: Action | None, queues: dict[Source, deque[Action]], posted: set[Action]
) -> Iterator[Action]:
    """Post the receive of the input of `work`, and before it all earlier ones from the same sender."""
    arriving = work and input_of(schedule.module[work.module], work)
    if not arriving:
        return
    queue = queues[_source(schedule, arriving[0].module, arriving[0].peer_stage)]
    while arriving[0] not in posted:
        posted.add(queue[0])
        yield queue.popleft()
