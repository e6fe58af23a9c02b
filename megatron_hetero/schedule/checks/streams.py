"""Maps the actions of a rank to a GPU: work on its compute stream, operations on the streams of communicators.

NCCL gives a communicator one stream on each of its ranks, first in, first out, for its collectives and, if created
eagerly, for its unbatched point-to-point too. The host of a rank issues its actions and never blocks.

  * *Work* (a `run`) is on the compute stream. All ranks of a stage compute it together, since it may communicate.
  * An *operation* is on the stream of its communicator. A batch of point-to-point is one operation.
  * A *stream wait* (in `wait` and `finish`) makes the compute stream wait for the end of an operation.

    action            sending side, or collective                       receiving side
    run               work                                              the same
    send              operation                                         -
    irecv             -                                                 operation; of a B whose F has not run: after it
    wait              -                                                 stream wait
    start, disjoint   B: reduce, wait for it; then the batch of sends   the batch of receives
    finish, disjoint  wait for it                                       wait for it; gather, wait for that
    start, shared     operation of all participants                     the same
    finish, shared    wait for it; one more operation, wait for that    the same

The sides of a "disjoint" boundary share no rank, those of a "shared" one do. Which exchanges of a crossing a batch
needs, between which ranks, depends on its plan; here a crossing has all of them, between all ranks of its sides. A
start of B may occur during the backward of the text module, as soon as the gradients of rows are known, so that this
work has two parts. Tokens are embedded before rows are waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_hetero.distributed.communicators import EdgeUse, Link
from megatron_hetero.schedule.actions import Action, start
from megatron_hetero.schedule.communication import starts_early, use_of
from megatron_hetero.schedule.program import Role, Schedule


@dataclass(frozen=True)
class Wiring:
    """Which operations of a rank share a communicator.

    `links`: one communicator for activations (F, R) and one for gradients (B) per ordered pair of ranks (`pair`) or per
    pipeline. `boundaries`: one communicator per direction of an edge, or per edge. The defaults are those of
    `megatron_hetero.distributed.communicators`.
    """

    links: Literal["pair", "pipeline"] = "pair"
    boundaries: Literal["direction", "boundary"] = "direction"

    def of(self, use: Link | EdgeUse) -> str:
        """The name of the communicator for a use."""
        if isinstance(use, Link):
            return str(use) if self.links == "pair" else f"{use.module} {use.direction}"
        return str(use) if self.boundaries == "direction" else "-".join(use.edge.ends)


class Issue(NamedTuple):
    """A unit that a host issues: work (no `stream`), an operation, or a stream wait (`waits`: the operation's index).

    `at`: the index of its action. `part`: which part of the action, as text before its name. `joins`: the event that it
    contributes to by beginning. `needs`: it ends when all issues that join this event have begun.
    """

    at: int
    part: str
    stream: str | None = None
    joins: Hashable = None
    needs: Hashable = None
    waits: int | None = None


LinkOf = Callable[[Action], Hashable]
"""Distinguishes the transfers of one stage, kind and micro-batch whose ranks have different peers."""


def issues(schedule: Schedule, role: Role, wiring: Wiring, link: LinkOf = lambda action: None) -> list[Issue]:
    """The issues of each rank of the role, in order. Its actions must be complete, each once."""
    host = _Host(schedule, role, wiring, link)
    for at, action in enumerate(role.actions):
        host.issue(at, action)
    return host.issued


class _Host:
    """The host of one role: turns its actions into issues."""

    def __init__(self, schedule: Schedule, role: Role, wiring: Wiring, link: LinkOf):
        self.schedule, self.role, self.wiring, self.link = schedule, role, wiring, link
        self.issued: list[Issue] = []
        self.crosses = {edge: schedule.crosses(role, edge) for edge in schedule.edges}
        self.position = {action: at for at, action in enumerate(role.actions)}
        self.crossings = [a for a in role.actions if a.op in ("start", "finish")]
        self.next_crossing = 0
        self.operation: dict[Action, int] = {}  # by irecv or start, its (last) operation
        self.early: dict[Action, int] = {}  # by irecv that its `wait` precedes, that wait
        self.ran: set[tuple[str, int | None, int]] = set()
        self.deferred: dict[str, deque[Action]] = {}
        self.embedded: set[tuple[str, int]] = set()

    def issue(self, at: int, action: Action) -> None:
        match action.op:
            case "run":
                self._run(at, action)
            case "send":
                self._transfer(at, action, "send")
            case "irecv":
                self._irecv(action)
            case "wait":
                self._wait(at, action)
            case "start":
                self._start(action)
                self.next_crossing += 1
            case "finish":
                self._finish(at, action)
                self.next_crossing += 1

    def _add(self, issue: Issue) -> int:
        self.issued.append(issue)
        return len(self.issued) - 1

    def _stream(self, action: Action) -> str:
        return self.wiring.of(use_of(self.schedule, action))

    def _stream_wait(self, at: int, part: str, operation: int) -> None:
        self.issued.append(Issue(at, part, waits=operation))

    # ------------------------------------------------------------------------------------------------ work

    def _run(self, at: int, action: Action) -> None:
        self._work(at, "", (action, 0))
        if action.kind == "B" and (action.module, action.stage) in self.schedule.entering:
            following = self.crossings[self.next_crossing] if self.next_crossing < len(self.crossings) else None
            if following is not None and starts_early(self.schedule, action, following):
                self._start(following)
            self._work(at, "the rest of ", (action, 1))
        if action.kind != "B":
            self.ran.add((action.module, action.stage, action.micro_batch))
            self._post_deferred(action.module)

    def _work(self, at: int, part: str, key: Hashable) -> None:
        self.issued.append(Issue(at, part, None, key, key))

    # ------------------------------------------------------------------------------------------- pipelines

    def _transfer(self, at: int, action: Action, what: Literal["send", "irecv"]) -> int:
        source, stream = action.stage if what == "send" else action.peer, self._stream(action)
        message = action.kind, action.module, source, action.micro_batch, self.link(action)
        return self._add(Issue(at, "", stream, message, message))

    def _irecv(self, action: Action) -> None:
        if action.kind != "B":
            self._receive(action)
            return
        # A gradient has the shape of its output, and is received once that is known.
        self.deferred.setdefault(action.module, deque()).append(action)
        self._post_deferred(action.module)

    def _post_deferred(self, module: str) -> None:
        waiting = self.deferred.get(module, ())
        while waiting and (module, waiting[0].stage, waiting[0].micro_batch) in self.ran:
            self._receive(waiting.popleft())

    def _receive(self, action: Action) -> None:
        self.operation[action] = self._transfer(self.position[action], action, "irecv")
        if action in self.early:
            wait = self.early[action]
            self.issued[wait] = self.issued[wait]._replace(waits=self.operation[action])

    def _wait(self, at: int, action: Action) -> None:
        posted = Action("irecv", action.kind, action.module, action.micro_batch, action.stage, action.peer)
        if posted not in self.operation:  # The receive is issued later.
            self.early[posted] = len(self.issued)
        self._stream_wait(at, "", self.operation.get(posted, -1))

    # ------------------------------------------------------------------------------------------ boundaries

    def _start(self, action: Action) -> None:
        if action in self.operation:  # It started early.
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
            part = "the sums of "
            self._stream_wait(at, part, self._add(Issue(at, part, stream, (key, "reduce"), (key, "reduce"))))
        self.operation[action] = self._add(Issue(at, "", stream, (key, "out"), (key, "in")))

    def _finish(self, at: int, action: Action) -> None:
        embeds = action.kind == "F" and self.crosses[action.edge][1] and self.schedule.stages_of(action.edge)[1] == 0
        if embeds and (key := (action.edge.target, action.micro_batch)) not in self.embedded:
            self.embedded.add(key)
            self._work(at, "the embedding before ", ("embed", key))
        started = start(action.kind, action.edge, action.micro_batch)
        self._stream_wait(at, "", self.operation[started])
        if not self.schedule.collective[action.edge] and not self._gathers(action):
            return
        key = (action.kind, action.edge, action.micro_batch), 2
        part, stream = "the gather of ", self._stream(action)
        self._stream_wait(at, part, self._add(Issue(at, part, stream, key, key)))

    def _gathers(self, action: Action) -> bool:
        """Whether the role receives, and its side has several ranks."""
        return self._receives(action) and len(self.schedule.sides(action.edge)[action.kind == "F"]) > 1

    def _receives(self, action: Action) -> bool:
        return self.crosses[action.edge][action.kind == "F"]
