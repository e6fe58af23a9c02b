"""The order in which a pipeline rank of the text module runs forwards and backwards.

For pp:3 and five micro-batches (1F1B; time goes to the right):

    stage 0   F0 F1 F2          B0 F3    B1 F4    B2       B3       B4
    stage 1      F0 F1       B0 F2    B1 F3    B2 F4    B3       B4
    stage 2         F0 B0       F1 B1    F2 B2    F3 B3    F4 B4

1F1B: Narayanan et al. 2019 (PipeDream), in the flushing variant of Narayanan et al. 2021 (arXiv 2104.04473).
Interleaving of virtual stages: section 2.2 of the latter, with the warm-up of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from megatron_hetero.schedule.actions import WorkKind
from megatron_hetero.schedule.program import Module


class Work(NamedTuple):
    """A unit of work of the text module."""

    kind: WorkKind
    stage: int
    micro_batch: int


def pipeline_order(module: Module, coordinate: int, micro_batches: Sequence[int]) -> list[Work]:
    """The work of the ranks at a pipeline coordinate, in order: 1F1B, interleaved if the module has virtual stages."""
    pp, left = module.layout.pp, module.layout.pp - 1 - coordinate
    if module.virtual == 1:
        warm_up, forwards = left, [Work("F", coordinate, m) for m in micro_batches]
        backwards = [Work("B", coordinate, m) for m in micro_batches]
    else:
        warm_up = 2 * left + (module.virtual - 1) * pp
        forwards = _interleaved("F", module, coordinate, micro_batches)
        backwards = _interleaved("B", module, coordinate, micro_batches)
    order = forwards if not module.backward else _alternated(forwards, backwards, warm_up)
    return [work for work in order if work.micro_batch >= 0]


def _alternated(forwards: list[Work], backwards: list[Work], warm_up: int) -> list[Work]:
    """`warm_up` forwards, then forwards and backwards alternating, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return [*forwards[:warm_up], *chain.from_iterable(pairs), *backwards[steady:]]


def _interleaved(kind: WorkKind, module: Module, coordinate: int, micro_batches: Sequence[int]) -> list[Work]:
    """pp micro-batches through each of the rank's stages in turn, then the next pp of them.

    The micro-batches are padded to a multiple of pp; the padding has number -1 and is dropped later. Dropping a
    micro-batch everywhere adds no cycle to an order.
    """
    pp = module.layout.pp
    padded = [*micro_batches, *[-1] * (-len(micro_batches) % pp)]
    stages = range(coordinate, module.stages, pp)
    return [
        Work(kind, stage, m)
        for first in range(0, len(padded), pp)
        for stage in (stages if kind == "F" else reversed(stages))
        for m in padded[first : first + pp]
    ]
