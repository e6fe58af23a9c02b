"""Chunks of sequences for the gated delta rule: a pure plan, and the token indices of the plan on a device.

Every sequence is cut into chunks, the last of which is padded. A *step* is the i-th chunk of several sequences, which
are computed together. A *block* is a range of steps of the same sequences, whose intermediate results are in memory
together. For example, lengths 5, 9, 1 and 4 in chunks of 4, with at most four chunks per block:

    block 0    sequences 9, 5    steps 0, 1
    block 1    sequence 9        step 2          continues block 0
    block 2    sequences 4, 1    step 0

The longest sequences come first, so that the sequences of a step are the first ones of the previous step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.groups.platform import on_device

CHUNK, MIN_CHUNK = 64, 16
"""Number of tokens of a chunk, and its minimum in packs of short sequences."""
MAX_PADDING = 2
"""Maximum number of places in chunks per token; if there are more, the chunk length is halved."""
MIN_STEPS = 8
"""Minimum number of steps per block, if its sequences are long enough: the state before each block is saved."""
BLOCK = 4096, 512
"""Maximum number of places in a block on a GPU, and on a CPU, where the results should stay in the cache."""


class ChunkBlock(NamedTuple):
    """A range of steps of some sequences.

    Attributes:
        steps: number of chunks in each step, non-increasing.
        starts: whether the first step is the first chunk of its sequences.
        follows: number of chunks in the first step of the next block of the same sequences; 0 if there is none.
        tokens: int64 [chunks, tokens of a chunk], the token of the pack at each place; the number of tokens for
            padding.
    """

    steps: tuple[int, ...]
    starts: bool
    follows: int
    tokens: np.ndarray


def chunk_length(lengths: Sequence[int]) -> int:
    """Return the number of tokens of a chunk: `CHUNK`, or less if there would be too much padding."""
    chunk = CHUNK
    while chunk > MIN_CHUNK and sum(-(-length // chunk) * chunk for length in lengths) > MAX_PADDING * sum(lengths):
        chunk //= 2
    return chunk


def blocks_of(lengths: Sequence[int], chunk: int, limit: int) -> Iterator[ChunkBlock]:
    """Yield the blocks of sequences of `lengths`, each of at most `limit` chunks; a single step may have more."""
    ends = np.cumsum(lengths)
    order = [int(i) for i in np.argsort(-np.asarray(lengths), kind="stable") if lengths[i]]
    while order:
        steps = -(-lengths[order[0]] // chunk)
        members = max(1, limit // min(steps, MIN_STEPS))
        group, order = order[:members], order[members:]
        yield from _blocks_of_group(
            [(int(ends[i]) - lengths[i], lengths[i]) for i in group], chunk, limit, int(ends[-1])
        )


def _blocks_of_group(group: list[tuple[int, int]], chunk: int, limit: int, total: int) -> Iterator[ChunkBlock]:
    """Yield the blocks of the sequences in `group`, given as (first token, length), longest first."""
    steps: list[np.ndarray] = []
    places = np.arange(chunk)
    for step in range(-(-group[0][1] // chunk)):
        alive = np.asarray([(start, length) for start, length in group if length > step * chunk])
        offsets = step * chunk + places
        steps.append(np.where(offsets < alive[:, 1:], alive[:, :1] + offsets, total))
    begin = 0
    while begin < len(steps):
        end = begin + 1
        while end < len(steps) and sum(len(step) for step in steps[begin : end + 1]) <= limit:
            end += 1
        follows = len(steps[end]) if end < len(steps) else 0
        inside = steps[begin:end]
        yield ChunkBlock(tuple(len(step) for step in inside), begin == 0, follows, np.concatenate(inside))
        begin = end


class TokenBlock(NamedTuple):
    """A `ChunkBlock` on a device. Padding reads the last token of the pack, and writes to a row after all tokens.

    Attributes:
        steps, starts, follows: as in `ChunkBlock`.
        length: number of tokens of a chunk.
        read, write: int64 [chunks * length], the row that each place reads and writes.
        mask: 1 for tokens and 0 for padding, fp32 [chunks, length, 1].
    """

    steps: tuple[int, ...]
    starts: bool
    follows: int
    length: int
    read: Tensor
    write: Tensor
    mask: Tensor


class Chunks(NamedTuple):
    """The sequences of a pack in chunks of `length` tokens, which are grouped into blocks."""

    length: int
    blocks: tuple[TokenBlock, ...]

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Self:
        """Cut the consecutive sequences of a pack, with these `lengths`, into chunks."""
        length, total, blocks = chunk_length(lengths), sum(lengths), []
        for steps, starts, follows, tokens in blocks_of(lengths, length, BLOCK[device.type == "cpu"] // length):
            places = tokens.flatten(), tokens.clip(max=total - 1).flatten()
            write, read = (on_device(torch.from_numpy(rows), device) for rows in places)
            mask = on_device(torch.from_numpy((tokens < total).astype(np.float32)[..., None]), device)
            blocks.append(TokenBlock(steps, starts, follows, length, read, write, mask))
        return cls(length, tuple(blocks))
