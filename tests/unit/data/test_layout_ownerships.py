"""Ownerships of modules in layouts, against the definitions rank by rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.data.token_shards import own_samples, own_tokens, tokens_of
from megatron_hetero.layout.layout import Layout

DEGREE = st.integers(1, 3)
unhurried = settings(deadline=None)


@st.composite
def layouts(draw: st.DrawFn, pp: int = 2) -> Layout:
    tp, sp, cp, dp = (draw(DEGREE) for _ in range(4))
    stages, first = draw(st.integers(1, pp)), draw(st.integers(0, 3))
    return Layout(tp, sp, cp, dp, stages, tuple(range(first, first + tp * sp * cp * dp * stages)))


@st.composite
def packs(draw: st.DrawFn, layout: Layout) -> list[list[int]]:
    return [draw(st.lists(st.integers(1, 14), max_size=3)) for _ in range(layout.dp)]


@unhurried
@given(layouts(), st.lists(st.integers(0, 5), max_size=6), st.sets(st.sampled_from(["tp", "sp", "cp"])), st.data())
def test_samples_are_on_their_replicas(layout: Layout, counts: list[int], split: set[str], data: st.DataObject) -> None:
    replicas = [data.draw(st.integers(0, layout.dp - 1)) for _ in counts]
    owned, ends = own_samples(layout, counts, replicas, split=split), np.cumsum([0, *counts])
    assert owned.ranks == layout.stage(layout.pp - 1).ranks
    for replica in range(layout.dp):
        rows = [row for i, r in enumerate(replicas) if r == replica for row in range(ends[i], ends[i + 1])]
        ranks = [rank for rank in owned.ranks if layout.replica_of(rank) == replica]
        runs = {tuple(getattr(layout.coordinate(r), a) for a in ("cp", "sp", "tp") if a in split): r for r in ranks}
        assert [row for key in sorted(runs) for row in owned.held_by(runs[key])] == rows
        sizes = [owned.num_rows(rank) for rank in ranks]
        assert max(sizes) - min(sizes) <= 1
        shared = [axis for axis in ("tp", "sp", "cp") if axis not in split]
        assert all(owned.peers_of(rank) == layout.group_of(rank, *shared) for rank in ranks)


@unhurried
@given(layouts(), st.booleans(), st.data())
def test_each_token_is_on_one_rank_of_its_replica(layout: Layout, sequence: bool, data: st.DataObject) -> None:
    lengths = data.draw(packs(layout))
    for replica, pack in enumerate(lengths):
        mine = [
            tokens_of(layout, rank, pack, sequence_parallel=sequence).tolist()
            for rank in layout.stage(0).ranks
            if layout.replica_of(rank) == replica
            if sequence or layout.coordinate(rank).tp == 0
        ]
        assert sorted(token for tokens in mine for token in tokens) == list(range(sum(pack)))
        assert all(tokens == sorted(tokens) for tokens in mine)


@unhurried
@given(layouts(), st.booleans(), st.data())
def test_a_rank_needs_the_rows_of_its_tokens(layout: Layout, sequence: bool, data: st.DataObject) -> None:
    lengths = data.draw(packs(layout))
    places = [sorted(data.draw(st.sets(st.integers(0, sum(pack) - 1))) if pack else []) for pack in lengths]
    owned, first = own_tokens(layout, lengths, places, sequence_parallel=sequence), np.cumsum([0, *map(len, places)])
    for rank in layout.stage(0).ranks:
        replica = layout.replica_of(rank)
        tokens = set(tokens_of(layout, rank, lengths[replica], sequence_parallel=sequence).tolist())
        expected = [first[replica] + i for i, place in enumerate(places[replica]) if place in tokens]
        assert owned.held_by(rank).tolist() == expected
        assert owned.peers_of(rank) == ((rank,) if sequence else layout.group_of(rank, "tp"))
    # What an encoder of another layout makes gets there.
    encoder = Layout.parse("dp:2@0-1")
    plan_boundary(own_samples(encoder, [int(first[-1]), 0]), owned, row_bytes=2)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_context_parallel_is_megatrons_where_lengths_divide(cp: int, samples: int, chunk: int) -> None:
    """As in `get_batch_on_this_cp_rank`: [2 cp, chunk] of each sample, of which rank i takes i and 2 cp - 1 - i."""
    layout, length = Layout.parse(f"cp:{cp}", cp), 2 * cp * chunk
    whole = np.arange(samples * length).reshape(samples, 2 * cp, chunk)
    for rank in range(cp):
        expected = whole[:, [rank, 2 * cp - 1 - rank]].reshape(-1)
        assert tokens_of(layout, rank, [length] * samples).tolist() == sorted(expected.tolist())


def test_the_docstring_of_the_module() -> None:
    counts = [3, 3, 2]
    assert str(own_samples(Layout.parse("sp:2,dp:2", 4), counts, [0, 1, 0], split=["sp"])) == (
        "0: 0-1; 1: 2,6-7; 2: 3; 3: 4-5"
    )
    assert str(own_samples(Layout.parse("tp:2,dp:2", 4), counts, [0, 0, 1])) == "0,1: 0-5; 2,3: 6-7"
    assert str(own_samples(Layout.parse("dp:2", 2), counts, gradient="partial")) == "0: 0-2,6-7; 1: 3-5 partial"
    assert str(own_tokens(Layout.parse("cp:2", 2), [[8, 4]], [[0, 1, 2, 9]])) == "0: 0-1; 1: 2-3"


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda layout: own_samples(layout, [1, 2], [0]), "replicas: found 1 of 2 samples, expected one for each"),
        (lambda layout: own_samples(layout, [1], [2]), "replicas: found replica 2, expected 0 to 1, by the layout `tp"),
        (lambda layout: own_samples(layout, [-1]), "counts: found a sample of -1 rows, expected 0 or more"),
        (lambda layout: own_samples(layout, [1], split=["dp"]), "split: found axis `dp`, expected some of cp, sp, tp"),
        (lambda layout: own_tokens(layout, [[4]], [[0]]), "lengths: found 1 replicas, expected the 2 of the layout"),
        (lambda layout: own_tokens(layout, [[4], []], [[0]]), "places: found 1 replicas, expected the 2 of the layout"),
        (
            lambda layout: own_tokens(layout, [[4], [2]], [[], [2]]),
            "places of replica 1: found position 2, expected 0 to",
        ),
        (lambda layout: tokens_of(layout, 9, [4]), "layout tp:2,dp:2@0-3: found rank 9, expected one of its ranks"),
    ],
)
def test_what_does_not_fit_the_layout_is_refused(call: Callable[[Layout], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        call(Layout.parse("tp:2,dp:2", 4))
