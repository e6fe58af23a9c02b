"""Any two layouts that are legal alone are legal together: rows go from the ranks that encode them to the places of
their tokens, once, at the least cost, and gradients return by the adjoint. All ranks are simulated in NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice, product
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.data.token_shards import SequenceShard, TokenShards
from megatron_hetero.layout.axes import divisors, problem_of
from megatron_hetero.layout.layout import Layout, ModuleShape
from tests.unit.boundary.cases import PLACEMENTS, Placement
from tests.unit.boundary.checks import check_everything
from tests.unit.boundary.simulation import Boundary
from tests.unit.data.packs import BATCHES, SHAPE, first_rows, first_rows_of_images, images_of, random_packs

AXES = ("tp", "sp", "cp", "dp")
VISION = ModuleShape("vision", SHAPE.heads, SHAPE.heads, SHAPE.hidden, SHAPE.layers, "encoder")
TEXT = ModuleShape("text", 16, 4, 128, 2, "text")
MAX_RANKS = 64
SIZES = (1, 2, 3, 4, 6, 7, 8, 8, 12, 16, 16, 18, 24, 32, 36, 48, 64)


@dataclass(frozen=True)
class Case:
    """A micro-batch between two layouts. `sharded`: whether activations of vision and text are sharded over tp;
    `limit`: patches of a rank in one part of what vision encodes.
    """

    vision: Layout
    text: Layout
    sharded: tuple[bool, bool]
    batch: str
    seed: int
    limit: int | None

    @cached_property
    def packs(self) -> list[PackMetadata]:
        return random_packs(self.batch, self.text, self.seed)

    @cached_property
    def shards(self) -> EncoderShards:
        """Images are assigned at random: who encodes what is free."""
        grids = tuple(grid for pack in self.packs for grid in pack.sizes[0])
        replica = np.random.default_rng(self.seed).integers(self.vision.dp, size=len(grids))
        assigned = tuple(tuple(np.flatnonzero(replica == i).tolist()) for i in range(self.vision.dp))
        return EncoderShards(SHAPE, self.vision, self.sharded[0], grids, assigned, self.limit)

    @cached_property
    def tokens(self) -> TokenShards:
        places = {"vision": tuple(pack.positions(0) for pack in self.packs)}
        return TokenShards(self.text, self.sharded[1], tuple(pack.lengths for pack in self.packs), places)

    @cached_property
    def boundary(self) -> Boundary:
        return Boundary.of(self.shards.ownership(), self.tokens.ownership("vision"))


@lru_cache
def legal_degrees(shape: ModuleShape, ranks: int) -> tuple[tuple[dict[str, int], ...], ...]:
    """The degrees over so many ranks that suit the module, without pipeline stages, by the number of axes in use."""
    every = (dict(zip(AXES, degrees, strict=True)) | {"pp": 1} for degrees in product(divisors(ranks), repeat=4))
    legal = [degrees for degrees in every if prod(degrees.values()) == ranks and problem_of(shape, degrees) is None]
    by_axes = (tuple(d for d in legal if sum(n > 1 for n in d.values()) == axes) for axes in range(len(AXES) + 1))
    return tuple(filter(None, by_axes))


def random_layout(rng: np.random.Generator, shape: ModuleShape, ranks: tuple[int, ...]) -> Layout:
    """Over `ranks`; few axes as often as many."""
    by_axes = legal_degrees(shape, len(ranks))
    options = by_axes[rng.integers(len(by_axes))]
    return Layout.of(options[rng.integers(len(options))], ranks)


def random_ranks(rng: np.random.Generator, placement: Placement) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of both sides, `MAX_RANKS` together at most: contiguous, or any."""
    most = MAX_RANKS if placement == "equal" else MAX_RANKS // 2
    first, second = rng.choice([size for size in SIZES if size <= most], 2).tolist()
    second = first if placement == "equal" else second
    shared = {"equal": first, "disjoint": 0, "mixed": int(rng.integers(min(first, second) + 1))}[placement]
    world = first + second - shared
    ranks = np.arange(world) if rng.random() < 0.5 else rng.permutation(2 * world)[:world]
    return tuple(sorted(ranks[:first].tolist())), tuple(sorted(ranks[world - second :].tolist()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    placement = draw(st.sampled_from(PLACEMENTS))
    batch = draw(st.sampled_from((*BATCHES, "ragged", "some without images")))  # those in which most happens
    sharded = (draw(st.booleans()), draw(st.booleans()))
    seed, limit = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from((None, 1, 40, 120)))
    rng = np.random.default_rng(seed)
    first, second = random_ranks(rng, placement)
    return Case(random_layout(rng, VISION, first), random_layout(rng, TEXT, second), sharded, batch, seed, limit)


@settings(max_examples=80)
@given(cases())
def test_any_two_layouts(case: Case) -> None:
    check_sources(case)
    check_places(case)
    check_parts(case)
    check_everything(case.boundary)


def check_sources(case: Case) -> None:
    """Every row is held by one group of ranks, in the replica of its image, as the encoder leaves it."""
    source, vision = case.boundary.plan.source, case.vision
    assert sorted(source.ids.tolist()) == list(range(first_rows(case.packs)[-1]))
    first = first_rows_of_images(case.packs)
    for replica, images in enumerate(case.shards.assigned):
        leader = vision.rank_at(dp=replica)
        held = np.concatenate([source.held_by(rank) for rank in vision.group_of(leader, "tp", "sp", "cp")])
        assert set(held.tolist()) == {row for image in images for row in range(first[image], first[image + 1])}
    check_shard(case, vision.ranks[case.seed % vision.size])


def check_parts(case: Case) -> None:
    """Each replica encodes its pieces in turn, in as many parts as all others, of few patches or one piece."""
    shards, images = case.shards, images_of(case.packs)
    most = np.inf if case.limit is None else case.limit * case.vision.sp * case.vision.cp
    for replica, pieces in enumerate(shards.assigned):
        parts = [part.assigned[replica] for part in shards.chunks]
        assert tuple(chain.from_iterable(parts)) == pieces
        assert all(len(part) == 1 or sum(SHAPE.rows(images[i]) * SHAPE.unit for i in part) <= most for part in parts)
    assert len(shards.chunks) == 1 or all(any(part.assigned) for part in shards.chunks)


def check_shard(case: Case, rank: int) -> None:
    """The tp group of `rank` holds the rows of the patches that it encodes, part by part, and shares of one length with
    padding.
    """
    peers = case.vision.group_of(rank, "tp")
    every = zip(*(case.shards.shards(peer) for peer in peers), strict=True)
    held = [iter(case.boundary.plan.source.held_by(peer)) for peer in peers]
    for shares in every:
        own = [
            list(islice(rows, (share.local - share.padding) // SHAPE.unit))
            for rows, share in zip(held, shares, strict=True)
        ]
        units = np.concatenate(own if case.sharded[0] else own[:1]).astype(np.int64)
        np.testing.assert_array_equal(shares[0].positions, raster_positions(case, units))
        lengths = {len(rows) * SHAPE.unit + share.padding for rows, share in zip(own, shares, strict=True)}
        assert len(lengths) == 1 and {share.local for share in shares} == lengths
    assert not any(map(list, held))


def raster_positions(case: Case, units: np.ndarray) -> np.ndarray:
    """Row and column of the patches of units of 2 x 2, which are numbered through all images, [2, patches]."""
    first = np.array(first_rows_of_images(case.packs))
    image = np.searchsorted(first, units, side="right") - 1
    across = np.array([size.columns // 2 for size in images_of(case.packs)], np.int64)[image]
    row, column = np.divmod(units - first[image], across)
    patch = np.arange(4)
    return np.stack([2 * row[:, None] + patch // 2, 2 * column[:, None] + patch % 2]).reshape(2, -1)


def check_places(case: Case) -> None:
    """Once rows have crossed, each rank has that of every image token which it embeds in the token's place, and no
    others.
    """
    boundary = case.boundary
    arrived, _ = boundary.forward.run([boundary.plan.source.held_by(rank) for rank in boundary.plan.ranks])
    rows_of = dict(zip(boundary.plan.ranks, arrived, strict=True))
    row_at = tokens_of_rows(case.packs)
    for rank in case.text.ranks:
        share = case.tokens.shard(rank)
        expected = row_at[case.text.coordinate(rank).dp][embedded(case, share, rank)]
        found = np.full(len(expected), -1)
        found[share.rows_at["vision"]] = rows_of[rank]
        np.testing.assert_array_equal(found, expected)
        assert len(rows_of[rank]) == np.sum(expected >= 0)
    assert all(not len(rows_of[rank]) for rank in boundary.plan.ranks if rank not in case.text)


def tokens_of_rows(packs: list[PackMetadata]) -> list[np.ndarray]:
    """For each token of each pack the row that belongs there, -1 where it is text."""
    found = [np.full(sum(pack.lengths), -1) for pack in packs]
    for tokens, pack, first in zip(found, packs, first_rows(packs), strict=False):
        tokens[pack.positions(0)] = first + np.arange(len(pack.positions(0)))
    return found


def embedded(case: Case, share: SequenceShard, rank: int) -> np.ndarray:
    """The tokens that `rank` embeds."""
    if not case.sharded[1]:
        return share.positions
    return share.positions[share.local * case.text.coordinate(rank).tp :][: share.local]
