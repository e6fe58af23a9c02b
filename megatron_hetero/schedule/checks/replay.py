"""Replays a schedule in thought: in which order its actions can happen, and which wait for ever."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.semantics import Dependencies, Event

Point = tuple[int, int]
"""A role and the index of one of its actions."""


@dataclass(frozen=True, eq=False)
class Replay:
    """What came of it.

    `order`: the actions in an order in which they can happen; `reached`: how many each role gets done; `needed`: what
    each `take` and `wait` that was come to needs of other ranks; `happened`: all events.
    """

    schedule: Schedule
    order: list[Point]
    reached: list[int]
    needed: dict[Point, list[Event]]
    happened: set[Event]

    @property
    def stuck(self) -> list[Point]:
        """Where roles wait for ever."""
        ends = (len(role.actions) for role in self.schedule.roles)
        return [(role, at) for role, (at, end) in enumerate(zip(self.reached, ends, strict=True)) if at < end]


def replay(schedule: Schedule) -> Replay:
    """Execute all actions in thought, each as soon as it can be."""
    needs, found = Dependencies(schedule), Replay(schedule, [], [0] * len(schedule.roles), {}, set())
    sleeping: dict[Event, list[int]] = defaultdict(list)
    awake = deque(range(len(schedule.roles)))

    def announce(event: Event) -> None:
        found.happened.add(event)
        awake.extend(sleeping.pop(event, ()))

    while awake:
        role = awake.popleft()
        actions = schedule.roles[role].actions
        for at in range(found.reached[role], len(actions)):
            if actions[at].op in ("finish", "wait"):
                announce(Event(role, actions[at], waits=True))
                needed = found.needed.setdefault((role, at), needs.of(role, actions[at]))
                missing = next((event for event in needed if event not in found.happened), None)
                if missing is not None:
                    sleeping[missing].append(role)
                    break
            found.order.append((role, at))
            found.reached[role] = at + 1
            announce(Event(role, actions[at]))
    return found


def steps(found: Replay) -> dict[Point, int]:
    """The step of each action if each takes one; those that never happen follow their role's last one."""
    roles = found.schedule.roles
    index = {(role, action): at for role, each in enumerate(roles) for at, action in enumerate(each.actions)}
    never = [(role, at) for role, first in found.stuck for at in range(first, len(roles[role].actions))]
    step: dict[Point, int] = {}

    def after(event: Event) -> int:
        """The first step that may follow the event. Coming to an action follows the action before it."""
        at = index.get((event.role, event.action), 0)
        return step.get((event.role, at - event.waits), -1) + 1

    for role, at in [*found.order, *never]:
        events = found.needed.get((role, at), ())
        step[role, at] = max([step.get((role, at - 1), -1) + 1, *map(after, events)])
    return step
