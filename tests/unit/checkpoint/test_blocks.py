"""Flat ranges of local parameters as rectangles of stored tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.checkpoint.storage import FlatBlock, cut, first_owned
from megatron_hetero.hf.weight_map import TensorSlice, load_slices, share, stack


def test_a_flat_range_is_at_most_three_rectangles() -> None:
    slices = [TensorSlice("w", (10, 14), columns=(8, 12))]
    assert list(cut(slices, 4, 2, 13)) == [
        FlatBlock("w", (10, 11), (10, 12), 0, 4),
        FlatBlock("w", (11, 13), (8, 12), 2, 4),
        FlatBlock("w", (13, 14), (8, 9), 10, 4),
    ]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_ranges_of_all_ranks_are_every_element_once(rows: int, columns: int, tp: int, ranks: int) -> None:
    stored = {name: torch.arange(rows * columns).view(rows, columns) + 1000 * i for i, name in enumerate("ab")}
    rebuilt = {name: torch.full_like(values, -1) for name, values in stored.items()}
    maps = []
    for tp_rank in range(tp):
        part, length = share(rows, tp_rank, tp)
        # Padded shares of a and, below them, all of b on every rank.
        maps.append({"p": (TensorSlice("a", part), TensorSlice("b", (0, rows), at=length))})
    for tp_rank, m in enumerate(maps):
        parameter = torch.full((share(rows, tp_rank, tp)[1] + rows, columns), -7)
        load_slices(parameter, m["p"], [stored[tensor_slice.name][tensor_slice.source] for tensor_slice in m["p"]])
        flat = parameter.flatten()
        for rank in range(ranks):
            start, stop = (len(flat) * (rank + i) // ranks for i in range(2))
            for block in cut(first_owned(maps, tp_rank)["p"], columns, start, stop):
                place = rebuilt[block.name][slice(*block.rows), slice(*block.columns)]
                assert (place == -1).all(), "written twice"
                place.copy_(block.view(flat[start:stop], 2))
    assert all(torch.equal(rebuilt[name], values) for name, values in stored.items())


def test_a_slice_that_one_rank_holds_twice_is_held_once() -> None:
    maps = [{"p": stack(("k", (0, 2)), ("q", (0, 1)), ("k", (0, 2)))}, {"p": stack(("k", (0, 2)), ("q", (1, 2)))}]
    assert {tensor_slice.rectangle for tensor_slice in first_owned(maps, 0)["p"]} == {
        ("k", (0, 2), None),
        ("q", (0, 1), None),
    }
    assert [tensor_slice.name for tensor_slice in first_owned(maps, 1)["p"]] == ["q"]
