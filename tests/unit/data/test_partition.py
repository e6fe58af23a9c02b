# pyright: reportOptionalMemberAccess=false
"""The plan of a micro-batch over all ranks: every image is decoded once, every unit encoded once in order, every token
read once, and every image position gets its row."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.layout.context import zigzag_tokens
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from tests.support.sizes import received_rows
from tests.unit.data.packs import (
    BATCHES,
    SHAPE,
    Planned,
    decoded_units,
    first_rows_of_images,
    images_of,
    needed_rows,
    partitioner,
    planned,
    random_packs,
    step_of,
)

VISION = [
    "dp:8", "sp:8", "tp:8", "cp:8", "sp:4,dp:2", "tp:2,sp:2,dp:2", "tp:4,dp:2", "tp:2,sp:4", "sp:2,cp:2,tp:2",
    "cp:4,dp:2",
]  # fmt: skip
TEXT = ["dp:8", "tp:8", "tp:2,dp:4", "tp:4,dp:2", "cp:8", "sp:8", "tp:2,cp:2,dp:2", "sp:2,cp:2,tp:2", "sp:4,dp:2"]
Case = tuple[list[PackMetadata], dict[str, Layout], dict[str, bool], int]
some = settings(max_examples=40)

EDGE = Edge("vision", "text")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layouts = {
        "vision": Layout.parse(draw(st.sampled_from(VISION)), 8),
        "text": Layout.parse(draw(st.sampled_from(TEXT)), 8),
    }
    sharded = {name: draw(st.booleans()) for name in layouts}
    packs = random_packs(draw(st.sampled_from(BATCHES)), layouts["text"], draw(st.integers(0, 10**6)))
    return packs, layouts, sharded, draw(st.integers(0, 9))


def plans_of(case: Case) -> list[Planned]:
    packs, layouts, sharded, turn = case
    return [planned(partitioner(layouts, sharded, rank), packs, turn) for rank in range(8)]


def embedded_units(plans: list[Planned], packs: list[PackMetadata], vision: Layout) -> list[np.ndarray]:
    """The units whose patches each rank has once all replicas have shared what they decoded."""
    results: list[np.ndarray] = []
    for rank, plan in enumerate(plans):
        forward, replica = plan.vision.exchange.forward, vision.group_of(rank, "tp", "sp", "cp")
        assert plan.vision.exchange.ranks == replica
        result = np.full(forward.needed, -1)
        result[forward.local_to] = decoded_units(plan, packs)[forward.local_from]
        results.append(result)
    for stage in ("scatter", "gather"):
        for rank, plan in enumerate(plans):
            exchange = plan.vision.exchange.forward.exchange(stage)
            if exchange is not None:
                replica = vision.group_of(rank, "tp", "sp", "cp")
                parts = [_sent(plans, packs, results, peer, replica.index(rank), stage) for peer in replica]
                results[rank] = results[rank].copy()
                results[rank][exchange.receive] = np.concatenate(parts)
    return results


def _sent(
    plans: list[Planned], packs: list[PackMetadata], results: list[np.ndarray], sender: int, to: int, stage: str
) -> np.ndarray:
    exchange = plans[sender].vision.exchange.forward.exchange(stage)  # pyright: ignore[reportArgumentType]
    assert exchange is not None
    source = decoded_units(plans[sender], packs) if stage == "scatter" else results[sender]
    return np.split(source[exchange.send], np.cumsum(exchange.send_counts)[:-1])[to]


@some
@given(cases())
def test_every_image_is_decoded_once_and_every_unit_encoded_once(case: Case) -> None:
    packs, layouts, sharded, _ = case
    plans, vision = plans_of(case), layouts["vision"]
    total = sum(len(pack.positions(0)) for pack in packs)
    if total == 0:
        assert all(not p.vision and not p.rows and not len(p.text.rows_at["vision"]) for p in plans)
        return
    images = [image for plan in plans for image in plan.vision.decodes]
    assert sorted(images) == list(range(sum(len(pack.sizes[0]) for pack in packs)))
    units = embedded_units(plans, packs, vision)
    copies = 1 if sharded["vision"] else vision.tp
    assert Counter(np.concatenate(units).tolist()) == Counter(dict.fromkeys(range(total), copies))
    for rank, plan in enumerate(plans):
        assert plan.rows[EDGE].backward.needed == len(units[rank]), "gradients come back of other rows"
        if not sharded["vision"]:
            assert units[rank].tolist() == units[vision.group_of(rank, "tp")[0]].tolist()


@some
@given(cases())
def test_every_image_position_gets_its_row(case: Case) -> None:
    packs, layouts, sharded, _ = case
    plans, text = plans_of(case), layouts["text"]
    found: Counter[int] = Counter()
    for rank, plan in enumerate(plans):
        assert plan.text is not None
        needed = needed_rows(plan.text, packs, text, sharded["text"], rank)
        assert needed.tolist() == sorted(needed.tolist())
        found.update(needed.tolist())
        if plan.rows:
            assert plan.rows[EDGE].forward.needed == len(needed)
    copies = 1 if sharded["text"] else text.tp
    assert found == Counter(dict.fromkeys(range(sum(len(p.positions(0)) for p in packs)), copies))


@some
@given(cases())
def test_every_token_is_read_once(case: Case) -> None:
    packs, layouts, sharded, _ = case
    plans, text = plans_of(case), layouts["text"]
    for replica, pack in enumerate(packs):
        zigzag = zigzag_tokens(pack.lengths, text.cp)
        for member in range(text.cp):
            shares = [plans[text.rank_at(sp=sp, cp=member, dp=replica)].text for sp in range(text.sp)]
            assert np.concatenate([share.positions for share in shares]).tolist() == zigzag[member].tolist()
            lengths = [share.tokens for share in shares]
            assert max(lengths) - min(lengths) <= 1
            for share in shares:
                assert share.sp_lengths == tuple(lengths) and share.cp_lengths == tuple(map(len, zigzag))
                assert sum(share.segments.queries) == share.cp_lengths[member]
    for rank, plan in enumerate(plans):
        multiple = text.tp if sharded["text"] else 1
        assert plan.text.padded > 0 and plan.text.padded % multiple == 0
        assert plan.text.tokens <= plan.text.padded < max(1, plan.text.tokens) + multiple
        assert plan.text.positions.tolist() == plans[text.group_of(rank, "tp")[0]].text.positions.tolist()


@some
@given(cases())
def test_shares_fit_together(case: Case) -> None:
    """Patches, positions and lengths that the ranks of a replica and of a shard are given agree."""
    packs, layouts, sharded, _ = case
    plans, vision = plans_of(case), layouts["vision"]
    if not plans[0].vision:
        return
    units, table = embedded_units(plans, packs, vision), _raster_positions(packs)
    for rank, plan in enumerate(plans):
        [share], at = plan.vision.shards, vision.coordinate(rank)
        group = vision.group_of(rank, "tp")
        shard = np.concatenate([units[r] for r in group]) if sharded["vision"] else units[rank]
        np.testing.assert_array_equal(share.positions, table[shard].reshape(-1, 2).T)
        assert share.sp_lengths[at.sp] == sum(share.windows) == SHAPE.unit * len(shard)
        assert share.cp_lengths[at.cp] == sum(share.sp_lengths) == sum(share.segments.queries)
        padded = {SHAPE.unit * len(units[r]) + plans[r].vision.shards[0].padding for r in group}
        assert len(padded) == 1 and padded.pop() > 0, "ranks that share activations hold different lengths"


def _raster_positions(packs: list[PackMetadata]) -> np.ndarray:
    """Row and column of each patch of each unit of all images in raster order, [units, unit, 2]."""
    units = [
        [(row + i, column + j) for i in range(2) for j in range(2)]
        for _, rows, columns in images_of(packs)
        for row in range(0, rows, 2)
        for column in range(0, columns, 2)
    ]
    return np.array(units)


@pytest.mark.parametrize("vision", VISION)
def test_shards_are_near_even(vision: str) -> None:
    """One large image: no member of its replica exceeds the mean by more than a window."""
    layouts = {"vision": Layout.parse(vision, 8), "text": Layout.parse("tp:8", 8)}
    [pack] = random_packs("even", layouts["text"], 0)
    for plan in plans_of(([pack], layouts, {"vision": False, "text": False}, 0)):
        [share] = plan.vision.shards
        for lengths in (share.sp_lengths, share.cp_lengths):
            assert max(lengths) <= sum(lengths) / len(lengths) + SHAPE.window**2 * SHAPE.unit


def test_no_rank_needs_more_than_its_rows_in_its_shard() -> None:
    """sp:8 to tp:8 with sharded activations: each row crosses to one rank, and the traffic is at most all rows."""
    layouts = {"vision": Layout.parse("sp:8", 8), "text": Layout.parse("tp:8", 8)}
    packs = random_packs("ragged", layouts["text"], 5)
    plans = [plan.rows[EDGE] for plan in plans_of((packs, layouts, {"vision": True, "text": True}, 0))]
    total = sum(map(SHAPE.rows, images_of(packs)))
    assert total == sum(plan.forward.needed for plan in plans) == first_rows_of_images(packs)[-1]
    assert 0 < sum(received_rows(plan.forward) for plan in plans) <= total
    windows = [int(n) for size in images_of(packs) for n in SHAPE.order(size).windows]
    assert sum(windows) == total


def test_decoding_moves_from_rank_to_rank() -> None:
    """One image a micro-batch, and eight ranks that share it: each decodes one of eight."""
    layouts = {name: Layout.parse("sp:8", 8) for name in ("vision", "text")}
    packs = random_packs("even", layouts["text"], 0)
    partitioners = [partitioner(layouts, {"vision": False, "text": False}, rank) for rank in range(8)]
    turns = [[planned(p, packs, turn).vision.decodes for p in partitioners] for turn in range(8)]
    assert [decodes.index((0,)) for decodes in turns] == [(turns[0].index((0,)) + turn) % 8 for turn in range(8)]


def test_micro_batches_of_one_shape_are_planned_once() -> None:
    layouts = {"vision": Layout.parse("sp:4,dp:2", 8), "text": Layout.parse("tp:2,dp:4", 8)}
    packs = random_packs("ragged", layouts["text"], 3)
    ours = partitioner(layouts, {"vision": True, "text": True}, 5)
    copies = [PackMetadata(p.lengths, tuple(p.sizes), tuple(p.places), supervised=1) for p in packs]
    first, again, other = (
        planned(ours, packs),
        planned(ours, copies, turn=1),
        planned(ours, random_packs("ragged", layouts["text"], 4)),
    )
    assert first.rows[EDGE] is again.rows[EDGE] is not other.rows[EDGE]
    assert first.vision.shards is again.vision.shards and first.text is again.text
    # Four ranks share a replica's images.
    assert first.vision.exchange is planned(ours, copies, turn=4).vision.exchange
    assert first.vision.exchange is not again.vision.exchange


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[PackMetadata]], dict[str, Layout], dict[str, bool]]:
    """The packs of three micro-batches."""
    packs, layouts, sharded, _ = draw(cases())
    more = [random_packs(draw(st.sampled_from(BATCHES)), layouts["text"], draw(st.integers(0, 10**6))) for _ in "12"]
    return [packs, *more], layouts, sharded


@settings(max_examples=12)
@given(steps())
def test_a_call_encodes_several_micro_batches(step: tuple[Any, dict[str, Layout], dict[str, bool]]) -> None:
    """Every rank holds the rows of one after the other, and what the text module needs does not change."""
    packs, layouts, sharded = step
    everything, first = [pack for of_one in packs for pack in of_one], 0
    partitioners = [partitioner(layouts, sharded, rank, runs=lambda n: {"vision": (range(n),)}) for rank in range(8)]
    by_rank = [step_of(each, packs) for each in partitioners]
    units = (
        embedded_units([plans[0] for plans in by_rank], everything, layouts["vision"]) if images_of(everything) else []
    )
    held = [np.concatenate([[0], np.cumsum([_held(plan) for plan in plans])]) for plans in by_rank]
    for m, of_one in enumerate(packs):
        rows = sum(len(pack.positions(0)) for pack in of_one)
        for rank, plans in enumerate(by_rank):
            alone = planned(partitioners[rank], of_one)
            assert plans[m].text is alone.text
            assert set(plans[m].rows) == set(alone.rows) == ({EDGE} if rows else set())
            if rows:
                mine = units[rank][held[rank][m] : held[rank][m + 1]]
                assert ((first <= mine) & (mine < first + rows)).all()
                assert plans[m].rows[EDGE].forward.needed == alone.rows[EDGE].forward.needed
            assert m == 0 or not plans[m].vision
        first += rows
    for rank, mine in enumerate(units):
        assert held[rank][-1] == len(mine) and by_rank[rank][0].vision.micro_batches == range(3)


def _held(plan: Planned) -> int:
    return plan.rows[EDGE].forward.held if plan.rows else 0


def test_small_pictures_of_a_wave_fall_to_all_replicas() -> None:
    """One picture in each of eight micro-batches, and eight replicas."""
    layouts = {name: Layout.parse(text, 8) for name, text in (("vision", "dp:8"), ("text", "tp:8"))}
    packs = [random_packs("even", layouts["text"], m) for m in range(8)]
    ours = partitioner(layouts, {"vision": True, "text": True}, 3, runs=lambda n: {"vision": (range(n),)})
    [call] = ours.encoder_calls([tuple(each) for each in packs])
    assert len(call.everyone.loads) == 8 and min(call.everyone.loads) > 0


def test_balance_decides_who_encodes() -> None:
    layouts = {"vision": Layout.parse("dp:8", 8), "text": Layout.parse("dp:8", 8)}
    packs = random_packs("ragged", layouts["text"], 11)
    loads = {
        balance: planned(partitioner(layouts, {"vision": True, "text": True}, 0, balance), packs).vision.everyone.loads
        for balance in ("off", "replica")
    }
    assert sum(loads["off"]) == pytest.approx(sum(loads["replica"])) and max(loads["replica"]) < max(loads["off"])
