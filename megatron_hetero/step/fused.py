"""AdamW and SGD in one pass over all that an optimizer stores, which a compiler fuses: each number is read once and
written once, in its format. `optimizer` computes the same updates step by step, for platforms without a compiler.

    weights  beside         are
    fp32     -              their own masters
    int16    fp32           bits of bfloat16, and masters
    int16    int16          bits of bfloat16, and the lower halves of the masters
    int16    -              bits of bfloat16, rounded stochastically

bfloat16 is passed as its bits, so that all but arithmetic in fp32 uses integers. The same operations compute masters in
every format, and each product is an operand of one addition: a compiler that contracts them does so in every format,
and split masters equal masters in fp32, bit for bit.

States and gradients are updated in place. If they are in host memory, or in more than `PLACES` tensors, batches are
copied first: 6 bytes an element for split masters and moments in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from megatron_hetero.groups.platform import on_device
from megatron_hetero.step.number_formats import HALF, Noise, Plain, halves, hashed, limited
from megatron_hetero.step.optimizer_state import OptimizerState

SEGMENTS = 64
"""The maximum number of segments, each with its own rates, in a call."""
_SHARED, _RATES, _ALIGNMENT = 8, 3, 4
_LOW = 0xFFFF


@dataclass(frozen=True)
class SegmentRates:
    """Rates of neighbouring elements.

    Attributes:
        rate: the learning rate over the bias correction of the first moment.
        root: the inverse root of the bias correction of the second moment.
        decay: a factor of the weights.
    """

    rate: float
    root: float = 1.0
    decay: float = 1.0


@dataclass(frozen=True)
class CallRates:
    """Rates of a call.

    Attributes:
        scale: factor of the gradients.
        first: one minus the first beta.
        second: one minus the second beta.
        eps: added to the root of the second moment.
        noise: random bits for rounding.
        segments: rates of each segment.
    """

    scale: float
    first: float
    second: float
    eps: float
    noise: Noise
    segments: tuple[SegmentRates, ...]

    def numbers(self) -> list[float]:
        """Return the `numbers` of `update_`, padded to a multiple of 16 bytes; fp32 represents all integers exactly."""
        place = divmod(self.noise.start % (1 << 32), 1 << 16)
        shared = [self.scale, self.first, self.second, self.eps, *map(float, (*self.noise.keys, *place))]
        width = SEGMENTS if len(self.segments) > 1 else 1
        numbers = list(shared)
        for row in zip(*((s.rate, s.root, s.decay) for s in self.segments), strict=True):
            numbers += [*row, *row[-1:] * (width - len(row))]
        return numbers + [0.0] * (-len(numbers) % _ALIGNMENT)


@torch.no_grad()
def update_(
    weights: Tensor,
    beside: Tensor | None,
    gradients: Tensor,
    moments: tuple[Tensor, Tensor] | None,
    numbers: Tensor,
    ends: Tensor | None,
) -> None:
    """Update `weights`, the tensor `beside` them, and `moments`, fp32 or bits of bfloat16, in place: all [n].

    Args:
        weights: see the table above.
        beside: see the table above.
        gradients: gradients of any floating type.
        moments: moments of AdamW; without them the update is SGD's.
        numbers: result of `CallRates.numbers`, fp32.
        ends: result of `ends_on`.
    """
    scale, first, second, eps, *keys = numbers[:_SHARED].unbind()
    place = torch.arange(len(weights), dtype=torch.int32, device=weights.device)
    rate, root, decay = _segment_rates(numbers, place, ends)
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
        for moment, updated, random in zip(moments, (mean, square), halves(hashed(noise, key, other)), strict=True):
            moment.copy_(updated if moment.dtype == torch.float32 else _upper(limited(updated) + random))
    _store(master, weights, beside, halves(hashed(noise, key, other, 1))[0])


def _segment_rates(numbers: Tensor, place: Tensor, ends: Tensor | None) -> tuple[Tensor, ...]:
    """Return the rates of the segment of each element."""
    if ends is None:
        return numbers[_SHARED : _SHARED + _RATES].unbind()
    # The number of segments that end at or before the place: a binary search, without a data-dependent loop.
    segment, width = torch.zeros_like(place), SEGMENTS
    while width > 1:
        width //= 2
        segment = segment + width * (ends[segment + (width - 1)] <= place).int()
    return tuple(numbers[_SHARED + SEGMENTS * i : _SHARED + SEGMENTS * (i + 1)][segment] for i in range(_RATES))


def _masters(weights: Tensor, beside: Tensor | None) -> Tensor:
    """Return fp32 masters."""
    if beside is None:
        return _widened(weights)
    if beside.dtype == torch.float32:
        return beside
    # Subtract 1 where the first bit of `beside` is 1: the weight was rounded up.
    upper = weights.int() + (beside.int() >> 15)
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
    """Return the upper halves of int32 bits, int16."""
    return (bits >> 16).short()


PLACES = 64
"""The maximum number of tensors that weights or gradients may be in if they are updated in place."""
_MAX_ELEMENTS = 1 << 30
"""Elements of a call, which indexes them by 32 bits."""


@dataclass(frozen=True)
class Batch:
    """Elements [start, stop) of an `OptimizerState`, updated in one call: `lengths` elements of parameters `names`."""

    start: int
    stop: int
    names: tuple[str, ...]
    lengths: tuple[int, ...]

    def segments(self, rates: Mapping[str, SegmentRates]) -> tuple[tuple[SegmentRates, ...], tuple[int, ...]]:
        """Merge neighbours with equal `rates`, given by parameter. Returns the rates of each segment, and its end."""
        segments, ends = list[SegmentRates](), list[int]()
        for name, end in zip(self.names, accumulate(self.lengths), strict=True):
            if segments and segments[-1] == rates[name]:
                ends[-1] = end
            else:
                segments.append(rates[name])
                ends.append(end)
        return tuple(segments), tuple(ends)


def is_fused(state: OptimizerState) -> bool:
    """Return whether there is a fused update for the formats of a state."""
    return all(isinstance(moment, Plain) for moment in state.moments.values())


def batches_of(state: OptimizerState, tied: str | None, limit: int, *, streamed: bool) -> Iterator[Batch]:
    """Cut a state into batches. The `tied` parameter is alone: on other stages it has other neighbours.

    `limit`: maximum elements of a batch of which everything is copied. `streamed`: whether the states are in host
    memory.
    """
    both = state.master.weights, state.gradients
    copied = [each for each in both if streamed or len(each.tensors) > PLACES]
    cuts = {0, *(end for each in both if each not in copied for end in each.ends)}
    longest = _MAX_ELEMENTS
    if copied:
        # The same number of bytes, if only weights or gradients are copied.
        longest = limit * sum(each.dtype.itemsize for each in both) // sum(each.dtype.itemsize for each in copied)
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
    on_gpu = [tensor.to(weights.device, non_blocking=True) for tensor in stored]
    moments = [_bits(tensor) for tensor in (on_gpu if beside is None else on_gpu[1:])]
    yield (
        _bits(weights),
        None if beside is None else on_gpu[0],
        gradients,
        (moments[0], moments[1]) if moments else None,
    )
    if len(state.master.weights.views(start, stop)) > 1:
        state.master.weights.write(start, weights)
    for target, values in zip(stored, on_gpu, strict=True):
        if target.device != values.device:
            target.copy_(values, non_blocking=True)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def numbers_of(calls: Sequence[CallRates], device: torch.device) -> Sequence[Tensor]:
    """Return the `numbers` of each call of `update_`, after one transfer to the device."""
    rows = [call.numbers() for call in calls]
    flat = on_device(torch.tensor([number for row in rows for number in row]), device)
    return flat.split([len(row) for row in rows])


@lru_cache(maxsize=1024)
def ends_on(device: torch.device, ends: tuple[int, ...]) -> Tensor | None:
    """Return the `ends` of segments for `update_`, int32 [64]; None for a single segment."""
    if len(ends) == 1:
        return None
    padded = [*ends[:-1], *[torch.iinfo(torch.int32).max] * (SEGMENTS + 1 - len(ends))]
    return on_device(torch.tensor(padded, dtype=torch.int32), device)
