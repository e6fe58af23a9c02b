"""Several samples in one sequence, without padding between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_hetero.data.processing import TokenizedSample
from megatron_hetero.errors import UserError

IGNORED = -100


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A micro-batch as one sequence of S tokens: the samples one after the other, then padding.

    Attributes:
        input_ids: int64 [S].
        labels: int64 [S], already shifted: the token that position i must predict, or -100. A sample's last token
            predicts nothing, so labels never cross samples; padding is -100.
        position_ids: int64 [3, S], from 0 in each sample; 0 in the padding.
        cu_seqlens: int64 [samples + 1], where each sample begins and the last one ends; excludes the padding.
        length: real tokens, ``cu_seqlens[-1]``.
        grids: int64 [images, 3]; time, height, width in patches, before merging.
        image_positions: int64 [rows], the positions of image tokens: image by image, in raster order of merged patches.
        supervised_tokens: labels that are not -100.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    length: int
    grids: np.ndarray
    image_positions: np.ndarray
    supervised_tokens: int


def pack(samples: Sequence[TokenizedSample], pad_multiple: int, pad_token_id: int) -> PackedBatch:
    """Packs samples in the order given. Without samples the pack is padding alone, so that a model has something to
    read.

    Args:
        samples: may be empty (all were too long and skipped).
        pad_multiple: S is the least multiple of it, above 0, that holds the samples.
        pad_token_id: what the tail is filled with.

    Raises:
        UserError: a sample's image tokens do not match its grids.
    """
    assert pad_multiple > 0, "a pack needs a positive multiple"
    for sample in samples:
        _check_rows(sample)
    cu_seqlens = np.cumsum([0] + [len(sample) for sample in samples], dtype=np.int64)
    length = int(cu_seqlens[-1])
    padding = max(length, 1) + -max(length, 1) % pad_multiple - length
    labels = _pad(_joined([_labels(sample) for sample in samples]), padding, IGNORED)
    images = [start + sample.image_positions for start, sample in zip(cu_seqlens[:-1], samples, strict=True)]
    return PackedBatch(
        input_ids=_pad(_joined([sample.input_ids for sample in samples]), padding, pad_token_id),
        labels=labels,
        position_ids=_pad(_joined([sample.position_ids for sample in samples], 3), padding, 0),
        cu_seqlens=cu_seqlens,
        length=length,
        grids=np.concatenate([np.zeros((0, 3), np.int64), *(sample.grids for sample in samples)]),
        image_positions=_joined(images),
        supervised_tokens=int((labels != IGNORED).sum()),
    )


def check_length(sample: TokenizedSample, max_seq_length: int, too_long: Literal["error", "skip"] = "error") -> bool:
    """Whether the sample is used; false where it is too long and ``too_long`` is skip. Samples are never cut.

    Raises:
        UserError: the sample has more than ``max_seq_length`` tokens and ``too_long`` is error.
    """
    if len(sample) <= max_seq_length:
        return True
    if too_long == "skip":
        return False
    raise UserError.at(
        sample.record.where,
        found=f"a sample of {len(sample)} tokens, {len(sample.image_positions)} of them for images",
        expected=f"at most data.max_seq_length = {max_seq_length}",
        because="samples are never cut",
        fix="raise data.max_seq_length, lower data.max_pixels, or set data.too_long to skip",
    )


def _labels(sample: TokenizedSample) -> np.ndarray:
    labels = np.full(len(sample), IGNORED, dtype=np.int64)
    labels[:-1] = np.where(sample.supervised[1:], sample.input_ids[1:], IGNORED)
    return labels


def _joined(parts: Sequence[np.ndarray], *dims: int) -> np.ndarray:
    """The parts, int64 [*dims, n], one after the other along the last dim."""
    return np.concatenate([np.zeros((*dims, 0), np.int64), *parts], axis=-1)


def _pad(values: np.ndarray, padding: int, fill: int) -> np.ndarray:
    """Pads the last dim at its end."""
    widths = [(0, 0)] * (values.ndim - 1) + [(0, padding)]
    return np.pad(values, widths, constant_values=fill)


def _check_rows(sample: TokenizedSample) -> None:
    rows = int(sample.grids.prod(axis=1).sum()) // sample.merge_size**2
    if rows != len(sample.image_positions):
        raise UserError.at(
            f"{sample.record.where}: field 'image'",
            found=f"{len(sample.image_positions)} image tokens",
            expected=f"{rows}, one for each merged patch of its {len(sample.grids)} images",
            fix="leave the pictures alone while training reads them, or mend the record",
        )
