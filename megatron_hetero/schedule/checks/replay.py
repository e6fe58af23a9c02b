"""Simulates the order in which the actions of a schedule can happen, and finds those that wait forever. No times."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.semantics import Dependencies, Event

Point = tuple[int, int]
"""A role and the index of one of its actions."""


@dataclass(frozen=True, eq=False)
class Replay:
    """The result of `replay`.

    `order`: the actions in an order in which they can happen; `done`: the number that each role executes; `needed`: the
    dependencies on other roles of each `wait` and `finish` that was reached; `happened`: all events.
    """

    schedule: Schedule
    order: list[Point]
    done: list[int]
    needed: dict[Point, list[Event]]
    happened: set[Event]

    @property
    def stuck(self) -> list[Point]:
        """The actions at which roles wait forever."""
        ends = (len(role.actions) for role in self.schedule.roles)
        return [(role, at) for role, (at, end) in enumerate(zip(self.done, ends, strict=True)) if at < end]


def replay(schedule: Schedule) -> Replay:
    """Execute all actions symbolically, each as soon as possible."""
    dependencies, found = Dependencies(schedule), Replay(schedule, [], [0] * len(schedule.roles), {}, set())
    sleeping: dict[Event, list[int]] = defaultdict(list)
    awake = deque(range(len(schedule.roles)))

    def announce(event: Event) -> None:
        found.happened.add(event)
        awake.extend(sleeping.pop(event, ()))

    while awake:
        role = awake.popleft()
        actions = schedule.roles[role].actions
        for at in range(found.done[role], len(actions)):
            if actions[at].op in ("finish", "wait"):
                announce(Event(role, actions[at], reached=True))
                needed = found.needed.setdefault((role, at), dependencies.of(role, actions[at]))
                missing = next((event for event in needed if event not in found.happened), None)
                if missing is not None:
                    sleeping[missing].append(role)
                    break
            found.order.append((role, at))
            found.done[role] = at + 1
            announce(Event(role, actions[at]))
    return found


def steps(found: Replay) -> dict[Point, int]:
    """The step of each action, if each takes one step. Actions that never happen follow the last one of their role."""
    roles = found.schedule.roles
    index = {(role, action): at for role, each in enumerate(roles) for at, action in enumerate(each.actions)}
    never = [(role, at) for role, first in found.stuck for at in range(first, len(roles[role].actions))]
    step: dict[Point, int] = {}

    def after(event: Event) -> int:
        """The first step that may follow the event. An action is reached after the action before it."""
        at = index.get((event.role, event.action), 0)
        return step.get((event.role, at - event.reached), -1) + 1

    for role, at in [*found.order, *never]:
        events = found.needed.get((role, at), ())
        step[role, at] = max([step.get((role, at - 1), -1) + 1, *map(after, events)])
    return step
