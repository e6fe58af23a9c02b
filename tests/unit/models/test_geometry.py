"""Windows, positions and cuts, against `transformers` where it has the same."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from megatron_hetero.models.qwen2_5_vl.geometry import Grid, deal_images, image_geometry, plan_encoder

PATCH = 14
some = settings(max_examples=100, deadline=None)


@st.composite
def grids(draw: st.DrawFn, merge: int = 2) -> Grid:
    rows, columns = draw(st.integers(1, 11)), draw(st.integers(1, 11))
    return draw(st.integers(1, 3)), merge * rows, merge * columns


@st.composite
def merges_and_images(draw: st.DrawFn) -> tuple[int, int, list[Grid]]:
    merge = draw(st.sampled_from([1, 2, 3]))
    return merge, draw(st.integers(1, 5)), draw(st.lists(grids(merge), min_size=1, max_size=4))


@some
@given(merges_and_images())
def test_windows_and_positions_are_those_of_transformers(case: tuple[int, int, list[Grid]]) -> None:
    merge, window, images = case
    thw = torch.tensor(images)
    index, ends = get_vision_window_index(thw, merge, window * merge * PATCH, PATCH)
    positions = get_vision_position_ids(thw, merge).unflatten(0, (-1, merge * merge))[index].flatten(0, 1)
    ours = [image_geometry(grid, merge, window) for grid in images]
    first = np.cumsum([0] + [len(g.units) for g in ours])
    assert np.concatenate([g.units + at for g, at in zip(ours, first, strict=False)]).tolist() == index.tolist()
    assert np.cumsum(np.concatenate([g.windows for g in ours]) * merge**2).tolist() == ends.tolist()[1:]
    np.testing.assert_array_equal(np.concatenate([g.positions for g in ours], axis=1), positions.T.numpy())


@some
@given(st.lists(grids(), max_size=5), st.integers(1, 9), st.integers(1, 4))
def test_shards_partition_the_windows(images: list[Grid], members: int, window: int) -> None:
    ids = [10 + i for i in range(len(images))]
    plan = plan_encoder(ids, images, members, 2, window)
    geometries = {i: image_geometry(grid, 2, window) for i, grid in zip(ids, images, strict=True)}
    assert len(plan.slices) == len(plan.windows) == members
    encoded = [(s.image, u) for part in plan.slices for s in part for u in range(s.start, s.stop)]
    assert encoded == [(i, u) for i in ids for u in range(len(geometries[i].units))]
    assert [n for part in plan.windows for n in part] == [4 * n for g in geometries.values() for n in g.windows]
    for part, windows in zip(plan.slices, plan.windows, strict=True):
        assert 4 * sum(s.stop - s.start for s in part) == sum(windows)
        for piece in part:
            edges = {0, *np.cumsum(geometries[piece.image].windows).tolist()}
            assert piece.start in edges and piece.stop in edges and piece.start < piece.stop
    if images:
        assert [0, *np.cumsum(plan.sequences)] == get_vision_cu_seqlens(torch.tensor(images)).tolist()
    assert sum(plan.sequences) == sum(plan.lengths)


@some
@given(st.lists(grids(), max_size=5), st.integers(1, 9), st.integers(1, 4))
def test_shards_are_near_even(images: list[Grid], members: int, window: int) -> None:
    plan = plan_encoder(list(range(len(images))), images, members, 2, window)
    largest = max((n for part in plan.windows for n in part), default=0)
    assert max(plan.lengths) <= sum(plan.lengths) / members + largest


def test_nobody_encodes_where_there_is_no_image() -> None:
    plan = plan_encoder([], [], 3, 2, 4)
    assert plan.slices == plan.windows == ((), (), ()) and plan.lengths == (0, 0, 0) and plan.sequences == ()


def test_one_window_leaves_the_other_members_empty() -> None:
    lengths = plan_encoder([0], [(1, 8, 8)], 4, 2, 4).lengths
    assert sorted(lengths) == [0, 0, 0, 64]


def test_equal_windows_are_dealt_evenly() -> None:
    assert plan_encoder([0], [(1, 32, 32)], 8, 2, 4).lengths == (128,) * 8


@some
@given(st.lists(st.floats(0.01, 1e12), max_size=30), st.integers(1, 8))
def test_images_are_dealt_within_grahams_bound(costs: list[float], replicas: int) -> None:
    dealt = deal_images(costs, replicas)
    assert len(dealt) == replicas and all(images == sorted(images) for images in dealt)
    assert sorted(image for images in dealt for image in images) == list(range(len(costs)))
    loads = [sum(costs[i] for i in images) for images in dealt]
    largest, mean = max(costs, default=0.0), sum(costs) / replicas
    # Graham: nobody has more than the mean and what is left of the largest; loads differ by one image at most.
    assert max(loads) <= (mean + largest * (1 - 1 / replicas)) * (1 + 1e-9)
    assert max(loads) - min(loads) <= largest * (1 + 1e-9)


def test_equal_images_are_dealt_in_turn() -> None:
    assert deal_images([1.0] * 5, 3) == [[0, 3], [1, 4], [2]]
    assert deal_images([], 2) == [[], []]
