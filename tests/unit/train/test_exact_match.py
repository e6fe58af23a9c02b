"""Held-out evaluation without ranks: when it is due, which samples it reads, and how answers are counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.data.packing import IGNORED
from megatron_hetero.data.token_shards import TokenShards
from megatron_hetero.job.job import BatchShape
from megatron_hetero.layout.layout import Layout
from megatron_hetero.train.held_out import answer_counts, exact_match
from megatron_hetero.train.run import evaluates, stretches

LAYOUTS = ["dp:1@0", "cp:2@0-1", "cp:3@0-2", "sp:2@0-1", "tp:2,sp:2,cp:2@0-7", "cp:2,pp:2@0-3"]


@settings(max_examples=150)
@given(
    st.sampled_from(LAYOUTS),
    st.lists(st.integers(1, 9), max_size=6),
    st.floats(0, 1),
    st.floats(0, 0.5),
    st.integers(0, 2),
    st.integers(0, 2**32 - 1),
)
def test_counts_of_all_ranks_together(
    layout: str, lengths: list[int], supervised: float, wrong: float, left_out: int, seed: int
) -> None:
    rng, total = np.random.default_rng(seed), sum(lengths)
    labels = np.where(rng.random(total) < supervised, rng.integers(0, 50, total), IGNORED)
    hits = rng.random(total) >= wrong
    samples, number = np.repeat(np.arange(len(lengths)), lengths), len(lengths) + left_out
    text = Layout.parse(layout)
    shards = TokenShards(text.stage(0), False, (tuple(lengths),), {})
    counts = np.zeros((2, number), np.int64)
    for rank in text.stage(0).ranks:
        if text.coordinate(rank).tp == 0:
            tokens = shards.shard(rank).positions
            supervised_here = tokens[labels[tokens] != IGNORED]
            counts += answer_counts(samples[supervised_here], hits[supervised_here], number)
    right = asked = 0
    for sample in range(len(lengths)):
        places = [i for i in np.flatnonzero(samples == sample) if labels[i] != IGNORED]
        asked += bool(places)
        right += bool(places) and all(hits[i] for i in places)
    assert exact_match(counts) == (right, asked)
    assert counts.shape == (2, number) and counts[0].sum() == (labels != IGNORED).sum()


def test_when_data_sets_are_evaluated() -> None:
    assert [step for step in range(9) if evaluates(step, 3, 8)] == [3, 6, 8]
    assert not any(evaluates(step, 0, 8) for step in range(1, 9))
    assert list(stretches(1, 8, 3)) == [(1, 3), (4, 6), (7, 8)]
    assert list(stretches(5, 8, 3)) == [(5, 6), (7, 8)]
    assert list(stretches(1, 8, 0)) == [(1, 8)]
    assert list(stretches(9, 8, 3)) == []


@pytest.mark.parametrize("samples", [1, 2, 5, 12, 13, 31])
def test_a_stream_with_an_end_is_read_once(samples: int) -> None:
    shape = BatchShape(replicas=2, micro_batches=3, samples=2).once(samples)
    assert shape.micro_batches == min(3, -(-samples // 4))
    steps = range(1, 1 - (-samples // shape.step_samples))
    places = [(step, r, m) for step in steps for m in range(shape.micro_batches) for r in range(2)]
    assert [n for place in places for n in shape.numbers(*place)] == list(range(samples))
