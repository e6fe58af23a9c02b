"""Sampling rate of a data set per epoch: ``name%rate``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from megatron_hetero.errors import UserError

_RATE = re.compile(r"\d+(\.\d+)?")
_MOST = 1_000_000
"""Percent: ten thousand passes."""


@dataclass(frozen=True)
class SampledDataset:
    """A data set and its sampling rate per epoch, written ``name%percent``."""

    name: str
    """Key of the data set in `data.registry`."""
    rate: Fraction = Fraction(1)
    """Epochs of the data set per epoch of the mixture: 1/2 is half of it, 5/2 two and a half passes."""

    @classmethod
    def parse(cls, text: str) -> SampledDataset:
        """Parses ``name`` or ``name%percent``.

        Raises:
            UserError: the percentage is not a positive number.
        """
        name, mark, percent = text.rpartition("%")
        if not mark:
            return cls(text)
        if not _RATE.fullmatch(percent) or not 0 < Fraction(percent) <= _MOST or not name:
            raise UserError.at(
                "data.datasets",
                found=repr(text),
                expected=f"`name` or `name%rate` with a percentage > 0 and ≤ {_MOST}, in digits",
                fix=f"write {name or 'name'}%50 for half of the data set per epoch",
            )
        return cls(name, Fraction(percent) / 100)

    def __str__(self) -> str:
        return self.name if self.rate == 1 else f"{self.name}%{float(self.rate * 100):g}"

    def count(self, records: int) -> int:
        """Samples per epoch from a data set with this many records: rate · records, rounded up."""
        return math.ceil(self.rate * records)
