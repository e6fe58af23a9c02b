"""Which micro-batches an encoder computes in one call. Pure.

Small pictures leave a GPU waiting for the host, which issues as many kernels for few patches as for many. So the
micro-batches of a wave are one packed call: attention stays within a piece, everything else takes all patches at
once, and pieces are assigned to replicas, and cut over ranks, over the whole call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

PATCHES_OF_A_CALL = 4096
"""Patches of a rank up to which a call takes more micro-batches, on average over the encoder's ranks.

By then a GPU computes longer than its host takes to issue: a layer of a vision encoder takes some 40 MFLOP per patch
forward, 4,096 of them about 0.3 ms on an H100, and a dozen kernels and the Python around them less. Beyond it a larger
call would gain nothing, and take more temporary memory: here that of a layer is about 150 MB.
"""


def cut_calls(patches: Sequence[int], together: Iterable[range], ranks: int) -> tuple[range, ...]:
    """All micro-batches, in runs that are one call each.

    A call takes one micro-batch after the other for as long as it stays within `PATCHES_OF_A_CALL` for each rank, and
    always one. Micro-batches that are larger have calls of their own.

    Args:
        patches: of each micro-batch, over all replicas.
        together: all micro-batches, in runs of those that may be one call.
        ranks: of a stage of the encoder.
    """
    return tuple(call for run in together for call in _cut(patches, run, PATCHES_OF_A_CALL * ranks))


def _cut(patches: Sequence[int], run: range, most: int) -> Iterator[range]:
    first, total = run.start, 0
    for m in run:
        if m > first and total + patches[m] > most:
            yield range(first, m)
            first, total = m, 0
        total += patches[m]
    yield range(first, run.stop)
