"""Tokenized samples, and the metadata of packs that all ranks have.

A *pack* is the micro-batch of one replica of the text module: samples as one sequence of tokens, without padding
between them. It may be empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megatron_hetero.base.errors import BadSample, UserError
from megatron_hetero.data.records import Record
from megatron_hetero.models.items.types import ItemShape, Size

IGNORED = -100
"""Label of a position that is not trained on."""


@dataclass(frozen=True, eq=False)
class TokenizedSample:
    """A record as tokens, with one token for each row of its items.

    Attributes:
        input_ids: token ids, int64 [n].
        supervised: bool [n], true for the tokens that the model is trained to produce.
        sizes: the size of each item.
        pieces: the sizes of each item's pieces.
        position_ids: int64 [dims, n], rotary positions, from 0.
        row_positions: int64 [rows], indices of the tokens that stand for rows, item by item in the order of rows.
        rows: int64 [items], the number of rows of each item.
        record: the source record, which also names the encoder of each item.
    """

    input_ids: np.ndarray
    supervised: np.ndarray
    sizes: tuple[Size, ...]
    pieces: tuple[tuple[Size, ...], ...]
    position_ids: np.ndarray
    row_positions: np.ndarray
    rows: np.ndarray
    record: Record

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def label_count(self) -> int:
        """Number of positions with a label: the supervised tokens but the first, since a label is the next token."""
        return int(self.supervised[1:].sum())

    @property
    def labels(self) -> np.ndarray:
        """Token that each position must predict, or `IGNORED`, int64 [n]. The last position predicts nothing, so that
        labels never cross samples.
        """
        labels = np.full(len(self), IGNORED, np.int64)
        labels[:-1] = np.where(self.supervised[1:], self.input_ids[1:], IGNORED)
        return labels


@dataclass(frozen=True)
class PackMetadata:
    """Metadata of a pack that all ranks have. Tuples by encoder are in the order of the encoders.

    Instances are hashable; comparison ignores `supervised` and `sources`, which do not affect how a pack is cut.

    Attributes:
        lengths: number of tokens of each sample.
        sizes: by encoder, the size of each piece.
        places: by encoder, the positions of its rows in the pack as bytes, see `positions`.
        supervised: number of supervised tokens.
        sources: by encoder, the source of each piece, int64 [pieces, 3]: numbers of the sample in the stream, of the
            item in the sample, and of the piece in the item.
    """

    lengths: tuple[int, ...]
    sizes: tuple[tuple[Size, ...], ...]
    places: tuple[bytes, ...]
    supervised: int = field(default=0, compare=False)
    sources: tuple[np.ndarray, ...] = field(default=(), compare=False)

    @classmethod
    def of_sample(cls, number: int, sample: TokenizedSample, encoders: Sequence[str]) -> PackMetadata:
        """Return the metadata of a pack of one sample, which has this number in the stream."""
        assert sample.rows.sum() == len(sample.row_positions), "a sample has one token for each row of its items"
        sizes, places, sources = [], [], []
        for encoder in encoders:
            encoded = np.array([ref.field.encoder == encoder for ref in sample.record.items], bool)
            items = np.flatnonzero(encoded).tolist()
            source = [(number, item, piece) for item in items for piece in range(len(sample.pieces[item]))]
            sizes.append(tuple(size for item in items for size in sample.pieces[item]))
            places.append(sample.row_positions[np.repeat(encoded, sample.rows)].astype(np.int64).tobytes())
            sources.append(np.array(source, np.int64).reshape(-1, 3))
        return cls((len(sample),), tuple(sizes), tuple(places), sample.label_count, tuple(sources))

    @classmethod
    def joined(cls, packs: Sequence[PackMetadata], encoders: int) -> PackMetadata:
        """Return one pack of the samples of `packs`, in a model with `encoders` encoders."""
        starts = np.cumsum([0, *(pack.tokens for pack in packs)])[:-1].tolist()
        return cls(
            lengths=tuple(length for pack in packs for length in pack.lengths),
            sizes=tuple(tuple(size for pack in packs for size in pack.sizes[i]) for i in range(encoders)),
            places=tuple(
                b"".join((pack.positions(i) + start).tobytes() for pack, start in zip(packs, starts, strict=True))
                for i in range(encoders)
            ),
            supervised=sum(pack.supervised for pack in packs),
            sources=tuple(
                np.concatenate([np.zeros((0, 3), np.int64), *(pack.sources[i] for pack in packs)])
                for i in range(encoders)
            ),
        )

    def is_same(self, other: PackMetadata) -> bool:
        """Return whether the packs are equal, including `supervised` and `sources`."""
        same_sources = all(map(np.array_equal, self.sources, other.sources))
        return self == other and self.supervised == other.supervised and same_sources

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples of the pack."""
        return sum(self.lengths)

    def positions(self, encoder: int) -> np.ndarray:
        """Return the positions of an encoder's rows among the tokens of the pack, int64 [rows]."""
        return np.frombuffer(self.places[encoder], np.int64)

    def patches(self, encoders: Mapping[str, ItemShape]) -> list[int]:
        """Return the number of patches for each encoder."""
        return [len(self.positions(i)) * shape.unit for i, shape in enumerate(encoders.values())]

    def cost(self, encoders: Mapping[str, ItemShape]) -> float:
        """Return the predicted forward flops of all encoders."""
        shapes = zip(encoders.values(), self.sizes, strict=True)
        return sum(shape.cost(size) for shape, sizes in shapes for size in sizes)


def bad_counts(bad: Sequence[BadSample]) -> dict[str, int]:
    """Return metrics by name: the number of bad samples, in total and by cause."""
    causes = Counter(each.cause for each in bad)
    return {"bad_samples": len(bad), **{f"bad_samples_{cause}": causes[cause] for cause in sorted(causes)}}


@dataclass(frozen=True)
class SampleLimits:
    """Limits of a sample, which is never truncated.

    `patches`: limit for each encoder; None: no limit. `too_long`: whether a larger sample is an error or is skipped.
    """

    tokens: int
    patches: int | None = None
    too_long: Literal["error", "skip"] = "error"

    def admits(self, sample: TokenizedSample, encoders: Mapping[str, ItemShape]) -> bool:
        """Return whether the sample is within the limits. Raises `UserError` for a larger one that is an error."""
        if len(sample) > self.tokens:
            problem = {
                "found": f"a sample of {len(sample)} tokens, {len(sample.row_positions)} of them for images",
                "expected": f"at most data.max_seq_length = {self.tokens}",
                "because": "samples are never truncated",
                "fix": "raise data.max_seq_length, lower data.max_pixels, or set data.too_long to skip",
            }
        elif self.patches is not None and (patches := _max_patches(sample, encoders)) > self.patches:
            problem = {
                "found": f"images of {patches} patches",
                "expected": f"at most train.patches_per_micro_batch = {self.patches}",
                "because": "a sample is never split over micro-batches",
                "fix": "raise train.patches_per_micro_batch, lower data.max_pixels, or set data.too_long to skip",
            }
        else:
            return True
        if self.too_long == "skip":
            return False
        raise UserError.at(sample.record.where, **problem)


def _max_patches(sample: TokenizedSample, encoders: Mapping[str, ItemShape]) -> int:
    """Return the largest number of patches that the sample has for one encoder."""
    return max(PackMetadata.of_sample(0, sample, list(encoders)).patches(encoders))
