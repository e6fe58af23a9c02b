"""Executes a schedule on GPUs in thought, rank by rank, to judge `find_cycle` by something else.

Each rank has a list of what its host has issued: kernels of work, communication in the queue of a communicator, and
waits of the compute queue for communication. Whatever may begin begins, whatever may end ends, in any order, until
nothing changes. Nothing here is shared with `megatron_hetero.schedule.deadlock`.

A GPU has `sms`: kernels begin where they fit beside those that have begun and not ended, each of as many CTAs as `ctas`
says of its queue. Sums of gradients take `sum_ctas` of each module of the rank all the while. It has `streams`: from so
many communicators on two share one, as in PyTorch's pool.

A batch may leave things out: `absent` modules of micro-batches that have nothing for them, and `bare` messages of a
crossing apart, which carry no row. Which start of a return comes in the middle of the backward, and which receive is
deferred, is what `megatron_hetero.step.execution` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Schedule

COLLECTIVE_CTAS = 32


@dataclass(eq=False)
class Entry:
    """Of a rank's list. `queue`: of a communicator, or "compute". `tag` and `needs`: it ends when all entries that have
    a tag in `needs` have begun. `after`: the entry that a wait is for; found when the list is complete, by `of`.
    """

    rank: int
    action: Action
    queue: str
    tag: Hashable = None
    needs: frozenset = frozenset()
    waits: bool = False
    of: Action | None = None
    after: Entry | None = None
    begun: bool = False
    ended: bool = False

    @property
    def others(self) -> set[int]:
        """Further ranks that it needs."""
        return {rank for _, rank in self.needs} - {self.rank}


class Gpu:
    """One rank: its entries, and for each queue the numbers of those that have not ended, the next one last."""

    def __init__(self, entries: list[Entry], one_queue: bool, sms: float, ctas: Callable[[Entry], int]):
        self.entries, self.one_queue, self.free, self.ctas = entries, one_queue, sms, ctas
        self.queues: dict[str, list[int]] = {}
        for at in reversed(range(len(entries))):
            self.queues.setdefault(entries[at].queue, []).append(at)
        self.first_unbegun = 0

    def advance(self, tagged: dict[Hashable, Entry]) -> bool:
        """Let begin and end what may; whether anything did."""
        moved = False
        while any(self._step(queue, tagged) for queue in self.queues.values() if queue):
            moved = True
        return moved

    def _step(self, queue: list[int], tagged: dict[Hashable, Entry]) -> bool:
        entry, moved = self.entries[queue[-1]], False
        if not entry.begun and self._may_begin(queue[-1]):
            entry.begun = moved = True
            self.free -= self.ctas(entry)
        counterparts = (t in tagged and tagged[t].begun for t in entry.needs)
        if entry.begun and (entry.after.ended if entry.after else all(counterparts)):
            entry.ended = moved = True
            self.free += self.ctas(entry)
            queue.pop()
        return moved

    def _may_begin(self, at: int) -> bool:
        compute = self.queues.get("compute")
        if compute and compute[-1] < at:
            return False
        while self.first_unbegun < at and self._is_behind(self.entries[self.first_unbegun]):
            self.first_unbegun += 1
        if self.ctas(self.entries[at]) > self.free:
            return False
        return self.entries[at].waits or not self.one_queue or self.first_unbegun >= at

    def _is_behind(self, entry: Entry) -> bool:
        return entry.begun or entry.waits


@dataclass
class Gpus:
    """All ranks of a schedule. `pairs`: a communicator for each directed pair of a pipeline, else for each pipeline;
    `directions`: for each direction of a boundary, else for each boundary. `one_queue`: of the hardware.
    """

    schedule: Schedule
    pairs: bool = True
    directions: bool = True
    one_queue: bool = True
    absent: Collection[tuple[str, int]] = ()
    bare: Callable[[Hashable], bool] = lambda message: False
    sms: float = float("inf")
    link_ctas: int = 1
    edge_ctas: int = 1
    sum_ctas: int = 0
    streams: int | None = None

    def run(self) -> list[Entry]:
        """Execute everything; what never ends."""
        lists = [self.issued(rank) for role in self.schedule.roles for rank in role.ranks]
        for each in lists if self.streams else ():
            self._share_streams(each)
        gpus = [Gpu(each, self.one_queue, self._free(each[0].rank), self._ctas) for each in lists if each]
        tagged = {entry.tag: entry for each in lists for entry in each if entry.tag is not None}
        while any(gpu.advance(tagged) for gpu in gpus):
            pass
        return [entry for each in lists for entry in each if not entry.ended]

    def _free(self, rank: int) -> float:
        """SMs that sums of gradients, which wait for other ranks, leave."""
        held = [m.layout for m in self.schedule.modules if rank in m.layout and m.backward]
        return self.sms - self.sum_ctas * sum(layout.sp * layout.cp * layout.dp > 1 for layout in held)

    def _ctas(self, entry: Entry) -> int:
        """Of its kernel. Work is a collective of NCCL's choice, and the least that a product needs."""
        if entry.waits:
            return 0
        if entry.queue == "compute":
            return COLLECTIVE_CTAS + 1
        return self.edge_ctas if entry.action.op in ("start", "finish") else self.link_ctas

    def _share_streams(self, entries: Sequence[Entry]) -> None:
        """Give the communicators of a rank the streams of the pool in turn."""
        names = dict.fromkeys(entry.queue for entry in entries if entry.queue != "compute")
        streams = {name: str(at % (self.streams or 1)) for at, name in enumerate(names)}
        for entry in entries:
            entry.queue = streams.get(entry.queue, entry.queue)

    # --------------------------------------------------------------------------------- what a rank's host issues

    def issued(self, rank: int) -> list[Entry]:
        """What the host of a rank issues, in order."""
        made: list[Entry] = []
        actions = self.schedule.actions_of(rank)
        deferred: dict[str, list[Action]] = defaultdict(list)
        done: set[Action] = set()

        def receive_what_is_known(module: str) -> None:
            while deferred[module]:
                a = deferred[module][0]
                if not any(self._is_forward_of(a, d) for d in done):
                    return
                made.append(self._message(rank, deferred[module].pop(0)))

        for at, a in enumerate(actions):
            if (a.module, a.micro_batch) in self.absent:
                continue
            if a.op == "run":
                made += self._work(rank, a, actions[at:], done)
            elif a.op == "send" or (a.op == "irecv" and a.kind != "B"):
                made.append(self._message(rank, a))
            elif a.op == "irecv":
                deferred[a.module].append(a)
                receive_what_is_known(a.module)
            elif a.op == "wait":
                made.append(Entry(rank, a, "compute", waits=True, of=_with(a, "irecv")))
            elif a.op == "start" and a not in done:
                made += self._start(rank, a)
            elif a.op == "finish":
                made += self._finish(rank, a, done)
            done.add(a)
            if a.op == "run" and a.kind != "B":
                receive_what_is_known(a.module)
        for entry in made:
            if entry.of:
                entry.after = [e for e in made if e.action == entry.of and not e.waits][-1]
        return made

    def _is_forward_of(self, a: Action, d: Action) -> bool:
        return (
            d.op == "run" and d.kind != "B" and (d.module, d.stage, d.micro_batch) == (a.module, a.stage, a.micro_batch)
        )

    def _together(self, rank: int, a: Action, queue: str, what: Hashable, ranks: set[int]) -> Entry:
        return Entry(rank, a, queue, (what, rank), frozenset((what, other) for other in ranks))

    def _work(self, rank: int, a: Action, rest: Sequence[Action], done: set[Action]) -> list[Entry]:
        assert a.stage is not None
        ranks = set(self.schedule.module[a.module].stage_ranks(a.stage))
        parts = [self._together(rank, a, "compute", (a, part), ranks) for part in "xy"]
        entered = {(edge.target, "B", edge.target_stage or 0) for edge in self.schedule.edges}
        if (a.module, a.kind, a.stage) not in entered:
            return parts[:1]
        crossing = next((b for b in rest if b.op in ("start", "finish")), None)
        if not crossing or (crossing.module, crossing.micro_batch) in self.absent:
            return parts
        if (crossing.op, crossing.kind, crossing.micro_batch) != ("start", "B", a.micro_batch):
            return parts
        target, own = (self.schedule.module[name] for name in (crossing.edge.target, crossing.module))
        early = own.style == "ahead" or (own.style != "graph" and target.layout.pp == 1)
        if not early or (target.name, crossing.edge.target_stage or 0) != (a.module, a.stage):
            return parts
        done.add(crossing)
        return [parts[0], *self._start(rank, crossing), parts[1]]

    def _message(self, rank: int, a: Action) -> Entry:
        other = self.schedule.peer_rank(rank, a)
        source, target = (rank, other) if a.op == "send" else (other, rank)
        way = "back" if a.kind == "B" else "forth"
        message = (a.kind, a.micro_batch, max(a.stage, a.peer), min(a.stage, a.peer), a.module, source, target)  # pyright: ignore[reportArgumentType]
        queue = f"{a.module} {way} {source} {target}" if self.pairs else f"{a.module} {way}"
        return Entry(rank, a, queue, (message, rank), frozenset([(message, other)]))

    def _queue(self, a: Action) -> str:
        return f"{a.edge} {a.kind}" if self.directions else str(a.edge)

    def sides(self, rank: int, a: Action) -> tuple[set[int], set[int], bool]:
        """The rank's own side, the other one, and whether the own one receives; for a collective all, and none."""
        encoder, text = map(set, self.schedule.sides(a.edge))
        if encoder & text:
            return encoder | text, set(), True
        return (encoder, text, a.kind == "B") if rank in encoder else (text, encoder, a.kind == "F")

    def _batch(self, rank: int, a: Action, what: str, ranks: set[int]) -> Entry:
        name = what, a.kind, a.edge, a.micro_batch
        others = {other for other in ranks - {rank} if not self.bare((*name, *sorted((rank, other))))}
        return self._together(rank, a, self._queue(a), name, others)

    def _start(self, rank: int, a: Action) -> list[Entry]:
        own, other, receives = self.sides(rank, a)
        if not other:
            return [self._together(rank, a, self._queue(a), ("first", a.kind, a.edge, a.micro_batch), own)]
        found = [self._batch(rank, a, "rows", other)]
        if a.kind == "B" and not receives and len(own) > 1:
            summed = self._batch(rank, a, "sums", own)
            found = [summed, Entry(rank, a, "compute", waits=True, after=summed), *found]
        return found

    def _finish(self, rank: int, a: Action, done: set[Action]) -> list[Entry]:
        own, other, receives = self.sides(rank, a)
        found: list[Entry] = []
        first = self.schedule.module[a.edge.target].stage_ranks(0)
        embedding = Action("run", "F", f"embedding of {a.edge.target}", a.micro_batch)
        if a.kind == "F" and rank in first and not a.edge.target_stage and embedding not in done:
            done.add(embedding)
            found.append(self._together(rank, a, "compute", embedding, set(first)))
        found.append(Entry(rank, a, "compute", waits=True, of=_with(a, "start")))
        if receives and (not other or len(own) > 1):
            last = (
                self._batch(rank, a, "gather", own)
                if other
                else self._together(rank, a, self._queue(a), ("second", a.kind, a.edge, a.micro_batch), own)
            )
            found += [last, Entry(rank, a, "compute", waits=True, after=last)]
        return found


def _with(a: Action, op: str) -> Action:
    return Action(op, a.kind, a.module, a.micro_batch, a.stage, a.peer)  # pyright: ignore[reportArgumentType]
