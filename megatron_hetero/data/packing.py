"""Samples, and several of them in one sequence, without padding between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.data.records import MOST_CHARACTERS, Record
from megatron_hetero.models.items.types import Size

IGNORED = -100
CHARACTERS_PER_TOKEN = 64
"""More than the average of any text; tokenizers have longer tokens, for rules and blanks."""
FEW_CHARACTERS = 2**16
"""Texts up to this size are always tokenized, which is cheap and gives their exact length."""


@dataclass(frozen=True, eq=False)
class TokenizedSample:
    """One record as tokens, with a token for each row of its items.

    Attributes:
        input_ids: int64 [n].
        supervised: bool [n], true for the tokens the model is trained to produce.
        sizes: of each item, of its type's own.
        pieces: of each item the sizes of its pieces.
        position_ids: int64 [dims, n], the rotary positions of the family, from 0.
        row_positions: int64 [rows], the indices of the tokens that stand for rows, item by item in the order of rows.
        rows: int64 [items], the rows of each item.
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


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A micro-batch as one sequence of n tokens: the samples one after the other, without padding. May be empty.

    Attributes:
        input_ids: int64 [n].
        labels: int64 [n], already shifted: the token that position i must predict, or -100. A sample's last token
            predicts nothing, so labels never cross samples.
        position_ids: int64 [dims, n], from 0 in each sample; without samples [3, 0].
        cu_seqlens: int64 [samples + 1], where each sample begins and the last one ends.
        supervised_tokens: labels that are not -100.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    supervised_tokens: int


def pack(samples: Sequence[TokenizedSample]) -> PackedBatch:
    """Packs samples in the order given; there may be none (all were too long and skipped).

    Raises:
        UserError: the tokens that a sample has for rows are not as many as its items have rows.
    """
    for sample in samples:
        check_rows(sample)
    cu_seqlens = np.cumsum([0] + [len(sample) for sample in samples], dtype=np.int64)
    labels = _joined([_labels(sample) for sample in samples])
    return PackedBatch(
        input_ids=_joined([sample.input_ids for sample in samples]),
        labels=labels,
        position_ids=_joined(
            [sample.position_ids for sample in samples], len(samples[0].position_ids) if samples else 3
        ),
        cu_seqlens=cu_seqlens,
        supervised_tokens=int((labels != IGNORED).sum()),
    )


TooLong = Literal["error", "skip"]
"""What is done with a sample that exceeds a limit: refuse it, or leave it out. Samples are never truncated."""


def check_text(record: Record, max_seq_length: int, too_long: TooLong = "error") -> bool:
    """Whether the text of a record may be tokenized, which takes proportional memory; false if it is too long for
    ``max_seq_length`` tokens by its number of characters alone. Raises `UserError` where ``too_long`` is error.
    """
    most = min(max(CHARACTERS_PER_TOKEN * max_seq_length, FEW_CHARACTERS), MOST_CHARACTERS)
    raised = "raise data.max_seq_length, " if most < MOST_CHARACTERS else ""
    return record.characters <= most or _skips(
        record,
        too_long,
        found=f"a text of {record.characters} characters",
        expected=f"at most {most} for data.max_seq_length = {max_seq_length}",
        because="a token is a few characters, and samples are never truncated",
        fix=f"{raised}shorten the record, or set data.too_long to skip",
    )


def check_length(sample: TokenizedSample, max_seq_length: int, too_long: TooLong = "error") -> bool:
    """Whether the sample is used; false if it has more than ``max_seq_length`` tokens. Raises `UserError` where
    ``too_long`` is error.
    """
    return len(sample) <= max_seq_length or _skips(
        sample.record,
        too_long,
        found=f"a sample of {len(sample)} tokens, {len(sample.row_positions)} of them for images",
        expected=f"at most data.max_seq_length = {max_seq_length}",
        because="samples are never truncated",
        fix="raise data.max_seq_length, lower data.max_pixels, or set data.too_long to skip",
    )


def check_patches(sample: TokenizedSample, patches: int, most: int, too_long: TooLong = "error") -> bool:
    """Whether the sample, with so many `patches`, is used; false if these are more than ``most``. Raises `UserError`
    where ``too_long`` is error.
    """
    return patches <= most or _skips(
        sample.record,
        too_long,
        found=f"images of {patches} patches",
        expected=f"at most train.patches_per_micro_batch = {most}",
        because="a sample is never split over micro-batches",
        fix="raise train.patches_per_micro_batch, lower data.max_pixels, or set data.too_long to skip",
    )


def _skips(record: Record, too_long: TooLong, **problem: str) -> bool:
    """False, where records are skipped for such a problem. Raises `UserError` otherwise."""
    if too_long == "skip":
        return False
    raise UserError.at(record.where, **problem)


def check_rows(sample: TokenizedSample) -> None:
    """Check that a sample has as many tokens for rows as its items have rows. Raises `UserError`."""
    rows = int(sample.rows.sum())
    if rows != len(sample.row_positions):
        raise UserError.at(
            f"{sample.record.where}: field 'image'",
            found=f"{len(sample.row_positions)} image tokens",
            expected=f"{rows}, one for each merged patch of its {len(sample.sizes)} images",
            fix="do not change pictures while training reads them, or correct the record",
        )


def _labels(sample: TokenizedSample) -> np.ndarray:
    labels = np.full(len(sample), IGNORED, dtype=np.int64)
    labels[:-1] = np.where(sample.supervised[1:], sample.input_ids[1:], IGNORED)
    return labels


def _joined(parts: Sequence[np.ndarray], *dims: int) -> np.ndarray:
    """The parts, int64 [*dims, n], one after the other along the last dim."""
    return np.concatenate([np.zeros((*dims, 0), np.int64), *parts], axis=-1)
