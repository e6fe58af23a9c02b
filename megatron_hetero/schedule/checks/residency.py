"""How many CTAs of communication wait on a rank's GPU at a time.

That they end (`deadlock`) takes all kernels that begin to fit on the GPU beside each other: one that finds no SM waits
for others to end, which may wait for it. A receive posted early occupies its SMs all the while. A communicator runs one
kernel at a time, of at most its `max_ctas`; a CTA of NCCL has up to 640 threads, and is counted as an SM. A module's
gradients are summed, or its weights gathered, beside anything else, so that these kernels count all the time.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_hetero.distributed.communicators import GRADIENT_AXES, Axes, max_ctas
from megatron_hetero.schedule.checks.streams import Wiring, issues
from megatron_hetero.schedule.communication import use_of
from megatron_hetero.schedule.program import Role, Schedule

MOST_CTAS = 80
"""They leave room for a collective of the layers and some products: of the 132 SMs of an H100, on which NCCL gives a
collective up to 32 CTAs, and of the 108 of an A100, on which it gives it up to 24.
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
    held = {name: schedule.module[name] for name, _ in role.held_stages}
    sums = [Axes(m.name, GRADIENT_AXES) for m in held.values() if m.backward and m.layout.ways("tokens", "samples") > 1]
    # By communicator, the index of its last operation and the CTAs of one.
    pending = {str(use): (-1, max_ctas(use) or 0) for use in sums}
    most = Resident(sum(ctas for _, ctas in pending.values()), 0, tuple(pending))
    issued = issues(schedule, role, wiring)
    for index, issue in enumerate(issued):
        if issue.waits is not None:
            stream = issued[issue.waits].stream
            if stream in pending and pending[stream][0] <= issue.waits:
                del pending[stream]  # A communicator is a queue: what came before has ended too.
        elif issue.stream is not None:
            pending[issue.stream] = index, max_ctas(use_of(schedule, role.actions[issue.at])) or 0
            if (now := sum(ctas for _, ctas in pending.values())) > most.ctas:
                most = Resident(now, issue.at, tuple(pending))
    return most
