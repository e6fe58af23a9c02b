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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hetero.step.noise import Noise, halves, hashed

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
