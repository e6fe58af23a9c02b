"""Executes a schedule rank by rank, as processes would, to judge `check` and the builders by something else.

Ranks advance in random order. Messages between two ranks are a queue without tags, collectives are matched by their
number in the group, and work looks for its inputs in what the rank holds. Nothing here is shared with
`megatron_hetero.schedule.check`.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random

from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Schedule


class Failure(Exception):
    """A rank received or used what it should not, or all that are left wait for ever."""


class Execution:
    """All ranks of a schedule."""

    def __init__(self, schedule: Schedule, random: Random):
        self.schedule, self.random = schedule, random
        self.at = {rank: 0 for role in schedule.roles for rank in role.ranks}
        self.sent: dict[tuple, list] = defaultdict(list)
        self.receives: dict[tuple, list] = defaultdict(list)
        self.holds: dict[int, set] = defaultdict(set)
        self.started: dict[tuple, list] = defaultdict(list)
        self.entered: dict[tuple, list] = defaultdict(list)
        self.waiting: dict[int, Action] = {}

    def run(self) -> None:
        """Execute everything. Raises `Failure`."""
        awake = set(self.at)
        while awake:
            rank = self.random.choice(sorted(awake))
            if self._advance(rank):
                awake = {r for r in self.at if self.at[r] < len(self.schedule.actions_of(r))}
            else:
                awake.discard(rank)
        if any(self.at[rank] < len(self.schedule.actions_of(rank)) for rank in self.at):
            raise Failure("deadlock")
        if any(len(self.sent[key]) != len(self.receives[key]) for key in {*self.sent, *self.receives}):
            raise Failure("messages that nobody received")

    def _advance(self, rank: int) -> bool:
        action = self.schedule.actions_of(rank)[self.at[rank]]
        if not getattr(self, f"_{action.op}")(rank, action):
            return False
        self.at[rank] += 1
        self.holds[rank].add(action)
        return True

    def _module(self, action: Action):
        return self.schedule.module[action.module]

    # -------------------------------------------------------------------------------------------- pipelines

    def _send(self, rank: int, a: Action) -> bool:
        self._require(rank, Action("run", a.kind, a.module, a.micro_batch, a.stage))
        self.sent[a.module, rank, self.schedule.peer_rank(rank, a)].append((a.kind, a.stage, a.peer, a.micro_batch))
        return True

    def _irecv(self, rank: int, a: Action) -> bool:
        self.receives[a.module, self.schedule.peer_rank(rank, a), rank].append((a.kind, a.peer, a.stage, a.micro_batch))
        return True

    def _wait(self, rank: int, a: Action) -> bool:
        key, wanted = (a.module, self.schedule.peer_rank(rank, a), rank), (a.kind, a.peer, a.stage, a.micro_batch)
        if wanted not in self.receives[key]:
            raise Failure(f"rank {rank} waits for {a} without an irecv")
        number = self.receives[key].index(wanted)
        if number >= len(self.sent[key]):
            return False
        if self.sent[key][number] != wanted:
            raise Failure(f"rank {rank} waits for {a} and gets {self.sent[key][number]}")
        return True

    # -------------------------------------------------------------------------------------------- crossings

    def _sides(self, a: Action) -> tuple[set[int], set[int]]:
        source, target = map(set, self.schedule.sides(a.edge))
        return (source, target) if a.kind == "F" else (target, source)

    def _ends(self, edge: Edge) -> tuple[int, int]:
        """The stages that it leaves and enters."""
        if edge.source_stage is None or edge.target_stage is None:
            return self.schedule.module[edge.source].stages - 1, 0
        return edge.source_stage, edge.target_stage

    def _start(self, rank: int, a: Action) -> bool:
        source, _target = self._sides(a)
        if rank in source:
            leaves, enters = self._ends(a.edge)
            forward = Action("run", "F", a.module, a.micro_batch, leaves)
            backward = Action("run", "B", a.edge.target, a.micro_batch, enters)
            self._require(rank, forward if a.kind == "F" else backward)
        self._enter(rank, a)
        return True

    def _enter(self, rank: int, a: Action) -> None:
        """The rank's next operation of the group must be the one that its fellows have at that number. Where no rank is
        on both sides, only receivers do something together when they finish.
        """
        source, target = self._sides(a)
        collective = bool(source & target)
        lane = (a.edge, a.kind) if collective else (a.edge, a.kind, a.op)
        members = source | target if collective or a.op == "start" else target
        if rank not in members:
            return
        mine = self.entered[lane, rank]
        mine.append(a)
        for other in members:
            theirs = self.entered[lane, other]
            if len(theirs) >= len(mine) and theirs[len(mine) - 1] != a:
                raise Failure(f"rank {rank} does {a} while rank {other} does {theirs[len(mine) - 1]}")

    def _finish(self, rank: int, a: Action) -> bool:
        begun = Action("start", a.kind, a.module, a.micro_batch, None, a.peer)
        self._require(rank, begun)
        if self.waiting.get(rank) != a:
            self.waiting[rank] = a
            self._enter(rank, a)
        source, target = self._sides(a)

        def all_started(ranks: set[int]) -> bool:
            return all(begun in self.holds[r] for r in ranks)

        def all_wait(ranks: set[int]) -> bool:
            return all(self.waiting.get(r) == a or a in self.holds[r] for r in ranks)

        if source & target:
            return all_wait(source | target)
        return all_started(target) if rank in source else all_started(source) and all_wait(target)

    # ------------------------------------------------------------------------------------------------ work

    def _require(self, rank: int, action: Action) -> None:
        if action not in self.holds[rank]:
            raise Failure(f"rank {rank} lacks {action}")

    def _run(self, rank: int, a: Action) -> bool:
        module, m = self._module(a), a.micro_batch
        back = a.kind == "B"
        source = a.stage + 1 if back else a.stage - 1  # pyright: ignore[reportOptionalOperand]
        if 0 <= source < module.stages:
            self._require(rank, Action("wait", a.kind, a.module, m, a.stage, source))
        for edge in self.schedule.edges:
            leaves, enters = self._ends(edge)
            if (back and (edge.source, leaves) == (a.module, a.stage)) or (
                not back and (edge.target, enters) == (a.module, a.stage)
            ):
                self._require(rank, Action("finish", "B" if back else "F", edge.source, m, None, edge))
        if a.kind != "F":
            again = back and module.style == "recompute"
            self._require(rank, Action("run", "R" if again else "F", a.module, m, a.stage))
        if a in self.holds[rank]:
            raise Failure(f"rank {rank} runs {a} twice")
        return True


def execute(schedule: Schedule, seed: int = 0) -> None:
    """Execute the schedule in some order of ranks. Raises `Failure`."""
    Execution(schedule, Random(seed)).run()
