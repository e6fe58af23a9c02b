"""What ranks tell each other of the samples that they read, and of packs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hetero.batch.step_plan import Images, ImageSource, PackMetadata, PackShape
from megatron_hetero.data.packing import check_rows
from megatron_hetero.data.sample import TokenizedSample
from megatron_hetero.sharding.items import ItemShape


@dataclass(frozen=True)
class SampleMetadata:
    """What other ranks need to know of a sample: its tokens, how many of them are supervised, by encoder its `images`
    (as a pack of this sample alone has them), and by encoder the `places` of these among all images of the sample.
    """

    tokens: int
    supervised: int
    images: tuple[Images, ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sample: TokenizedSample, encoders: Sequence[str]) -> SampleMetadata:
        """Of `sample`, for a model with these encoders. Raises `UserError` where its images do not fit its tokens."""
        check_rows(sample)
        chosen = [np.array([name == encoder for name in sample.record.encoders], bool) for encoder in encoders]
        return cls(
            tokens=len(sample),
            # A label is the token that follows.
            supervised=int(sample.supervised[1:].sum()),
            images=tuple(_images_of(sample, mine) for mine in chosen),
            places=tuple(tuple(np.flatnonzero(mine).tolist()) for mine in chosen),
        )

    def patches(self, encoders: Mapping[str, ItemShape]) -> list[int]:
        """Patches of its images, for each of the encoders."""
        shapes = zip(encoders.values(), self.images, strict=True)
        return [sum(map(shape.rows, images.sizes)) * shape.unit for shape, images in shapes]

    def cost(self, encoders: Mapping[str, ItemShape]) -> float:
        """Predicted forward flops of all encoders."""
        return sum(
            shape.cost(size)
            for shape, images in zip(encoders.values(), self.images, strict=True)
            for size in images.sizes
        )


def _images_of(sample: TokenizedSample, mine: np.ndarray) -> Images:
    """Those images of a sample that are chosen: bool [images]."""
    return Images(
        counts=(int(mine.sum()),),
        sizes=tuple(size for size, chosen in zip(sample.sizes, mine, strict=True) if chosen),
        places=sample.image_positions[np.repeat(mine, sample.rows)].astype(np.int64).tobytes(),
    )


def pack_metadata(numbers: Sequence[int], samples: Mapping[int, SampleMetadata], encoders: int) -> PackMetadata:
    """Of a pack of the samples of these `numbers` in the stream, in this order. `encoders`: their number."""
    of_pack = [samples[number] for number in numbers]
    starts = np.cumsum([0, *(sample.tokens for sample in of_pack)])
    images = tuple(
        Images(
            counts=tuple(count for sample in of_pack for count in sample.images[i].counts),
            sizes=tuple(size for sample in of_pack for size in sample.images[i].sizes),
            places=b"".join(
                (sample.images[i].positions + start).tobytes()
                for start, sample in zip(starts[:-1], of_pack, strict=True)
            ),
        )
        for i in range(encoders)
    )
    sources = tuple(
        tuple(
            ImageSource(number, place)
            for number, sample in zip(numbers, of_pack, strict=True)
            for place in sample.places[i]
        )
        for i in range(encoders)
    )
    shape = PackShape(tuple(sample.tokens for sample in of_pack), images)
    return PackMetadata(shape, sources, sum(sample.supervised for sample in of_pack))
