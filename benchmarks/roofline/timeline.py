"""When collectives run beside the kernels of the stream that computes, and how long that waits for them.

A process group issues a collective when the stream that computes gets to it, and runs it on a stream of its own; the
stream that computes waits where the program waits for the `Work`, at once unless it asked for `async_op`. The links
carry one collective after another.
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


class Timeline:
    """Clocks of one GPU, in seconds: `now` of the stream that computes, and until when each of its links is taken.

    Links have names: what is in every micro-batch does not wait for what happens once in a step.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._taken: dict[str, float] = defaultdict(float)

    def compute(self, seconds: float) -> None:
        """Run a kernel."""
        self.now += seconds

    def issue(self, seconds: float, link: str) -> float:
        """Run a collective beside the kernels; returns when it ends."""
        self._taken[link] = max(self.now, self._taken[link]) + seconds
        return self._taken[link]

    def wait(self, end: float) -> float:
        """Let the stream that computes wait until then; returns how long it does."""
        idle = max(0.0, end - self.now)
        self.now += idle
        return idle


@contextlib.contextmanager
def works_noted(issued: Callable[[], Any], waited: Callable[[Any], None]) -> Iterator[None]:
    """Inside, `waited` is called where the program waits for a collective of the backend `fake`, with what `issued`
    returned when it was issued.
    """
    # By address, with the work itself, so that no other one gets the same.
    found: dict[int, tuple[Any, Any]] = {}

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = method(*args, **kwargs)
            found[id(work)] = work, issued()
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
