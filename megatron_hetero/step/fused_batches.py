"""What the fused update is given at a time: neighbouring elements of a module's states, and the tensors that they are
in.

States and gradients are updated where they lie. What lies in host memory, or in very many places, is brought together
some at a time: split masters and moments in bfloat16 are then 6 bytes an element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor

from megatron_hetero.distributed.platform import on_device
from megatron_hetero.step.fused_update import SEGMENTS, CallRates, SegmentRates, ends_of
from megatron_hetero.step.number_formats import (
    Fp32Master,
    Fp32Weights,
    Plain,
    RoundedMaster,
    SplitMaster,
    Spread,
)
from megatron_hetero.step.optimizer_state import OptimizerState

PLACES = 64
"""In how many places weights and gradients may lie so that they are updated there."""
_MOST = 1 << 30
"""Elements of a call, which indexes them by 32 bits."""


@dataclass(frozen=True)
class Batch:
    """Elements [start, stop) of the states of a module: of parameters `names`, so many of each."""

    start: int
    stop: int
    names: tuple[str, ...]
    lengths: tuple[int, ...]

    def segments(self, rates: Mapping[str, SegmentRates]) -> tuple[tuple[SegmentRates, ...], tuple[int, ...]]:
        """Rates of neighbours that differ in them, of those of all parameters, and where each ends in the batch."""
        found = [(rates[name], end) for name, end in zip(self.names, accumulate(self.lengths), strict=True)]
        groups = [(rate, [end for _, end in of][-1]) for rate, of in groupby(found, key=lambda each: each[0])]
        return tuple(rate for rate, _ in groups), tuple(end for _, end in groups)


def is_fused(state: OptimizerState) -> bool:
    """Whether there is a fused update of what is kept in such numbers."""
    return isinstance(state.master, Fp32Weights | Fp32Master | SplitMaster | RoundedMaster) and all(
        isinstance(moment, Plain) for moment in state.moments.values()
    )


def batches_of(state: OptimizerState, tied: str | None, most: int, *, streamed: bool) -> Iterator[Batch]:
    """All elements. What is `tied` is by itself: on other stages it has other neighbours, and other places.

    `most`: elements of which all is brought together at a time. `streamed`: whether the states lie in host memory.
    """
    several = _weights(state), state.gradients
    brought = [each for each in several if streamed or len(each.tensors) > PLACES]
    cuts = {0, *(end for each in several if each not in brought for end in each.ends)}
    longest = _MOST
    if brought:
        # As many bytes, if only some of it is brought.
        longest = most * sum(map(_itemsize, several)) // sum(map(_itemsize, brought))
    names, lengths, start, end = list[str](), list[int](), 0, 0
    for name, shard in state.shards.items():
        stop = shard.at + shard.stop - shard.start
        while end < stop:
            apart = bool(names) and (name == tied) != (names[-1] == tied)
            full = end - start == longest or len(names) == SEGMENTS
            if names and (apart or full or end in cuts):
                yield Batch(start, end, tuple(names), tuple(lengths))
                names, lengths, start = [], [], end
            until = min(stop, start + longest, *(cut for cut in cuts if cut > end))
            names.append(name)
            lengths.append(until - end)
            end = until
    if names:
        yield Batch(start, end, tuple(names), tuple(lengths))


def _itemsize(numbers: Spread) -> int:
    return numbers.dtype.itemsize


def _weights(state: OptimizerState) -> Spread:
    assert isinstance(state.master, Fp32Weights | Fp32Master | SplitMaster | RoundedMaster), "see `is_fused`"
    return state.master.weights


@dataclass(frozen=True, eq=False)
class Brought:
    """The tensors of a batch, as the fused update takes them, on the device."""

    state: OptimizerState
    batch: Batch
    weights: Tensor
    kept: Tensor | None
    gradients: Tensor
    moments: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, state: OptimizerState, batch: Batch) -> Brought:
        """Where they lie, or copies."""
        span = batch.start, batch.stop
        weights, gradients = _weights(state).read(*span), state.gradients.read(*span)
        kept, *moments = (None if t is None else t[slice(*span)].to(weights.device, non_blocking=True)
                          for t in _tensors(state))  # fmt: skip
        first, second = moments or (None, None)
        both = None if first is None or second is None else (first, second)
        return cls(state, batch, weights, kept, gradients, both)

    def arguments(self) -> tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor] | None]:
        """Weights, what is kept besides, gradients and moments: bfloat16 as its bits, but for gradients."""
        moments = None if self.moments is None else (_bits(self.moments[0]), _bits(self.moments[1]))
        return _bits(self.weights), self.kept, self.gradients, moments

    def put_back(self) -> None:
        """Write copies to where the numbers lie."""
        weights, start = _weights(self.state), self.batch.start
        if len(weights.views(start, self.batch.stop)) > 1:
            weights.write(start, self.weights)
        for tensor, found in zip(_tensors(self.state), (self.kept, *(self.moments or ())), strict=True):
            if tensor is not None and found is not None and tensor.device != found.device:
                tensor[start : self.batch.stop].copy_(found, non_blocking=True)


def _tensors(state: OptimizerState) -> list[Tensor | None]:
    """What is kept besides the weights, if anything, and moments."""
    beside = state.master.tensors
    return [beside[0] if beside else None, *(moment.tensors[0] for moment in state.moments.values())]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def numbers_of(calls: Sequence[CallRates], device: torch.device) -> Sequence[Tensor]:
    """What each call takes, in one transfer to the device."""
    rows = [call.numbers() for call in calls]
    flat = on_device(torch.tensor([number for row in rows for number in row]), device)
    return flat.split([len(row) for row in rows])


@lru_cache(maxsize=1024)
def ends_on(device: torch.device, ends: tuple[int, ...]) -> Tensor | None:
    """Where segments end, if there are several, as the fused update takes it."""
    return on_device(ends_of(ends), device) if len(ends) > 1 else None
