"""Who waits for whom: which operations can still end, and the cycle in words where one cannot.

Nodes of the graph are operations that are to begin or to end, hosts that are to come to a communicator, and threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.nccl_rules.rules import Operation, Rules


@dataclass(frozen=True)
class End:
    """An operation ends."""

    operation: Operation


@dataclass(frozen=True)
class Begin:
    """An operation begins."""

    operation: Operation


@dataclass(frozen=True)
class Come:
    """The host of a rank issues something on a communicator, behind what is there."""

    rank: int
    communicator: str


@dataclass(frozen=True)
class Issue:
    """Any thread of a rank that uses a communicator goes on."""

    rank: int
    communicator: str


@dataclass(frozen=True)
class Thread:
    """A thread of a rank goes on."""

    rank: int
    name: str


Node = End | Begin | Come | Issue | Thread
RANK_HAS_ENDED = "deadlock: ranks wait for one that has ended its job"
MAIN = "MainThread"
"""Is expected to use a communicator that no thread of its rank has used."""


def needs(rules: Rules, node: Node) -> list[Node] | None:
    """What must happen before; all of it, but for `Issue` any. None: it never can."""
    match node:
        case End(operation):
            return _needs_to_end(operation)
        case Begin(operation):
            before = [] if operation.before is None else [End(operation.before)]
            queue = rules.unbegun[operation.rank]
            first = [Begin(queue[0])] if operation in queue and queue[0] is not operation else []
            return [*before, *first]
        case Come(rank, communicator):
            if rank in rules.finished:
                return None
            on = rules.communicators[communicator]
            ahead = [End(on.streams[rank][-1])] if on.streams[rank] else []
            return [*ahead, Issue(rank, communicator)]
        case Issue(rank, communicator):
            if rank in rules.finished:
                return None
            return [Thread(rank, name) for name in rules.communicators[communicator].threads[rank] or {MAIN}]
        case Thread(rank, name):
            if (rank, name) in rules.meeting:
                communicator = rules.meeting[rank, name][0].communicator
                return [Issue(other, communicator) for _, other in rules.unmet(rank, name)]
            return [End(rules.waiting[rank, name][0])] if (rank, name) in rules.waiting else []


def _needs_to_end(operation: Operation) -> list[Node]:
    request = operation.request
    begin: list[Node] = [] if operation.begun else [Begin(operation)]
    if request.transfers:
        for i in sorted(operation.open):
            partner = operation.partners[i]
            if partner is None:
                begin.append(Come(request.transfers[i].peer, request.communicator))
            elif not partner[0].begun:
                begin.append(Begin(partner[0]))
        return begin
    for rank in request.ranks:
        other = operation.slot.get(rank)
        if other is None:
            begin.append(Come(rank, request.communicator))
        elif not other.begun and other is not operation:
            begin.append(Begin(other))
    return begin


def stuck(rules: Rules) -> list[Node]:
    """The threads that wait for what cannot end, each with the rest of its path: a walk along what cannot happen, until
    it comes back to a node or to a rank that has finished. Empty where all can go on.
    """
    threads: list[Node] = [Thread(*waiter) for waiter in (*rules.waiting, *rules.meeting)]
    graph: dict[Node, list[Node] | None] = {}
    todo = list(threads)
    while todo:
        node = todo.pop()
        if node not in graph:
            graph[node] = needs(rules, node)
            todo.extend(graph[node] or ())
    possible: set[Node] = set()
    grown = True
    while grown:
        grown = False
        for node in reversed(list(graph)):
            below = graph[node]
            if node in possible or below is None:
                continue
            happens = any if isinstance(node, Issue) else all
            if happens(other in possible for other in below):
                possible.add(node)
                grown = True
    start = next((node for node in threads if node not in possible), None)
    path: list[Node] = []
    while start is not None and start not in path:
        path.append(start)
        start = next((other for other in graph[start] or () if other not in possible), None)
    return path if start is None else path[path.index(start) :]


def describe_deadlock(rules: Rules, path: list[Node]) -> str:
    """The path, a line for each thing that waits."""
    ends = isinstance(path[-1], Come | Issue) and path[-1].rank in rules.finished
    head = RANK_HAS_ENDED if ends else "deadlock: ranks wait for each other"
    following: list[Any] = [*path[1:], None if ends else path[0]]
    lines = [_line(rules, node, after) for node, after in zip(path, following, strict=True)]
    return "\n  ".join([head, *filter(None, lines)])


def _line(rules: Rules, node: Node, after: Node | None) -> str | None:
    match node, after:
        case Thread(rank, name), End():
            operation, where = rules.waiting[rank, name]
            thread = "" if name == MAIN else f", thread {name}"
            return f"rank {rank}{thread}, {where}: waits for {operation.request}"
        case Thread(rank, name), Issue(other, _):
            request, _ = rules.meeting[rank, name]
            return f"rank {rank}, {request.where}: connects for {request}, to which rank {other} has not come"
        case Begin(operation), End(before):
            return (
                f"rank {operation.rank}, {operation.request.where}: {operation.request} cannot begin before "
                f"{before.request.what} has ended, which stands before it on the same communicator, issued in "
                f"{before.request.where}"
            )
        case Begin(operation), Begin(before):
            return (
                f"rank {operation.rank}, {operation.request.where}: {operation.request} cannot begin before "
                f"{before.request} has begun, issued earlier in {before.request.where} (one connection)"
            )
        case End(operation), Come(rank, _):
            return (
                f"rank {operation.rank}, {operation.request.where}: {operation.request} needs rank {rank}, which has "
                f"{'ended its job' if rank in rules.finished else 'not come to it'}"
            )
        case Come(rank, _), End(before):
            return (
                f"rank {rank} would come to it behind {before.request}, which stands there, issued in "
                f"{before.request.where}"
            )
        case _:
            return None
