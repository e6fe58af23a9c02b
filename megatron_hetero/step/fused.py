"""AdamW and SGD updates that a compiler fuses into one pass: each number is read once and written once, in its storage
format. `optimizer` computes the same updates in several passes, for platforms without a compiler.

    weights  beside         contents
    fp32     -              fp32 weights, which are also the masters
    int16    fp32           bits of bfloat16 weights, and fp32 masters
    int16    int16          bits of bfloat16 weights, and the lower halves of the masters
    int16    -              bits of bfloat16 weights, rounded stochastically, without masters

bfloat16 numbers are passed as their bits, so that the kernel uses only fp32 and integer arithmetic. Masters are
computed by the same operations in every format, and each product is an operand of one addition: a compiler that
contracts these to fused multiply-adds does so in every format, and split masters are bitwise equal to fp32 masters.

States are updated in place. If states are in host memory, or weights or gradients in more than `PLACES` tensors, each
batch is copied first: 6 bytes for each element with split masters and bfloat16 moments.
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
"""The maximum number of segments in a call of `update_`. Each segment has separate rates."""
_SHARED, _RATES, _ALIGNMENT = 7, 3, 4
_LOW = 0xFFFF


@dataclass(frozen=True)
class SegmentRates:
    """The rates of a segment, a range of elements with equal rates.

    Attributes:
        rate: the learning rate divided by the bias correction of the first moment.
        root: the inverse square root of the bias correction of the second moment.
        decay: the factor by which weight decay multiplies the weights.
    """

    rate: float
    root: float = 1.0
    decay: float = 1.0


@dataclass(frozen=True)
class CallRates:
    """The rates of a call of `update_`.

    Attributes:
        first: one minus the first beta.
        second: one minus the second beta.
        eps: a number that is added to the root of the second moment.
        noise: the random bits for stochastic rounding.
        segments: the rates of each segment.
    """

    first: float
    second: float
    eps: float
    noise: Noise
    segments: tuple[SegmentRates, ...]

    def numbers(self) -> list[float]:
        """Return the argument `numbers` of `update_`, padded to 16 bytes. fp32 represents its integers exactly."""
        place = divmod(self.noise.start % (1 << 32), 1 << 16)
        shared = [self.first, self.second, self.eps, *map(float, (*self.noise.keys, *place))]
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
    scale: Tensor,
) -> None:
    """Update `weights`, `beside` and `moments` in place by a step of AdamW or SGD. The first four arguments are [n].
    They do not change if `scale` is NaN: what is stored is then what was read, which each format stores exactly.

    Args:
        weights: fp32 weights, or int16 bits of bfloat16 weights.
        beside: fp32 masters, int16 lower halves of masters, or None.
        gradients: gradients of any floating dtype.
        moments: the two moments of AdamW, in fp32 or as int16 bits of bfloat16; None for SGD.
        numbers: the result of `CallRates.numbers` as an fp32 tensor.
        ends: the result of `ends_on`.
        scale: the factor of the gradients, an fp32 scalar.
    """
    first, second, eps, *keys = numbers[:_SHARED].unbind()
    place = torch.arange(len(weights), dtype=torch.int32, device=weights.device)
    rate, root, decay = _segment_rates(numbers, place, ends)
    key, other, high, low = (each.int() for each in keys)
    noise = place + (high << 16) + low
    before, grads, skips = _masters(weights, beside), gradients.float() * scale, scale.isnan()
    if moments is None:
        master = before - rate * grads
    else:
        old_mean, old_square = map(_widened, moments)
        mean = old_mean + first * (grads - old_mean)
        square = old_square + second * (grads * grads - old_square)
        master = before * decay - rate * mean / (square.sqrt() * root + eps)
        mean, square = torch.where(skips, old_mean, mean), torch.where(skips, old_square, square)
        for moment, updated, random in zip(moments, (mean, square), halves(hashed(noise, key, other)), strict=True):
            moment.copy_(updated if moment.dtype == torch.float32 else _upper(limited(updated) + random))
    _store(torch.where(skips, before, master), weights, beside, halves(hashed(noise, key, other, 1))[0])


def _segment_rates(numbers: Tensor, place: Tensor, ends: Tensor | None) -> tuple[Tensor, ...]:
    """Return the rate, root and decay of each element, which are the rates of its segment."""
    if ends is None:
        return numbers[_SHARED : _SHARED + _RATES].unbind()
    # Count the segments that end at or before each element: a binary search without a data-dependent loop.
    segment, width = torch.zeros_like(place), SEGMENTS
    while width > 1:
        width //= 2
        segment = segment + width * (ends[segment + (width - 1)] <= place).int()
    return tuple(numbers[_SHARED + SEGMENTS * i : _SHARED + SEGMENTS * (i + 1)][segment] for i in range(_RATES))


def _masters(weights: Tensor, beside: Tensor | None) -> Tensor:
    """Return the fp32 masters that `weights` and `beside` store."""
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
    """Return fp32 numbers, or int16 bits of bfloat16 numbers, as fp32."""
    return numbers if numbers.dtype == torch.float32 else (numbers.int() << 16).view(torch.float32)


def _upper(bits: Tensor) -> Tensor:
    """Return the upper halves of int32 `bits` as int16."""
    return (bits >> 16).short()


PLACES = 64
"""The maximum number of weight or gradient tensors that are processed without copies to a batch."""
_MAX_ELEMENTS = 1 << 30
"""The maximum number of elements in a call, which has 32-bit indices."""


@dataclass(frozen=True)
class Batch:
    """Elements [start, stop) of an `OptimizerState` that one call updates: `lengths` elements of parameters `names`."""

    start: int
    stop: int
    names: tuple[str, ...]
    lengths: tuple[int, ...]

    def segments(self, rates: Mapping[str, SegmentRates]) -> tuple[tuple[SegmentRates, ...], tuple[int, ...]]:
        """Merge adjacent parameters with equal `rates` into segments. Return the rates and the end of each segment."""
        segments, ends = list[SegmentRates](), list[int]()
        for name, end in zip(self.names, accumulate(self.lengths), strict=True):
            if segments and segments[-1] == rates[name]:
                ends[-1] = end
            else:
                segments.append(rates[name])
                ends.append(end)
        return tuple(segments), tuple(ends)


def is_fused(state: OptimizerState) -> bool:
    """Return whether the fused update supports the storage formats of a state."""
    return all(isinstance(moment, Plain) for moment in state.moments.values())


def batches_of(state: OptimizerState, tied: str | None, limit: int, *, streamed: bool) -> Iterator[Batch]:
    """Yield the batches of a state. The `tied` parameter has separate batches: another stage must round it equally.

    `limit`: maximum number of elements in a batch whose weights and gradients are copied. `streamed`: whether states
    are in host memory.
    """
    both = state.master.weights, state.gradients
    copied = [each for each in both if streamed or len(each.tensors) > PLACES]
    cuts = {0, *(end for each in both if each not in copied for end in each.ends)}
    longest = _MAX_ELEMENTS
    if copied:
        # If only weights or gradients are copied, a batch may have more elements in the same number of bytes.
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
    """Yield the tensors of a batch for `update_`, on the device: views, or copies that are written back at exit."""
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
    """Return the argument `numbers` of each call of `update_`, copied to the device in one transfer."""
    rows = [call.numbers() for call in calls]
    flat = on_device(torch.tensor([number for row in rows for number in row]), device)
    return flat.split([len(row) for row in rows])


@lru_cache(maxsize=1024)
def ends_on(device: torch.device, ends: tuple[int, ...]) -> Tensor | None:
    """Return the argument `ends` of `update_`, the ends of segments, int32 [64]; None for a single segment."""
    if len(ends) == 1:
        return None
    padded = [*ends[:-1], *[torch.iinfo(torch.int32).max] * (SEGMENTS + 1 - len(ends))]
    return on_device(torch.tensor(padded, dtype=torch.int32), device)
