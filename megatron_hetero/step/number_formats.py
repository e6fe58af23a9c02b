"""Formats that store fp32 numbers in fewer bits: master weights and moments of optimizers (docs/training.md, "Optimizer
states in fewer bytes"), and the random bits for stochastic rounding.

    Master     fp32 weights, or bfloat16 weights beside fp32 masters, beside the lower 16 bits of the masters, or alone
               (stochastic rounding: Gupta et al. 2015, arXiv 1502.02551)
    Plain      fp32, or bfloat16, rounded stochastically
    Blocks8    one byte for each element, a scale for each block of 256 (Dettmers et al. 2021, arXiv 2110.02861)

All tensors are flat concatenations of many parameters, so that few kernels process all parameters. Random bits are a
hash of a text and an element's index: they are the same on all ranks that store the element, on every device, after a
resume, and for any batch size of the rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

BITS = 16
"""Number of random bits in a draw, which is the number of bits that rounding from fp32 to bfloat16 removes."""
_LOW = (1 << BITS) - 1
_KEY_BITS = 24
"""Number of bits of a key: fp32 represents 24-bit integers exactly."""


@dataclass(frozen=True)
class Noise:
    """Random bits of the elements from index `start` on, by two 24-bit `keys`. `number`: the index of the draw."""

    keys: tuple[int, int]
    start: int = 0
    number: int = 0

    @classmethod
    def of(cls, text: str, start: int = 0) -> Self:
        """Return noise with keys derived from a text."""
        digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        return cls((digest % (1 << _KEY_BITS), (digest >> _KEY_BITS) % (1 << _KEY_BITS)), start)

    def bits(self, count: int, device: torch.device) -> Tensor:
        """Draw 16 bits for each of `count` elements, int32 [count]."""
        place = torch.arange(count, dtype=torch.int32, device=device) + _wrapped(self.start)
        return halves(hashed(place, *self.keys, self.number // 2))[self.number % 2]


def hashed(place: Tensor, key: Tensor | int, other: Tensor | int, round: int = 0) -> Tensor:
    """Hash each int32 index in `place`, with two keys and a round number, to 32 random bits."""
    return _mixed(_mixed(place + key) ^ (other + (round << _KEY_BITS)))


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower 16 bits and the upper 16 bits of each int32 element."""
    return bits & _LOW, (bits >> BITS) & _LOW


def _mixed(x: Tensor) -> Tensor:
    """Return `x` hashed by C. Wellons' `lowbias32` (nullprogram.com/blog/2018/07/31), in wrapping int32 arithmetic."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _wrapped(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _wrapped(number: int) -> int:
    """Return a number wrapped to the range of int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


BLOCK = 256
"""Number of elements in a block, which shares one scale."""
PIECE = 1 << 23
"""Number of elements that are unpacked at a time: 32 MiB in fp32."""
assert PIECE % BLOCK == 0, "pieces begin at block boundaries"
BATCHES = 32
"""Approximate number of batches in which numbers are unpacked or copied for an update, if the batches are small."""
_SHARE = 8
"""Maximum number of pieces in which masters are rounded: the workspace is 1/24 of masters and moments."""
HALF = 1 << 15
"""Half a unit in the last place of bfloat16, in the bits of fp32."""
_NAN = 0x7FC00000
"""The bits of the smallest quiet NaN. Adding to the bits of a larger NaN might overflow."""


@dataclass(frozen=True, eq=False)
class FlatTensors:
    """A sequence of flat tensors of one dtype, indexed as one concatenated tensor."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        """Return the `FlatTensors` of `tensors`. Tensors that are adjacent in memory are merged."""
        merged = list[Tensor]()
        for tensor in tensors:
            if merged and _adjoin(merged[-1], tensor):
                last = merged.pop()
                tensor = last.as_strided((len(last) + len(tensor),), (1,), last.storage_offset())
            merged.append(tensor)
        return cls(tuple(merged))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return self.tensors[0].dtype

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The end index of each tensor in the concatenation."""
        return tuple(accumulate(map(len, self.tensors)))

    def views(self, start: int, stop: int) -> list[Tensor]:
        """Return views of elements [start, stop), one view of each tensor that contains any of these elements."""
        views = list[Tensor]()
        place = bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[place] - len(self.tensors[place])
            views.append(self.tensors[place][start - begin : stop - begin])
            start = min(stop, self.ends[place])
            place += 1
        return views

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), as a view if they are all in one tensor."""
        views = self.views(start, stop)
        return views[0] if len(views) == 1 else torch.cat(views)

    def write(self, start: int, values: Tensor) -> None:
        """Copy `values` to the elements from `start` on."""
        targets = self.views(start, start + len(values))
        if len(targets) == 1:
            targets[0].copy_(values)
        else:
            torch._foreach_copy_(targets, values.contiguous().split(list(map(len, targets))))

    def slice(self, start: int, stop: int) -> FlatTensors:
        """Return elements [start, stop) as `FlatTensors` of views."""
        return FlatTensors(tuple(self.views(start, stop)))


@dataclass(frozen=True, eq=False)
class Plain:
    """Fp32 numbers in one tensor of fp32 or bfloat16, on any device.

    Attributes:
        values: the tensor of the numbers; other formats have None if no single tensor contains the numbers.
        device: the device that computes with the numbers.
    """

    values: Tensor
    device: torch.device

    def read(self, start: int, stop: int) -> Tensor:
        """Return numbers [start, stop) in fp32 on the device, as a view if they are stored so in one tensor."""
        return self.values[start:stop].to(self.device, non_blocking=True).float()

    def write(self, start: int, values: Tensor, noise: Noise | None = None) -> None:
        """Store fp32 `values` from `start` on. Rounding is stochastic if `noise` is given, else to nearest."""
        target = self.values[start : start + len(values)]
        if noise is not None and target.dtype == torch.bfloat16:
            values = upper_half(rounded_stochastically(values, noise))
        _copy_unless_same(target, values)

    def slice(self, start: int, stop: int) -> Plain:
        """Return numbers [start, stop) as a `Plain` that is a view."""
        return Plain(self.values[start:stop], self.device)


@dataclass(frozen=True, eq=False)
class Master:
    """Fp32 master values of the `weights`, with the interface of `Plain`.

    Fp32 weights are the masters. For bfloat16 weights, `beside` stores the fp32 masters or the lower 16 bits of each
    master (int16); if `beside` is None, there are no masters, and weights are rounded stochastically.
    """

    weights: FlatTensors
    beside: Tensor | None = None

    @property
    def values(self) -> Tensor | None:  # noqa: D102
        if self.beside is None:
            return self.weights.tensors[0] if len(self.weights.tensors) == 1 else None
        return self.beside if self.beside.dtype == torch.float32 else None

    @property
    def are_weights(self) -> bool:
        """Whether the weights themselves are the masters, in fp32."""
        return self.weights.dtype == torch.float32

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which masters are stored; for split masters, the dtype of the lower halves."""
        return self.weights.dtype if self.beside is None else self.beside.dtype

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        if self.beside is None:
            return self.weights.read(start, stop).float()
        beside = self.beside[start:stop].to(self.weights.tensors[0].device, non_blocking=True)
        return beside if beside.dtype == torch.float32 else joined(self.weights.read(start, stop), beside)

    def write(self, start: int, values: Tensor, noise: Noise | None = None) -> None:  # noqa: D102
        if self.are_weights:
            self.weights.write(start, values)
        elif self.beside is None:
            bits = rounded(values) if noise is None else rounded_stochastically(values, noise)
            self.weights.write(start, upper_half(bits))
        elif self.beside.dtype == torch.float32:
            _copy_unless_same(self.beside[start : start + len(values)], values)
            size = max(PIECE, -(-len(values) // _SHARE))
            for first in range(0, len(values), size):
                self.weights.write(start + first, upper_half(rounded(values[first : first + size])))
        else:
            self.weights.write(start, upper_half(rounded(values)))
            self.beside[start : start + len(values)].copy_(values.view(torch.int16)[::2], non_blocking=True)

    def slice(self, start: int, stop: int) -> Master:  # noqa: D102
        return Master(self.weights.slice(start, stop), None if self.beside is None else self.beside[start:stop])


@dataclass(frozen=True, eq=False)
class Blocks8:
    """Fp32 numbers stored as one byte each and a scale for each block, with the interface of `Plain`.

    Attributes:
        codes: one byte for each number, an index into `levels`.
        scales: the fp32 scale of each block.
        device: the device that computes with the numbers.
        squares: whether the numbers are second moments, which are never negative. Their square roots are stored, since
            second moments have twice the dynamic range of first moments.
        sizes: number of elements of each parameter. Each parameter begins a new block.
    """

    codes: Tensor
    scales: Tensor
    device: torch.device
    squares: bool
    sizes: tuple[int, ...]

    values = None

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        skipped, lengths, (first, last) = self._cut(start, stop)
        codes = self.codes[start:stop].to(self.device, non_blocking=True)
        scales = self.scales[first:last].to(self.device, non_blocking=True).repeat_interleave(BLOCK)
        numbers = levels(not self.squares, self.device)[codes.int()]
        numbers *= _without_gaps(scales[skipped:], lengths, skipped)
        return numbers.square_() if self.squares else numbers

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
        position = (shares - low) / (high - low)  # The relative position between the two levels, in [0, 1].
        # Stochastic rounding takes the lower level with the probability that preserves the mean.
        limit = 0.5 if noise is None else noise.bits(len(position), position.device) * 2.0**-BITS
        codes = above - (position <= limit).int()
        if self.squares:
            codes = torch.where(shares > 0, codes.clamp(min=1), codes)  # Updates divide by these roots: avoid 0.
        self.codes[start : start + len(values)].copy_(codes, non_blocking=True)
        self.scales[first:last].copy_(scales, non_blocking=True)

    def slice(self, start: int, stop: int) -> Blocks8:  # noqa: D102
        skipped, lengths, (first, last) = self._cut(start, stop)
        assert skipped == 0, "whole blocks have one scale"
        return Blocks8(self.codes[start:stop], self.scales[first:last], self.device, self.squares, tuple(lengths))

    @cached_property
    def _ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The cumulative end of each parameter, counted in elements and counted in blocks."""
        return tuple(accumulate(self.sizes)), tuple(accumulate(map(_blocks, self.sizes)))

    def _cut(self, start: int, stop: int) -> tuple[int, list[int], tuple[int, int]]:
        """Locate elements [start, stop) in the blocks.

        Returns the number of elements of the first block before `start`, the number of the elements in each parameter,
        and the range of blocks.
        """
        ends, block_ends = self._ends
        lengths, skipped, first_block, last_block = list[int](), 0, 0, 0
        place = bisect_right(ends, start)
        while start < stop:
            size = self.sizes[place]
            begin, end = ends[place] - size, min(stop, ends[place])
            blocks_before = block_ends[place] - _blocks(size)
            if not lengths:
                skipped = (start - begin) % BLOCK
                first_block = blocks_before + (start - begin) // BLOCK
            last_block = blocks_before + _blocks(end - begin)
            lengths.append(end - start)
            start, place = end, place + 1
        return skipped, lengths, (first_block, last_block)


Stored = Plain | Master | Blocks8
"""Fp32 numbers in one of the formats of this module."""


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _copy_unless_same(target: Tensor, values: Tensor) -> None:
    """Copy `values` to `target`, unless `values` is a view of the same memory, which was updated in place."""
    if _place(target) != _place(values) or target.dtype != values.dtype:
        target.copy_(values, non_blocking=True)


def _adjoin(one: Tensor, other: Tensor) -> bool:
    """Return whether `other` directly follows `one` in memory."""
    memory, start = _place(one)
    return (memory, start + len(one)) == _place(other)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _gaps(lengths: Sequence[int], skipped: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each parameter if each parameter is padded to whole blocks. `skipped`: number of
    elements that are missing from the first block.
    """
    begin = 0
    for length in lengths:
        yield begin, begin + length
        begin += length + -(length + skipped) % BLOCK
        skipped = 0


def _with_gaps(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the values of parameters of `lengths` elements, each parameter padded with zeros to whole blocks."""
    places = list(_gaps(lengths))
    padded = values.new_zeros(places[-1][1] + -places[-1][1] % BLOCK)
    torch._foreach_copy_([padded[begin:end] for begin, end in places], values.split(list(lengths)))
    return padded


def _without_gaps(padded: Tensor, lengths: Sequence[int], skipped: int = 0) -> Tensor:
    """Return the values without the padding that `_with_gaps` adds."""
    places = list(_gaps(lengths, skipped))
    if places[-1][1] == sum(lengths):
        return padded[: sum(lengths)]
    return torch.cat([padded[begin:end] for begin, end in places])


def batch_elements(elements: int) -> int:
    """Return the batch size for unpacking or copying the `elements` of a module that a rank updates."""
    return min(4 * PIECE, max(PIECE, -(-elements // BATCHES)))


def unpacked(stored: Stored, start: int, stop: int) -> Tensor:
    """Return numbers [start, stop) as an fp32 tensor on the host."""
    numbers = torch.empty(stop - start)
    for first in range(start, stop, PIECE):
        last = min(first + PIECE, stop)
        numbers[first - start : last - start] = stored.read(first, last)
    return numbers


def write_all(stored: Stored, values: Tensor, device: torch.device) -> None:
    """Store all `values`, of any floating dtype on the device or the host, rounded to nearest."""
    for start in range(0, len(values), PIECE):
        stored.write(start, values[start : start + PIECE].to(device).float())


# ----------------------------------------------------------------------------------------------- bits


def nearest_bfloat16(values: Tensor) -> Tensor:
    """Return fp32 `values` of any shape in bfloat16, with the rounding that weights have."""
    return upper_half(rounded(values.contiguous().view(-1))).view(values.shape)


def limited(values: Tensor) -> Tensor:
    """Return the int32 bits of fp32 `values`, clamped so that adding one bfloat16 unit (1 << 16) does not overflow."""
    return values.view(torch.int32).clamp(max=_NAN)


def rounded(values: Tensor) -> Tensor:
    """Return int32 bits whose upper halves are fp32 `values` in bfloat16, rounded to nearest, ties away from zero."""
    return limited(values).add_(HALF)


def rounded_stochastically(values: Tensor, noise: Noise) -> Tensor:
    """Return int32 bits whose upper halves are fp32 `values` in bfloat16, rounded stochastically without bias."""
    return noise.bits(len(values), values.device).add_(limited(values))


def upper_half(bits: Tensor) -> Tensor:
    """Return the upper halves of int32 `bits` as a bfloat16 view. All platforms of PyTorch are little-endian."""
    return bits.view(torch.bfloat16)[1::2]


def joined(weights: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 numbers of bfloat16 `weights`, which are `rounded`, and int16 `lower` halves of the bits."""
    upper = weights.contiguous().view(torch.int16) + (lower >> 15)  # Subtract 1 where the weight was rounded up.
    return torch.stack((lower, upper), 1).view(torch.float32).view(-1)


def code_of_zero(squares: bool) -> int:
    """Return the code of the number 0."""
    return 0 if squares else 127


@lru_cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """Return the numbers that codes represent, ascending to 1, fp32 [255]. Levels are evenly spaced in each decade, and
    higher decades have more levels (dynamic tree quantization, Dettmers 2015, arXiv 1511.04561).
    """
    exponents, positive = 7, [1.0]
    for exponent in range(exponents):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        positive += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - exponents + 1)).tolist()
    positive.sort()
    # Replace the largest level by 1: a block's scale is its largest absolute value, which is then stored exactly.
    del positive[-2]
    negative = [-level for level in reversed(positive)] if signed else []
    return torch.tensor([*negative, 0.0, *positive], dtype=torch.float32, device=device)
