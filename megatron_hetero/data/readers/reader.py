"""From records to what ranks train on, one record or item at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_hetero.data.metadata import SampleMetadata
from megatron_hetero.data.packing import TokenizedSample, check_length, check_patches, check_text
from megatron_hetero.data.processor.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.models.items.types import ItemShape, Piece


class Wanted(NamedTuple):
    """Some pieces of item `number` of a record."""

    record: Record
    number: int
    pieces: Sequence[Piece]


class Reader(Protocol):
    """Reads, from any thread. What is wrong with the data is a `UserError`."""

    def tokenise(self, record: Record) -> TokenizedSample | None:
        """A record as tokens; None where it is too long, and such are skipped."""
        ...

    def patches(self, wanted: Wanted) -> np.ndarray:
        """Pieces as their encoder takes them, one after the other, fp32 [patches, elements of a patch]."""
        ...


@dataclass(frozen=True, eq=False)
class SampleReader:
    """The `Reader` of this process. Can be pickled.

    `encoders`: by name. `max_seq_length`, `most_patches`: of a sample, for each encoder; None: any number. `too_long`:
    what is done with a longer one.
    """

    processor: Processor
    encoders: Mapping[str, ItemShape]
    max_seq_length: int
    too_long: Any
    most_patches: int | None = None

    def tokenise(self, record: Record) -> TokenizedSample | None:
        """See `Reader`."""
        if not check_text(record, self.max_seq_length, self.too_long):
            return None
        sample = self.processor.tokenize(record)
        if not check_length(sample, self.max_seq_length, self.too_long):
            return None
        most = self.most_patches
        return sample if most is None or check_patches(sample, self._patches_of(sample), most, self.too_long) else None

    def patches(self, wanted: Wanted) -> np.ndarray:
        """See `Reader`."""
        return self.processor.patches(*wanted)

    def _patches_of(self, sample: TokenizedSample) -> int:
        """The patches of a sample's items, of the encoder for which it has most."""
        return max(SampleMetadata.of(sample, list(self.encoders)).patches(self.encoders))
