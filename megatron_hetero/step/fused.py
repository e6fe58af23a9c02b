"""AdamW and SGD in one pass over all that an optimizer stores, which a compiler fuses: each number is read once and
written once, in its format. `optimizer` has the same updates in steps, for platforms without a compiler.

    weights  beside         are
    fp32     -              their own masters
    int16    fp32           bits of bfloat16, and masters
    int16    int16          bits of bfloat16, and the lower halves of the masters
    int16    -              bits of bfloat16, rounded stochastically

bfloat16 is passed as its bits, so that all but arithmetic in fp32 is done with integers. Masters are computed by the
same operations in every format, each product being added to once: a compiler that contracts them contracts all alike,
and split masters equal those in fp32, bit for bit.

States and gradients are updated in place. Batches of those in host memory, or in very many places, are copied first:
6 bytes an element for split masters and moments in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor

from megatron_hetero.groups.platform import on_device
from megatron_hetero.step.number_formats import HALF, Noise, Plain, halves, hashed, limited
from megatron_hetero.step.optimizer_state import OptimizerState

SEGMENTS = 64
"""The most segments of a call with rates of their own."""
_SHARED, _OWN, _ALIGNMENT = 8, 3, 4
_LOW = 0xFFFF


@dataclass(frozen=True)
class SegmentRates:
    """Rates of neighbouring elements: `rate`, the learning rate over the bias correction of the first moment; `root`,
    the inverse root of the correction of the second; `decay`, a factor of the weights.
    """

    rate: float
    root: float = 1.0
    decay: float = 1.0


@dataclass(frozen=True)
class CallRates:
    """Rates of a call. `scale`: factor of the gradients; `first`, `second`: one minus the betas."""

    scale: float
    first: float
    second: float
    eps: float
    noise: Noise
    segments: tuple[SegmentRates, ...]

    def numbers(self) -> list[float]:
        """The `numbers` of `update_`, padded to a multiple of 16 bytes; integers are those that fp32 represents."""
        place = divmod(self.noise.start % (1 << 32), 1 << 16)
        shared = [self.scale, self.first, self.second, self.eps, *map(float, (*self.noise.keys, *place))]
        own = [list(each) for each in zip(*((s.rate, s.root, s.decay) for s in self.segments), strict=True)]
        width = SEGMENTS if len(self.segments) > 1 else 1
        found = shared + [number for row in own for number in row + row[-1:] * (width - len(row))]
        return found + [0.0] * (-len(found) % _ALIGNMENT)


@torch.no_grad()
def update_(
    weights: Tensor,
    beside: Tensor | None,
    gradients: Tensor,
    moments: tuple[Tensor, Tensor] | None,
    numbers: Tensor,
    ends: Tensor | None,
) -> None:
    """Update `weights`, what is stored `beside` them, and `moments`, fp32 or bits of bfloat16, in place: all [n].

    Args:
        weights: see above.
        beside: see above.
        gradients: of any floating type.
        moments: of AdamW; without them the update is that of SGD.
        numbers: those of `CallRates`, fp32.
        ends: see `ends_on`.
    """
    scale, first, second, eps, *keys = numbers[:_SHARED].unbind()
    place = torch.arange(len(weights), dtype=torch.int32, device=weights.device)
    rate, root, decay = _own(numbers, place, ends)
    key, other, high, low = (each.int() for each in keys)
    noise = place + (high << 16) + low
    master, grads = _masters(weights, beside), gradients.float() * scale
    if moments is None:
        master = master - rate * grads
    else:
        mean, square = map(_widened, moments)
        mean = mean + first * (grads - mean)
        square = square + second * (grads * grads - square)
        master = master * decay - rate * mean / (square.sqrt() * root + eps)
        for moment, found, random in zip(moments, (mean, square), halves(hashed(noise, key, other)), strict=True):
            moment.copy_(found if moment.dtype == torch.float32 else _upper(limited(found) + random))
    _store(master, weights, beside, halves(hashed(noise, key, other, 1))[0])


def _own(numbers: Tensor, place: Tensor, ends: Tensor | None) -> tuple[Tensor, ...]:
    """The rates of the segment of each element."""
    if ends is None:
        return numbers[_SHARED : _SHARED + _OWN].unbind()
    # The number of segments that end at or before the place: a binary search, without a data-dependent loop.
    segment, width = torch.zeros_like(place), SEGMENTS
    while width > 1:
        width //= 2
        segment = segment + width * (ends[segment + (width - 1)] <= place).int()
    return tuple(numbers[_SHARED + SEGMENTS * i : _SHARED + SEGMENTS * (i + 1)][segment] for i in range(_OWN))


def _masters(weights: Tensor, beside: Tensor | None) -> Tensor:
    """Fp32 masters."""
    if beside is None:
        return _widened(weights)
    if beside.dtype == torch.float32:
        return beside
    upper = weights.int() + (beside.int() >> 15)  # Rounded up where the first bit is 1: then -1.
    return ((upper << 16) | (beside.int() & _LOW)).view(torch.float32)


def _store(masters: Tensor, weights: Tensor, beside: Tensor | None, random: Tensor) -> None:
    if weights.dtype == torch.float32:
        weights.copy_(masters)
        return
    weights.copy_(_upper(limited(masters) + (random if beside is None else HALF)))
    if beside is not None:
        whole = masters.view(torch.int32)
        beside.copy_(masters if beside.dtype == torch.float32 else ((whole << 16) >> 16).short())


def _widened(numbers: Tensor) -> Tensor:
    """Convert fp32, or bits of bfloat16, to fp32."""
    return numbers if numbers.dtype == torch.float32 else (numbers.int() << 16).view(torch.float32)


def _upper(bits: Tensor) -> Tensor:
    """The upper halves of int32 bits, int16."""
    return (bits >> 16).short()


PLACES = 64
"""The most tensors that weights and gradients may be in to be updated in place."""
_MOST = 1 << 30
"""Elements of a call, which indexes them by 32 bits."""


@dataclass(frozen=True)
class Batch:
    """Elements [start, stop) of an `OptimizerState`, updated in one call: `lengths` elements of parameters `names`."""

    start: int
    stop: int
    names: tuple[str, ...]
    lengths: tuple[int, ...]

    def segments(self, rates: Mapping[str, SegmentRates]) -> tuple[tuple[SegmentRates, ...], tuple[int, ...]]:
        """Merge neighbours with equal `rates`, which are by parameter: the rates of each segment, and its end."""
        found = [(rates[name], end) for name, end in zip(self.names, accumulate(self.lengths), strict=True)]
        groups = [(rate, [end for _, end in of][-1]) for rate, of in groupby(found, key=lambda each: each[0])]
        return tuple(rate for rate, _ in groups), tuple(end for _, end in groups)


def is_fused(state: OptimizerState) -> bool:
    """Whether there is a fused update for the formats of a state."""
    return all(isinstance(moment, Plain) for moment in state.moments.values())


def batches_of(state: OptimizerState, tied: str | None, most: int, *, streamed: bool) -> Iterator[Batch]:
    """Cut a state into batches. The `tied` parameter is alone: on other stages it has other neighbours.

    `most`: elements of a batch of which everything is copied. `streamed`: whether the states are in host memory.
    """
    several = state.master.weights, state.gradients
    copied = [each for each in several if streamed or len(each.tensors) > PLACES]
    cuts = {0, *(end for each in several if each not in copied for end in each.ends)}
    longest = _MOST
    if copied:
        # As many bytes, if only some of it is copied.
        longest = most * sum(each.dtype.itemsize for each in several) // sum(each.dtype.itemsize for each in copied)
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


@contextmanager
def tensors_of(
    state: OptimizerState, batch: Batch
) -> Iterator[tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor] | None]]:
    """Yield the first arguments of `update_` for a batch, on the device: views, or copies that are written back."""
    start, stop = batch.start, batch.stop
    weights, gradients = state.master.weights.read(start, stop), state.gradients.read(start, stop)
    beside = state.master.beside
    stored = [] if beside is None else [beside[start:stop]]
    stored += [moment.values[start:stop] for moment in state.moments.values() if moment.values is not None]
    found = [tensor.to(weights.device, non_blocking=True) for tensor in stored]
    moments = [_bits(tensor) for tensor in (found if beside is None else found[1:])]
    yield (
        _bits(weights),
        None if beside is None else found[0],
        gradients,
        (moments[0], moments[1]) if moments else None,
    )
    if len(state.master.weights.views(start, stop)) > 1:
        state.master.weights.write(start, weights)
    for target, values in zip(stored, found, strict=True):
        if target.device != values.device:
            target.copy_(values, non_blocking=True)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def numbers_of(calls: Sequence[CallRates], device: torch.device) -> Sequence[Tensor]:
    """The `numbers` of each call of `update_`, in one transfer to the device."""
    rows = [call.numbers() for call in calls]
    flat = on_device(torch.tensor([number for row in rows for number in row]), device)
    return flat.split([len(row) for row in rows])


@lru_cache(maxsize=1024)
def ends_on(device: torch.device, ends: tuple[int, ...]) -> Tensor | None:
    """The `ends` of segments for `update_`, int32 [64]; None for a single segment."""
    if len(ends) == 1:
        return None
    padded = [*ends[:-1], *[torch.iinfo(torch.int32).max] * (SEGMENTS + 1 - len(ends))]
    return on_device(torch.tensor(padded, dtype=torch.int32), device)
