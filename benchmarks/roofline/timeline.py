"""When kernels and collectives of a GPU run, by its streams, hardware queues and multiprocessors, and how long what
computes waits.

An event model. What a program issues begins, in the order of issue, when

  1. what its stream was given before has ended: kernels follow each other on "main", the collectives of a communicator
     on a stream of its own, taken from PyTorch's pool of 32 in turn, so that the 33rd shares one with the first;
  2. what its stream was made to wait for has ended: a collective waits for what "main" was given before it; "main"
     waits where the program waits for a `Work`, at once unless it asked for `async_op`;
  3. all before it in its hardware queue have begun: the n-th stream is in queue n modulo CUDA_DEVICE_MAX_CONNECTIONS;
  4. it finds multiprocessors, of which a collective holds a few from its begin to its end.

With one queue the third makes a collective that waits for the one before it hold up all that is issued after it.

The fourth tells kernels apart. Most are many short thread blocks: a collective of high priority gets multiprocessors as
blocks end, and the kernel shares the rest, slower by those. A matrix product of Hopper is *whole*: it starts a block on
each multiprocessor, which computes tiles until the product ends (pytorch issue 143988, pull request 144974).

  lands first        then
  the product        the collective begins when the product ends
  the collective     blocks that find no multiprocessor begin when the collective or the other blocks end: the product
                     takes up to twice as long

Which is first where both wait for the same kernel nobody promises: an assumption. A collective that waited for the
collective before it, or since an earlier product, is first. Products that are told to leave some multiprocessors
("carved") share with collectives, and are slower by those. The links carry one collective after another.

What the host has not issued yet does not begin either: each operation takes it a while, and it is not ahead of the
device by more than CUDA's queue has room for.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from benchmarks.roofline.devices import AHEAD

COLLECTIVES = (
    "allreduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast", "send", "recv",
    "_allgather_base", "_reduce_scatter_base", "alltoall_base",
)  # fmt: skip
"""Methods of a process group that `torch.distributed` calls, and that return a `Work`: the last three before 2.13."""
POOL = 32
"""Streams that PyTorch hands out again and again."""
MAIN = 0
"""The stream that computes; those of communicators follow."""
PROCESSORS = 132
"""Multiprocessors of an H100."""


@dataclass(frozen=True)
class Sharing:
    """How kernels share a device of so many `processors` with collectives. `whole`: products hold all multiprocessors
    until they end, in place of sharing them. `product_first`: such a product lands before a collective where both wait
    for the same kernel. `carved`: products beside collectives leave these the multiprocessors that they need.
    """

    processors: int = PROCESSORS
    whole: bool = False
    product_first: bool = False
    carved: bool = False


@dataclass
class _Issued:
    """A collective. `after`: when what it waits for on the stream that computes has ended; or, where it `waits` for
    multiprocessors, the product that has them.
    """

    number: int
    stream: int
    link: str
    seconds: float
    ctas: int
    after: float
    waits: bool = False
    begin: float = 0.0
    end: float | None = None


class Timeline:
    """Clocks of one GPU of so many hardware `queues`, and of its host, in seconds: `launch` for an operation, at most
    `ahead` of which the device has not begun.

    Links have names: what is in every micro-batch does not wait for what happens once in a step.
    """

    def __init__(
        self, queues: int = POOL, sharing: Sharing = Sharing(), launch: float = 0.0, ahead: int = AHEAD
    ) -> None:
        self._queues, self._sharing, self._launch = queues, sharing, launch
        self._host, self._began = 0.0, deque[float](maxlen=ahead)
        self._works: list[_Issued] = []
        self._pending: list[_Issued] = []  # those that have not begun, in the order of issue
        self._running: list[_Issued] = []  # those that have, and may hold multiprocessors
        self._streams: dict[str, int] = {}  # of communicators
        self._ends: dict[int, float] = defaultdict(float)  # by stream
        self._begun: dict[int, tuple[float, str]] = defaultdict(lambda: (0.0, ""))  # by queue, and on which link
        self._links: dict[str, float] = {}  # until when each carries something

    @property
    def now(self) -> float:
        """When the stream that computes has done what it was given."""
        return self._ends[MAIN]

    def compute(self, seconds: float, *, product: bool = False) -> dict[str, float]:
        """Run a kernel. Returns by how much later it ends because of collectives: by link."""
        self._begin(lambda work, _: self._queue(work.stream) == self._queue(MAIN))
        late: dict[str, float] = {}
        begun, link = self._begun[self._queue(MAIN)]
        if begun > self.now:
            late[link] = begun - self.now
        begin = max(self.now, begun)
        self._begin(lambda work, ready: ready < begin or (ready == begin and self._lands(work, begin)))
        self._running = [work for work in self._running if work.end is not None and work.end > begin]
        carved = product and self._sharing.carved and bool(self._running or self._pending)
        if product and self._sharing.whole and not carved:
            end, link = self._whole(begin, seconds)
            self._begin(lambda work, ready: ready < end and not work.ctas)  # Copy engines need none.
            for work in self._pending:
                if work.after < end:
                    work.after, work.waits = end, True
        else:
            end, link = self._shared(begin, seconds, carved)
        if end > begin + seconds:
            late[link] = late.get(link, 0.0) + end - begin - seconds
        self._begun[self._queue(MAIN)], self._ends[MAIN] = (begin, ""), end
        return late

    def launch(self, seconds: float = 0.0) -> float:
        """Let the host issue an operation, before it runs, in so many `seconds` (0: as any); returns how long the
        stream that computes waits for it.
        """
        if len(self._began) == self._began.maxlen:
            self._host = max(self._host, self._began[0])
        self._host += min(seconds or self._launch, self._launch)
        idle = max(0.0, self._host - self.now)
        self._ends[MAIN] += idle
        self._began.append(self.now)
        return idle

    def host_waits(self) -> None:
        """Let the host wait until the stream that computes has done all it was given."""
        self._host = max(self._host, self.now)

    def issue(self, seconds: float, link: str = "", communicator: str = "", ctas: int = 0) -> int:
        """Run a collective beside the kernels, on so many multiprocessors; returns its number."""
        stream = 1 + self._streams.setdefault(communicator, len(self._streams)) % POOL
        work = _Issued(len(self._works), stream, link, seconds, ctas, self.now)
        self._works.append(work)
        self._pending.append(work)
        return work.number

    def wait(self, work: int) -> float:
        """Let the stream that computes wait for a collective; returns how long it does. Its queue waits with it."""
        queue = self._queue(self._works[work].stream)
        self._begin(lambda each, _: each.number <= work and self._queue(each.stream) == queue)
        end = self._works[work].end
        assert end is not None, "what its queue was given before has begun"
        begin = max(self.now, self._begun[self._queue(MAIN)][0], end)
        idle, self._ends[MAIN] = begin - self.now, begin
        self._begun[self._queue(MAIN)] = begin, ""
        return idle

    def _begin(self, can: Callable[[_Issued, float], bool]) -> None:
        """Begin what is pending in the order of issue, where it `can` at the time when it is ready."""
        left: list[_Issued] = []
        for work in self._pending:
            queue, since = self._queue(work.stream), self._links.get(work.link, 0.0)
            ready = max(work.after, self._ends.get(work.stream, 0.0), self._begun[queue][0])
            behind = any(self._queue(other.stream) == queue or other.stream == work.stream for other in left)
            if behind or not can(work, ready):
                left.append(work)
                continue
            work.begin, work.end = ready, max(ready, since) + work.seconds
            self._begun[queue] = ready, work.link
            self._links[work.link] = self._ends[work.stream] = work.end
            self._running.append(work)
        self._pending = left

    def _lands(self, work: _Issued, begin: float) -> bool:
        """Whether a collective gets multiprocessors before a kernel that can `begin` at the same time."""
        return not self._sharing.product_first or work.waits or self._ends.get(work.stream) == begin

    def _whole(self, begin: float, seconds: float) -> tuple[float, str]:
        """When a product ends that needs all multiprocessors, and the link of what made it later."""
        holding = [work for work in self._running if work.ctas]
        if not holding:
            return begin + seconds, ""
        last = max(holding, key=lambda work: work.end or 0.0)
        return min(last.end or 0.0, begin + seconds) + seconds, last.link

    def _shared(self, begin: float, seconds: float, carved: bool) -> tuple[float, str]:
        """When a kernel ends that is slower by the multiprocessors that collectives hold meanwhile, or that it leaves
        them from the first, and the link of these.
        """
        end, link = begin + seconds, ""
        while True:
            self._begin(lambda _, ready, end=end: ready < end)
            each = [work for work in self._running if work.ctas]
            link = each[-1].link if each else ""
            if carved:
                longer = begin + seconds * self._slower(max((work.ctas for work in each), default=0))
            else:
                longer = self._ending(begin, seconds, each)
            if longer <= end:
                return end, link
            end = longer

    def _ending(self, begin: float, seconds: float, beside: list[_Issued]) -> float:
        """When so many seconds of a kernel are done, at less speed while collectives run `beside` it."""
        times = sorted({begin, *(t for work in beside for t in (work.begin, work.end or 0.0) if t > begin)})
        for since, until in zip(times, [*times[1:], float("inf")], strict=True):
            held = sum(work.ctas for work in beside if work.begin <= since < (work.end or 0.0))
            slower = self._slower(held)
            if since + seconds * slower <= until:
                return since + seconds * slower
            seconds -= (until - since) / slower
        raise AssertionError("the last interval has no end")

    def _slower(self, held: int) -> float:
        processors = self._sharing.processors
        return processors / max(1, processors - held)

    def _queue(self, stream: int) -> int:
        return stream % self._queues


@contextlib.contextmanager
def works_noted(issued: Callable[[str], Any], waited: Callable[[Any], object]) -> Iterator[None]:
    """Inside, `waited` is called where the program waits for a collective of the backend `fake`, with what `issued`
    returned for its communicator when it was issued.
    """
    # By address, with the work itself, so that no other one gets the same.
    found: dict[int, tuple[Any, Any]] = {}

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = method(group, *args, **kwargs)
            found[id(work)] = work, issued(group.group_name)
            return work

        return call

    wait = FakeWork.wait

    def waiting(work: Any, *timeout: Any) -> Any:
        if id(work) in found:
            waited(found.pop(id(work))[1])
        return wait(work, *timeout)

    methods: Mapping[str, Any] = {name: getattr(dist.ProcessGroup, name, None) for name in COLLECTIVES}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeWork, "wait", waiting))
        for name, method in methods.items():
            if method is not None:
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, noting(method)))
        yield
