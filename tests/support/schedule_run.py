"""Executes the actions of a schedule on the process group with NCCL's rules, with small tensors and no model, to see
whether they end.

What an action does is what `megatron_hetero.step.interpreter` and the boundary's communicator do: a work is a
collective of the ranks of its stage; a crossing has all of its exchanges, between all ranks of its sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.layout.communicators import DIRECTIONS, EdgeUse, Link
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.deadlock import DESIGN, Wiring
from megatron_hetero.schedule.program import Schedule, use_of
from tests.support.pool import Pool, world

Ranks = tuple[int, ...]


def runs_to_the_end(schedule: Schedule, pool: Pool, wiring: Wiring = DESIGN) -> str | None:
    """None where the schedule ends on the ranks of the pool, else what the process group says of it.

    Args:
        schedule: may be wrong; its ranks are among those of the pool.
        pool: with NCCL's rules, and with one connection or without.
        wiring: which operations share a communicator.
    """
    failures = {outcome.failure for outcome in pool.attempt(execute, schedule, wiring)} - {None}
    if not failures:
        return None
    said = [str(failure).split("RuntimeError: ")[-1] for failure in failures]
    text = min(said, key=len)
    assert text.startswith("deadlock") and all(other.startswith(text.rstrip()) for other in said), said
    return text


def execute(schedule: Schedule, wiring: Wiring) -> None:
    """Execute this rank's actions, on ranks that have connected before. What the workers of the pool run."""
    world().client.takes_as_connected = True
    groups = {name: dist.split_group(split_ranks=parts, group_desc=name) for name, parts in _groups(schedule, wiring)}
    if dist.get_rank() in schedule.role_index:
        _Rank(schedule, wiring, groups).run()


def _groups(schedule: Schedule, wiring: Wiring) -> list[tuple[str, list[list[int]]]]:
    """By name, the ranks of all communicators of that name: of those that send each other something, and of stages."""
    linked: dict[str, list[Ranks]] = {}
    for module in schedule.modules:
        linked[f"work of {module.name}"] = [module.stage_ranks(at) for at in range(module.layout.pp)]
        for stage in range(module.stages - 1):
            for direction, sender, receiver in zip(DIRECTIONS, (stage, stage + 1), (stage + 1, stage), strict=True):
                name = wiring.of(Link(module.name, direction, module.coordinate(sender)))
                pairs = zip(module.stage_ranks(sender), module.stage_ranks(receiver), strict=True)
                linked.setdefault(name, []).extend(pair for pair in pairs if pair[0] != pair[1])
    for edge in schedule.edges:
        for direction in DIRECTIONS:
            name = wiring.of(EdgeUse(edge, direction))
            linked.setdefault(name, []).append(tuple(chain(*schedule.sides(edge))))
    return [(name, parts) for name, links in linked.items() if (parts := _connected(links))]


def _connected(links: Iterable[Ranks]) -> list[list[int]]:
    parts: list[set[int]] = []
    for link in links:
        touched = [part for part in parts if not part.isdisjoint(link)]
        parts = [part for part in parts if part not in touched] + [set(link).union(*touched)]
    return [sorted(part) for part in parts]


class _Rank:
    """One rank's execution of one step."""

    def __init__(self, schedule: Schedule, wiring: Wiring, groups: dict[str, Any]):
        self.schedule, self.wiring, self.groups = schedule, wiring, groups
        self.rank = dist.get_rank()
        self.actions = schedule.actions_of(self.rank)
        self.watchdog = Watchdog(0, self.rank)  # Tells the process group what this rank does.
        self.works: dict[Action, Any] = {}
        self.leaving: list[Any] = []
        self.deferred: dict[str, deque[Action]] = {}
        self.ran: set[tuple[str, int | None, int]] = set()
        self.embedded: set[tuple[str, int]] = set()

    def run(self) -> None:
        """All actions, in order."""
        for at, action in enumerate(self.actions):
            with self.watchdog.doing(partial(str, action)):
                self._do(at, action)
        for work in self.leaving:
            work.wait()

    def _do(self, at: int, action: Action) -> None:
        match action.op:
            case "run":
                self._run(at, action)
            case "send":
                self.leaving.append(self._transfer(action, sends=True))
            case "irecv" if action.kind == "B":
                self.deferred.setdefault(action.module, deque()).append(action)
                self._receive_what_is_known(action.module)
            case "irecv":
                self.works[action] = self._transfer(action, sends=False)
            case "wait":
                self.works[replace(action, op="irecv")].wait()
            case "start" if action not in self.works:
                self.works[action] = self._start(action)
            case "finish":
                self._finish(action)

    def _run(self, at: int, action: Action) -> None:
        assert action.stage is not None
        self._work(action.module, action.stage)
        if action.kind != "B":
            self.ran.add((action.module, action.stage, action.micro_batch))
            self._receive_what_is_known(action.module)
        elif any((e.target, e.target_stage or 0) == (action.module, action.stage) for e in self.schedule.edges):
            # The next crossing, where it is the return of this micro-batch's rows, starts amid the backward.
            following = next((a for a in self.actions[at:] if a.op in ("start", "finish")), None)
            returns = ("start", "B", action.micro_batch)
            is_return = following and (following.op, following.kind, following.micro_batch) == returns
            if (
                following
                and is_return
                and (following.edge.target, following.edge.target_stage or 0) == (action.module, action.stage)
                and self.schedule.returns_early(following.edge)
            ):
                self.works[following] = self._start(following)
            self._work(action.module, action.stage)

    def _work(self, module: str, stage: int) -> None:
        """What the ranks of a stage compute together."""
        dist.all_reduce(torch.ones(1), group=self.groups[f"work of {module}"])

    def _transfer(self, action: Action, *, sends: bool) -> Any:
        call, group = dist.isend if sends else dist.irecv, self._group(action)
        return call(torch.ones(2), self.schedule.peer_rank(self.rank, action), group=group)

    def _receive_what_is_known(self, module: str) -> None:
        """A gradient is received when what it is of has been computed."""
        waiting = self.deferred.get(module, ())
        while waiting and (module, waiting[0].stage, waiting[0].micro_batch) in self.ran:
            action = waiting.popleft()
            self.works[action] = self._transfer(action, sends=False)

    def _start(self, action: Action) -> Any:
        own, other, receives = self._sides(action)
        if not other:
            return self._all_to_all(action)
        if not receives and action.kind == "B":
            _wait(self._batch(action, own, own))
        return self._batch(action, (), other) if receives else self._batch(action, other, ())

    def _finish(self, action: Action) -> None:
        own, other, receives = self._sides(action)
        is_first = not action.edge.target_stage
        target = action.edge.target
        embeds = is_first and action.kind == "F" and self.rank in self.schedule.module[target].stage_ranks(0)
        if embeds and (target, action.micro_batch) not in self.embedded:
            self.embedded.add((target, action.micro_batch))
            self._work(target, 0)
        _wait(self.works[replace(action, op="start")])
        if receives:
            _wait(self._batch(action, own, own) if other else self._all_to_all(action))

    def _sides(self, action: Action) -> tuple[Ranks, Ranks, bool]:
        """The ranks of the own side, of the other, and whether the own one receives; of a collective all, and none."""
        encoder, text = self.schedule.sides(action.edge)
        if self.schedule.collective[action.edge]:
            return encoder, (), True
        if self.rank in encoder:
            return encoder, text, action.kind == "B"
        return text, encoder, action.kind == "F"

    def _group(self, action: Action) -> Any:
        return self.groups[self.wiring.of(use_of(self.schedule, action))]

    def _all_to_all(self, action: Action) -> Any:
        group = self._group(action)
        return dist.all_to_all_single(torch.ones(group.size()), torch.ones(group.size()), group=group, async_op=True)

    def _batch(self, action: Action, to: Sequence[int], by: Sequence[int]) -> Any:
        """One batch of a row to each of some ranks and of one from each of others; nothing where there are none."""
        group = self._group(action)
        calls = [(dist.isend, rank) for rank in to] + [(dist.irecv, rank) for rank in by]
        batch = [dist.P2POp(call, torch.ones(1), rank, group) for call, rank in calls if rank != self.rank]
        return dist.batch_isend_irecv(batch)[0] if batch else None


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
