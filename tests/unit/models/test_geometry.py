"""Windows, positions and cuts, against `transformers` where it has the same."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from megatron_hetero.data.encoder_shards import ReplicaShards
from megatron_hetero.models.items.pictures import ImageSize, patch_positions, picture_order
from megatron_hetero.models.items.types import ItemOrder

PATCH = 14
COST = (1.0, 0.01)
"""Per patch, and per patch and patch of its frame: as much of either where a frame has 100 patches."""
some = settings(max_examples=100)
degrees = st.integers(1, 4)


@dataclass(frozen=True)
class Encoder:
    """What cutting needs to know of one."""

    merge: int
    window: int
    flops: tuple[float, float]
    unit_width: int = 1
    position_dims: int = 2

    @property
    def unit(self) -> int:
        return self.merge**2

    def rows(self, size: ImageSize) -> int:
        return prod(size) // self.unit

    def order(self, size: ImageSize) -> ItemOrder:
        return picture_order(size, self.merge, self.window)

    def sequences(self, size: ImageSize) -> tuple[int, ...]:
        return (size[1] * size[2],) * size[0]

    def positions(self, size: ImageSize, units: np.ndarray) -> np.ndarray:
        return patch_positions(size, self.merge, units)

    def cost(self, size: ImageSize) -> float:
        return prod(size) * self.cost_per_patch(size)

    def cost_per_patch(self, size: ImageSize) -> float:
        return self.flops[0] + self.flops[1] * size[1] * size[2]


@st.composite
def grids(draw: st.DrawFn, merge: int = 2) -> ImageSize:
    rows, columns = draw(st.integers(1, 11)), draw(st.integers(1, 11))
    return ImageSize(draw(st.integers(1, 3)), merge * rows, merge * columns)


@st.composite
def merges_and_images(draw: st.DrawFn) -> tuple[int, int, list[ImageSize]]:
    merge = draw(st.sampled_from([1, 2, 3]))
    return merge, draw(st.integers(1, 5)), draw(st.lists(grids(merge), min_size=1, max_size=4))


@some
@given(merges_and_images())
def test_windows_and_positions_are_those_of_transformers(case: tuple[int, int, list[ImageSize]]) -> None:
    merge, window, images = case
    thw = torch.tensor(images)
    index, ends = get_vision_window_index(thw, merge, window * merge * PATCH, PATCH)
    positions = get_vision_position_ids(thw, merge).unflatten(0, (-1, merge * merge))[index].flatten(0, 1)
    ours = [picture_order(grid, merge, window) for grid in images]
    first = np.cumsum([0] + [len(g.units) for g in ours])
    assert np.concatenate([g.units + at for g, at in zip(ours, first, strict=False)]).tolist() == index.tolist()
    assert np.cumsum(np.concatenate([g.windows for g in ours]) * merge**2).tolist() == ends.tolist()[1:]
    found = [patch_positions(size, merge, order.units) for size, order in zip(images, ours, strict=True)]
    np.testing.assert_array_equal(np.concatenate(found, axis=1), positions.T.numpy())


def plan(grids: list[ImageSize], sp: int = 1, cp: int = 1, window: int = 4, **options) -> ReplicaShards:
    shape = Encoder(options.pop("merge", 2), window, options.pop("cost", COST))
    return ReplicaShards(shape, grids, sp, cp)


class Slice(NamedTuple):
    """The units [start, stop) of one image, in its own order."""

    image: int
    start: int
    stop: int


def slices(shards: ReplicaShards) -> list[list[Slice]]:
    """What each shard has of the images."""
    ends = np.cumsum([0, *shards.units]).tolist()
    firsts = np.cumsum([0, *map(shards.shape.rows, shards.pieces)]).tolist()
    return [
        [
            Slice(image, max(low - first, 0), min(high, last) - first)
            for image, (first, last) in enumerate(pairwise(firsts))
            if max(low, first) < min(high, last)
        ]
        for low, high in pairwise(ends)
    ]


def windows_of(shards: ReplicaShards) -> list[tuple[int, ...]]:
    return [shards.windows(member) for member in range(shards.sp * shards.cp)]


def lengths(shards: ReplicaShards) -> tuple[int, ...]:
    """Of each shard, in patches."""
    return tuple((shards.units * shards.shape.unit).tolist())


def flops(grids: list[ImageSize], shards: ReplicaShards) -> list[float]:
    """Work of each member by `COST`, patch by patch. Images are numbered from 0."""
    frame = [rows * columns for _, rows, columns in grids]
    of_part = [[4 * (s.stop - s.start) * (COST[0] + COST[1] * frame[s.image]) for s in part] for part in slices(shards)]
    return [sum(parts) for parts in of_part]


def largest_window(grids: list[ImageSize], window: int, cost: tuple[float, float]) -> float:
    units = [(picture_order(g, 2, window).windows.max(), g[1] * g[2]) for g in grids]
    return max((4 * n * (cost[0] + cost[1] * frame) for n, frame in units), default=0.0)


def furthest_cut(shares: np.ndarray) -> float:
    """How far the running totals of `shares` are from those of even shares, at most."""
    return abs(np.cumsum(shares) - shares.mean() * np.arange(1, len(shares) + 1)).max()


@some
@given(st.lists(grids(), max_size=5), degrees, degrees, st.integers(1, 4))
def test_shards_partition_the_windows(images: list[ImageSize], sp: int, cp: int, window: int) -> None:
    made = plan(images, sp, cp, window)
    geometries = [picture_order(grid, 2, window) for grid in images]
    assert len(slices(made)) == len(windows_of(made)) == sp * cp
    encoded = [(s.image, u) for part in slices(made) for s in part for u in range(s.start, s.stop)]
    assert encoded == [(i, u) for i, order in enumerate(geometries) for u in range(len(order.units))]
    assert [n for part in windows_of(made) for n in part] == [4 * n for g in geometries for n in g.windows]
    for part, windows in zip(slices(made), windows_of(made), strict=True):
        assert 4 * sum(s.stop - s.start for s in part) == sum(windows)
        for piece in part:
            edges = {0, *np.cumsum(geometries[piece.image].windows).tolist()}
            assert piece.start in edges and piece.stop in edges and piece.start < piece.stop
    if images:
        assert [0, *np.cumsum(made.sequences)] == get_vision_cu_seqlens(torch.tensor(images)).tolist()
    assert sum(made.sequences) == sum(lengths(made))


@some
@given(st.lists(grids(), max_size=5), degrees, degrees, st.integers(1, 4))
def test_cp_members_have_even_work_and_their_sp_members_even_patches(
    images: list[ImageSize], sp: int, cp: int, window: int
) -> None:
    made = plan(images, sp, cp, window)
    # Cuts are at the nearest edge of a window.
    work = np.reshape(flops(images, made), (cp, sp)).sum(axis=1)
    assert furthest_cut(work) <= largest_window(images, window, COST) / 2 * (1 + 1e-9)
    for patches in np.reshape(lengths(made), (cp, sp)):
        assert furthest_cut(patches) <= largest_window(images, window, (1, 0)) / 2


@some
@given(st.lists(grids(), max_size=5), st.integers(1, 6), degrees, degrees)
def test_cuts_of_sp_lie_within_the_runs_of_cp(images: list[ImageSize], cp: int, sp: int, window: int) -> None:
    runs, made = plan(images, 1, cp, window), plan(images, sp, cp, window)
    members = [windows_of(made)[sp * i : sp * (i + 1)] for i in range(cp)]
    assert [tuple(chain(*run)) for run in members] == list(windows_of(runs))


def test_sp_cuts_by_patches_and_cp_by_the_attention_of_their_frames_too() -> None:
    # 4096 patches each: of 2.56 + 1 per patch in small images, 40.96 + 1 in the large one, which is 92% of the work.
    small_ones_and_a_large = [ImageSize(1, 16, 16)] * 16 + [ImageSize(1, 64, 64)]
    by_sp, by_cp = plan(small_ones_and_a_large, sp=2), plan(small_ones_and_a_large, cp=2)
    assert lengths(by_sp) == (4096, 4096)
    work = flops(small_ones_and_a_large, by_cp)
    assert lengths(by_cp)[0] > 5800 and max(work) < 0.51 * sum(work)
    by_patches = plan(small_ones_and_a_large, cp=2, cost=(1.0, 0.0))
    assert slices(by_patches) == slices(by_sp) and windows_of(by_patches) == windows_of(by_sp)


def test_frames_of_a_video_attend_to_themselves_only() -> None:
    video_and_image = [ImageSize(4, 16, 16), ImageSize(1, 32, 32)]
    assert lengths(plan(video_and_image, cp=2, cost=(0.0, 1.0))) == (1024 + 384, 1024 - 384)


def test_nobody_encodes_where_there_is_no_image() -> None:
    made = plan([], 3, 2)
    assert slices(made) == [[]] * 6 and windows_of(made) == [()] * 6
    assert lengths(made) == (0,) * 6 and made.sequences == ()


def test_one_window_leaves_the_other_members_empty() -> None:
    for sp, cp in ((4, 1), (1, 4), (2, 2)):
        assert sorted(lengths(plan([ImageSize(1, 8, 8)], sp, cp))) == [0, 0, 0, 64]


def test_equal_windows_are_split_evenly() -> None:
    for sp, cp in ((8, 1), (1, 8), (2, 4)):
        assert lengths(plan([ImageSize(1, 32, 32)], sp, cp)) == (128,) * 8


def test_members_are_numbered_with_sp_fastest() -> None:
    # Quadratic work only, of 64 x 64 for each small image and 64 x 256 for each window of the large one: halves are
    # the small images with one window, and three windows.
    made = plan([ImageSize(1, 8, 8)] * 8 + [ImageSize(1, 16, 16)], sp=2, cp=2, cost=(0.0, 1.0))
    parts = [[tuple(part) for part in member] for member in slices(made)]
    small = [(image, 0, 16) for image in range(8)]
    assert parts == [small[:5], [*small[5:], (8, 0, 16)], [(8, 16, 48)], [(8, 48, 64)]]
