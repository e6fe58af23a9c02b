"""The plan of a micro-batch over all ranks: every unit is encoded once, every image position gets its row."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.layout import Layout
from megatron_hetero.models.qwen2_5_vl.geometry import image_geometry
from megatron_hetero.training.step_plan import MicroBatchPlan, PackMetadata, plan_micro_batch
from tests.unit.training.jobs_packs import BATCHES, SHAPE, encoded_rows, random_packs

VISION = ["dp:8", "sp:8", "tp:8", "sp:4,dp:2", "tp:2,sp:2,dp:2", "tp:4,dp:2", "tp:2,sp:4"]
TEXT = ["dp:8", "tp:8", "tp:2,dp:4", "tp:4,dp:2"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[PackMetadata], dict[str, Layout], dict[str, bool]]:
    layouts = {
        "vision": Layout.parse(draw(st.sampled_from(VISION)), 8),
        "text": Layout.parse(draw(st.sampled_from(TEXT)), 8),
    }
    sharded = {name: draw(st.booleans()) for name in layouts}
    multiple = layouts["text"].tp if sharded["text"] else 1
    packs = random_packs(draw(st.sampled_from(BATCHES)), layouts["text"], multiple, draw(st.integers(0, 10**6)))
    return packs, layouts, sharded


def plans_of(
    packs: list[PackMetadata], layouts: dict[str, Layout], sharded: dict[str, bool]
) -> tuple[MicroBatchPlan, ...]:
    return tuple(plan_micro_batch(packs, SHAPE, layouts, sharded, rank, 8) for rank in range(8))


Case = tuple[list[PackMetadata], dict[str, Layout], dict[str, bool]]
some = settings(max_examples=60, deadline=None)


@some
@given(cases())
def test_every_unit_is_encoded_once(case: Case) -> None:
    packs, layouts, sharded = case
    plans, vision = plans_of(*case), layouts["vision"]
    total = sum(len(pack.positions) for pack in packs)
    if total == 0:
        assert all(p.encoder is None and p.boundary is None and not len(p.rows_at) for p in plans)
        return
    copies = 1 if sharded["vision"] else vision.tp
    times = Counter()
    for rank, plan in enumerate(plans):
        assert plan.encoder is not None and plan.boundary is not None
        rows = encoded_rows(plan.encoder.parts, packs)
        times.update(rows.tolist())
        assert plan.boundary.backward.rows == len(rows), "the gradients that come back are not of the rows encoded"
        if not sharded["vision"]:
            first = encoded_rows(plans[vision.group_of(rank, "tp")[0]].encoder.parts, packs)  # pyright: ignore
            assert rows.tolist() == first.tolist()
    assert times == Counter(dict.fromkeys(range(total), copies))


@some
@given(cases())
def test_every_image_position_gets_its_row(case: Case) -> None:
    packs, layouts, sharded = case
    plans, text = plans_of(*case), layouts["text"]
    for replica, pack in enumerate(packs):
        ranks = [r for r in range(8) if text.replica_of(r) == replica]
        shards = []
        for rank in ranks:
            plan, at = plans[rank], text.coordinate(rank)
            length = pack.padded_length // text.tp if sharded["text"] else pack.padded_length
            assert (plan.rows_at >= 0).all() and (plan.rows_at < length).all()
            shards.append(plan.rows_at + (length * at.tp if sharded["text"] else 0))
            if plan.boundary is not None:
                assert plan.boundary.forward.rows == len(plan.rows_at)
        if sharded["text"]:
            assert np.concatenate(shards).tolist() == pack.positions.tolist()
        else:
            assert all(shard.tolist() == pack.positions.tolist() for shard in shards)


@some
@given(cases())
def test_shares_fit_together(case: Case) -> None:
    """Pixels, positions and lengths that the ranks of a replica and of a shard are given agree."""
    packs, layouts, sharded = case
    plans, vision = plans_of(*case), layouts["vision"]
    if plans[0].encoder is None:
        return
    for rank, plan in enumerate(plans):
        share, at = plan.encoder, vision.coordinate(rank)
        assert share is not None
        member = at.cp * vision.sp + at.sp
        patches = sum(len(part.patches) for part in share.parts)
        assert share.shard_lengths[member] == sum(share.windows) == share.positions.shape[1]
        assert sum(share.shard_lengths) == sum(share.sequences)
        assert patches + share.padding > 0 and (patches + share.padding) % SHAPE.unit == 0
        group = [plans[r].encoder for r in vision.group_of(rank, "tp")]
        held = [sum(len(part.patches) for part in other.parts) for other in group]  # pyright: ignore
        padded = {n + other.padding for n, other in zip(held, group, strict=True)}  # pyright: ignore
        assert len(padded) == 1, "ranks that share activations hold different lengths"
        assert sum(held) == share.shard_lengths[member] * (1 if sharded["vision"] else vision.tp)
        for part in share.parts:
            assert part.grid == dict(zip_sources(packs))[part.source]


def zip_sources(packs: list[PackMetadata]) -> list[tuple[object, tuple[int, int, int]]]:
    return [pair for pack in packs for pair in zip(pack.sources, pack.grids, strict=True)]


@some
@given(cases())
def test_positions_are_those_of_the_patches_in_the_shard(case: Case) -> None:
    packs, layouts, sharded = case
    plans, vision = plans_of(*case), layouts["vision"]
    if plans[0].encoder is None:
        return
    grids = [grid for pack in packs for grid in pack.grids]
    table = np.concatenate([_raster_positions(grid) for grid in grids])
    for rank, plan in enumerate(plans):
        group = vision.group_of(rank, "tp") if sharded["vision"] else (rank,)
        rows = np.concatenate([encoded_rows(plans[r].encoder.parts, packs) for r in group])  # pyright: ignore
        assert plan.encoder is not None
        expected = table[rows].reshape(-1, 2).T
        np.testing.assert_array_equal(plan.encoder.positions, expected)


def _raster_positions(grid: tuple[int, int, int]) -> np.ndarray:
    """Row and column of each patch of each unit in raster order, [units, unit, 2]."""
    units = []
    for row in range(0, grid[1], 2):
        for column in range(0, grid[2], 2):
            units.append([(row + i, column + j) for i in range(2) for j in range(2)])
    return np.array(units * grid[0])


@pytest.mark.parametrize("vision", VISION)
def test_shards_are_near_even(vision: str) -> None:
    """One large image over all members: no shard exceeds the mean by more than a window."""
    layouts = {"vision": Layout.parse(vision, 8), "text": Layout.parse("tp:8", 8)}
    packs = random_packs("even", layouts["text"], 1, 0)
    for plan in plans_of(packs, layouts, {"vision": False, "text": False}):
        assert plan.encoder is not None
        lengths = plan.encoder.shard_lengths
        assert max(lengths) <= sum(lengths) / len(lengths) + SHAPE.window**2 * SHAPE.unit


def test_no_rank_needs_more_than_its_rows_in_its_shard() -> None:
    """sp:8 to tp:8 with sharded activations: each row crosses to one rank, and the traffic is at most all rows."""
    layouts = {"vision": Layout.parse("sp:8", 8), "text": Layout.parse("tp:8", 8)}
    packs = random_packs("ragged", layouts["text"], 8, 5)
    plans = plans_of(packs, layouts, {"vision": True, "text": True})
    total = sum(prod(grid) // SHAPE.unit for grid in packs[0].grids)
    assert total == sum(plan.boundary.forward.rows for plan in plans)  # pyright: ignore
    assert sum(plan.boundary.forward.received_rows for plan in plans) <= total  # pyright: ignore
    windows = [int(n) for grid in packs[0].grids for n in image_geometry(grid, 2, SHAPE.window).windows]
    assert sum(windows) == total
