"""Fp32 numbers stored in fewer bits: master weights and moments of optimizers (docs/training.md, "Optimizer states in
fewer bytes"), and the random bits with which they are rounded.

    Master     fp32 weights, or bfloat16 weights beside fp32 masters, beside the lower 16 bits of the masters, or alone
               (stochastic rounding: Gupta et al. 2015, arXiv 1502.02551)
    Plain      fp32, or bfloat16, rounded stochastically
    Blocks8    one byte an element and a scale for each block of 256 (Dettmers et al. 2021, arXiv 2110.02861)

All tensors are flat and concatenate many parameters, so that a handful of kernels processes all of them.
Random bits are a hash of a text and an element's place: they are the same on all ranks that hold the element, on every
device, after a resume, and however many elements are rounded at a time.
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
"""Random bits of a draw, as many as rounding from fp32 to bfloat16 removes."""
_LOW = (1 << BITS) - 1
_KEY_BITS = 24
"""Bits of a key, which fp32 represents exactly."""


@dataclass(frozen=True)
class Noise:
    """Random bits of elements from place `start` on, by two `keys` of 24 bits. `number` counts draws of an element."""

    keys: tuple[int, int]
    start: int = 0
    number: int = 0

    @classmethod
    def of(cls, text: str, start: int = 0) -> Self:
        """Derive the keys from a text."""
        digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        return cls((digest % (1 << _KEY_BITS), (digest >> _KEY_BITS) % (1 << _KEY_BITS)), start)

    def bits(self, count: int, device: torch.device) -> Tensor:
        """Draw 16 bits for each of `count` elements, int32 [count]."""
        place = torch.arange(count, dtype=torch.int32, device=device) + _wrapped(self.start)
        return halves(hashed(place, *self.keys, self.number // 2))[self.number % 2]


def hashed(place: Tensor, key: Tensor | int, other: Tensor | int, round: int = 0) -> Tensor:
    """Hash each int32 place to 32 random bits."""
    return _mixed(_mixed(place + key) ^ (other + (round << _KEY_BITS)))


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Split 32 bits into the lower and the upper 16."""
    return bits & _LOW, (bits >> BITS) & _LOW


def _mixed(x: Tensor) -> Tensor:
    """C. Wellons' `lowbias32` (nullprogram.com/blog/2018/07/31), in int32: factors wrap, and shifts bring in zeros."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _wrapped(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _wrapped(number: int) -> int:
    """Wrap a number to int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


BLOCK = 256
"""Elements of a block with one scale."""
PIECE = 1 << 23
"""Elements that are unpacked at a time: 32 MiB in fp32."""
assert PIECE % BLOCK == 0, "pieces begin at block boundaries"
BATCHES = 32
"""Numbers are unpacked or copied for an update in about this many batches, if these are small."""
_SHARE = 8
"""Masters are rounded in at most about this many pieces: the workspace is 1/24 of masters and moments."""
HALF = 1 << 15
"""Half a unit of bfloat16, in bits of fp32."""
_NAN = 0x7FC00000
"""Bits of the smallest quiet NaN: adding to those of a larger one might wrap."""


@dataclass(frozen=True, eq=False)
class FlatTensors:
    """Flat tensors of one dtype, indexed as if they were concatenated."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        """Merge `tensors` that are neighbours in memory."""
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
        """The end of each tensor."""
        return tuple(accumulate(map(len, self.tensors)))

    def views(self, start: int, stop: int) -> list[Tensor]:
        """Views of elements [start, stop), one of each tensor that has some."""
        views = list[Tensor]()
        place = bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[place] - len(self.tensors[place])
            views.append(self.tensors[place][start - begin : stop - begin])
            start = min(stop, self.ends[place])
            place += 1
        return views

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop): a view if one tensor has them all."""
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
        """Elements [start, stop), as views."""
        return FlatTensors(tuple(self.views(start, stop)))


@dataclass(frozen=True, eq=False)
class Plain:
    """Fp32 numbers in one tensor of fp32 or bfloat16, on any device.

    Attributes:
        values: the tensor; None in formats that have no tensor whose elements are the numbers.
        device: the device that computes with the numbers.
    """

    values: Tensor
    device: torch.device

    def read(self, start: int, stop: int) -> Tensor:
        """Return numbers [start, stop), fp32 on the device: a view if they are stored so, in one tensor."""
        return self.values[start:stop].to(self.device, non_blocking=True).float()

    def write(self, start: int, values: Tensor, noise: Noise | None = None) -> None:
        """Store `values`, fp32, from `start` on. Rounding is stochastic with `noise`, and to the nearest without."""
        target = self.values[start : start + len(values)]
        if noise is not None and target.dtype == torch.bfloat16:
            values = upper_half(rounded_stochastically(values, noise))
        _copy_unless_same(target, values)

    def slice(self, start: int, stop: int) -> Plain:
        """Numbers [start, stop), as views."""
        return Plain(self.values[start:stop], self.device)


@dataclass(frozen=True, eq=False)
class Master:
    """Fp32 masters of the `weights`, with the interface of `Plain`.

    Fp32 weights are their own masters. Weights in bfloat16 have `beside` them the masters in fp32, or the lower halves
    of the masters (int16), or nothing: then they are rounded stochastically.
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
        """Whether the weights are the masters."""
        return self.weights.dtype == torch.float32

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which masters are stored, except for the upper halves of split ones."""
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
    """Fp32 numbers as bytes with a scale for each block, with the interface of `Plain`.

    Attributes:
        codes: bytes that index `levels`.
        scales: scales of the blocks, fp32.
        device: the device that computes with the numbers.
        squares: whether the numbers are second moments: they are never negative, and their square roots are stored,
            since their range is twice as wide as that of first moments.
        sizes: sizes of the parameters, each of which begins a block.
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
        position = (shares - low) / (high - low)  # Between the two levels, in [0, 1].
        # Stochastic rounding takes the lower level with the probability that preserves the mean.
        limit = 0.5 if noise is None else noise.bits(len(position), position.device) * 2.0**-BITS
        codes = above - (position <= limit).int()
        if self.squares:
            codes = torch.where(shares > 0, codes.clamp(min=1), codes)  # A divisor must not become 0.
        self.codes[start : start + len(values)].copy_(codes, non_blocking=True)
        self.scales[first:last].copy_(scales, non_blocking=True)

    def slice(self, start: int, stop: int) -> Blocks8:  # noqa: D102
        skipped, lengths, (first, last) = self._cut(start, stop)
        assert skipped == 0, "whole blocks have one scale"
        return Blocks8(self.codes[start:stop], self.scales[first:last], self.device, self.squares, tuple(lengths))

    @cached_property
    def _ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ends of the elements and of the blocks of each parameter."""
        return tuple(accumulate(self.sizes)), tuple(accumulate(map(_blocks, self.sizes)))

    def _cut(self, start: int, stop: int) -> tuple[int, list[int], tuple[int, int]]:
        """Locate elements [start, stop).

        Returns how many elements of the first block precede them, how many of them each parameter has, and the range of
        their blocks.
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
"""Fp32 numbers in some format."""


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _copy_unless_same(target: Tensor, values: Tensor) -> None:
    """Copy `values`, unless they are a view of the target, updated in place."""
    if _place(target) != _place(values) or target.dtype != values.dtype:
        target.copy_(values, non_blocking=True)


def _adjoin(one: Tensor, other: Tensor) -> bool:
    """Whether `other` follows `one` in memory."""
    memory, start = _place(one)
    return (memory, start + len(one)) == _place(other)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _gaps(lengths: Sequence[int], skipped: int = 0) -> Iterator[tuple[int, int]]:
    """Yield where the elements of each parameter begin and end, if each is padded to whole blocks. `skipped`: how many
    elements the first block lacks.
    """
    begin = 0
    for length in lengths:
        yield begin, begin + length
        begin += length + -(length + skipped) % BLOCK
        skipped = 0


def _with_gaps(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Pad the values of parameters of `lengths` elements with zeros to whole blocks each."""
    places = list(_gaps(lengths))
    padded = values.new_zeros(places[-1][1] + -places[-1][1] % BLOCK)
    torch._foreach_copy_([padded[begin:end] for begin, end in places], values.split(list(lengths)))
    return padded


def _without_gaps(padded: Tensor, lengths: Sequence[int], skipped: int = 0) -> Tensor:
    """Undo `_with_gaps`."""
    places = list(_gaps(lengths, skipped))
    if places[-1][1] == sum(lengths):
        return padded[: sum(lengths)]
    return torch.cat([padded[begin:end] for begin, end in places])


def batch_elements(elements: int) -> int:
    """Return how many of the `elements` of a module that a rank updates are unpacked or copied at a time."""
    return min(4 * PIECE, max(PIECE, -(-elements // BATCHES)))


def unpacked(stored: Stored, start: int, stop: int) -> Tensor:
    """Read numbers [start, stop), fp32 on the host."""
    numbers = torch.empty(stop - start)
    for first in range(start, stop, PIECE):
        last = min(first + PIECE, stop)
        numbers[first - start : last - start] = stored.read(first, last)
    return numbers


def write_all(stored: Stored, values: Tensor, device: torch.device) -> None:
    """Store `values` of any floating type, on the device or the host, rounded to the nearest."""
    for start in range(0, len(values), PIECE):
        stored.write(start, values[start : start + PIECE].to(device).float())


# ----------------------------------------------------------------------------------------------- bits


def nearest_bfloat16(values: Tensor) -> Tensor:
    """Round fp32 `values` of any shape to bfloat16, as weights are."""
    return upper_half(rounded(values.contiguous().view(-1))).view(values.shape)


def limited(values: Tensor) -> Tensor:
    """Copy the bits of fp32 `values`, int32, limited so that adding up to one unit of bfloat16 does not wrap."""
    return values.view(torch.int32).clamp(max=_NAN)


def rounded(values: Tensor) -> Tensor:
    """Return int32 bits whose upper halves are fp32 `values` in bfloat16, rounded to nearest, ties away from zero."""
    return limited(values).add_(HALF)


def rounded_stochastically(values: Tensor, noise: Noise) -> Tensor:
    """Return the same for `values` that are rounded up with the probability that preserves the mean."""
    return noise.bits(len(values), values.device).add_(limited(values))


def upper_half(bits: Tensor) -> Tensor:
    """View the upper halves of int32 `bits` as bfloat16. (All platforms of PyTorch are little-endian.)"""
    return bits.view(torch.bfloat16)[1::2]


def joined(weights: Tensor, lower: Tensor) -> Tensor:
    """Restore fp32 numbers from bfloat16 `weights`, the `rounded` numbers, and the `lower` halves, int16."""
    upper = weights.contiguous().view(torch.int16) + (lower >> 15)  # -1 where the weight was rounded up.
    return torch.stack((lower, upper), 1).view(torch.float32).view(-1)


def code_of_zero(squares: bool) -> int:
    """The code of the number 0."""
    return 0 if squares else 127


@lru_cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """The numbers that codes stand for, ascending to 1, fp32 [255]: a decimal exponent in unary, and the rest of the
    bits evenly spaced in between (dynamic tree quantization, Dettmers 2015, arXiv 1511.04561).
    """
    exponents, positive = 7, [1.0]
    for exponent in range(exponents):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        positive += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - exponents + 1)).tolist()
    positive.sort()
    # 1 itself replaces the largest of these: the scale of a block is its largest number, and is stored exactly.
    del positive[-2]
    negative = [-level for level in reversed(positive)] if signed else []
    return torch.tensor([*negative, 0.0, *positive], dtype=torch.float32, device=device)
