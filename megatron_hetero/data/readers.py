"""Reading of single samples and items: from a record to tokens, and from an item to patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_hetero.data.packing import TokenizedSample, check_length, check_patches
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.models.items.types import ItemShape, Piece


class Wanted(NamedTuple):
    """Some pieces of item `number` of a record."""

    record: Record
    number: int
    pieces: Sequence[Piece]


class Reader(Protocol):
    """Reads, from any thread. Raises `UserError` for bad data."""

    def tokenise(self, record: Record) -> TokenizedSample | None:
        """A record as tokens; None if it is too long and skipped."""
        ...

    def patches(self, wanted: Wanted) -> np.ndarray:
        """Pieces as their encoder takes them, concatenated, fp32 [patches, elements of a patch]."""
        ...


@dataclass(frozen=True, eq=False)
class SampleReader:
    """The `Reader` of this process. Can be pickled.

    `encoders`: shapes by name. `max_seq_length`, `most_patches`: limits of a sample, the latter for each encoder (None:
    no limit). `too_long`: whether a longer one is an error or skipped.
    """

    processor: Processor
    encoders: Mapping[str, ItemShape]
    max_seq_length: int
    too_long: Any
    most_patches: int | None = None

    def tokenise(self, record: Record) -> TokenizedSample | None:
        """See `Reader`."""
        sample = self.processor.tokenize(record)
        if not check_length(sample, self.max_seq_length, self.too_long):
            return None
        if self.most_patches is None:
            return sample
        patches = dict.fromkeys(self.encoders, 0)
        for ref, pieces in zip(record.items, sample.pieces, strict=True):
            shape = self.encoders[ref.field.encoder]
            patches[ref.field.encoder] += sum(map(shape.rows, pieces)) * shape.unit
        return sample if check_patches(sample, max(patches.values()), self.most_patches, self.too_long) else None

    def patches(self, wanted: Wanted) -> np.ndarray:
        """See `Reader`."""
        return self.processor.patches(*wanted)
