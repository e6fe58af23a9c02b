"""When kernels and collectives of a GPU run, by its streams and hardware queues, and how long what computes waits.

An event model. What a program issues begins, in the order of issue, when

  1. what its stream was given before has ended: kernels follow each other on "main", the collectives of a communicator
     on a stream of its own, taken from PyTorch's pool of 32 in turn, so that the 33rd shares one with the first;
  2. what its stream was made to wait for has ended: a collective waits for what "main" was given before it; "main"
     waits where the program waits for a `Work`, at once unless it asked for `async_op`;
  3. all before it in its hardware queue have begun: the n-th stream is in queue n modulo CUDA_DEVICE_MAX_CONNECTIONS.

With one queue the last makes a collective that waits for the one before it hold up all that is issued after it. With
several, a kernel that is issued behind a collective may begin first, and fill the device: of high priority, that gets
multiprocessors when the first tiles are done. The links carry one collective after another; a kernel is slower while
they carry one, as NCCL has some of the multiprocessors.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

COLLECTIVES = (
    "allreduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast", "send", "recv",
    "_allgather_base", "_reduce_scatter_base", "alltoall_base",
)  # fmt: skip
"""Methods of a process group that `torch.distributed` calls, and that return a `Work`: the last three before 2.13."""
POOL = 32
"""Streams that PyTorch hands out again and again."""
MAIN = 0
"""The stream that computes; those of communicators follow."""


class Timeline:
    """Clocks of one GPU of so many hardware `queues`, in seconds. Kernels take 1 / (1 - `slowed`) as long beside a
    collective, which begins `late` where the kernel behind it may begin first.

    Links have names: what is in every micro-batch does not wait for what happens once in a step.
    """

    def __init__(self, queues: int = POOL, slowed: float = 0.0, late: float = 0.0) -> None:
        self._queues, self._speed, self._late = queues, 1 - slowed, late if queues > 1 else 0.0
        self._works: list[float] = []  # when each ends
        self._fresh: list[tuple[int, int, str]] = []  # works that no kernel was issued behind, their streams and links
        self._streams: dict[str, int] = {}  # of communicators
        self._ends: dict[int, float] = defaultdict(float)  # by stream
        self._begun: dict[int, tuple[float, str]] = defaultdict(lambda: (0.0, ""))  # by queue, and on which link
        self._links: dict[str, tuple[float, float]] = {}  # since when each carries something, and until when

    @property
    def now(self) -> float:
        """When the stream that computes has done what it was given."""
        return self._ends[MAIN]

    def compute(self, seconds: float) -> dict[str, float]:
        """Run a kernel. Returns by how much later it ends because of what the links carry: by link."""
        for work, stream, name in self._fresh:
            self._works[work] += min(self._late, seconds)
            since, until = self._links[name]
            self._links[name] = since, max(until, self._works[work])
            self._ends[stream] = max(self._ends[stream], self._works[work])
        self._fresh.clear()
        late: dict[str, float] = {}
        before, (begun, link) = self.now, self._begun[self._queue(MAIN)]
        if begun > before:
            late[link] = begun - before
        begin = max(before, begun)
        self._begun[self._queue(MAIN)] = begin, ""
        end = begin + seconds
        for name, (since, until) in self._links.items():
            # What would be done meanwhile at full speed takes longer, until either ends.
            beside = min(end, until) - max(begin, since)
            if self._speed < 1 and beside > 0:
                slower = min(beside / self._speed, until - max(begin, since)) * (1 - self._speed)
                late[name] = late.get(name, 0.0) + slower
                end += slower
        self._ends[MAIN] = end
        return late

    def issue(self, seconds: float, link: str = "", communicator: str = "") -> int:
        """Run a collective beside the kernels; returns its number."""
        stream = 1 + self._streams.setdefault(communicator, len(self._streams)) % POOL
        begin = max(self.now, self._ends[stream], self._begun[self._queue(stream)][0])
        self._begun[self._queue(stream)] = begin, link
        since, until = self._links.get(link, (0.0, 0.0))
        self._links[link] = (since if until > begin else begin), max(begin, until) + seconds
        self._ends[stream] = self._links[link][1]
        self._works.append(self._ends[stream])
        self._fresh.append((len(self._works) - 1, stream, link))
        return self._fresh[-1][0]

    def wait(self, work: int) -> float:
        """Let the stream that computes wait for a collective; returns how long it does. Its queue waits with it."""
        begin = max(self.now, self._begun[self._queue(MAIN)][0], self._works[work])
        self._fresh = [each for each in self._fresh if each[0] > work]
        idle, self._ends[MAIN] = begin - self.now, begin
        self._begun[self._queue(MAIN)] = begin, ""
        return idle

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
