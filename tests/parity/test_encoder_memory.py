"""Under `sp` the encoder keeps its share of the activations, and sends what is predicted in full-attention layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from benchmarks.measuring.encoder import Encoder, encoder_shape
from benchmarks.measuring.meter import predicted_sp_bytes, predicted_sp_collectives, total_bytes
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.models.families.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.models.items.pictures import ImageSize
from tests.support.pool import Pools

SQUARE: tuple[ImageSize, ...] = (ImageSize(1, 64, 64),)
"""64 windows."""
RAGGED: tuple[ImageSize, ...] = (ImageSize(1, 20, 36), ImageSize(1, 6, 4))
"""Two images whose last windows are smaller, so that shards are uneven."""
TINY: tuple[ImageSize, ...] = (ImageSize(1, 4, 12),)
"""Two windows: two of four shards are empty."""
FP32 = 4
Measure = Callable[[int, str, tuple[ImageSize, ...]], list[dict[str, Any]]]


def encoder() -> VisionShape:
    """An encoder with one full-attention layer in eight, and one more, so that two layers communicate."""
    narrow = encoder_shape(hidden=64, layers=9, heads=4, out_hidden=48)
    assert narrow.full_layers == {7}
    return VisionShape(**{**vars(narrow), "full_layers": frozenset({3, 7})})


def measured(layout: str, grids: tuple[ImageSize, ...]) -> dict[str, Any]:
    """Saved activations (bytes), collectives by name, and bytes sent in one forward and backward pass."""
    built = Encoder.build(encoder(), layout, grids, Platform(CPU, "gloo"))
    records = built.meter().records
    return {
        "saved": built.saved_activation_bytes(),
        "names": [record.name for record in records],
        "sent": total_bytes(records),
        "shard_lengths": built.shard_lengths,
    }


@pytest.fixture(scope="module")
def measure(pools: Pools) -> Measure:
    """`measure(ranks, layout, images)`: what each rank found, once for the same arguments."""

    @cache
    def get(ranks: int, layout: str, images: tuple[ImageSize, ...]) -> list[dict[str, Any]]:
        return pools(ranks).run(measured, layout, images)

    return get


def test_saved_activations_are_shared_out(measure: Measure) -> None:
    alone = measure(1, "dp:1", SQUARE)[0]
    shared = measure(4, "sp:4", SQUARE)
    assert max(rank["saved"] for rank in shared) <= 0.3 * alone["saved"]


@pytest.mark.parametrize("grids", [SQUARE, RAGGED, TINY], ids=["square", "ragged", "tiny"])
def test_collectives_and_bytes_are_as_predicted(grids: tuple[ImageSize, ...], measure: Measure) -> None:
    shape = encoder()
    ranks = measure(4, "sp:4", grids)
    assert predicted_sp_collectives(shape) == 2 * 2 * 2  # two layers, two ways, two exchanges
    assert all(rank["names"] == ["alltoall_base"] * 8 for rank in ranks)
    assert [rank["sent"] for rank in ranks] == predicted_sp_bytes(shape, ranks[0]["shard_lengths"], FP32)


def test_one_rank_communicates_nothing(measure: Measure) -> None:
    assert measure(1, "dp:1", SQUARE)[0]["names"] == []


@pytest.mark.parametrize("grids", [SQUARE, RAGGED], ids=["square", "ragged"])
def test_sp_sends_at_most_a_quarter_of_tp(grids: tuple[ImageSize, ...], measure: Measure) -> None:
    sp, tp = (measure(4, layout, grids) for layout in ("sp:4", "tp:4"))
    assert max(rank["sent"] for rank in sp) <= 0.25 * max(rank["sent"] for rank in tp)
