"""When operations end by NCCL's rules, and who waits for whom where they cannot. Pure: knows no process."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tests.support.nccl_rules.requests import SPLIT, Key, Move, Request
from tests.support.nccl_rules.waiting import describe_deadlock, stuck


class Broken(Exception):
    """What would hang, or compute nonsense, on NCCL."""


@dataclass(eq=False)
class Operation:
    """An operation of one rank, from when it is issued until it ends."""

    rank: int
    index: int
    request: Request
    before: Operation | None
    """On the same stream, if it has not ended."""
    begun: bool = False
    ended: bool = False
    slot: dict[int, Operation] = field(default_factory=dict)
    """Of a collective: the operations of all ranks that have come to it."""
    partners: list[tuple[Operation, int] | None] = field(default_factory=list)
    """Of each transfer: the other side and which of its transfers it is, once it has come."""
    open: set[int] = field(default_factory=set)
    """Transfers that have not ended."""


@dataclass
class Communicator:
    """What has been issued on a communicator."""

    ranks: tuple[int, ...]
    streams: dict[int, deque[Operation]]
    issued: dict[int, int]
    collectives: dict[int, int]
    slots: dict[int, dict[int, Operation]]
    lone: defaultdict[tuple[int, int, bool], deque[tuple[Operation, int]]]
    """Transfers whose other side has not come, by (from, to, whether they send)."""
    threads: defaultdict[int, set[str]]
    """Those that have used it, by rank."""
    met: defaultdict[Key, set[int]]
    """Ranks whose hosts have come to connect for an algorithm or a message."""

    @classmethod
    def of(cls, ranks: tuple[int, ...]) -> Communicator:
        """One that nobody has used."""
        nothing = dict.fromkeys(ranks, 0)
        return cls(
            ranks, {r: deque() for r in ranks}, dict(nothing), dict(nothing), {}, defaultdict(deque),
            defaultdict(set), defaultdict(set),
        )  # fmt: skip

    def missing(self, key: Key) -> set[int]:
        """Ranks that must still come to connect: the two of a message, all of another algorithm."""
        return set(self.ranks if isinstance(key, str) else key) - self.met[key]


class Rules:
    """The state of a job of `ranks` processes. `one_connection`: CUDA_DEVICE_MAX_CONNECTIONS=1.

    Methods raise `Broken`; afterwards the state is of no use. `take_moves` gives what they let happen, in an order in
    which all ranks can do it.
    """

    def __init__(self, ranks: int, *, one_connection: bool = False):
        self.ranks, self.one_connection = ranks, one_connection
        self.communicators: dict[str, Communicator] = {}
        self.waiting: dict[tuple[int, str], tuple[Operation, str]] = {}
        """By rank and thread: for which operation it waits, and where in the program."""
        self.meeting: dict[tuple[int, str], tuple[Request, Collection[Key]]] = {}
        """By rank and thread: the request before which its host waits for others to connect, and for what."""
        self.finished: set[int] = set()
        self.unbegun: list[deque[Operation]] = [deque() for _ in range(ranks)]
        """Of each rank, on the device, in the order of issue; kept with one connection only."""
        self._moves: list[tuple[int, Move]] = []

    def take_moves(self) -> list[tuple[int, Move]]:
        """What ranks may do, by rank, since the last time."""
        moves, self._moves = self._moves, []
        return moves

    def meet(self, rank: int, request: Request, keys: Collection[Key]) -> list[tuple[int, str]]:
        """A host comes to connect before a request. Returns the hosts, by rank and thread, that go on."""
        on = self.communicators.setdefault(request.communicator, Communicator.of(request.ranks))
        on.threads[rank].add(request.thread)
        for key in keys:
            on.met[key].add(rank)
        self.meeting[rank, request.thread] = request, keys
        free = [host for host in self.meeting if not any(self.unmet(*host))]
        for host in free:
            del self.meeting[host]
        self._require_no_deadlock()
        return free

    def unmet(self, rank: int, thread: str) -> Iterator[tuple[Key, int]]:
        """For what a host that waits to connect needs which rank."""
        request, keys = self.meeting[rank, thread]
        on = self.communicators[request.communicator]
        return ((key, other) for key in keys for other in sorted(on.missing(key)))

    def issue(self, rank: int, request: Request) -> None:
        """A rank issues its next operation on a communicator."""
        name = request.communicator
        on = self.communicators.setdefault(name, Communicator.of(request.ranks))
        if on.ranks != request.ranks:
            raise Broken(f"rank {rank}: found {request}, expected the communicator's ranks {on.ranks}")
        stream = on.streams[rank]
        operation = Operation(rank, on.issued[rank], request, stream[-1] if stream else None)
        on.issued[rank] += 1
        on.threads[rank].add(request.thread)
        stream.append(operation)
        if self.one_connection and request.on_device:
            self.unbegun[rank].append(operation)
        if request.transfers:
            self._pair(on, operation)
        else:
            self._gather(on, operation)
        self._advance(operation)

    def wait(self, rank: int, thread: str, communicator: str, index: int, where: str) -> None:
        """A thread comes to wait for an operation of its rank."""
        operation = self._find(rank, communicator, index)
        if operation is not None:
            self.waiting[rank, thread] = operation, where
            self._require_no_deadlock()

    def finish(self, rank: int) -> None:
        """A rank has ended its job and issues nothing more."""
        self.finished.add(rank)
        self._require_no_deadlock()
        if len(self.finished) == self.ranks:
            self._require_nothing_left()

    # -------------------------------------------------------------------------------------- what belongs together

    def _gather(self, on: Communicator, operation: Operation) -> None:
        """Put a collective with those of the other ranks."""
        rank, place = operation.rank, on.collectives[operation.rank]
        on.collectives[rank] += 1
        operation.slot = on.slots.setdefault(place, {})
        for other in operation.slot.values():
            if problem := _mismatch(other, operation) or _mismatch(operation, other):
                raise Broken(
                    f"mismatch: collective {place} of a communicator differs between ranks: {problem}\n"
                    f"  rank {other.rank}, {other.request.where}: {other.request}\n"
                    f"  rank {rank}, {operation.request.where}: {operation.request}"
                )
        operation.slot[rank] = operation
        if len(operation.slot) == len(on.ranks):
            del on.slots[place]

    def _pair(self, on: Communicator, operation: Operation) -> None:
        """Put sends with their receives, in the order of issue between two ranks."""
        operation.open = set(range(len(operation.request.transfers)))
        for i, transfer in enumerate(operation.request.transfers):
            operation.partners.append(None)
            pair = (operation.rank, transfer.peer) if transfer.sends else (transfer.peer, operation.rank)
            others = on.lone[*pair, not transfer.sends]
            if not others:
                on.lone[*pair, transfer.sends].append((operation, i))
                continue
            other, j = others.popleft()
            theirs = other.request.transfers[j]
            if (theirs.elements, theirs.dtype) != (transfer.elements, transfer.dtype):
                raise Broken(
                    "mismatch: a receive differs from its send\n"
                    f"  rank {other.rank}, {other.request.where}: {theirs} on {other.request.name!r}\n"
                    f"  rank {operation.rank}, {operation.request.where}: {transfer} on {operation.request.name!r}"
                )
            operation.partners[i], other.partners[j] = (other, j), (operation, i)

    # ------------------------------------------------------------------------------------------------ what happens

    def _advance(self, *operations: Operation) -> None:
        """Begin what can begin, end what can end, and go on with what that allows."""
        ready = deque(operations)
        while ready:
            operation = ready.popleft()
            if operation.begun or not self._can_begin(operation):
                continue
            operation.begun = True
            if self.unbegun[operation.rank] and self.unbegun[operation.rank][0] is operation:
                self.unbegun[operation.rank].popleft()
                ready.extend(list(self.unbegun[operation.rank])[:1])
            for ended in self._ended_by(operation):
                ready.extend(self._end(ended))

    def _can_begin(self, operation: Operation) -> bool:
        if operation.before is not None:
            return False
        return not (self.one_connection and operation.request.on_device) or (
            self.unbegun[operation.rank][0] is operation
        )

    def _ended_by(self, operation: Operation) -> Iterator[Operation]:
        """What ends because an operation has begun, after telling whose numbers move."""
        communicator = operation.request.communicator
        if not operation.request.transfers:
            everyone = operation.slot
            if len(everyone) == len(operation.request.ranks) and all(other.begun for other in everyone.values()):
                for other in everyone.values():
                    self._moves.append((other.rank, Move(communicator, other.index)))
                yield from list(everyone.values())
            return
        for i in sorted(operation.open):
            partner = operation.partners[i]
            if partner is None or not partner[0].begun or i not in operation.open:
                continue
            other, j = partner
            self._moves.append((operation.rank, Move(communicator, operation.index, i)))
            self._moves.append((other.rank, Move(communicator, other.index, j)))
            operation.open.discard(i)
            other.open.discard(j)
            if not other.open and other is not operation:
                yield other
        if not operation.open:
            yield operation

    def _end(self, operation: Operation) -> Iterator[Operation]:
        """End an operation; gives the next one of its stream."""
        operation.ended = True
        stream = self.communicators[operation.request.communicator].streams[operation.rank]
        assert stream.popleft() is operation
        for waiter in [waiter for waiter, (awaited, _) in self.waiting.items() if awaited is operation]:
            del self.waiting[waiter]
        if stream:
            stream[0].before = None
            yield stream[0]

    # ------------------------------------------------------------------------------------------- what cannot happen

    def _find(self, rank: int, communicator: str, index: int) -> Operation | None:
        """An operation of a rank; None where it has ended."""
        stream = self.communicators[communicator].streams[rank]
        return stream[index - stream[0].index] if stream and index >= stream[0].index else None

    def _require_no_deadlock(self) -> None:
        found = stuck(self)
        if found:
            raise Broken(describe_deadlock(self, found))

    def _require_nothing_left(self) -> None:
        left = [op for on in self.communicators.values() for stream in on.streams.values() for op in stream]
        if left:
            lines = [f"\n  rank {op.rank}, {op.request.where}: {op.request}" for op in left]
            raise Broken("unfinished: operations that never end, though all ranks ended their job" + "".join(lines))


def _mismatch(first: Operation, second: Operation) -> str | None:
    """How the second rank's part of a collective does not fit the first's."""
    a, b = first.request, second.request
    if a.signature != b.signature:
        return "another operation, size or type"
    if a.signature == SPLIT:
        together = a.colour is not None and second.rank in a.colour
        return "other neighbours" if together != (a.colour is not None and a.colour == b.colour) else None
    if a.sent:
        sent, received = a.sent[a.ranks.index(second.rank)], b.received[a.ranks.index(first.rank)]
        if sent != received:
            return f"rank {first.rank} sends {sent} to rank {second.rank}, which receives {received}"
    return None
