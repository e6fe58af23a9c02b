"""Whether a schedule ends on NCCL, and if not, who waits for whom in a cycle.

The rules, for what the host of each rank issues (`streams`):

  * work and waits begin when all work and waits that were issued before them have ended;
  * an operation begins when these have, and what was issued before it on its communicator has ended;
  * work ends when all ranks of its stage have begun it, a collective when all its participants have, a batch of
    point-to-point when all counterparts have, a send and its receive when both have begun: nothing is buffered;
  * a wait ends when its operation has.

With a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron asks for) besides:

  * work and operations begin when all work and operations that the rank issued before, on any stream, have begun.

All of these are "and": what waits for something waits for all of it. So a schedule ends if and only if there is no
cycle in the graph of beginnings and ends; how long anything takes does not matter. What a batch of data leaves out of
it, it leaves out on all ranks that take part, which adds no cycle.

Hosts never wait here. They do on NCCL where two ranks first send to each other on a communicator: these connect, and
each call returns when the other rank has made its own. Many schedules would not survive that, since they post early;
so ranks are taken to be connected before a schedule begins.

Ranks are taken together: first those of a role, as if each needed what any of them needs, which finds every cycle;
where it finds one, again only those whose partners in all pipelines are taken together too. Then each rank needs what
one of them needs, so that a cycle of these is one of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from typing import Literal, NamedTuple

from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.checks.streams import Issue, LinkOf, Wiring, issues
from megatron_hetero.schedule.program import Role, Schedule

DESIGN = Wiring()
"""The communicators that `Topology` makes."""


Reason = Literal["begin", "end", "behind", "after"]


@dataclass(frozen=True)
class Waiting:
    """What ranks of a role wait in, and for what, which is where the next of a cycle of these wait.

    `ranks`: such as ``rank 0 (vision.0)``; `rank`: the first of them; `at`: the index of their action; `what`: the
    action, or which part of it; `communicator`: None on their compute stream. `reason`: they wait for `ranks_there`
    to `begin` what they do `there`; for the `end` of their own operation; they stand `behind` another one on their
    communicator; or come `after` what they issued before.
    """

    rank: int
    ranks: str
    at: int
    what: str
    communicator: str | None
    reason: Reason
    ranks_there: str
    there: str

    def __str__(self) -> str:
        on = f" on communicator `{self.communicator}`" if self.communicator else ""
        reasons = {
            "begin": f"waits for {self.ranks_there} to begin {self.there}",
            "end": f"waits for the end of {self.there}",
            "behind": f"stands behind {self.there}",
            "after": f"begins after {self.there}",
        }
        return f"{self.ranks}: {self.what}{on} {reasons[self.reason]}"


def find_cycle(schedule: Schedule, wiring: Wiring = DESIGN, *, single_queue: bool = True) -> tuple[Waiting, ...] | None:
    """Who waits for whom for ever; None where the schedule ends.

    Args:
        schedule: whose roles have all of their actions once, and wait for what they have started.
        wiring: which operations share a communicator.
        single_queue: whether a rank has one hardware queue for all its streams. A schedule that ends with one ends
            with more.
    """
    found = _cycle(schedule, schedule.roles, lambda role: lambda action: None, wiring, single_queue)
    if found is None:
        return None
    classes = _classes(schedule)
    index = {rank: at for at, each in enumerate(classes) for rank in each.ranks}

    def link(role: Role) -> LinkOf:
        rank = role.ranks[0]

        def sender(action: Action) -> int:
            return index[rank if action.op == "send" else schedule.peer_rank(rank, action)]

        return sender

    return _cycle(schedule, classes, link, wiring, single_queue)


def _classes(schedule: Schedule) -> list[Role]:
    """The roles, divided until the partners of a class's ranks in each pipeline are all of one class."""
    color = dict(schedule.role_index)
    neighbors = [_neighbors(stages) for stages in _pipelines(schedule)]
    while True:
        signs = {
            rank: (own, *(tuple(color[other] for other in each.get(rank, ())) for each in neighbors))
            for rank, own in color.items()
        }
        numbers: dict[Hashable, int] = {}
        refined = {rank: numbers.setdefault(sign, len(numbers)) for rank, sign in signs.items()}
        if len(numbers) == len(set(color.values())):
            break
        color = refined
    members: dict[int, list[int]] = {}
    for rank in sorted(color):
        members.setdefault(color[rank], []).append(rank)
    return [replace(schedule.roles[schedule.role_index[ranks[0]]], ranks=tuple(ranks)) for ranks in members.values()]


def _pipelines(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """Of each module with stages, the ranks of each stage."""
    return [[m.stage_ranks(s) for s in range(m.layout.pp)] for m in schedule.modules if m.layout.pp > 1]


def _neighbors(stages: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """The ranks before and after each in its pipeline, which is a ring."""
    rings = zip(*stages, strict=True)
    return {rank: (ring[at - 1], ring[(at + 1) % len(ring)]) for ring in rings for at, rank in enumerate(ring)}


# --------------------------------------------------------------------------------------------- the graph

Event = int
"""A beginning, an end, or that all have begun something."""


class _Place(NamedTuple):
    """Which party's issue an event is the beginning, or end, of."""

    party: int
    issue: int
    ends: bool


class _Graph:
    """Events, and which of them each is followed by. Number 2 i is the beginning of the i-th of all issues, 2 i + 1 its
    end (a wait only has an end); then come those that all that join something have begun it.
    """

    def __init__(self, issued: Sequence[Sequence[Issue]], single_queue: bool):
        self.first = [0, *accumulate(2 * len(each) for each in issued)]
        self.followers: list[list[Event]] = [[] for _ in range(self.first[-1])]
        self.all_begun: dict[Hashable, Event] = {}
        for first, each in zip(self.first, issued, strict=False):
            self._add_streams(first, each)
            self._add_counterparts(first, each)
            if single_queue:
                operations = [first + 2 * at for at, issue in enumerate(each) if issue.waits is None]
                for begin, following in pairwise(operations):
                    self.followers[begin].append(following)

    def place(self, event: Event) -> _Place | None:
        """Whose it is, if it is of one party."""
        if event >= self.first[-1]:
            return None
        party = bisect_right(self.first, event) - 1
        at, ends = divmod(event - self.first[party], 2)
        return _Place(party, at, bool(ends))

    def _add_streams(self, first: Event, issued: Sequence[Issue]) -> None:
        followers, computed, last = self.followers, None, {}
        for begin, issue in zip(count(first, 2), issued, strict=False):
            end = begin + 1
            following = begin if issue.waits is None else end
            if computed is not None:
                followers[computed].append(following)
            if issue.waits is not None:
                followers[first + 2 * issue.waits + 1].append(end)
                computed = end
                continue
            followers[begin].append(end)
            if issue.stream is None:
                computed = end
                continue
            if issue.stream in last:
                followers[last[issue.stream]].append(begin)
            last[issue.stream] = end

    def _add_counterparts(self, first: Event, issued: Sequence[Issue]) -> None:
        for begin, issue in zip(count(first, 2), issued, strict=False):
            if issue.waits is None:
                self.followers[begin].append(self._all(issue.joins))
                self.followers[self._all(issue.needs)].append(begin + 1)

    def _all(self, key: Hashable) -> Event:
        event = self.all_begun.setdefault(key, len(self.followers))
        if event == len(self.followers):
            self.followers.append([])
        return event

    def stuck(self) -> set[Event]:
        """The events that never happen."""
        before = [0] * len(self.followers)
        for each in self.followers:
            for event in each:
                before[event] += 1
        ready = [event for event, n in enumerate(before) if not n]
        while ready:
            for event in self.followers[ready.pop()]:
                before[event] -= 1
                if not before[event]:
                    ready.append(event)
        return {event for event, n in enumerate(before) if n}


def _cycle(
    schedule: Schedule, parties: Sequence[Role], link: Callable[[Role], LinkOf], wiring: Wiring, single_queue: bool
) -> tuple[Waiting, ...] | None:
    """The cycle, of parties that execute the actions of their role. `link`: see `LinkOf`."""
    issued = [issues(schedule, party, wiring, link(party)) for party in parties]
    graph = _Graph(issued, single_queue)
    stuck = graph.stuck()
    if not stuck:
        return None
    return _described(parties, issued, [*filter(None, map(graph.place, _short_cycle(graph, stuck)))])


def _short_cycle(graph: _Graph, stuck: set[Event]) -> list[Event]:
    """A short cycle among the events that never happen; each waits for the next."""
    before: dict[Event, list[Event]] = {event: [] for event in stuck}
    for event in stuck:
        for follower in graph.followers[event]:
            before[follower].append(event)
    event, path = min(stuck), {}
    while event not in path:
        path[event] = None
        event = before[event][0]
    events = list(path)
    cycle = events[events.index(event) :]
    return min((_shortest(before, event, cycle) for event in cycle[:100]), key=len)


def _shortest(before: dict[Event, list[Event]], first: Event, known: list[Event]) -> list[Event]:
    """The shortest cycle through `first`, which is one of a cycle that is known."""
    reached: dict[Event, Event] = {}
    frontier = deque([first])
    while frontier:
        event = frontier.popleft()
        for other in before[event]:
            if other == first:
                path = [event]
                while path[-1] != first:
                    path.append(reached[path[-1]])
                return path[::-1]
            if other not in reached:
                reached[other] = event
                frontier.append(other)
    return known


# --------------------------------------------------------------------------------------------- in words


def _described(
    parties: Sequence[Role], issued: Sequence[Sequence[Issue]], cycle: Sequence[_Place]
) -> tuple[Waiting, ...]:
    # Beginning and end of one issue are one line, and so is what comes after what comes after something.
    places = [place for at, place in enumerate(cycle) if place[:2] != cycle[at - 1][:2]]
    reasons = [_reason(issued, *pair) for pair in _around(places)]
    kept = [
        place for at, place in enumerate(places) if reasons[at] in ("begin", "end") or reasons[at] != reasons[at - 1]
    ]
    return tuple(_waiting(parties, issued, *pair) for pair in _around(kept))


def _around(places: Sequence[_Place]) -> Iterator[tuple[_Place, _Place]]:
    """Each with the next, the last with the first."""
    return zip(places, [*places[1:], *places[:1]], strict=True)


def _reason(issued: Sequence[Sequence[Issue]], mine: _Place, other: _Place) -> Reason:
    one, two = issued[mine.party][mine.issue], issued[other.party][other.issue]
    if mine.party != other.party:
        return "begin"
    if one.waits == other.issue:
        return "end"
    return "behind" if one.stream is not None and one.stream == two.stream and other.ends else "after"


def _waiting(parties: Sequence[Role], issued: Sequence[Sequence[Issue]], mine: _Place, other: _Place) -> Waiting:
    role, issue = parties[mine.party], issued[mine.party][mine.issue]
    whom, there = parties[other.party], issued[other.party][other.issue]
    return Waiting(
        role.ranks[0],
        str(role),
        issue.at,
        f"{issue.part}`{role.actions[issue.at]}`",
        issue.stream,
        _reason(issued, mine, other),
        str(whom),
        f"{there.part}`{whom.actions[there.at]}`",
    )
