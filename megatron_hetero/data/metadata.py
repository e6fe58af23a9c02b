"""The integers that ranks tell each other of samples and packs, from which all of them plan a step alike.

A *pack* is the micro-batch of one replica of the text module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_hetero.data.packing import TokenizedSample, check_rows
from megatron_hetero.models.items.types import ItemShape, Size


class PieceSource(NamedTuple):
    """Where a piece comes from: the number of the sample in the stream, of the item in it, and of the piece in that."""

    sample: int
    item: int
    piece: int


@dataclass(frozen=True)
class Pieces:
    """The pieces of a pack that are for one encoder. Hashable.

    `counts`: pieces of each sample; `sizes`: of all pieces. `places`: the bytes of int64 [rows], where rows go in the
    pack.
    """

    counts: tuple[int, ...]
    sizes: tuple[Size, ...]
    places: bytes

    @property
    def positions(self) -> np.ndarray:
        """Where rows go in the pack, int64 [rows]."""
        return np.frombuffer(self.places, np.int64)


@dataclass(frozen=True)
class PackShape:
    """What decides how a pack is cut: the tokens of each sample, and the pieces of each encoder, in the order of the
    encoders. Hashable.
    """

    lengths: tuple[int, ...]
    pieces: tuple[Pieces, ...]


@dataclass(frozen=True)
class PackMetadata:
    """What other ranks need to know of a pack: its shape, where the pieces of each encoder come from, and the number of
    its supervised tokens.
    """

    shape: PackShape
    sources: tuple[tuple[PieceSource, ...], ...]
    supervised: int

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self.shape.lengths)


@dataclass(frozen=True)
class SampleMetadata:
    """What other ranks need to know of a sample: its tokens, how many of them are supervised, the number of its items,
    by encoder its `pieces` (as a pack of this sample alone has them), and by encoder the `sources` of these: item, and
    piece of the item.
    """

    tokens: int
    supervised: int
    items: int
    pieces: tuple[Pieces, ...]
    sources: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, sample: TokenizedSample, encoders: Sequence[str]) -> SampleMetadata:
        """The metadata of `sample` in a model with these encoders. Raises `UserError` where its items do not fit its
        tokens.
        """
        check_rows(sample)
        chosen = [np.array([name == encoder for name in sample.record.encoders], bool) for encoder in encoders]
        sources = [
            tuple((k, piece) for k in np.flatnonzero(mine).tolist() for piece in range(len(sample.pieces[k])))
            for mine in chosen
        ]
        return cls(
            tokens=len(sample),
            # A label is the token that follows.
            supervised=int(sample.supervised[1:].sum()),
            items=len(sample.sizes),
            pieces=tuple(
                Pieces(
                    counts=(len(mine),),
                    sizes=tuple(sample.pieces[k][piece] for k, piece in mine),
                    places=sample.row_positions[np.repeat(of_encoder, sample.rows)].astype(np.int64).tobytes(),
                )
                for of_encoder, mine in zip(chosen, sources, strict=True)
            ),
            sources=tuple(sources),
        )

    def patches(self, encoders: Mapping[str, ItemShape]) -> list[int]:
        """Patches of its items, for each of the encoders."""
        shapes = zip(encoders.values(), self.pieces, strict=True)
        return [sum(map(shape.rows, pieces.sizes)) * shape.unit for shape, pieces in shapes]

    def cost(self, encoders: Mapping[str, ItemShape]) -> float:
        """Predicted forward flops of all encoders."""
        return sum(
            shape.cost(size)
            for shape, pieces in zip(encoders.values(), self.pieces, strict=True)
            for size in pieces.sizes
        )


def pack_metadata(numbers: Sequence[int], samples: Mapping[int, SampleMetadata], encoders: int) -> PackMetadata:
    """The metadata of a pack of the samples of these `numbers` in the stream. `encoders`: their number."""
    of_pack = [samples[number] for number in numbers]
    starts = np.cumsum([0, *(sample.tokens for sample in of_pack)])
    pieces = tuple(
        Pieces(
            counts=tuple(count for sample in of_pack for count in sample.pieces[i].counts),
            sizes=tuple(size for sample in of_pack for size in sample.pieces[i].sizes),
            places=b"".join(
                (sample.pieces[i].positions + start).tobytes()
                for start, sample in zip(starts[:-1], of_pack, strict=True)
            ),
        )
        for i in range(encoders)
    )
    sources = tuple(
        tuple(
            PieceSource(number, *source)
            for number, sample in zip(numbers, of_pack, strict=True)
            for source in sample.sources[i]
        )
        for i in range(encoders)
    )
    shape = PackShape(tuple(sample.tokens for sample in of_pack), pieces)
    return PackMetadata(shape, sources, sum(sample.supervised for sample in of_pack))
