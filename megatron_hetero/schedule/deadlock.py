"""Checks whether a schedule ends on NCCL, and finds the cycle of ranks that wait for each other if it does not.

NCCL gives a communicator one stream on each of its ranks, first in, first out, for its collectives and, if created
eagerly, also for its unbatched point-to-point. The host of a rank issues its actions, and waits only for work (for the
sizes of exchanges between experts). Everything that the host issues later begins after that work, on any stream.

  * *Work* (a `run`) is on the compute stream. All ranks of a stage, of all replicas, compute it together, because it
    may communicate: experts exchange tokens over replicas, in step with the computation.
  * An *operation* is on the stream of its communicator. A batch of point-to-point is one operation.
  * A *stream wait* (in `wait` and `finish`) makes the compute stream wait for the end of an operation.

    action            sending side, or collective                       receiving side
    run               work                                              the same
    send              operation                                         -
    irecv             -                                                 operation; for B, not before its F has run
    wait              -                                                 stream wait
    start, disjoint   B: reduce, wait for it; then the batch of sends   the batch of receives
    finish, disjoint  wait for it                                       wait for it; gather, wait for that
    start, shared     operation of all participants                     the same
    finish, shared    wait for it; one more operation, wait for that    the same

The sides of a "disjoint" boundary share no rank; the sides of a "shared" boundary do. The plan of a batch determines
which exchanges of a crossing it needs, between which ranks; here a crossing has all exchanges, between all ranks of its
sides. A start of B may occur during the backward of the text module, as soon as the gradients of rows are known, so
that this work is issued in two pieces. Tokens are embedded before the wait for rows.

docs/schedules.md, "How deadlocks are excluded", states the rules and their assumptions. Each event waits for all of its
predecessors, so a schedule ends if and only if the graph of beginnings and ends has no cycle, whatever the durations.
A crossing that a batch of data does not need is skipped on all ranks that take part, which adds no cycle.

All ranks of a role issue the same actions, so the graph has one node for all ranks of a role, and a transfer is between
all ranks of its stages. Where this graph has a cycle, roles are split until all peers of a role's ranks have the same
role: a cycle of these roles is a cycle of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, count, pairwise
from typing import Literal, NamedTuple

from megatron_hetero.layout.communicators import EdgeUse, Link
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Role, Schedule, early_start, use_of

Communicator = Callable[[Link | EdgeUse], str]
"""A function that returns the name of a use's communicator. `str` names the communicators that `Topology` creates."""


class Issue(NamedTuple):
    """One thing that a host issues: work (no `stream`), an operation, or a stream wait (`waits`: the index of the
    operation).

    `at`: the index of its action. `detail`: text before the action's name that tells which step of it this is. `joins`:
    the key of an event that needs this issue to begin. `needs`: the key of the event that must occur before it ends.
    """

    at: int
    detail: str
    stream: str | None = None
    joins: Hashable = None
    needs: Hashable = None
    waits: int | None = None


def issues(
    schedule: Schedule, role: Role, communicator: Communicator = str, has_split_roles: bool = False
) -> list[Issue]:
    """Return the issues of the host of each rank of the role, in order. The role must have each of its actions once.
    `has_split_roles`: whether the schedule was returned by `Schedule.with_split_roles`.
    """
    host = _Host(schedule, role, communicator, has_split_roles)
    for at, action in enumerate(role.actions):
        host.issue(at, action)
    return host.issued


class _Host:
    """The host of one role, which translates the role's actions into issues."""

    def __init__(self, schedule: Schedule, role: Role, communicator: Communicator, has_split_roles: bool):
        self.schedule, self.role, self.communicator = schedule, role, communicator
        self.has_split_roles = has_split_roles
        self.issued: list[Issue] = []
        self.crosses = {edge: schedule.crosses(role, edge) for edge in schedule.edges}
        self.position = {action: at for at, action in enumerate(role.actions)}
        self.operation: dict[Action, int] = {}  # by irecv or start, the index of its (last) operation
        self.early: dict[Action, int] = {}  # by irecv that is issued after its `wait`, the index of that `wait`
        self.ran: set[tuple[str, int | None, int]] = set()  # the forwards that have run: module, stage, micro-batch
        self.deferred: dict[str, deque[Action]] = {}  # by module, receives that are not issued yet
        self.embedded: set[tuple[str, int]] = set()  # the embeddings that have run: module, micro-batch

    def issue(self, at: int, action: Action) -> None:
        """Append the issues of `action`, the role's action at index `at`."""
        match action.op:
            case "run":
                self._run(at, action)
            case "send":
                self._transfer(at, action)
            case "irecv":
                self._irecv(action)
            case "wait":
                self._wait(at, action)
            case "start":
                self._start(action)
            case "finish":
                self._finish(at, action)

    def _add(self, issue: Issue) -> int:
        self.issued.append(issue)
        return len(self.issued) - 1

    def _stream(self, action: Action) -> str:
        return self.communicator(use_of(self.schedule, action))

    def _stream_wait(self, at: int, detail: str, operation: int) -> None:
        self.issued.append(Issue(at, detail, waits=operation))

    # ------------------------------------------------------------------------------------------------ work

    def _run(self, at: int, action: Action) -> None:
        self._work(at, "", (action, 0))
        if action.kind == "B" and action.place in self.schedule.entering:
            if early := early_start(self.schedule, self.role.actions, at):
                self._start(early)
            self._work(at, "the rest of ", (action, 1))
        if action.kind != "B":
            self.ran.add((action.module, action.stage, action.micro_batch))
            self._post_deferred(action.module)

    def _work(self, at: int, detail: str, key: Hashable) -> None:
        self.issued.append(Issue(at, detail, None, key, key))

    # ------------------------------------------------------------------------------------------- pipelines

    def _transfer(self, at: int, action: Action) -> int:
        """Issue a send or receive, and return its index. The key of the message names the sender on both sides."""
        sends, rank = action.op == "send", self.role.ranks[0]
        sender = self.schedule.role_index[rank if sends else self.schedule.peer_rank(rank, action)]
        stage = action.stage if sends else action.peer
        message = action.kind, action.module, stage, sender if self.has_split_roles else None, action.micro_batch
        return self._add(Issue(at, "", self._stream(action), message, message))

    def _irecv(self, action: Action) -> None:
        if action.kind != "B":
            self._receive(action)
            return
        # A gradient has the shape of its output, so it is received only after the forward has run.
        self.deferred.setdefault(action.module, deque()).append(action)
        self._post_deferred(action.module)

    def _post_deferred(self, module: str) -> None:
        waiting = self.deferred.get(module, ())
        while waiting and (module, waiting[0].stage, waiting[0].micro_batch) in self.ran:
            self._receive(waiting.popleft())

    def _receive(self, action: Action) -> None:
        self.operation[action] = self._transfer(self.position[action], action)
        if action in self.early:
            wait = self.early[action]
            self.issued[wait] = self.issued[wait]._replace(waits=self.operation[action])

    def _wait(self, at: int, action: Action) -> None:
        posted = action.posted
        if posted not in self.operation:  # The receive is issued later, and `_receive` completes this wait.
            self.early[posted] = len(self.issued)
        self._stream_wait(at, "", self.operation.get(posted, -1))

    # ------------------------------------------------------------------------------------------ boundaries

    def _start(self, action: Action) -> None:
        if action in self.operation:  # The crossing was started early, during a backward.
            return
        at, key = self.position[action], (action.kind, action.edge, action.micro_batch)
        stream = self._stream(action)
        if self.schedule.collective[action.edge]:
            self.operation[action] = self._add(Issue(at, "", stream, (key, 1), (key, 1)))
            return
        if self._receives(action):
            self.operation[action] = self._add(Issue(at, "", stream, (key, "in"), (key, "out")))
            return
        if action.kind == "B" and len(self.schedule.sides(action.edge)[1]) > 1:
            detail = "the sums of "
            self._stream_wait(at, detail, self._add(Issue(at, detail, stream, (key, "reduce"), (key, "reduce"))))
        self.operation[action] = self._add(Issue(at, "", stream, (key, "out"), (key, "in")))

    def _finish(self, at: int, action: Action) -> None:
        embeds = action.kind == "F" and self.crosses[action.edge][1] and self.schedule.stages_of(action.edge)[1] == 0
        if embeds and (key := (action.edge.target, action.micro_batch)) not in self.embedded:
            self.embedded.add(key)
            self._work(at, "the embedding before ", ("embed", key))
        self._stream_wait(at, "", self.operation[action.posted])
        if not self.schedule.collective[action.edge] and not self._gathers(action):
            return
        key = (action.kind, action.edge, action.micro_batch), 2
        detail, stream = "the gather of ", self._stream(action)
        self._stream_wait(at, detail, self._add(Issue(at, detail, stream, key, key)))

    def _gathers(self, action: Action) -> bool:
        """Return whether the role is on the receiving side of a crossing, and several ranks are on that side."""
        return self._receives(action) and len(self.schedule.sides(action.edge)[action.kind == "F"]) > 1

    def _receives(self, action: Action) -> bool:
        return self.crosses[action.edge][action.kind == "F"]


Reason = Literal["begin", "end", "behind", "after"]


class Waiting(NamedTuple):
    """An action of a role that waits for the action of the next `Waiting` in a cycle.

    `role`: the role, or the ranks of a role that wait. `at`: the index of the action. `reason`: the action waits for
    other ranks to `begin` the next action; it waits for the `end` of an operation of the same ranks; it is queued
    `behind` another operation on its communicator; or it begins `after` earlier actions. `text`: a line that says this.
    """

    role: Role
    at: int
    reason: Reason
    text: str


def find_cycle(
    schedule: Schedule, communicator: Communicator = str, *, single_queue: bool = True
) -> list[Waiting] | None:
    """Return the cycle of roles that wait for each other; None if the schedule ends.

    Args:
        schedule: a schedule whose roles have all of their actions once, and finish what they start.
        communicator: a function that returns the name of a use's communicator.
        single_queue: whether all streams of a rank share one hardware queue. A schedule that ends with one queue also
            ends with several.
    """
    for has_split_roles in (False, True):
        schedule = schedule.with_split_roles() if has_split_roles else schedule
        issued = [issues(schedule, role, communicator, has_split_roles) for role in schedule.roles]
        graph = _EventGraph(issued, single_queue)
        if not (stuck := graph.stuck()):
            return None
    return _described(schedule, issued, [*filter(None, map(graph.issue_of, _short_cycle(graph, stuck)))])


# --------------------------------------------------------------------------------------------- the graph

Node = int
"""The number of an event: an issue begins, an issue ends, or all counterparts of an issue have begun."""


class _IssueEnd(NamedTuple):
    """The beginning or the end of an issue of a role, by indices."""

    role: int
    issue: int
    is_end: bool


class _EventGraph:
    """A graph of events, each with its followers. Node 2 i is the beginning of the i-th of all issues, 2 i + 1 its end
    (a stream wait has only an end). Each further node is the event that all counterparts of an operation have begun.
    """

    def __init__(self, issued: Sequence[Sequence[Issue]], single_queue: bool):
        self.first = [0, *accumulate(2 * len(each) for each in issued)]
        self.followers: list[list[Node]] = [[] for _ in range(self.first[-1])]
        self.all_begun: dict[Hashable, Node] = {}
        for first, each in zip(self.first, issued, strict=False):
            self._add_streams(first, each)
            self._add_counterparts(first, each)
            if single_queue:
                operations = [first + 2 * at for at, issue in enumerate(each) if issue.waits is None]
                for begin, following in pairwise(operations):
                    self.followers[begin].append(following)

    def issue_of(self, node: Node) -> _IssueEnd | None:
        """Return the issue whose beginning or end is `node`; None for the event that all counterparts have begun."""
        if node >= self.first[-1]:
            return None
        role = bisect_right(self.first, node) - 1
        at, is_end = divmod(node - self.first[role], 2)
        return _IssueEnd(role, at, bool(is_end))

    def _add_streams(self, first: Node, issued: Sequence[Issue]) -> None:
        followers, computed = self.followers, None
        last: dict[str, Node] = {}
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

    def _add_counterparts(self, first: Node, issued: Sequence[Issue]) -> None:
        for begin, issue in zip(count(first, 2), issued, strict=False):
            if issue.waits is None:
                self.followers[begin].append(self._all(issue.joins))
                self.followers[self._all(issue.needs)].append(begin + 1)

    def _all(self, key: Hashable) -> Node:
        node = self.all_begun.setdefault(key, len(self.followers))
        if node == len(self.followers):
            self.followers.append([])
        return node

    def stuck(self) -> set[Node]:
        """Return the nodes of the events that never occur, because they are in a cycle or after one."""
        missing = [0] * len(self.followers)  # the number of predecessors that have not occurred
        for followers in self.followers:
            for node in followers:
                missing[node] += 1
        ready = [node for node, n in enumerate(missing) if n == 0]
        while ready:
            for node in self.followers[ready.pop()]:
                missing[node] -= 1
                if missing[node] == 0:
                    ready.append(node)
        return {node for node, n in enumerate(missing) if n > 0}


def _short_cycle(graph: _EventGraph, stuck: set[Node]) -> list[Node]:
    """Return a short cycle of nodes in `stuck`, in which each node waits for the next."""
    before: dict[Node, list[Node]] = {node: [] for node in stuck}
    for node in stuck:
        for follower in graph.followers[node]:
            before[follower].append(node)
    node = min(stuck)
    path: dict[Node, None] = {}
    while node not in path:
        path[node] = None
        node = before[node][0]
    nodes = list(path)
    cycle = nodes[nodes.index(node) :]
    return min((_shortest(before, node) for node in cycle[:100]), key=len)


def _shortest(before: Mapping[Node, Sequence[Node]], first: Node) -> list[Node]:
    """Return the shortest cycle through `first`, which must be in a cycle. `before`: the predecessors of each node."""
    reached: dict[Node, Node] = {}
    frontier = deque([first])
    while True:
        node = frontier.popleft()
        for other in before[node]:
            if other == first:
                path = [node]
                while path[-1] != first:
                    path.append(reached[path[-1]])
                return path[::-1]
            if other not in reached:
                reached[other] = node
                frontier.append(other)


# --------------------------------------------------------------------------------------------- in words


def _described(schedule: Schedule, issued: Sequence[Sequence[Issue]], cycle: Sequence[_IssueEnd]) -> list[Waiting]:
    """Describe each step of a cycle, starting at an operation queued behind another, or else at a change of roles."""
    # The beginning and the end of an issue share a line, and so do successive steps with the reason "after".
    ends = [end for at, end in enumerate(cycle) if end[:2] != cycle[at - 1][:2]]
    reasons = [_reason(issued, *pair) for pair in _around(ends)]
    shown = [end for at, end in enumerate(ends) if reasons[at] in ("begin", "end") or reasons[at] != reasons[at - 1]]
    waiting = [_waiting(schedule, issued, *pair) for pair in _around(shown)]
    behind = (at for at, each in enumerate(waiting) if each.reason == "behind")
    others = (at for at, each in enumerate(waiting) if each.role != waiting[at - 1].role)
    first = next(behind, next(others, 0))
    return [*waiting[first:], *waiting[:first]]


def _around(ends: Sequence[_IssueEnd]) -> Iterator[tuple[_IssueEnd, _IssueEnd]]:
    """Yield each pair of successive ends, and finally the pair of the last end and the first."""
    return zip(ends, [*ends[1:], *ends[:1]], strict=True)


def _reason(issued: Sequence[Sequence[Issue]], mine: _IssueEnd, other: _IssueEnd) -> Reason:
    one, two = issued[mine.role][mine.issue], issued[other.role][other.issue]
    if mine.role != other.role:
        return "begin"
    if one.waits == other.issue:
        return "end"
    return "behind" if one.stream is not None and one.stream == two.stream and other.is_end else "after"


def _waiting(schedule: Schedule, issued: Sequence[Sequence[Issue]], mine: _IssueEnd, other: _IssueEnd) -> Waiting:
    role, issue = schedule.roles[mine.role], issued[mine.role][mine.issue]
    whom, there = schedule.roles[other.role], issued[other.role][other.issue]
    what, on = f"{there.detail}`{whom.actions[there.at]}`", f" on communicator `{issue.stream}`" if issue.stream else ""
    reason = _reason(issued, mine, other)
    waits = {
        "begin": f"waits for {whom} to begin {what}",
        "end": f"waits for the end of {what}",
        "behind": f"is queued behind {what}",
        "after": f"begins after {what}",
    }[reason]
    return Waiting(role, issue.at, reason, f"{role}: {issue.detail}`{role.actions[issue.at]}`{on} {waits}")
