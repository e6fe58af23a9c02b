"""Splits of modules into pipeline stages, and what of the stored tensors each stage holds."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.hf.weight_map import Share
from megatron_hetero.layout.pipeline import LAYERS, PipelineStage, cut_stages, even_split, stages_of_rank
from megatron_hetero.models.weights import weight_map
from tests.support.shapes import shapes_of

splits = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple)


def assert_covers(stages: tuple[PipelineStage, ...], layers: int) -> None:
    """Every layer is in one stage, in order, and only the ends are ends."""
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert all(len(stage.layers) >= 1 for stage in stages)
    assert [stage.is_first for stage in stages] == [i == 0 for i in range(len(stages))]
    assert [stage.is_last for stage in stages] == [i == len(stages) - 1 for i in range(len(stages))]


@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 40))
def test_even_stages(pp: int, per_rank: int, more: int) -> None:
    per_rank = per_rank if pp > 1 else 1
    layers = pp * per_rank + more
    stages = cut_stages(layers, pp, per_rank=per_rank)
    assert_covers(stages, layers)
    sizes = [len(stage.layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the head is work enough"
    assert sizes[0] == min(sizes) or all(size == sizes[0] for size in sizes[:-1]), "the middle takes more first"


@given(splits)
def test_stages_of_an_explicit_split(split: tuple[int, ...]) -> None:
    stages = cut_stages(sum(split), len(split), split=split)
    assert_covers(stages, sum(split))
    assert tuple(len(stage.layers) for stage in stages) == split


@given(st.integers(2, 5), st.integers(1, 4))
def test_ranks_hold_every_stage_once(pp: int, per_rank: int) -> None:
    stages = cut_stages(pp * per_rank, pp, per_rank=per_rank)
    held = [stages_of_rank(stages, rank, pp) for rank in range(pp)]
    assert all(len(of_rank) == per_rank for of_rank in held)
    assert sorted((stage for of_rank in held for stage in of_rank), key=lambda s: s.first) == list(stages)
    assert held[0][0].is_first and held[-1][-1].is_last


@pytest.mark.parametrize(
    "layers, stages, expected",
    [(8, 2, (4, 4)), (9, 2, (5, 4)), (11, 4, (3, 3, 3, 2)), (9, 4, (2, 3, 2, 2)), (5, 3, (2, 2, 1)), (7, 1, (7,))],
)
def test_what_is_left_over(layers: int, stages: int, expected: tuple[int, ...]) -> None:
    assert even_split(layers, stages) == expected


@pytest.mark.parametrize(
    "split, found",
    [
        ((8,), "found 1 number, expected 2, "),
        ((2, 3, 3), "found 3 numbers, expected 2"),
        ((0, 8), "found a stage of 0 layers, expected 1 or more"),
        ((9, -1), "found a stage of -1 layers, expected 1 or more"),
        ((3, 4), "found 7 layers in all, expected 8"),
        ((), "found 0 numbers, expected 2"),
    ],
)
def test_a_wrong_split_is_refused(split: tuple[int, ...], found: str) -> None:
    with pytest.raises(UserError) as error:
        cut_stages(8, 2, split=split, module="audio")
    written = " ".join(map(str, split))
    assert str(error.value).startswith(f"audio split `{written}` (--audio-layers): {found}")
    assert "Try `--audio-layers 4 4`" in str(error.value)
    assert len(cut_stages(8, 2, split=(4, 4))) == 2, "what is suggested works"


@given(st.data())
def test_stages_of_equal_cost(data: st.DataObject) -> None:
    """Against all splits: the largest cost of a stage is least, then the second largest, and so on."""
    kinds = data.draw(st.sampled_from([st.integers(0, 5), st.sampled_from([0.1, 0.3, 1e9]), st.floats(0, 10)]))
    costs = data.draw(st.lists(kinds, min_size=2, max_size=9))
    count = data.draw(st.integers(2, min(5, len(costs))))
    stages = cut_stages(len(costs), count, costs=costs)
    assert_covers(stages, len(costs))

    def of_stages(ends: tuple[int, ...]) -> list[Fraction]:
        return sorted((sum(map(Fraction, costs[a:b])) for a, b in pairwise(ends)), reverse=True)  # pyright: ignore[reportReturnType]

    every = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), count - 1)]
    assert of_stages((0, *(stage.last for stage in stages))) == min(map(of_stages, every))


@given(st.integers(2, 6), st.integers(0, 30), st.floats(0, 1e6))
def test_equal_costs_leave_the_equal_split(pp: int, more: int, cost: float) -> None:
    layers = pp + more
    assert cut_stages(layers, pp, costs=[cost] * layers) == cut_stages(layers, pp)
    split = (1,) * (pp - 1) + (layers - pp + 1,)
    assert cut_stages(layers, pp, costs=range(layers), split=split) == cut_stages(layers, pp, split=split)


def test_stages_of_layers_of_several_kinds() -> None:
    """Three cheap layers and a dear one in turns, as delta nets and attention are, over virtual stages too."""
    costs = [1, 1, 1, 3] * 4
    for pp, per_rank, expected in ((2, 1, (8, 8)), (3, 1, (5, 6, 5)), (4, 2, (3, 1, 3, 1, 3, 1, 3, 1))):
        stages = cut_stages(16, pp, per_rank=per_rank, costs=costs)
        assert tuple(len(stage.layers) for stage in stages) == expected


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"text stages \(--text-parallel, axis pp\): found 5 layers for 6 stages"):
        cut_stages(5, 3, per_rank=2)


def test_names() -> None:
    stage = PipelineStage(3, 5, False, True)
    assert stage.global_name("layers.1.mlp.linear_fc1.weight") == "layers.4.mlp.linear_fc1.weight"
    assert stage.global_name("final_layernorm.weight") == "final_layernorm.weight"
    assert str(stage) == "layers 3-4" and str(PipelineStage(3, 4, False, False)) == "layers 3"


# ------------------------------------------------------------------------------------------------- weights


EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@given(splits, st.booleans(), st.sampled_from([(0, 1), (0, 2), (1, 2)]))
def test_stages_share_the_map_of_the_whole(split: tuple[int, ...], tied: bool, at: tuple[int, int]) -> None:
    shapes = shapes_of(sum(split), tied)
    for module in ("vision", "text"):
        stages = cut_stages(sum(split), len(split), split=split, module=module)
        maps = [weight_map(module, shapes, Share(*at), stage) for stage in stages]
        whole = weight_map(module, shapes, Share(*at))
        names = [name for own_map in maps for name in own_map]
        assert len(names) == len(set(names))
        copied = module == "text" and tied and len(split) > 1
        assert set(names) == whole.keys() | ({HEAD} if copied else set())
        for own_map, stage in zip(maps, stages, strict=True):
            numbers = {int(n.removeprefix(LAYERS).split(".")[0]) for n in own_map if n.startswith(LAYERS)}
            assert numbers == set(stage.layers)
            assert all(slices == whole.get(name, whole.get(EMBEDDING)) for name, slices in own_map.items())


def test_who_holds_a_tied_parameter() -> None:
    tied, untied = shapes_of(3, True), shapes_of(3, False)
    stages = cut_stages(3, 3)
    assert [tied["text"].architecture.tied_parameter(stage) for stage in stages] == [EMBEDDING, None, HEAD]
    assert [untied["text"].architecture.tied_parameter(stage) for stage in stages] == [None] * 3
    assert [tied["vision"].architecture.tied_parameter(stage) for stage in stages] == [None] * 3
    assert tied["text"].architecture.tied_parameter(PipelineStage.whole(3)) is None
