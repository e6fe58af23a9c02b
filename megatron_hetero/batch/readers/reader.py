"""From records to what ranks train on, one record or picture at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_hetero.batch.samples import SampleMetadata
from megatron_hetero.data.items import Size
from megatron_hetero.data.packing import check_length, check_patches, check_text
from megatron_hetero.data.records import Record
from megatron_hetero.data.sample import TokenizedSample
from megatron_hetero.processor.processor import Processor
from megatron_hetero.sharding.items import ItemShape


class Picture(NamedTuple):
    """Image `number` of a record, and its size as its encoder takes it."""

    record: Record
    number: int
    size: Size


class Reader(Protocol):
    """Reads, from any thread. What is wrong with the data is a `UserError`."""

    def tokenise(self, record: Record) -> TokenizedSample | None:
        """A record as tokens; None where it is too long, and such are skipped."""
        ...

    def patches(self, picture: Picture) -> np.ndarray:
        """A picture as its encoder takes it, fp32 [patches, elements of a patch]."""
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

    def patches(self, picture: Picture) -> np.ndarray:
        """See `Reader`."""
        return self.processor.patches(*picture)

    def _patches_of(self, sample: TokenizedSample) -> int:
        """The patches of a sample's images, of the encoder for which it has most."""
        return max(SampleMetadata.of(sample, list(self.encoders)).patches(self.encoders))
