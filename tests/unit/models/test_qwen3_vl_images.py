"""Where the patches of Qwen3-VL are, and which learned positions they take, against `transformers`."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from megatron_hetero.data.encoder_shards import ReplicaShards
from megatron_hetero.layout.names import ROWS
from megatron_hetero.models.families.qwen3_vl.family import QWEN3_VL
from megatron_hetero.models.families.qwen3_vl.shapes import TextShape, VisionShape, taps
from megatron_hetero.models.items.pictures import ImageSize
from megatron_hetero.models.layers.rotary import MultimodalRotary

some = settings(max_examples=100)
SHAPE = VisionShape(4, 48, 4, 52, 3, 16, 2, 2, 64, 1e4, table_side=6, deepstack=(0, 2))
sizes = st.tuples(st.integers(1, 3), st.integers(1, 40).map(lambda n: 2 * n), st.integers(1, 40).map(lambda n: 2 * n))


def positions_of(size: ImageSize) -> np.ndarray:
    """Of all patches of an image."""
    return SHAPE.positions(size, SHAPE.order(size).units)


@some
@given(st.lists(sizes, min_size=1, max_size=4))
def test_positions_are_those_of_transformers(images: list[ImageSize]) -> None:
    found = np.concatenate([positions_of(size) for size in images], axis=1)
    np.testing.assert_array_equal(found[:2], get_vision_position_ids(torch.tensor(images), 2).T.numpy())
    counts = [prod(size) for size in images]
    np.testing.assert_array_equal(found[2:], np.repeat(np.array(images)[:, 1:], counts, axis=0).T)


@some
@given(sizes, st.integers(0, 30), st.integers(0, 30))
def test_positions_of_a_part(size: ImageSize, start: int, units: int) -> None:
    order = SHAPE.order(size)
    part = SHAPE.positions(size, order.units[start : start + units])
    np.testing.assert_array_equal(part, positions_of(size)[:, 4 * start : 4 * (start + units)])
    assert order.windows.sum() == len(order.units) == SHAPE.rows(size)


@some
@given(st.lists(sizes, min_size=1, max_size=4), st.integers(1, 48))
def test_interpolation_is_that_of_transformers(images: list[ImageSize], side: int) -> None:
    positions = np.concatenate([positions_of(size) for size in images], axis=1)
    places, weights = taps(torch.from_numpy(positions), side)
    expected_places, expected_weights = get_vision_interpolation_indices_and_weights(
        torch.tensor(images), num_grid_per_side=side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    table = torch.randn(side * side, 3, dtype=torch.float64)
    found = (table[places] * weights[:, :, None]).sum(1)
    expected = (table[expected_places] * expected_weights[:, :, None]).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights.sum(1), torch.ones(positions.shape[1]))


def test_padding_takes_some_position() -> None:
    places, weights = taps(torch.zeros(4, 5, dtype=torch.int64), 6)
    assert not places[:, 0].any() and weights.isfinite().all()


def test_an_image_is_cut_between_any_units() -> None:
    plan = ReplicaShards(SHAPE, [ImageSize(1, 6, 2), ImageSize(1, 2, 4)], sp=5, cp=1)
    assert plan.units.tolist() == [1] * 5 and plan.sequences == (12, 8)


def test_outputs_and_their_places() -> None:
    text = TextShape(2, 64, 4, 2, 24, 74, 300, True, 1e4, (6, 3, 3), 1e-6)
    assert list(SHAPE.outputs.items()) == [(ROWS, 3), ("deepstack.0", 0), ("deepstack.1", 2)]
    entered = {ROWS: 0, "deepstack.0": 0, "deepstack.1": 1, "deepstack.2": None}
    assert {name: text.entry_layer(name) for name in entered} == entered
    assert all(text.entry_layer(odd) is None for odd in ("", "deepstack.", "deepstack.x", "0", "other.0"))


@pytest.mark.parametrize("head_dim, sections", [(128, [24, 20, 20]), (24, [6, 3, 3]), (24, [2, 5, 5]), (16, [8, 0, 0])])
def test_rotary_table_is_that_of_transformers(head_dim: int, sections: list[int]) -> None:
    assert QWEN3_VL.rope_settings(128)["mrope_section"] == [24, 20, 20]
    text = TextShape(1, 64, 4, 2, head_dim, 74, 300, True, 5e6, tuple(sections), 1e-6)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections}
    config: Any = Qwen3VLConfig(text_config={"head_dim": head_dim, "rope_parameters": rope}).text_config
    positions = torch.randint(0, 500, (3, 17))
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(()), positions[:, None])
    found = MultimodalRotary(text.rope_theta, head_dim, text.turns).table(positions)
    torch.testing.assert_close(found, torch.stack([cos[0], sin[0]]), rtol=0, atol=0)


def test_flops_count_every_merger_and_no_gate() -> None:
    linear, quadratic = SHAPE.flops_per_patch
    merger = 2 * 48 * (48 * 4 + 64)
    assert linear == 4 * (8 * 48**2 + 4 * 48 * 52) + 2 * 1536 * 48 + 3 * merger and quadratic == 4 * 4 * 48
    assert SHAPE.cost(ImageSize(2, 4, 6)) == 2 * (linear * 24 + quadratic * 24**2)
