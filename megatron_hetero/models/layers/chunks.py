"""Chunks of sequences for the gated delta rule: their plan, which is pure, and the index of tokens into chunks.

Every sequence is cut into chunks of its own, the last of which is padded. A *step* is the i-th chunk of several
sequences, which are computed at once, and a *block* is some steps of the same sequences, whose intermediate results
exist at the same time. Lengths 5, 9, 1 and 4 in chunks of 4, at most four chunks in a block:

    block 0    sequences 9, 5    steps 0, 1
    block 1    sequence 9        step 2          continues block 0
    block 2    sequences 4, 1    step 0

The longest sequences come first, so that the sequences of a step are the first ones of the step before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.groups.platform import on_device

CHUNK, MIN_CHUNK = 64, 16
"""Tokens of a chunk, and of one in a pack of short sequences."""
MAX_PADDING = 2
"""Places in chunks for each token, beyond which chunks are halved."""
MIN_STEPS = 8
"""Steps that a block has room for, where its sequences are as long: the state before a block is saved."""
BLOCK = 4096, 512
"""Places in the chunks of a block on a GPU, and on a CPU, where its results should stay in the cache."""


class Block(NamedTuple):
    """Some steps of some sequences.

    Attributes:
        steps: number of chunks in each step, never increasing.
        starts: whether the first step is the first chunk of its sequences.
        follows: number of chunks in the first step of the next block of the same sequences; 0 if there is none.
        tokens: token in the pack of each place [chunks, tokens of a chunk], int64; padding has the number of tokens.
    """

    steps: tuple[int, ...]
    starts: bool
    follows: int
    tokens: np.ndarray


def chunk_length(lengths: Sequence[int]) -> int:
    """Return the tokens of a chunk: `CHUNK`, or less where padding would outweigh tokens."""
    chunk = CHUNK
    while chunk > MIN_CHUNK and sum(-(-length // chunk) * chunk for length in lengths) > MAX_PADDING * sum(lengths):
        chunk //= 2
    return chunk


def blocks_of(lengths: Sequence[int], chunk: int, most: int) -> Iterator[Block]:
    """Cut sequences of `lengths` into blocks of at most `most` chunks; of one step if that alone has more."""
    ends = np.cumsum(lengths)
    order = [int(i) for i in np.argsort(-np.asarray(lengths), kind="stable") if lengths[i]]
    while order:
        steps = -(-lengths[order[0]] // chunk)
        members = max(1, most // min(steps, MIN_STEPS))
        group, order = order[:members], order[members:]
        yield from _blocks_of_group(
            [(int(ends[i]) - lengths[i], lengths[i]) for i in group], chunk, most, int(ends[-1])
        )


def _blocks_of_group(group: list[tuple[int, int]], chunk: int, most: int, total: int) -> Iterator[Block]:
    """Cut sequences, each with its first token and its length, the longest first."""
    steps: list[np.ndarray] = []
    places = np.arange(chunk)
    for step in range(-(-group[0][1] // chunk)):
        alive = np.asarray([(start, length) for start, length in group if length > step * chunk])
        offsets = step * chunk + places
        steps.append(np.where(offsets < alive[:, 1:], alive[:, :1] + offsets, total))
    begin = 0
    while begin < len(steps):
        end = begin + 1
        while end < len(steps) and sum(len(step) for step in steps[begin : end + 1]) <= most:
            end += 1
        follows = len(steps[end]) if end < len(steps) else 0
        inside = steps[begin:end]
        yield Block(tuple(len(step) for step in inside), begin == 0, follows, np.concatenate(inside))
        begin = end


class TokenBlock(NamedTuple):
    """Block of a pack on a device. Padding reads the last token of the pack, and is written to a row after all tokens.

    Attributes:
        steps, starts, follows: as in `Block`.
        length: tokens of a chunk.
        read, write: row of each place, int64 [chunks * length].
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
    """Sequences in chunks of `length` tokens, in blocks."""

    length: int
    blocks: tuple[TokenBlock, ...]

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Self:
        """Cut sequences of `lengths`, one after the other in a pack."""
        length, total, blocks = chunk_length(lengths), sum(lengths), []
        for steps, starts, follows, tokens in blocks_of(lengths, length, BLOCK[device.type == "cpu"] // length):
            places = tokens.flatten(), tokens.clip(max=total - 1).flatten()
            write, read = (on_device(torch.from_numpy(rows), device) for rows in places)
            mask = on_device(torch.from_numpy((tokens < total).astype(np.float32)[..., None]), device)
            blocks.append(TokenBlock(steps, starts, follows, length, read, write, mask))
        return cls(length, tuple(blocks))
