"""Simulates the times of a schedule's actions from the durations of work and transfers: bubbles, peak activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_hetero.base.errors import UserError
from megatron_hetero.schedule.actions import Action, start
from megatron_hetero.schedule.check import ScheduleError, check_schedule, live_activations
from megatron_hetero.schedule.program import Role, Schedule
from megatron_hetero.schedule.semantics import Dependencies, replay

DurationKey = tuple[str, str, int]
"""Work: (module, kind (F, R, B), stage). Transfer: the same, of the sender. Crossing: (encoder, kind, -1)."""
Durations = Callable[[str, str, int], float] | Mapping[DurationKey, float] | float


class Span(NamedTuple):
    """An action with its start and end, in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """The times of a schedule. `spans`: the actions of each role with their times, the same on all of its ranks."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the seconds of work on the rank."""
        return sum(s.end - s.start for s in self.spans[self.schedule.role_index[rank]] if s.action.op == "run")

    def bubble(self, rank: int) -> float:
        """Return the share of the step in which the rank is idle, from 0 to 1."""
        return 1 - self.busy(rank) / self.seconds if self.seconds else 0.0

    @cached_property
    def mean_bubble(self) -> float:
        """Mean of `bubble` over all ranks."""
        weighted = [(len(role.ranks), self.bubble(role.ranks[0])) for role in self.schedule.roles]
        return sum(n * bubble for n, bubble in weighted) / sum(n for n, _ in weighted)

    def peak_activations(self, rank: int) -> dict[str, int]:
        """Return the most micro-batches (with virtual stages: stages) whose activations live at once, by module."""
        role = self.schedule.roles[self.schedule.role_index[rank]]
        names = dict.fromkeys(name for name, _ in role.held_stages)
        return {name: max(live_activations(self.schedule, role, name), default=0) for name in names}


def simulate(schedule: Schedule, durations: Durations, transfers: Durations = 0.0) -> Simulation:
    """Simulate a checked schedule, with each action as early as possible.

    Args:
        durations: seconds of work, by module, kind and stage (see `DurationKey`): a function (called for each action),
            a mapping or one number.
        transfers: seconds of a transfer or crossing once both sides are ready. Transfers overlap with work, and do not
            slow each other down.

    Raises:
        ScheduleError: the schedule deadlocks.
        UserError: a duration is missing.
    """
    clock = _Clock(schedule, _lookup("durations", durations), _lookup("transfers", transfers))
    found = replay(schedule)
    if found.stuck:
        check_schedule(schedule)
        raise ScheduleError.at(
            "schedule",
            found="a deadlock that `check_schedule` does not find",
            expected="an order in which all ranks can proceed",
            fix="build the schedule with `build_schedule`",
        )
    for role, at in found.order:
        clock.advance(role, schedule.roles[role].actions[at])
    return Simulation(schedule, tuple(map(tuple, clock.spans)))


class _Clock:
    """Clocks of all roles, advanced action by action."""

    def __init__(
        self, schedule: Schedule, duration: Callable[[DurationKey], float], transfer: Callable[[DurationKey], float]
    ):
        self._schedule, self._duration, self._transfer = schedule, duration, transfer
        self._dependencies = Dependencies(schedule)
        self._ready: dict[tuple[int, Action], float] = {}
        """When each send, irecv and start was executed."""
        self.spans: list[list[Span]] = [[] for _ in schedule.roles]

    def advance(self, role: int, action: Action) -> None:
        now = self.spans[role][-1].end if self.spans[role] else 0.0
        end = now
        match action.op:
            case "run":
                end = now + self._duration((action.module, action.kind, action.own_stage))
            case "wait":
                end = max(now, self._arrival_of_transfer(role, action))
            case "finish":
                end = max(now, self._arrival_of_crossing(role, action))
            case _:
                self._ready[role, action] = now
        self.spans[role].append(Span(action, now, end))

    def _arrival_of_transfer(self, role: int, action: Action) -> float:
        """Return when a transfer ends that begins when it is sent and its receive is posted."""
        posted = Action("irecv", action.kind, action.module, action.micro_batch, action.stage, action.peer)
        sent = [self._ready[event] for event in ((e.role, e.action) for e in self._dependencies.of(role, action))]
        took = self._transfer((action.module, action.kind, action.peer_stage))
        return max(self._ready[role, posted], *sent) + took

    def _arrival_of_crossing(self, role: int, action: Action) -> float:
        """Return when a crossing ends that begins when this rank and all that it exchanges rows with have started."""
        started = start(action.kind, action.edge, action.micro_batch)
        own, other = self._dependencies.own_and_other_side(role, action.edge)
        members = {*own, *other} if self._schedule.collective[action.edge] else {role, *other}
        return max(self._ready[member, started] for member in members) + self._transfer(
            (action.module, action.kind, -1)
        )


def _lookup(name: str, durations: Durations) -> Callable[[DurationKey], float]:
    if callable(durations):
        return lambda key: durations(*key)
    if isinstance(durations, Mapping):
        return lambda key: _found(name, durations, key)
    return lambda key: durations


def _found(name: str, durations: Mapping[DurationKey, float], key: DurationKey) -> float:
    if key not in durations:
        where = f"simulation, {name}"
        expected = "seconds for each module, kind and stage"
        raise UserError.at(where, found=f"nothing for {key}", expected=expected, fix=f"add {key} to them")
    return durations[key]


def role_label(role: Role) -> str:
    """Return the label of a role in plots, such as ``0-3 vision.0+text.1``."""
    return f"{role.ranks_text[1:]} {role.name}"
