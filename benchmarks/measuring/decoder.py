"""What processes of `benchmarks.data` do with records."""

from __future__ import annotations

import numpy as np

from megatron_hetero.data.records import Record
from megatron_hetero.models.items.image_files import load_picture


class Decoder:
    """Decodes pictures."""

    def decode(self, record: Record) -> np.ndarray:
        """The picture of a record, uint8 [height, width, 3]."""
        item = record.item(0)
        return np.asarray(load_picture(item.content, item.where))
