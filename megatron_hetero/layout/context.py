"""The tokens of each context-parallel rank, and the keys that its queries attend to. Pure, on NumPy integers.

Causal sequences are cut *zigzag*, sample by sample (cutting the whole pack would not balance causal work). Sample s of
a pack, with L tokens, has 2 * cp chunks; chunk c begins at floor((c * L + s mod 2cp) / 2cp). Lengths need not be
divisible, chunks may be empty, and the remainders of consecutive samples go to different members. Member i holds chunks
i and 2 * cp - 1 - i of every sample, in the order of the pack. For cp = 2 and samples of 8 and 5 tokens:

    position   0 1 2 3 4 5 6 7 | 8 9 10 11 12
    chunk      0 0 1 1 2 2 3 3 | 0 1  2  2  3       member 0: 0 1 6 7 8 12, member 1: 2 3 4 5 9 10 11
    member     0 0 1 1 1 1 0 0 | 0 1  1  1  0

Sequences of encoders may be cut anywhere: each member holds a contiguous run of all tokens.

Attention works on *segments*: a run of a member's queries from one sequence, and the keys to which these queries
attend. With causal attention the keys end at the segment's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class AttentionSegments:
    """The attention segments of one context-parallel member. Equality compares lengths only.

    `queries`, `keys`: numbers of query and key tokens of each segment, in the order of the member's queries; every
    segment has queries. `key_index`: int64 [sum of keys], the index of each key in the joined tokens of members 0, 1,
    and so on; None if the keys are the member's local tokens.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    key_index: np.ndarray | None = field(default=None, compare=False)

    @classmethod
    def of(cls, segments: Sequence[tuple[int, np.ndarray]]) -> AttentionSegments:
        """Build segments from the number of queries and the key indices of each segment."""
        index = np.concatenate([np.zeros(0, np.int64), *(keys for _, keys in segments)])
        return cls(tuple(queries for queries, _ in segments), tuple(len(keys) for _, keys in segments), index)

    @classmethod
    def whole(cls, lengths: Sequence[int] | np.ndarray) -> AttentionSegments:
        """Return the segments of a member that holds whole sequences of these `lengths`."""
        tokens = tuple(int(n) for n in lengths if n)
        return cls(tokens, tokens)


def chunk_bounds(lengths: np.ndarray, numbers: np.ndarray, cp: int) -> np.ndarray:
    """Return the bounds of the chunks within each sample, int64 [samples, 2 * cp + 1]. `lengths`, `numbers`: lengths of
    the samples, and their numbers in the pack, from 0; int64 [samples].
    """
    return (lengths[:, None] * np.arange(2 * cp + 1) + numbers[:, None] % (2 * cp)) // (2 * cp)


def zigzag_member(offsets: np.ndarray, lengths: np.ndarray, numbers: np.ndarray, cp: int) -> np.ndarray:
    """Return the member that holds the token at each of `offsets` in a sample. `lengths`, `numbers`: length and number
    of the sample of each offset.
    """
    # The number of the last chunk that begins at or before the offset.
    chunk = ((offsets + 1) * 2 * cp - 1 - numbers % (2 * cp)) // lengths
    return np.minimum(chunk, 2 * cp - 1 - chunk)


def zigzag_tokens(lengths: Sequence[int] | np.ndarray, cp: int) -> tuple[np.ndarray, ...]:
    """Return the ascending positions of each member's tokens in a pack of samples of these `lengths`."""
    lengths = np.asarray(lengths, np.int64)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(len(sample)) - (np.cumsum(lengths) - lengths)[sample]
    member = zigzag_member(offsets, lengths[sample], sample, cp)
    return tuple(np.flatnonzero(member == i) for i in range(cp))


def zigzag_segments(lengths: Sequence[int] | np.ndarray, cp: int, member: int) -> AttentionSegments:
    """Return the segments of `member` for causal attention in samples of `lengths` tokens."""
    if cp == 1:
        return AttentionSegments.whole(lengths)
    lengths = np.asarray(lengths, np.int64)
    bounds = chunk_bounds(lengths, np.arange(len(lengths)), cp)
    starts = np.cumsum(lengths) - lengths
    place = np.empty(int(lengths.sum()), np.int64)  # index of each position of the pack in the members' joined tokens
    place[np.concatenate(zigzag_tokens(lengths, cp))] = np.arange(len(place))
    # The member's chunks of a sample in pack order. The last member's two chunks are adjacent and form one segment.
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
    """Return the segments of `member` for bidirectional attention, if each member holds a contiguous run of tokens.
    `sequences`: lengths of the sequences; `shard_lengths`: number of tokens of each member.
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
