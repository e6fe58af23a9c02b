"""Weight maps cover every stored element, hold copies only where expected, and scatter and assemble bit by bit."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_hetero.hf.weight_map import (
    Share,
    TensorSlice,
    WeightMap,
    extract_slice,
    held,
    load_slices,
    share,
    split_columns,
    split_length,
    split_rows,
    stack,
)
from megatron_hetero.models.families.common import canonical_name
from megatron_hetero.models.families.qwen2_5_vl.shapes import TextShape, VisionShape
from megatron_hetero.models.families.qwen3_vl import shapes as qwen3_vl
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import projector_shapes, stored_shapes, tensors_by_subset, weight_map
from megatron_hetero.train.hf_export import assemble
from tests.support.shapes import parameter_count

KEY_OR_VALUE = re.compile(r"\.[kv]_proj\.")
REPLICATED = re.compile(r"norm|ln_q|_embed\.|attn\.proj\.bias|down_proj\.bias|mlp\.2\.bias|fc2\.bias")


@st.composite
def shapes_and_tp(draw: st.DrawFn) -> tuple[ModelShapes, int]:
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    heads = tp * draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    head_dim, size = draw(st.integers(1, 3)), st.integers(1, 13)
    vision_heads = tp * draw(st.integers(1, 2))
    if draw(st.booleans()):
        return draw(newer_shapes(tp, heads, kv_heads)), tp
    text = TextShape(
        layers=draw(st.integers(1, 2)), hidden=heads * head_dim, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, ffn=draw(size), vocab=draw(size), tied=draw(st.booleans()),
        rope_theta=1e4, mrope_section=(1,), norm_eps=1e-6,
    )  # fmt: skip
    vision = VisionShape(
        layers=draw(st.integers(1, 2)), hidden=vision_heads * draw(st.integers(1, 2)), heads=vision_heads,
        ffn=draw(size), channels=3, patch=2, temporal_patch=1, merge=draw(st.integers(1, 2)), window=4,
        full_layers=frozenset({0}), out_hidden=text.hidden, rope_theta=1e4,
    )  # fmt: skip
    further = {"detail": replace(vision, layers=1, ffn=draw(size))} if draw(st.booleans()) else {}
    return ModelShapes({"vision": vision, **further}, text), tp


@st.composite
def newer_shapes(draw: st.DrawFn, tp: int, heads: int, kv_heads: int) -> ModelShapes:
    """Of Qwen3-VL: heads that are not a part of the hidden size, and mergers of several layers."""
    size, vision_heads = st.integers(1, 13), tp * draw(st.integers(1, 2))
    text = qwen3_vl.TextShape(
        layers=2, hidden=draw(size), heads=heads, kv_heads=kv_heads, head_dim=draw(st.integers(1, 3)), ffn=draw(size),
        vocab=draw(size), tied=draw(st.booleans()), rope_theta=1e4, mrope_section=(1, 0, 0), norm_eps=1e-6,
    )  # fmt: skip
    vision = qwen3_vl.VisionShape(
        layers=3, hidden=vision_heads * draw(st.integers(1, 2)), heads=vision_heads, ffn=draw(size), channels=3,
        patch=2, temporal_patch=1, merge=draw(st.integers(1, 2)), table_side=draw(st.integers(1, 3)),
        deepstack=draw(st.sampled_from([(), (1,), (0, 2)])), out_hidden=text.hidden, rope_theta=1e4,
    )  # fmt: skip
    return ModelShapes({"vision": vision}, text)


some = settings(max_examples=60)


def maps_of(shapes: ModelShapes, module: str, tp: int) -> list[WeightMap]:
    return [weight_map(module, shapes, Share(rank, tp)) for rank in range(tp)]


def attention_of(shapes: ModelShapes) -> Any:
    return shapes.text.architecture.layers[0].attention


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], int(np.prod(shape[1:]))


def times_held(shapes: ModelShapes, tp: int) -> dict[str, np.ndarray]:
    """For each stored element, how many slices of the tensor-parallel group hold it."""
    counts = {name: np.zeros(matrix(shape), int) for name, shape in stored_shapes(shapes).items()}
    for module in shapes.modules:
        for own_map in maps_of(shapes, module, tp):
            for slices in own_map.values():
                for tensor_slice in slices:
                    counts[tensor_slice.name][tensor_slice.source] += 1
    return counts


@some
@given(shapes_and_tp())
def test_every_stored_element_is_held_as_often_as_expected(case: tuple[ModelShapes, int]) -> None:
    shapes, tp = case
    for name, counts in times_held(shapes, tp).items():
        of_keys = lcm(attention_of(shapes).kv_heads, tp) // attention_of(shapes).kv_heads
        copies = of_keys if KEY_OR_VALUE.search(name) else tp if REPLICATED.search(name) else 1
        assert (counts == copies).all(), name


@some
@given(shapes_and_tp())
def test_held_counts_what_is_held(case: tuple[ModelShapes, int]) -> None:
    shapes, tp = case
    counts = times_held(shapes, tp)
    for module in shapes.modules:
        maps = maps_of(shapes, module, tp)
        for own_map, own_held in zip(maps, held(maps), strict=True):
            assert own_map.keys() == own_held.keys()
            for name, how in own_held.items():
                slices = own_map[name]
                assert how.sharded == any(other[name] != maps[0][name] for other in maps)
                for tensor_slice, copies in zip(slices, how.copies, strict=True):
                    assert tensor_slice.empty or (counts[tensor_slice.name][tensor_slice.source] == copies).all()
                doubled = any(
                    n > 1 for n, tensor_slice in zip(how.copies, slices, strict=True) if not tensor_slice.empty
                )
                assert how.replicated_slices == (how.sharded and doubled)


@some
@given(shapes_and_tp())
def test_scatter_then_assemble_is_exact(case: tuple[ModelShapes, int]) -> None:
    shapes, tp = case
    generator = torch.Generator().manual_seed(0)
    stored = {name: torch.randn(shape, generator=generator) for name, shape in stored_shapes(shapes).items()}
    parts = []
    for module in shapes.modules:
        maps = maps_of(shapes, module, tp)
        for name in maps[0]:
            shape = local_shape([own_map[name] for own_map in maps], stored)
            for own_map in maps:
                parameter = torch.full(shape, torch.nan)
                load_slices(parameter, own_map[name], [read(stored, tensor_slice) for tensor_slice in own_map[name]])
                assert not parameter.isnan().any(), "padding is not zero"
                parts.append((own_map[name], parameter))
    assembled = dict(assemble(parts, stored_shapes(shapes)))
    assert assembled.keys() == stored.keys()
    assert all(torch.equal(assembled[name], stored[name]) for name in stored)


def local_shape(slices_of_ranks: list[tuple[TensorSlice, ...]], stored: dict[str, Tensor]) -> tuple[int, ...]:
    """The shape that a parameter has on every rank: what its largest share needs."""
    slices = [tensor_slice for slices in slices_of_ranks for tensor_slice in slices]
    rows = max(tensor_slice.at + tensor_slice.rows[1] - tensor_slice.rows[0] for tensor_slice in slices)
    tensor = stored[slices[0].name]
    if tensor.dim() == 1:
        return (rows,)
    widths = [
        tensor_slice.columns[1] - tensor_slice.columns[0] for tensor_slice in slices if tensor_slice.columns is not None
    ]
    return rows, max(widths, default=int(np.prod(tensor.shape[1:])))


def read(stored: dict[str, Tensor], tensor_slice: TensorSlice) -> Tensor:
    tensor = stored[tensor_slice.name]
    return tensor[slice(*tensor_slice.rows)] if tensor.dim() == 1 else tensor.flatten(1)[tensor_slice.source]


@some
@given(shapes_and_tp())
def test_query_heads_lie_with_their_key_and_value_heads(case: tuple[ModelShapes, int]) -> None:
    shapes, tp = case
    text = attention_of(shapes)
    ratio, found = text.heads // text.kv_heads, []
    for rank in range(tp):
        slices = weight_map("text", shapes, Share(rank, tp))["layers.0.self_attention.linear_qkv.weight"]
        for q, k, v in zip(slices[::3], slices[1::3], slices[2::3], strict=True):
            queries = range(q.rows[0] // text.head_dim, q.rows[1] // text.head_dim)
            assert k.rows == v.rows and tuple(p.name.split(".")[-2] for p in (q, k, v)) == (
                "q_proj",
                "k_proj",
                "v_proj",
            )
            assert {head // ratio for head in queries} == {k.rows[0] // text.head_dim}
            found += list(queries)
    assert found == list(range(text.heads))


@pytest.mark.parametrize(
    "size, tp, expected", [(10, 4, [(0, 3), (3, 6), (6, 9), (9, 10)]), (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)])]
)
def test_shares(size: int, tp: int, expected: list[tuple[int, int]]) -> None:
    assert [share(size, rank, tp)[0] for rank in range(tp)] == expected


@given(st.integers(1, 200), st.integers(1, 9))
def test_what_a_rank_has_of_a_split_width_is_aligned(size: int, tp: int) -> None:
    rows, columns = zip(
        *((split_rows("a", size, Share(r, tp))[0], split_columns("a", 3, size, Share(r, tp))[0]) for r in range(tp)),
        strict=True,
    )
    assert [i for part in rows for i in range(*part.rows)] == list(range(size))
    assert [part.columns for part in columns] == [part.rows for part in rows]
    lengths = {part.rows[1] - part.rows[0] + part.padding for part in rows}
    assert lengths == {split_length(size, tp)} and split_length(size, tp) % 8 == 0
    assert tp * split_length(size, tp) - size < 8 * tp


def test_stack_extract_and_padding() -> None:
    slices = stack(("a", (2, 4)), ("b", (0, 0)), ("a", (0, 1)))
    parameter = torch.full((4, 2), 7.0)
    a = torch.arange(10.0).view(5, 2)
    load_slices(parameter, slices, [a[2:4], a[0:0], a[0:1]])
    assert parameter.tolist() == [[4, 5], [6, 7], [0, 1], [0, 0]]
    assert torch.equal(extract_slice(parameter, slices[0]), a[2:4]) and slices[1].empty and not slices[2].empty


def test_names() -> None:
    assert canonical_name("model.visual.blocks.0.norm1.weight") == "visual.blocks.0.norm1.weight"
    assert canonical_name("model.language_model.norm.weight") == "model.norm.weight"
    assert canonical_name("model.embed_tokens.weight") == "model.embed_tokens.weight"


def test_parts() -> None:
    shapes = small()
    found = tensors_by_subset(shapes)
    assert sorted(itertools.chain(*found.values())) == sorted(stored_shapes(shapes))
    assert found.keys() == {"vision", "projector", "text"}
    assert set(found["projector"]) == set(projector_shapes("vision", shapes))


def small() -> ModelShapes:
    vision = VisionShape(1, 4, 2, 3, 3, 2, 1, 1, 4, 1e4, window=4, full_layers=frozenset({0}))
    return ModelShapes({"vision": vision}, TextShape(1, 4, 2, 1, 2, 3, 5, True, 1e4, (1,), 1e-6))


def test_parameter_count() -> None:
    shapes = small()
    assert parameter_count(shapes) == sum(int(np.prod(s)) for s in stored_shapes(shapes).values())
    assert "lm_head.weight" not in stored_shapes(shapes)
