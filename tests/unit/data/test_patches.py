"""Pixels that stay on the rank that decoded them are copied to their places once."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.boundary.routes import DirectionPlan
from megatron_hetero.data.loader import place_rows


@given(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 3), st.booleans(), st.integers(0, 1 << 30))
def test_rows_of_several_parts_are_placed(lengths: list[int], more: int, in_order: bool, seed: int) -> None:
    """Some of them, in any order, or in runs; rows that nobody gives are zero."""
    held = sum(lengths)
    rng = np.random.default_rng(seed)
    kept = np.sort(rng.permutation(held)[: rng.integers(0, held + 1)])
    needed = len(kept) + more
    places = rng.permutation(needed)[: len(kept)] if not in_order else np.arange(len(kept))
    direction = DirectionPlan(held, needed, kept, places, (), complete=more == 0)
    rows = torch.arange(1.0, held + 1)[:, None].expand(held, 3)
    out = torch.full((needed, 3), -1.0)
    place_rows(direction, rows.split(lengths) if lengths else (), out)
    expected = torch.zeros(needed, 3)
    expected[torch.from_numpy(places)] = rows[torch.from_numpy(kept)]
    assert torch.equal(out, expected)
