"""The tokens of each context-parallel rank, and the keys that its queries attend to. Pure, on NumPy integers.

Causal sequences are cut *zigzag*, each sample by itself (cutting the whole pack would not balance causal work): the
s-th sample of a pack, of L tokens, into 2 * cp chunks, chunk c from floor((c * L + s mod 2cp) / 2cp) to the start of
the next, so that lengths need not divide, chunks may be empty, and remainders go to other members in each sample.
Member i holds chunks i and 2 * cp - 1 - i of every sample, in the order of the pack. For cp = 2 and samples of 8 and
5 tokens:

    position   0 1 2 3 4 5 6 7 | 8 9 10 11 12
    chunk      0 0 1 1 2 2 3 3 | 0 1  2  2  3       member 0: 0 1 6 7 8 12, member 1: 2 3 4 5 9 10 11
    member     0 0 1 1 1 1 0 0 | 0 1  1  1  0

Other sequences (those of an encoder) are cut anywhere: each member holds a contiguous run of all tokens.

Attention works on *segments*: a run of this member's queries, all of one sequence, and the keys that they attend to,
which end with the segment's last token where attention is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class AttentionSegments:
    """The segments of one context-parallel member. Compared by lengths.

    `queries`, `keys`: number of tokens of each segment, in the order of the member's queries; every segment has
    queries. `key_index`: int64 [sum of keys], the index of each key among the tokens of member 0, member 1, ... in
    their order; None if the keys are the member's local tokens.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    key_index: np.ndarray | None = field(default=None, compare=False)

    @classmethod
    def of(cls, segments: Sequence[tuple[int, np.ndarray]]) -> AttentionSegments:
        """Build segments from the number of queries and the index of the keys of each segment."""
        index = np.concatenate([np.zeros(0, np.int64), *(keys for _, keys in segments)])
        return cls(tuple(queries for queries, _ in segments), tuple(len(keys) for _, keys in segments), index)

    @classmethod
    def whole(cls, lengths: Sequence[int] | np.ndarray) -> AttentionSegments:
        """Return the segments of a member that holds every sequence whole."""
        tokens = tuple(int(n) for n in lengths if n)
        return cls(tokens, tokens)


def chunk_bounds(lengths: np.ndarray, numbers: np.ndarray, cp: int) -> np.ndarray:
    """Return the bounds of the chunks within each sample, int64 [samples, 2 * cp + 1]. `lengths`, `numbers`: of the
    samples, int64 [samples]; samples are numbered from 0 in their pack.
    """
    return (lengths[:, None] * np.arange(2 * cp + 1) + numbers[:, None] % (2 * cp)) // (2 * cp)


def zigzag_member(offsets: np.ndarray, lengths: np.ndarray, numbers: np.ndarray, cp: int) -> np.ndarray:
    """Return the member that holds the token at each of `offsets`, in the sample given by the same entry of `lengths`
    and `numbers`.
    """
    # The largest chunk that begins at or before the offset.
    chunk = ((offsets + 1) * 2 * cp - 1 - numbers % (2 * cp)) // lengths
    return np.minimum(chunk, 2 * cp - 1 - chunk)


def zigzag_tokens(lengths: Sequence[int] | np.ndarray, cp: int) -> tuple[np.ndarray, ...]:
    """Return the positions of each member's tokens in a pack of samples of these lengths, ascending."""
    lengths = np.asarray(lengths, np.int64)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(len(sample)) - (np.cumsum(lengths) - lengths)[sample]
    member = zigzag_member(offsets, lengths[sample], sample, cp)
    return tuple(np.flatnonzero(member == i) for i in range(cp))


def zigzag_segments(lengths: Sequence[int] | np.ndarray, cp: int, member: int) -> AttentionSegments:
    """Return the segments of `member` with causal attention in samples of `lengths` tokens."""
    if cp == 1:
        return AttentionSegments.whole(lengths)
    lengths = np.asarray(lengths, np.int64)
    bounds = chunk_bounds(lengths, np.arange(len(lengths)), cp)
    starts = np.cumsum(lengths) - lengths
    place = np.empty(int(lengths.sum()), np.int64)  # of each position of the pack among the members' tokens
    place[np.concatenate(zigzag_tokens(lengths, cp))] = np.arange(len(place))
    # The chunks of a sample in the order of the pack. Those of the last member are adjacent, and form one segment.
    last = 2 * cp - 1 - member
    runs = [(member, last + 1)] if member == cp - 1 else [(member, member + 1), (last, last + 1)]
    segments = [
        (int(ends[stop] - ends[first]), place[start : start + ends[stop]])
        for start, ends in zip(starts, bounds, strict=True)
        for first, stop in runs
        if ends[stop] > ends[first]
    ]
    return AttentionSegments.of(segments)


def contiguous_segments(sequences: Sequence[int], shard_lengths: Sequence[int], member: int) -> AttentionSegments:
    """Return the segments of `member` with bidirectional attention, if each member holds a contiguous run of the
    sequences.
    """
    if len(shard_lengths) == 1:
        return AttentionSegments.whole(sequences)
    ends = np.cumsum(np.asarray(sequences, np.int64))
    starts = ends - np.asarray(sequences, np.int64)
    low = sum(shard_lengths[:member])
    high = low + shard_lengths[member]
    queries = np.minimum(ends, high) - np.maximum(starts, low)
    seen = np.flatnonzero(queries > 0)
    segments: list[tuple[int, np.ndarray]] = [(int(queries[i]), np.arange(starts[i], ends[i])) for i in seen]
    return AttentionSegments.of(segments)
