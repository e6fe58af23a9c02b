"""Adds the transfers between pipeline stages to the work of each role.

An output is sent right after the work that computes it. The receive of an input is posted before the preceding work, so
that transfer and work overlap, and is waited for directly before its use. Receives are posted in the order in which the
sender sends: earlier receives from the same rank are posted at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_hetero.schedule.actions import Action, irecv, send, wait
from megatron_hetero.schedule.program import Role, Schedule

Hop = tuple[str, int, int]
"""A module, and the pipeline coordinates of the sender and of the receiver of a transfer."""


def input_of(schedule: Schedule, work: Action) -> tuple[Action, Action] | None:
    """Return the `irecv` and `wait` of the input of `work`; None if no other stage of the module sends the input."""
    source = work.own_stage + (1 if work.kind == "B" else -1)
    if not 0 <= source < schedule.module[work.module].stages:
        return None
    where = work.kind, work.module, work.own_stage, source, work.micro_batch
    return irecv(*where), wait(*where)


def output_of(schedule: Schedule, work: Action) -> Action | None:
    """Return the `send` of the output of `work`; None if no other stage of the module uses the output."""
    target = work.own_stage - (1 if work.kind == "B" else -1)
    if not 0 <= target < schedule.module[work.module].stages:
        return None
    return send(work.kind, work.module, work.own_stage, target, work.micro_batch)


def receive_of(sending: Action) -> Action:
    """Return the `irecv` with which the other stage receives a `send`."""
    return irecv(sending.kind, sending.module, sending.peer_stage, sending.own_stage, sending.micro_batch)


def with_transfers(schedule: Schedule, orders: Sequence[Sequence[Action]]) -> tuple[Role, ...]:
    """Return the roles with their actions: the work and crossings of `orders`, and the transfers of the work."""
    sent: dict[Hop, list[Action]] = {}
    for order in orders:  # All ranks of a stage run its work in the same order, whatever other modules they run.
        sent |= _sent(schedule, order)
    return tuple(
        replace(role, actions=tuple(_completed(schedule, order, sent)))
        for role, order in zip(schedule.roles, orders, strict=True)
    )


def _sent(schedule: Schedule, order: Sequence[Action]) -> dict[Hop, list[Action]]:
    """Return the messages that leave a role, by hop and in order, each as the receiver's `irecv`."""
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
    """Yield the work and crossings of a role in order, with the sends, receives and waits of its work."""
    queues = {hop: iter(messages) for hop, messages in sent.items()}
    posted: set[Action] = set()
    works = [action for action in order if action.op == "run"]
    following = dict(pairwise(works))
    for action in order:
        if action.op != "run":
            yield action
            continue
        # Post the receives of this work, which are not posted yet only for the first work, and of the next work.
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
