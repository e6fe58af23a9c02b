"""Chunks of sequences for the gated delta rule: pure planning, and the index of tokens into chunks.

Every sequence is cut into chunks of its own, the last of which is padded. A *step* is the i-th chunk of several
sequences, which are computed at once, and a *block* is some steps of the same sequences, whose intermediate results
exist at the same time. Lengths 5, 9, 1 and 4 in chunks of 4, at most four chunks in a block:

    sequences by length   9 5 4 1
    group 9 5             step 0: 9a 5a    step 1: 9b 5b  | step 2: 9c              | parts blocks
    group 4 1             step 0: 4a 1a

The longest sequences come first, so that the sequences of a step are the first ones of the step before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

CHUNK, MIN_CHUNK = 64, 16
"""Tokens of a chunk, and of one in a pack of short sequences."""
MAX_PADDING = 2
"""Places in chunks for each token, beyond which chunks are halved."""
MIN_STEPS = 8
"""Steps of a block that has all of its chunks; the state between two blocks is saved for the backward pass."""


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
