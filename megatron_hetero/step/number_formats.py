"""The random bits that numbers are rounded with: a hash of an element's place and of a text.

So they are the same on all ranks that hold the element, on every device, after a resume, and however many elements are
rounded at a time.

Fp32 numbers kept in fewer bits: how optimizers keep master weights and moments (docs/training.md, "Optimizer states
in fewer bytes").

    Fp32Weights    the weights themselves, in fp32
    Fp32Master     master weights in fp32; the weights are those rounded to bfloat16
    SplitMaster    the bfloat16 weight and the lower 16 bits of the master, which together are the master, bit for bit
    RoundedMaster  the bfloat16 weight alone, rounded stochastically at each update (Gupta et al. 2015,
                   arXiv 1502.02551)
    Plain          fp32, or bfloat16, rounded stochastically
    Blocks8        one byte an element and a scale for each block of 256 (Dettmers et al. 2021, arXiv 2110.02861)

All tensors are flat, and of many parameters, one after the other: so that a handful of kernels does them all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Protocol, Self

import torch
from torch import Tensor

BITS = 16
"""Of a draw: what rounding from fp32 to bfloat16 takes."""
_LOW = (1 << BITS) - 1
_KEY_BITS = 24
"""Of a key: a number that fp32 has."""


@dataclass(frozen=True)
class Noise:
    """Random bits of elements from place `start` on. `keys`: two numbers of 24 bits. `number`: which draw of an
    element this is.
    """

    keys: tuple[int, int]
    start: int = 0
    number: int = 0

    @classmethod
    def of(cls, text: str) -> Self:
        """Other bits for each text."""
        digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        return cls((digest % (1 << _KEY_BITS), (digest >> _KEY_BITS) % (1 << _KEY_BITS)))

    def at(self, start: int) -> Noise:
        """That of elements from place `start` on."""
        return replace(self, start=start)

    def draw(self, number: int) -> Noise:
        """Another draw of the same elements."""
        return replace(self, number=number)

    def bits(self, count: int, device: torch.device) -> Tensor:
        """Draws of `count` elements: int32 [count], of 16 bits."""
        place = torch.arange(count, dtype=torch.int32, device=device) + _wrapped(self.start)
        return halves(hashed(place, *self.keys, self.number // 2))[self.number % 2]


def hashed(place: Tensor, key: Tensor | int, other: Tensor | int, round: int = 0) -> Tensor:
    """32 random bits for each int32 place."""
    return _mixed(_mixed(place + key) ^ (other + (round << _KEY_BITS)))


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper 16 of 32 bits."""
    return bits & _LOW, (bits >> BITS) & _LOW


def _mixed(x: Tensor) -> Tensor:
    """C. Wellons' `lowbias32` (nullprogram.com/blog/2018/07/31), in int32: factors wrap, and shifts bring in zeros."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _wrapped(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _wrapped(number: int) -> int:
    """The int32 of the lowest 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


BLOCK = 256
"""Elements of a block with one scale."""
PIECE = 1 << 23
"""Elements that are unpacked at a time: 32 MiB in fp32."""
assert PIECE % BLOCK == 0, "pieces begin where blocks do"
BATCHES = 32
"""Numbers that are unpacked, or brought together, for updates are so in about so many batches, if these are small."""
_SHARE = 8
"""Masters are rounded in at most about so many goes: their workspace is 1/24 of what they and their moments take."""
_HALF = 1 << 15
_NAN = 0x7FC00000
"""Bits of the smallest quiet NaN: adding to those of a larger one might wrap."""


@dataclass(frozen=True, eq=False)
class Spread:
    """Numbers that lie one after the other in several flat tensors, of one dtype."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        """Those of `tensors`, of which neighbours in memory become one."""
        merged = list[Tensor]()
        for tensor in tensors:
            if merged and _adjoin(merged[-1], tensor):
                last = merged.pop()
                tensor = last.as_strided((len(last) + len(tensor),), (1,), last.storage_offset())
            merged.append(tensor)
        return cls(tuple(merged))

    @property
    def dtype(self) -> torch.dtype:
        """Of all of them."""
        return self.tensors[0].dtype

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each of them ends."""
        return tuple(accumulate(map(len, self.tensors)))

    def views(self, start: int, stop: int) -> list[Tensor]:
        """Numbers [start, stop), as they lie."""
        found, place = list[Tensor](), bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[place] - len(self.tensors[place])
            found.append(self.tensors[place][start - begin : stop - begin])
            start, place = min(stop, self.ends[place]), place + 1
        return found

    def read(self, start: int, stop: int) -> Tensor:
        """Numbers [start, stop); a view where they lie in one tensor."""
        found = self.views(start, stop)
        return found[0] if len(found) == 1 else torch.cat(found)

    def write(self, start: int, values: Tensor) -> None:
        """Copy `values` to where numbers from `start` on lie."""
        targets = self.views(start, start + len(values))
        if len(targets) == 1:
            targets[0].copy_(values)
        else:
            torch._foreach_copy_(targets, values.contiguous().split(list(map(len, targets))))

    def part(self, start: int, stop: int) -> Spread:
        """Numbers [start, stop)."""
        return Spread(tuple(self.views(start, stop)))


class Stored(Protocol):
    """Fp32 numbers in some form."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What they are kept in, other than the weights."""
        ...

    @property
    def values(self) -> Tensor | None:
        """The tensor that has their values as they are kept, [size]; None where they are kept in parts."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """Numbers [start, stop), fp32 on the device; a view where they are kept so, in one tensor."""
        ...

    def write(self, start: int, values: Tensor, noise: Noise | None = None) -> None:
        """Keep `values`, fp32, from `start` on. What has to be rounded is rounded stochastically with `noise`, and to
        the nearest without.
        """
        ...

    def part(self, start: int, stop: int) -> Stored:
        """Numbers [start, stop): views of these."""
        ...


@dataclass(frozen=True, eq=False)
class Plain:
    """In a tensor, fp32 or bfloat16. `device`: where they are computed with."""

    kept: Tensor
    device: torch.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.kept,)

    @property
    def values(self) -> Tensor:  # noqa: D102
        return self.kept

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        return self.kept[start:stop].to(self.device, non_blocking=True).float()

    def write(self, start: int, values: Tensor, noise: Noise | None = None) -> None:  # noqa: D102
        target = self.kept[start : start + len(values)]
        if _same_memory(target, values):
            return  # A view of it, updated in place.
        if noise is not None and self.kept.dtype == torch.bfloat16:
            values = upper_half(rounded_stochastically(values, noise))
        target.copy_(values, non_blocking=True)

    def part(self, start: int, stop: int) -> Plain:  # noqa: D102
        return Plain(self.kept[start:stop], self.device)


@dataclass(frozen=True, eq=False)
class Fp32Weights:
    """The `weights`, fp32."""

    weights: Spread

    tensors = ()

    @property
    def values(self) -> Tensor | None:  # noqa: D102
        return _only(self.weights)

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        return self.weights.read(start, stop)

    def write(self, start: int, values: Tensor, noise: Noise | None = None) -> None:  # noqa: D102
        self.weights.write(start, values)

    def part(self, start: int, stop: int) -> Fp32Weights:  # noqa: D102
        return Fp32Weights(self.weights.part(start, stop))


@dataclass(frozen=True, eq=False)
class Fp32Master:
    """Fp32 master weights, and the `weights`, bfloat16, that are those rounded."""

    weights: Spread
    master: Plain

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # noqa: D102
        return self.master.tensors

    @property
    def values(self) -> Tensor:  # noqa: D102
        return self.master.values

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        return self.master.read(start, stop)

    def write(self, start: int, values: Tensor, noise: Noise | None = None) -> None:  # noqa: D102
        self.master.write(start, values)
        size = max(PIECE, -(-len(values) // _SHARE))
        for first in range(0, len(values), size):
            self.weights.write(start + first, upper_half(rounded(values[first : first + size])))

    def part(self, start: int, stop: int) -> Fp32Master:  # noqa: D102
        return Fp32Master(self.weights.part(start, stop), self.master.part(start, stop))


@dataclass(frozen=True, eq=False)
class SplitMaster:
    """The `weights`, bfloat16, and the lower halves of the masters, int16."""

    weights: Spread
    lower: Tensor

    values = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.lower,)

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        weights = self.weights.read(start, stop)
        return joined(weights, self.lower[start:stop].to(weights.device, non_blocking=True))

    def write(self, start: int, values: Tensor, noise: Noise | None = None) -> None:  # noqa: D102
        self.weights.write(start, upper_half(rounded(values)))
        self.lower[start : start + len(values)].copy_(values.view(torch.int16)[::2], non_blocking=True)

    def part(self, start: int, stop: int) -> SplitMaster:  # noqa: D102
        return SplitMaster(self.weights.part(start, stop), self.lower[start:stop])


@dataclass(frozen=True, eq=False)
class RoundedMaster:
    """The `weights`, bfloat16, and nothing else."""

    weights: Spread

    tensors = ()

    @property
    def values(self) -> Tensor | None:  # noqa: D102
        return _only(self.weights)

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        return self.weights.read(start, stop).float()

    def write(self, start: int, values: Tensor, noise: Noise | None = None) -> None:  # noqa: D102
        bits = rounded(values) if noise is None else rounded_stochastically(values, noise)
        self.weights.write(start, upper_half(bits))

    def part(self, start: int, stop: int) -> RoundedMaster:  # noqa: D102
        return RoundedMaster(self.weights.part(start, stop))


@dataclass(frozen=True, eq=False)
class Blocks8:
    """A byte for each element, its place in `levels`, and a scale, fp32, for each block. `squares`: numbers that are
    never negative, of which the square root is kept: second moments, whose range is twice as wide as that of the first.
    `sizes`: of the parameters that they belong to; blocks begin where these do.
    """

    codes: Tensor
    scales: Tensor
    device: torch.device
    squares: bool
    sizes: tuple[int, ...]

    values = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # noqa: D102
        return self.codes, self.scales

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        skipped, lengths, (first, last) = self._cut(start, stop)
        codes = self.codes[start:stop].to(self.device, non_blocking=True)
        scales = self.scales[first:last].to(self.device, non_blocking=True).repeat_interleave(BLOCK)
        found = levels(not self.squares, self.device)[codes.int()]
        found *= _without_gaps(scales[skipped:], lengths, skipped)
        return found.square_() if self.squares else found

    def write(self, start: int, values: Tensor, noise: Noise | None = None) -> None:  # noqa: D102
        skipped, lengths, (first, last) = self._cut(start, start + len(values))
        assert skipped == 0, "whole blocks have one scale"
        known = levels(not self.squares, self.device)
        blocks = _with_gaps(values.sqrt() if self.squares else values, lengths).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        shares = (blocks / torch.where(scales > 0, scales, 1.0)[:, None]).view(-1)
        shares = _without_gaps(shares, lengths)
        above = torch.searchsorted(known, shares, out_int32=True).clamp_(1, len(known) - 1)
        low, high = known[above - 1], known[above]
        part = (shares - low) / (high - low)
        # Not the nearest where rounding is stochastic: the lower with the probability that keeps the mean.
        limit = 0.5 if noise is None else noise.bits(len(part), part.device) * 2.0**-BITS
        codes = above - (part <= limit).int()
        if self.squares:
            codes = torch.where(shares > 0, codes.clamp(min=1), codes)  # A divisor: never 0 where it was not.
        self.codes[start : start + len(values)].copy_(codes, non_blocking=True)
        self.scales[first:last].copy_(scales, non_blocking=True)

    def part(self, start: int, stop: int) -> Blocks8:  # noqa: D102
        skipped, lengths, (first, last) = self._cut(start, stop)
        assert skipped == 0, "whole blocks have one scale"
        return Blocks8(self.codes[start:stop], self.scales[first:last], self.device, self.squares, tuple(lengths))

    @cached_property
    def _ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of each parameter the end of its elements, and of its blocks."""
        return tuple(accumulate(self.sizes)), tuple(accumulate(-(-size // BLOCK) for size in self.sizes))

    def _cut(self, start: int, stop: int) -> tuple[int, list[int], tuple[int, int]]:
        """Of elements [start, stop): those of their first block before them, how many each parameter has of them, and
        their blocks.
        """
        ends, ends_of_blocks = self._ends
        lengths, blocks, skipped, place = list[int](), list[int](), 0, bisect_right(ends, start)
        while start < stop:
            begin, end = ends[place] - self.sizes[place], min(stop, ends[place])
            before = ends_of_blocks[place] - -(-self.sizes[place] // BLOCK)
            if not lengths:
                skipped = (start - begin) % BLOCK
            lengths.append(end - start)
            blocks += [before + (start - begin) // BLOCK, before - (begin - end) // BLOCK]
            start, place = end, place + 1
        return skipped, lengths, (blocks[0], blocks[-1]) if blocks else (0, 0)


def _only(spread: Spread) -> Tensor | None:
    return spread.tensors[0] if len(spread.tensors) == 1 else None


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return _place(one) == _place(other) and one.dtype == other.dtype


def _adjoin(one: Tensor, other: Tensor) -> bool:
    """Whether `other` lies right behind `one`."""
    memory, start = _place(one)
    return (memory, start + len(one)) == _place(other)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _gaps(lengths: Sequence[int], skipped: int = 0) -> Iterator[tuple[int, int]]:
    """Where elements of parameters with gaps behind them, up to a whole block, begin and end. `skipped`: how much of
    the first block is not there.
    """
    begin = 0
    for length in lengths:
        yield begin, begin + length
        begin += length + -(length + skipped) % BLOCK
        skipped = 0


def _has_gaps(lengths: Sequence[int], skipped: int = 0) -> bool:
    return any(end != begin for (_, end), (begin, _) in pairwise(_gaps(lengths, skipped)))


def _with_gaps(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """`values` of parameters of so many elements, with zeros up to a whole block behind each."""
    if not _has_gaps(lengths):
        return torch.nn.functional.pad(values, (0, -len(values) % BLOCK))
    places = list(_gaps(lengths))
    padded = values.new_zeros(places[-1][1] + -places[-1][1] % BLOCK)
    torch._foreach_copy_([padded[begin:end] for begin, end in places], values.split(list(lengths)))
    return padded


def _without_gaps(padded: Tensor, lengths: Sequence[int], skipped: int = 0) -> Tensor:
    """The opposite."""
    if not _has_gaps(lengths, skipped):
        return padded[: sum(lengths)]
    return torch.cat([padded[begin:end] for begin, end in _gaps(lengths, skipped)])


def batch_elements(elements: int) -> int:
    """How many of the elements that a rank updates of a module are unpacked, or brought together, at a time."""
    return min(4 * PIECE, max(PIECE, -(-elements // BATCHES)))


def unpacked(stored: Stored, start: int, stop: int) -> Tensor:
    """Numbers [start, stop), fp32 on the host."""
    found = torch.empty(stop - start)
    for first in range(start, stop, PIECE):
        last = min(first + PIECE, stop)
        found[first - start : last - start] = stored.read(first, last)
    return found


def write_all(stored: Stored, values: Tensor, device: torch.device) -> None:
    """Keep `values` of any floating type, on the device or the host, rounded to the nearest."""
    for start in range(0, len(values), PIECE):
        stored.write(start, values[start : start + PIECE].to(device).float())


# ----------------------------------------------------------------------------------------------- bits


def nearest_bfloat16(values: Tensor) -> Tensor:
    """Fp32 `values`, of any shape, in bfloat16, rounded as weights are."""
    return upper_half(rounded(values.contiguous().view(-1))).view(values.shape)


def rounded(values: Tensor) -> Tensor:
    """Bits, int32, whose upper halves are fp32 `values` in bfloat16, rounded to the nearest, ties away from zero."""
    return values.view(torch.int32).clamp(max=_NAN).add_(_HALF)


def rounded_stochastically(values: Tensor, noise: Noise) -> Tensor:
    """As `rounded`, up with the probability that keeps the mean."""
    return noise.bits(len(values), values.device).add_(values.view(torch.int32).clamp(max=_NAN))


def upper_half(bits: Tensor) -> Tensor:
    """The bfloat16 numbers in the upper halves of int32 `bits`. (All platforms of PyTorch are little-endian.)"""
    return bits.view(torch.bfloat16)[1::2]


def joined(weights: Tensor, lower: Tensor) -> Tensor:
    """Fp32 numbers from bfloat16 `weights`, which are those `rounded`, and their `lower` halves, int16."""
    upper = weights.contiguous().view(torch.int16) + (lower >> 15)  # Rounded up where its first bit is 1: then -1.
    return torch.stack((lower, upper), 1).view(torch.float32).view(-1)


def code_of_zero(squares: bool) -> int:
    """The byte of 0."""
    return 0 if squares else 127


@lru_cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """The numbers of at most 1 that a byte stands for, ascending, fp32 [255]: a decimal exponent in unary, and the rest
    of the bits evenly spaced in between (dynamic tree quantization, Dettmers 2015, arXiv 1511.04561).
    """
    exponents, found = 7, [1.0]
    for exponent in range(exponents):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        found += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - exponents + 1)).tolist()
    # 1 itself takes the place of the next: the scale of a block is its largest number, and is kept exactly.
    positive = sorted(found)
    del positive[-2]
    both = [-level for level in reversed(positive)] if signed else []
    return torch.tensor([*both, 0.0, *positive], dtype=torch.float32, device=device)
