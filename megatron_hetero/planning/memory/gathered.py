"""What ranks that share weights (ZeRO 2 and 3) gather to run a module, and what the exchange of its gradients takes.
Pure.

As FSDP2 does it, with the units of `step.fully_sharded`: an embedding, each layer, and what is left of a stage.

    weights        of a unit that runs, and of its neighbour, which is fetched ahead; once more of one unit, as they
                   arrive. What is left of a stage stays from its forward to its backward pass, and so does an embedding
                   that is the head, too. With ZeRO 2, and with waves of several calls, everything stays
    gradients      of a unit: whole, and once more in the dtype that they are accumulated in, as they are sent
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_hetero.execution.gathering import Span, span_of
from megatron_hetero.layout.stages import LAYERS
from megatron_hetero.planning.memory.parameters import Parameter
from megatron_hetero.schedule.program import Schedule

_EMBEDDING = "embedding"
"""The end of a language model that is a unit of its own."""


@dataclass(frozen=True)
class GatheredBytes:
    """Of a module on one rank: what `stays` between its runs, at most; and what is there only while it runs."""

    stays: int = 0
    running: int = 0


def planned_span(schedule: Schedule, name: str, zero: int, calls: Sequence[range]) -> Span:
    """How long a module's gathered weights stay. `calls`: of an encoder, its micro-batches in runs that are one call
    each; where it has one in each of its turns, nothing is left that they could stay for.
    """
    span = span_of(schedule.module[name], zero)
    turns = [turn for turn in (*schedule.waves, *schedule.returned) if turn]
    once = all(any(call[0] <= turn[0] and turn[-1] <= call[-1] for call in calls) for turn in turns)
    return "run" if span == "wave" and once else span


def gathered_bytes(
    parameters: Sequence[Parameter], itemsize: int, gradient: int, span: Span, *, is_head: bool
) -> GatheredBytes:
    """`itemsize`: bytes of a weight; `gradient`: of its gradient, whole and as it is sent. `is_head`: whether the
    embedding is read again after the layers.
    """
    whole, exchanged = defaultdict[str, int](int), defaultdict[str, int](int)
    for parameter in parameters:
        unit = _unit_of(parameter.name)
        whole[unit] += parameter.elements * itemsize
        exchanged[unit] += parameter.elements * parameter.trains * gradient
    if span != "run":
        return GatheredBytes(sum(whole.values()), max(whole.values()) + max(exchanged.values()))
    layers = [unit for unit in whole if unit.startswith(LAYERS)]
    sizes, embedding = [whole[unit] for unit in layers], whole[_EMBEDDING]
    # All layers are gathered before the gradients of what is left, and of the embedding, are exchanged.
    of_layers = max((exchanged[unit] for unit in layers), default=0) + max(sizes, default=0)
    of_layers += max(map(sum, pairwise(sizes)), default=sum(sizes))
    stays = whole[""] + embedding * is_head
    return GatheredBytes(stays, max(of_layers, *exchanged.values(), embedding * (1 + (not is_head))))


def _unit_of(name: str) -> str:
    """The layer, or the embedding; what is left of a stage has no name."""
    if name.startswith(LAYERS):
        return LAYERS + name.removeprefix(LAYERS).partition(".")[0]
    return _EMBEDDING if name.startswith(f"{_EMBEDDING}.") else ""
