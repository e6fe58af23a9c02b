"""AdamW and SGD in one pass over all that an optimizer keeps, as a compiler joins it: each number is read once and
written once, in the form in which it is kept. `optimizer` has the same in steps, for where there is no compiler.

    weights  kept           are
    fp32     -              their own masters
    int16    fp32           bits of bfloat16, and masters
    int16    int16          bits of bfloat16, and what is missing to the masters
    int16    -              bits of bfloat16, rounded stochastically

bfloat16 comes as its bits, so that all but arithmetic in fp32 is done with whole numbers. Masters are computed by the
same operations whatever they are kept in, each product being added to once: a compiler that contracts them contracts
all alike, and masters that are `split` stay those in fp32, bit for bit.

What the fused update is given at a time: neighbouring elements of a module's states, and the tensors that they are
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

from megatron_hetero.groups.platform import on_device
from megatron_hetero.step.number_formats import (
    Fp32Master,
    Fp32Weights,
    Noise,
    Plain,
    RoundedMaster,
    SplitMaster,
    Spread,
    halves,
    hashed,
)
from megatron_hetero.step.optimizer_state import OptimizerState

SEGMENTS = 64
"""The most segments of a call that differ in their rates."""
_SHARED, _OWN, _ALIGNMENT = 8, 3, 4
_HALF, _NAN, _LOW = 1 << 15, 0x7FC00000, 0xFFFF


@dataclass(frozen=True)
class SegmentRates:
    """Of neighbouring elements: `rate`, the learning rate over the correction of the first moment; `root`, one over
    the root of that of the second; `decay`, what weights are multiplied by.
    """

    rate: float
    root: float = 1.0
    decay: float = 1.0


@dataclass(frozen=True)
class CallRates:
    """Of all elements of a call. `scale`: of gradients; `first`, `second`: one minus the betas; `noise`: for rounding.
    `segments`: one, or as many as there are.
    """

    scale: float
    first: float
    second: float
    eps: float
    noise: Noise
    segments: tuple[SegmentRates, ...]

    def numbers(self) -> list[float]:
        """What `update_` takes, all numbers that fp32 has where they are whole; a multiple of 16 bytes."""
        place = divmod(self.noise.start % (1 << 32), 1 << 16)
        shared = [self.scale, self.first, self.second, self.eps, *map(float, (*self.noise.keys, *place))]
        own = [list(each) for each in zip(*((s.rate, s.root, s.decay) for s in self.segments), strict=True)]
        width = SEGMENTS if len(self.segments) > 1 else 1
        found = shared + [number for row in own for number in row + row[-1:] * (width - len(row))]
        return found + [0.0] * (-len(found) % _ALIGNMENT)


def ends_of(segments: Sequence[int]) -> Tensor:
    """Where segments end, as `update_` takes it: int32 [64] on the host."""
    ends = [*segments[:-1], *[torch.iinfo(torch.int32).max] * (SEGMENTS + 1 - len(segments))]
    return torch.tensor(ends, dtype=torch.int32)


@torch.no_grad()
def update_(
    weights: Tensor,
    kept: Tensor | None,
    gradients: Tensor,
    moments: tuple[Tensor, Tensor] | None,
    numbers: Tensor,
    ends: Tensor | None,
) -> None:
    """Update `weights`, what is `kept` besides, and `moments`, fp32 or bits of bfloat16, in place: all [n].

    Args:
        weights: see above.
        kept: see above.
        gradients: of any floating type.
        moments: of AdamW; without them it is SGD.
        numbers: of `CallRates`, fp32.
        ends: where segments end, of `ends_of`; None where there is one.
    """
    scale, first, second, eps, *keys = numbers[:_SHARED].unbind()
    place = torch.arange(len(weights), dtype=torch.int32, device=weights.device)
    rate, root, decay = _own(numbers, place, ends)
    key, other, high, low = (each.int() for each in keys)
    noise = place + (high << 16) + low
    master, grads = _masters(weights, kept), gradients.float() * scale
    if moments is None:
        master = master - rate * grads
    else:
        mean, square = map(_widened, moments)
        mean = mean + first * (grads - mean)
        square = square + second * (grads * grads - square)
        master = master * decay - rate * mean / (square.sqrt() * root + eps)
        for moment, found, random in zip(moments, (mean, square), halves(hashed(noise, key, other)), strict=True):
            moment.copy_(found if moment.dtype == torch.float32 else _upper(_limited(found) + random))
    _keep(master, weights, kept, halves(hashed(noise, key, other, 1))[0])


def _own(numbers: Tensor, place: Tensor, ends: Tensor | None) -> tuple[Tensor, ...]:
    """What segments have of their own, of each element's."""
    if ends is None:
        return numbers[_SHARED : _SHARED + _OWN].unbind()
    # Of how many segments the end is not behind the place: a binary search, without a loop.
    segment, width = torch.zeros_like(place), SEGMENTS
    while width > 1:
        width //= 2
        segment = segment + width * (ends[segment + (width - 1)] <= place).int()
    return tuple(numbers[_SHARED + SEGMENTS * i : _SHARED + SEGMENTS * (i + 1)][segment] for i in range(_OWN))


def _masters(weights: Tensor, kept: Tensor | None) -> Tensor:
    """Fp32."""
    if kept is None:
        return _widened(weights)
    if kept.dtype == torch.float32:
        return kept
    upper = weights.int() + (kept.int() >> 15)  # Rounded up where the first bit is 1: then -1.
    return ((upper << 16) | (kept.int() & _LOW)).view(torch.float32)


def _keep(masters: Tensor, weights: Tensor, kept: Tensor | None, random: Tensor) -> None:
    if weights.dtype == torch.float32:
        weights.copy_(masters)
        return
    weights.copy_(_upper(_limited(masters) + (random if kept is None else _HALF)))
    if kept is not None:
        whole = masters.view(torch.int32)
        kept.copy_(masters if kept.dtype == torch.float32 else ((whole << 16) >> 16).short())


def _widened(numbers: Tensor) -> Tensor:
    """Fp32 from fp32, or from bits of bfloat16."""
    return numbers if numbers.dtype == torch.float32 else (numbers.int() << 16).view(torch.float32)


def _limited(values: Tensor) -> Tensor:
    """Bits of fp32 numbers that less than a unit of bfloat16 can be added to."""
    return values.view(torch.int32).clamp(max=_NAN)


def _upper(bits: Tensor) -> Tensor:
    """The upper halves, int16."""
    return (bits >> 16).short()


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
