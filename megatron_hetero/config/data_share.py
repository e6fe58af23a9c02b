"""How much of a data set an epoch takes: ``name%rate``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from megatron_hetero.errors import UserError

_RATE = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class Share:
    """A data set and the part of it that one epoch takes: ``share(text) == name%rate``.

    ``rate`` is in units of the whole data set: 1/2 is half of it, 5/2 all of it twice and half of it once more.
    """

    name: str
    rate: Fraction = Fraction(1)

    @classmethod
    def parse(cls, text: str) -> Share:
        """Parses ``name`` or ``name%percent``.

        Raises:
            UserError: the percentage is not a positive number.
        """
        name, mark, percent = text.rpartition("%")
        if not mark:
            return cls(text)
        if not _RATE.fullmatch(percent) or not Fraction(percent) or not name:
            raise UserError.at(
                "data.datasets",
                found=repr(text),
                expected="`name` or `name%rate` with a rate above 0 in percent",
                fix=f"write {name or 'name'}%50 for half of the data set in each epoch",
            )
        return cls(name, Fraction(percent) / 100)

    def __str__(self) -> str:
        return self.name if self.rate == 1 else f"{self.name}%{float(self.rate * 100):g}"

    def count(self, records: int) -> int:
        """Samples per epoch from a data set of so many records: rate · records, rounded up."""
        return math.ceil(self.rate * records)
