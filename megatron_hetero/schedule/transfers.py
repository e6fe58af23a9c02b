"""Adds the transfers between pipeline stages to the work of each role.

An output is sent right after its work. A receive is posted before the work that precedes the work that uses it, so that
they overlap, and waited for directly before its use. Receives are posted in the order in which the sender sends:
earlier receives from the same rank are posted with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_hetero.schedule.actions import Action, irecv, send, wait
from megatron_hetero.schedule.program import Role, Schedule

Hop = tuple[str, int, int]
"""A module, and the pipeline coordinates of a sender and of a receiver."""


def input_of(schedule: Schedule, work: Action) -> tuple[Action, Action] | None:
    """Return the `irecv` and the `wait` of the input of `work`; None if it does not come from another stage."""
    source = work.own_stage + (1 if work.kind == "B" else -1)
    if not 0 <= source < schedule.module[work.module].stages:
        return None
    where = work.kind, work.module, work.own_stage, source, work.micro_batch
    return irecv(*where), wait(*where)


def output_of(schedule: Schedule, work: Action) -> Action | None:
    """Return the `send` of the output of `work`; None if no other stage uses it."""
    target = work.own_stage - (1 if work.kind == "B" else -1)
    if not 0 <= target < schedule.module[work.module].stages:
        return None
    return send(work.kind, work.module, work.own_stage, target, work.micro_batch)


def receive_of(sending: Action) -> Action:
    """Return the `irecv` of a `send`."""
    return irecv(sending.kind, sending.module, sending.peer_stage, sending.own_stage, sending.micro_batch)


def with_transfers(schedule: Schedule, orders: Sequence[Sequence[Action]]) -> tuple[Role, ...]:
    """Return the roles with their actions: work and crossings, in the order of `orders`, and transfers."""
    sent: dict[Hop, list[Action]] = {}
    for order in orders:  # All ranks of a stage run the module in one order, whatever other modules they hold.
        sent |= _sent(schedule, order)
    return tuple(
        replace(role, actions=tuple(_completed(schedule, order, sent)))
        for role, order in zip(schedule.roles, orders, strict=True)
    )


def _sent(schedule: Schedule, order: Sequence[Action]) -> dict[Hop, list[Action]]:
    """Collect the messages that leave a role, in order, as the receiver's `irecv`."""
    messages: defaultdict[Hop, list[Action]] = defaultdict(list)
    for work in order:
        if work.op == "run" and (sending := output_of(schedule, work)):
            message = receive_of(sending)
            messages[_hop(schedule, message)].append(message)
    return messages


def _hop(schedule: Schedule, message: Action) -> Hop:
    module = schedule.module[message.module]
    return module.name, module.coordinate(message.peer_stage), module.coordinate(message.own_stage)


def _completed(schedule: Schedule, order: Sequence[Action], sent: Mapping[Hop, Sequence[Action]]) -> Iterator[Action]:
    """Yield the work and crossings of a role in order, with the transfers of its work."""
    queues = {hop: iter(messages) for hop, messages in sent.items()}
    posted: set[Action] = set()
    works = [action for action in order if action.op == "run"]
    following = dict(pairwise(works))
    for action in order:
        if action.op != "run":
            yield action
            continue
        # The receives of this work (only the first work has not posted them yet) and of the next one.
        for work in (action, following.get(action)):
            arriving = input_of(schedule, work) if work is not None else None
            while arriving is not None and arriving[0] not in posted:
                message = next(queues[_hop(schedule, arriving[0])])
                posted.add(message)
                yield message
        if arriving := input_of(schedule, action):
            yield arriving[1]
        yield action
        if sending := output_of(schedule, action):
            yield sending
