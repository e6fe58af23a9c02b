"""How many CTAs of communication wait on a rank's GPU at a time.

That they end (`deadlock`) takes all kernels that begin to fit on the GPU beside each other: one that finds no SM waits
for others to end, which may wait for it. A receive posted early occupies its SMs all the while. A communicator runs one
kernel at a time, of at most its `max_ctas`; a CTA of NCCL has up to 640 threads, and is counted as an SM.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_hetero.distributed.communicators import max_ctas
from megatron_hetero.schedule.checks.streams import Wiring, issues
from megatron_hetero.schedule.communication import use_of
from megatron_hetero.schedule.program import Role, Schedule

MOST_CTAS = 56
"""They leave room for a collective of the layers, a sum of gradients and some products: of the 132 SMs of an H100, on
which NCCL gives a collective up to 32 CTAs, and of the 108 of an A100, on which it gives it up to 24.
"""


class Resident(NamedTuple):
    """CTAs on a rank's GPU before the action at index `at` ends, and the communicators that they are of."""

    ctas: int
    at: int
    communicators: tuple[str, ...]


def most_resident(schedule: Schedule, role: Role, wiring: Wiring) -> Resident:
    """The most CTAs that a rank of the role may have at a time. An operation is taken to last until it is waited for, a
    send to the end of the step.
    """
    most, pending, ctas = Resident(0, 0, ()), dict[str, int](), dict[str, int]()
    issued = issues(schedule, role, wiring)
    for index, issue in enumerate(issued):
        if issue.waits is not None:
            stream = issued[issue.waits].stream
            if stream is not None and pending.get(stream, -1) <= issue.waits:
                pending.pop(stream, None)  # A communicator is a queue: what came before has ended too.
        elif issue.stream is not None:
            pending[issue.stream] = index
            ctas[issue.stream] = max_ctas(use_of(schedule, role.actions[issue.at])) or 0
            now = sum(ctas[stream] for stream in pending)
            if now > most.ctas:
                most = Resident(now, issue.at, tuple(pending))
    return most
