"""Simulates when the actions of a schedule run, given durations of work and transfers, and computes idle time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_hetero.base.errors import UserError
from megatron_hetero.schedule.actions import Action, send
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.program import Schedule

DurationKey = tuple[str, str, int]
"""The key of a duration: (module, kind (F, R, B), stage) for work; the same with the sender's stage for a transfer;
(encoder, kind, -1) for a crossing.
"""
Durations = Callable[[str, str, int], float] | Mapping[DurationKey, float] | float
Event = tuple[int, Action]
"""An event: the index of a role, and an action that its ranks have begun."""


class Span(NamedTuple):
    """An action with its start and end, in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated schedule. `spans`: the actions of each role with their times, the same on all ranks of the role."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def seconds(self) -> float:
        """Seconds from the beginning of the step to the end of the last action."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the seconds in which the rank computes."""
        return sum(s.end - s.start for s in self.spans[self.schedule.role_index[rank]] if s.action.op == "run")

    def bubble(self, rank: int) -> float:
        """Return the fraction of the step in which the rank does not compute, from 0 to 1."""
        return 1 - self.busy(rank) / self.seconds if self.seconds else 0.0

    @cached_property
    def mean_bubble(self) -> float:
        """The mean of `bubble` over all ranks."""
        weighted = [(len(role.ranks), self.bubble(role.ranks[0])) for role in self.schedule.roles]
        return sum(n * bubble for n, bubble in weighted) / sum(n for n, _ in weighted)


def simulate(schedule: Schedule, durations: Durations, transfers: Durations = 0.0) -> Simulation:
    """Simulate a checked schedule, with each action as early as possible.

    Args:
        durations: the seconds of work by module, kind and stage: a function called for each action, a mapping with
            keys `DurationKey`, or one number for all work.
        transfers: the seconds of a transfer or crossing once both sides are ready. Transfers overlap with work, and do
            not slow each other down.

    Raises:
        ScheduleError: the schedule deadlocks.
        UserError: a duration is missing.
    """
    duration, transfer = _lookup("durations", durations), _lookup("transfers", transfers)
    spans: list[list[Span]] = [[] for _ in schedule.roles]
    begun: dict[Event, float] = {}
    for role, action, awaited in in_order(schedule):
        now = end = spans[role][-1].end if spans[role] else 0.0
        match action.op:
            case "run":
                end += duration((action.module, action.kind, action.own_stage))
            case "send" | "irecv" | "start":
                begun[role, action] = now
            case "wait" | "finish":
                ready = max(begun[event] for event in ((role, action.posted), *awaited))
                sender = action.peer_stage if action.op == "wait" else -1
                end = max(now, ready + transfer((action.module, action.kind, sender)))
        spans[role].append(Span(action, now, end))
    if any(len(each) < len(role.actions) for each, role in zip(spans, schedule.roles, strict=True)):
        check_schedule(schedule)  # Raises on a deadlock. Without one, ranks of a role wait for peers of several roles.
        return simulate(schedule.with_split_roles(), durations, transfers)
    return Simulation(schedule, tuple(map(tuple, spans)))


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action, list[Event]]]:
    """Yield all actions in an order in which they can run: the index of the role, the action, and the events of other
    roles for which it waits. Actions in a deadlock, and all actions after them, are omitted.
    """
    begun: set[Event] = set()
    sleeping: dict[Event, list[int]] = defaultdict(list)
    position = [0] * len(schedule.roles)
    awake = deque(range(len(schedule.roles)))
    while awake:
        role = awake.popleft()
        actions = schedule.roles[role].actions
        for at in range(position[role], len(actions)):
            action = actions[at]
            awaited = _awaited(schedule, role, action)
            missing = next((event for event in awaited if event not in begun), None)
            if missing is not None:
                sleeping[missing].append(role)
                break
            position[role] = at + 1
            if action.op in ("send", "start"):
                begun.add((role, action))
                awake.extend(sleeping.pop((role, action), ()))
            yield role, action, awaited


def _awaited(schedule: Schedule, role: int, action: Action) -> list[Event]:
    """Return the events of other roles for which an action waits: for a `wait`, each `send` of the sending stage; for a
    `finish`, each `start` of the other side or, if the sides share ranks, of both sides.
    """
    if action.op == "wait":
        sent = send(action.kind, action.module, action.peer_stage, action.own_stage, action.micro_batch)
        return [(other, sent) for other in schedule.roles_of_stages[sent.place]]
    if action.op != "finish":
        return []
    sources, targets = schedule.roles_of_sides(action.edge)
    both = schedule.collective[action.edge]
    others = sources | targets if both else targets if role in sources else sources
    return [(other, action.posted) for other in others]


def _lookup(name: str, durations: Durations) -> Callable[[DurationKey], float]:
    if callable(durations):
        return lambda key: durations(*key)
    if not isinstance(durations, Mapping):
        return lambda key: durations

    def find(key: DurationKey) -> float:
        if key not in durations:
            where, expected = f"simulation, {name}", "seconds for each module, kind and stage"
            raise UserError.at(where, found=f"nothing for {key}", expected=expected, fix=f"add {key} to them")
        return durations[key]

    return find
