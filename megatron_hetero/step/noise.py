"""The random bits that numbers are rounded with: a hash of an element's place and of a text.

So they are the same on all ranks that hold the element, on every device, after a resume, and however many elements are
rounded at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Self

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
