"""Where tokens go under context parallelism and what their queries see, against definitions written down naively."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.layout.context import (
    AttentionSegments,
    chunk_bounds,
    contiguous_segments,
    zigzag_segments,
    zigzag_tokens,
)
from megatron_hetero.models.layers.segments import padded_index

PACKS = st.lists(st.integers(0, 20), max_size=6)
MEMBERS = st.integers(1, 5)


def seen_by_query(
    segments: AttentionSegments, everybodys: np.ndarray, own: np.ndarray, *, causal: bool
) -> list[list[int]]:
    """For each query of a member the positions in the pack that it sees, as an attention kernel reads `segments`."""
    keys = own if segments.key_index is None else everybodys[segments.key_index]
    seen, start = [], 0
    for queries, length in zip(segments.queries, segments.keys, strict=True):
        of_segment = keys[start : start + length].tolist()
        seen += [of_segment[: length - queries + i + 1] if causal else of_segment for i in range(queries)]
        start += length
    assert start == len(keys)
    return seen


def starts_of_tokens(lengths: list[int]) -> list[int]:
    """For each token where its sequence begins."""
    return [sum(lengths[:i]) for i, length in enumerate(lengths) for _ in range(length)]


@settings(max_examples=200)
@given(PACKS, MEMBERS)
def test_zigzag_deals_every_token_to_one_member(lengths: list[int], cp: int) -> None:
    tokens = zigzag_tokens(lengths, cp)
    assert len(tokens) == cp and all(np.all(np.diff(part) > 0) for part in tokens)
    assert sorted(np.concatenate(tokens).tolist()) == list(range(sum(lengths)))


@settings(max_examples=200)
@given(PACKS, MEMBERS)
def test_zigzag_gives_member_i_the_chunks_i_and_as_many_from_the_end(lengths: list[int], cp: int) -> None:
    expected: list[list[int]] = [[] for _ in range(cp)]
    for sample, length in enumerate(lengths):
        bounds = [(c * length + sample % (2 * cp)) // (2 * cp) for c in range(2 * cp + 1)]
        assert chunk_bounds(np.array(lengths), np.arange(len(lengths)), cp)[sample].tolist() == bounds
        for c in range(2 * cp):
            start = sum(lengths[:sample])
            expected[min(c, 2 * cp - 1 - c)] += range(start + bounds[c], start + bounds[c + 1])
    assert [part.tolist() for part in zigzag_tokens(lengths, cp)] == expected


@settings(max_examples=200)
@given(PACKS, MEMBERS)
def test_zigzag_segments_are_the_causal_prefix_of_each_query(lengths: list[int], cp: int) -> None:
    tokens, starts = zigzag_tokens(lengths, cp), starts_of_tokens(lengths)
    for member in range(cp):
        segments = zigzag_segments(lengths, cp, member)
        assert all(n > 0 for n in segments.queries)
        seen = seen_by_query(segments, np.concatenate(tokens), tokens[member], causal=True)
        assert seen == [list(range(starts[t], t + 1)) for t in tokens[member].tolist()]


@pytest.mark.parametrize("length", [1, 2, 5, 9, 60])
@pytest.mark.parametrize("cp", [2, 4, 16])
def test_many_short_samples_are_dealt_evenly(length: int, cp: int) -> None:
    """What is left over of each sample goes round: over 2 * cp samples of a length all members get the same."""
    sizes = {len(part) for part in zigzag_tokens([length] * 2 * cp, cp)}
    assert sizes == {2 * length}


@settings(max_examples=200)
@given(st.integers(0, 200_000), st.integers(1, 16), st.integers(0, 40))
def test_zigzag_work_is_even(length: int, cp: int, number: int) -> None:
    """Tokens to two, visible keys to two rows of the sample's length: each of the at most four ends of a member's
    chunks is moved by less than a token.
    """
    bounds = chunk_bounds(np.array([length]), np.array([number]), cp)[0].tolist()

    def prefix(n: int) -> int:
        return n * (n + 1) // 2

    for i in range(cp):
        ends = [(bounds[i], bounds[i + 1]), (bounds[2 * cp - 1 - i], bounds[2 * cp - i])]
        assert abs(sum(b - a for a, b in ends) - length / cp) < 2
        assert abs(sum(prefix(b) - prefix(a) for a, b in ends) - prefix(length) / cp) <= 2 * (length + 1)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_zigzag_work_of_segments_is_that_of_chunks(cp: int) -> None:
    length = 1000
    work = []
    for member in range(cp):
        segments = zigzag_segments([length], cp, member)
        work.append(
            sum(
                q * k - q * (q - 1) // 2 for q, k in zip(segments.queries, segments.keys, strict=True)
            )  # ends at the last
        )
    assert sum(work) == length * (length + 1) // 2
    assert max(work) - min(work) <= 2 * (length + 1)
    # Halves of the pack would have been uneven by a half of it: the bound above can fail.
    assert length**2 // 4 > 2 * (length + 1)


@st.composite
def shards(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sequences, and how many tokens each member holds of all of them."""
    lengths = draw(PACKS)
    cuts = sorted(draw(st.lists(st.integers(0, sum(lengths)), max_size=4)))
    return lengths, np.diff([0, *cuts, sum(lengths)]).tolist()


@settings(max_examples=200)
@given(shards())
def test_contiguous_segments_are_the_whole_sequence_of_each_query(pack: tuple[list[int], list[int]]) -> None:
    lengths, members = pack
    everybodys, starts = np.arange(sum(lengths)), starts_of_tokens(lengths)
    ends = [
        start + length for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False) for _ in [0] * length
    ]
    for member in range(len(members)):
        segments = contiguous_segments(lengths, members, member)
        low = sum(members[:member])
        own = everybodys[low : low + members[member]]
        assert all(n > 0 for n in segments.queries) and sum(segments.queries) == len(own)
        seen = seen_by_query(segments, everybodys, own, causal=False)
        assert seen == [list(range(starts[t], ends[t])) for t in own.tolist()]


def test_the_table_at_the_head_of_the_file() -> None:
    assert [part.tolist() for part in zigzag_tokens([8, 5], 2)] == [[0, 1, 6, 7, 8, 12], [2, 3, 4, 5, 9, 10, 11]]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
def test_padded_index(lengths: list[int]) -> None:
    longest = max(lengths)
    expected = [member * longest + i for member, n in enumerate(lengths) for i in range(n)]
    order = np.random.default_rng(0).permutation(sum(lengths))
    assert padded_index(order, lengths).tolist() == [expected[i] for i in order]
