"""Fp32 numbers kept in fewer bits: how optimizers keep master weights and moments.

    Fp32Master     master weights in fp32; the weights are those rounded to bfloat16
    SplitMaster    the bfloat16 weight and the lower 16 bits of the master, which together are the master, bit for bit
    RoundedMaster  the bfloat16 weight alone, rounded stochastically at each update (Gupta et al. 2015,
                   arXiv 1502.02551)
    Plain          fp32, or bfloat16, rounded stochastically
    Blocks8        one byte an element and a scale for each block of 256 (Dettmers et al. 2021, arXiv 2110.02861)

A weight is its master rounded to the nearest, ties away from zero: then the lower half of the master says whether the
upper half was rounded up. Rounding stochastically keeps sums of many small updates right on average; to the nearest
they would be lost (a second moment with beta2 = 0.999 changes by less than half a unit of bfloat16 in a step).

All tensors are flat. What is kept in host memory (`offload`) is read to the device and written back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
"""Elements of a block with one scale."""
PIECE = 1 << 23
"""Elements that are unpacked at a time: 32 MiB in fp32."""
assert PIECE % BLOCK == 0, "pieces begin where blocks do"
_HALF = 1 << 15
_NAN = 0x7FC00000
"""Bits of the smallest quiet NaN: adding to those of a larger one might wrap."""


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
        """Numbers [start, stop), fp32 on the device; a view where they are kept so."""
        ...

    def write(self, start: int, values: Tensor, random: torch.Generator | None = None) -> None:
        """Keep `values`, fp32, from `start` on. What has to be rounded is rounded stochastically by `random`, and to
        the nearest without.
        """
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

    def write(self, start: int, values: Tensor, random: torch.Generator | None = None) -> None:  # noqa: D102
        target = self.kept[start : start + len(values)]
        if target.data_ptr() == values.data_ptr():
            return  # A view of it, updated in place.
        if random is not None and self.kept.dtype == torch.bfloat16:
            values = upper_half(rounded_stochastically(values, random))
        target.copy_(values, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Fp32Master:
    """Fp32 master weights, and the `weights`, bfloat16, that are those rounded."""

    weights: Tensor
    master: Plain

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # noqa: D102
        return self.master.tensors

    @property
    def values(self) -> Tensor:  # noqa: D102
        return self.master.values

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        return self.master.read(start, stop)

    def write(self, start: int, values: Tensor, random: torch.Generator | None = None) -> None:  # noqa: D102
        self.master.write(start, values)
        self.weights[start : start + len(values)] = upper_half(rounded(values))


@dataclass(frozen=True, eq=False)
class SplitMaster:
    """The `weights`, bfloat16, and the lower halves of the masters, int16."""

    weights: Tensor
    lower: Tensor

    values = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.lower,)

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        weights = self.weights[start:stop]
        return joined(weights, self.lower[start:stop].to(weights.device, non_blocking=True))

    def write(self, start: int, values: Tensor, random: torch.Generator | None = None) -> None:  # noqa: D102
        stop = start + len(values)
        self.weights[start:stop] = upper_half(rounded(values))
        self.lower[start:stop].copy_(values.view(torch.int16)[::2], non_blocking=True)


@dataclass(frozen=True, eq=False)
class RoundedMaster:
    """The `weights`, bfloat16, and nothing else."""

    weights: Tensor

    tensors = ()

    @property
    def values(self) -> Tensor:  # noqa: D102
        return self.weights

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        return self.weights[start:stop].float()

    def write(self, start: int, values: Tensor, random: torch.Generator | None = None) -> None:  # noqa: D102
        bits = rounded(values) if random is None else rounded_stochastically(values, random)
        self.weights[start : start + len(values)] = upper_half(bits)


@dataclass(frozen=True, eq=False)
class Blocks8:
    """A byte for each element, its place in `levels`, and a scale, fp32, for each block. `squares`: numbers that are
    never negative, of which the square root is kept: second moments, whose range is twice as wide as that of the first.
    """

    codes: Tensor
    scales: Tensor
    device: torch.device
    squares: bool

    values = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # noqa: D102
        return self.codes, self.scales

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        first, last = start // BLOCK, -(-stop // BLOCK)
        codes = self.codes[start:stop].to(self.device, non_blocking=True)
        scales = self.scales[first:last].to(self.device, non_blocking=True).repeat_interleave(BLOCK)
        found = levels(not self.squares, self.device)[codes.int()]
        found *= scales[start - first * BLOCK :][: len(codes)]
        return found.square_() if self.squares else found

    def write(self, start: int, values: Tensor, random: torch.Generator | None = None) -> None:  # noqa: D102
        assert start % BLOCK == 0, "whole blocks have one scale"
        known = levels(not self.squares, self.device)
        padded = torch.nn.functional.pad(values.sqrt() if self.squares else values, (0, -len(values) % BLOCK))
        blocks = padded.view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        shares = (blocks / torch.where(scales > 0, scales, 1.0)[:, None]).view(-1)[: len(values)]
        above = torch.searchsorted(known, shares, out_int32=True).clamp_(1, len(known) - 1)
        low, high = known[above - 1], known[above]
        part = (shares - low) / (high - low)
        # Not the nearest where rounding is stochastic: the lower with the probability that keeps the mean.
        limit = 0.5 if random is None else torch.rand(part.shape, generator=random, device=part.device)
        codes = above - (part <= limit).int()
        if self.squares:
            codes = torch.where(shares > 0, codes.clamp(min=1), codes)  # A divisor: never 0 where it was not.
        self.codes[start : start + len(values)].copy_(codes, non_blocking=True)
        self.scales[start // BLOCK :][: len(scales)].copy_(scales, non_blocking=True)


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


def rounded_stochastically(values: Tensor, random: torch.Generator) -> Tensor:
    """As `rounded`, up with the probability that keeps the mean."""
    bits = torch.randint(0, 2 * _HALF, values.shape, generator=random, device=values.device, dtype=torch.int32)
    return bits.add_(values.view(torch.int32).clamp(max=_NAN))


def upper_half(bits: Tensor) -> Tensor:
    """The bfloat16 numbers in the upper halves of int32 `bits`. (All platforms of PyTorch are little-endian.)"""
    return bits.view(torch.bfloat16)[1::2]


def joined(weights: Tensor, lower: Tensor) -> Tensor:
    """Fp32 numbers from bfloat16 `weights`, which are those `rounded`, and their `lower` halves, int16."""
    upper = weights.contiguous().view(torch.int16) - (lower < 0).to(torch.int16)  # Rounded up where its first bit is 1.
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
