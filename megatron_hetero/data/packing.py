"""Samples as tokens, and several of them packed into one sequence without padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_hetero.base.errors import BadSample, UserError
from megatron_hetero.data.records import Record
from megatron_hetero.models.items.types import ItemShape, Size

IGNORED = -100
"""Label of a position that is not trained on."""


@dataclass(frozen=True, eq=False)
class TokenizedSample:
    """One record as tokens, with a token for each row of its items.

    Attributes:
        input_ids: int64 [n].
        supervised: bool [n], true for the tokens the model is trained to produce.
        sizes: the size of each item.
        pieces: the sizes of each item's pieces.
        position_ids: int64 [dims, n], rotary positions, from 0.
        row_positions: int64 [rows], indices of the tokens that stand for rows, item by item in the order of rows.
        rows: int64 [items], the number of rows of each item.
        record: its source, which also names the encoder of each item.
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


def bad_counts(bad: Sequence[BadSample]) -> dict[str, int]:
    """Metrics: the number of bad samples, and those of each cause that there is."""
    causes = Counter(each.cause for each in bad)
    return {"bad_samples": len(bad), **{f"bad_samples_{cause}": causes[cause] for cause in sorted(causes)}}


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A micro-batch as one sequence of n tokens: its samples without padding between them. It may be empty.

    Attributes:
        input_ids: int64 [n].
        labels: int64 [n], already shifted: the token that position i must predict, or -100. A sample's last token
            predicts nothing, so labels never cross samples.
        position_ids: int64 [dims, n], from 0 in each sample; without samples [3, 0].
        cu_seqlens: int64 [samples + 1], the start of each sample and the end of the last one.
        supervised_tokens: number of labels that are not -100.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    supervised_tokens: int


def pack(samples: Sequence[TokenizedSample]) -> PackedBatch:
    """Packs samples in the order given; there may be none, if all were left out."""
    ids, supervised = _joined([each.input_ids for each in samples]), _joined([each.supervised for each in samples])
    ends = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    labels = np.where(np.roll(supervised, -1), np.roll(ids, -1), IGNORED)
    labels[ends[1:] - 1] = IGNORED
    positions = _joined([each.position_ids for each in samples], len(samples[0].position_ids) if samples else 3)
    return PackedBatch(ids, labels, positions, cu_seqlens=ends, supervised_tokens=int((labels != IGNORED).sum()))


@dataclass(frozen=True)
class SampleLimits:
    """Limits of a sample, which is never truncated.

    `patches`: for each encoder; None: no limit. `too_long`: whether a larger sample is an error or skipped.
    """

    tokens: int
    patches: int | None = None
    too_long: Literal["error", "skip"] = "error"

    def admits(self, sample: TokenizedSample, encoders: Mapping[str, ItemShape]) -> bool:
        """Return whether the sample is within the limits. Raises `UserError` for a larger one that is not skipped."""
        if len(sample) > self.tokens:
            problem = {
                "found": f"a sample of {len(sample)} tokens, {len(sample.row_positions)} of them for images",
                "expected": f"at most data.max_seq_length = {self.tokens}",
                "because": "samples are never truncated",
                "fix": "raise data.max_seq_length, lower data.max_pixels, or set data.too_long to skip",
            }
        elif self.patches is not None and (patches := _most_patches(sample, encoders)) > self.patches:
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


def _most_patches(sample: TokenizedSample, encoders: Mapping[str, ItemShape]) -> int:
    """The largest number of the sample's patches for one encoder."""
    patches = dict.fromkeys(encoders, 0)
    for ref, pieces in zip(sample.record.items, sample.pieces, strict=True):
        shape = encoders[ref.field.encoder]
        patches[ref.field.encoder] += sum(map(shape.rows, pieces)) * shape.unit
    return max(patches.values())


def _joined(parts: Sequence[np.ndarray], *dims: int) -> np.ndarray:
    """Joins arrays, int64 [*dims, n], along the last dim."""
    return np.concatenate([np.zeros((*dims, 0), np.int64), *parts], axis=-1)
