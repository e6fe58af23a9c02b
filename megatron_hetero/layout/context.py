"""Where tokens go under context parallelism, and which keys each rank's queries see. Pure, on NumPy integers.

Causal sequences are cut *zigzag*, each sample by itself (cutting the whole pack would not balance causal work): the
s-th sample of a pack, of L tokens, into 2 * cp chunks, chunk c from floor((c * L + s mod 2cp) / 2cp) up to where the
next one begins, so that lengths need not divide, chunks may be empty, and what is left over falls to other members in
each sample. Member i takes the chunks i and 2 * cp - 1 - i of every sample; it holds its tokens in the order of the
pack. For cp = 2 and samples of 8 and 5 tokens:

    position   0 1 2 3 4 5 6 7 | 8 9 10 11 12
    chunk      0 0 1 1 2 2 3 3 | 0 1  2  2  3       member 0 holds 0 1 6 7 8 12, member 1 holds 2 3 4 5 9 10 11
    member     0 0 1 1 1 1 0 0 | 0 1  1  1  0

Other sequences (the encoder's) are cut anywhere: each member holds a contiguous run of the whole.

Attention works on *segments*: a run of this member's queries, all of one sequence, and the keys that it attends to,
which end with the segment's own last token where attention is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class AttentionSegments:
    """What one context-parallel member attends to.

    `queries`, `keys`: tokens of each segment, in the order in which the member holds its queries; no segment is without
    queries. `key_index`: int64 [sum of keys], which tokens the keys are, counted over the members' tokens one after the
    other (member 0's, in the order in which it holds them, then member 1's, ...); None where keys are the member's own
    tokens in their order.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    key_index: np.ndarray | None = None

    @classmethod
    def whole(cls, lengths: Sequence[int] | np.ndarray) -> AttentionSegments:
        """All of every sequence on one member."""
        kept = tuple(int(n) for n in lengths if n)
        return cls(kept, kept)


def chunk_bounds(lengths: np.ndarray, numbers: np.ndarray, cp: int) -> np.ndarray:
    """Where the chunks of each sample begin and the last one ends, within the sample: int64 [samples, 2 * cp + 1].

    `lengths`, `numbers`: of the samples, int64; samples are numbered from 0 in their pack.
    """
    return (lengths[:, None] * np.arange(2 * cp + 1) + numbers[:, None] % (2 * cp)) // (2 * cp)


def zigzag_member(offsets: np.ndarray, lengths: np.ndarray, numbers: np.ndarray, cp: int) -> np.ndarray:
    """The member that holds the token at each of `offsets` in a sample of the same entry of `lengths` and `numbers`."""
    # The largest chunk that begins at or before the offset.
    chunk = ((offsets + 1) * 2 * cp - 1 - numbers % (2 * cp)) // lengths
    return np.minimum(chunk, 2 * cp - 1 - chunk)


def zigzag_tokens(lengths: Sequence[int] | np.ndarray, cp: int) -> tuple[np.ndarray, ...]:
    """For each member the positions of its tokens in the pack, ascending. `lengths`: of the pack's samples."""
    lengths = np.asarray(lengths, np.int64)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(len(sample)) - (np.cumsum(lengths) - lengths)[sample]
    member = zigzag_member(offsets, lengths[sample], sample, cp)
    return tuple(np.flatnonzero(member == i) for i in range(cp))


def zigzag_segments(lengths: Sequence[int] | np.ndarray, cp: int, member: int) -> AttentionSegments:
    """What `member` attends to, causally, in samples of `lengths` tokens."""
    if cp == 1:
        return AttentionSegments.whole(lengths)
    lengths = np.asarray(lengths, np.int64)
    bounds = chunk_bounds(lengths, np.arange(len(lengths)), cp)
    starts = np.cumsum(lengths) - lengths
    held = np.empty(int(lengths.sum()), np.int64)  # where each position of the pack stands among the members' tokens
    held[np.concatenate(zigzag_tokens(lengths, cp))] = np.arange(len(held))
    # The chunks of a sample in the order of the pack. Those of the last member lie side by side: one segment.
    last = 2 * cp - 1 - member
    runs = [(member, last + 1)] if member == cp - 1 else [(member, member + 1), (last, last + 1)]
    kept = [
        (int(start), int(ends[stop] - ends[first]), int(ends[stop]))
        for start, ends in zip(starts, bounds, strict=True)
        for first, stop in runs
        if ends[stop] > ends[first]
    ]
    index = [held[start : start + keys] for start, _, keys in kept]
    return AttentionSegments(
        tuple(queries for _, queries, _ in kept),
        tuple(keys for _, _, keys in kept),
        np.concatenate([np.zeros(0, np.int64), *index]),
    )


def contiguous_segments(sequences: Sequence[int], shard_lengths: Sequence[int], member: int) -> AttentionSegments:
    """What `member` attends to, in both directions, where each member holds a contiguous run of the sequences."""
    if len(shard_lengths) == 1:
        return AttentionSegments.whole(sequences)
    ends = np.cumsum(np.asarray(sequences, np.int64))
    starts = ends - np.asarray(sequences, np.int64)
    low = sum(shard_lengths[:member])
    high = low + shard_lengths[member]
    queries = np.minimum(ends, high) - np.maximum(starts, low)
    seen = np.flatnonzero(queries > 0)
    index: list[np.ndarray] = [np.arange(starts[i], ends[i]) for i in seen]
    return AttentionSegments(
        tuple(int(n) for n in queries[seen]),
        tuple(int(ends[i] - starts[i]) for i in seen),
        np.concatenate([np.zeros(0, np.int64), *index]),
    )
