"""Layers that exchange their tokens in parts: by themselves, and in whole steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_hetero.models.layers import attention, mlp
from megatron_hetero.models.layers.attention import PackedSelfAttention
from megatron_hetero.models.layers.linear import ColumnLinear, RowLinear, gradient_of_weight
from megatron_hetero.models.layers.mlp import MLPModule
from megatron_hetero.models.layers.overlapped import (
    Ahead,
    Overlapping,
    ahead_of,
    chunk_sizes,
    first_in_chunks,
    gather_ahead,
    overlap_exchanges,
    second_in_chunks,
)
from megatron_hetero.models.layers.rotary import Order
from tests.support.folders import ModelChoice, write_model
from tests.support.matrix import thinned
from tests.support.pool import world
from tests.support.ranks import on_ranks
from tests.unit.models.choices import assert_equal, flags_of
from tests.unit.models.steps import train

PARTS = [3, 0, 4, 1]


def shared(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("biased, gathered_ahead, hidden", [(True, False, 5), (False, True, 5), (True, True, 9)])
@on_ranks(3)
def test_two_layers_in_parts(biased: bool, gathered_ahead: bool, hidden: int) -> None:
    """Against the same two products on one rank: outputs, and gradients of the input, of weights and of the bias. The
    input of the second layer is narrow beside a `hidden` of 9: its weight's gradient is added up part by part.
    """
    group, rank, tokens, ffn = world(), dist.get_rank(), sum(PARTS), 12
    x, first, second = shared(3 * tokens, 1, hidden, seed=0), shared(ffn, hidden, seed=1), shared(hidden, ffn, seed=2)
    bias, cotangent = shared(ffn, seed=3), shared(3 * tokens, 1, hidden, seed=4)
    whole = [each.clone().requires_grad_() for each in (x, first, bias, second)]
    expected = (whole[0] @ whole[1].t() + whole[2] * biased).relu() @ whole[3].t()
    expected.backward(cotangent)

    def own(t: Tensor, dim: int = 0) -> Tensor:
        return t.detach().chunk(3, dim=dim)[rank].clone()

    mine = [nn.Parameter(each) for each in (own(x), own(first), own(bias), own(second, 1))]
    column: Any = SimpleNamespace(weight=mine[1], bias=mine[2] if biased else None, tp_group=group)
    row: Any = SimpleNamespace(weight=mine[3], bias=None, tp_group=group, skip_bias_add=True)
    total: Any = mine[3]
    total.main_grad, total.grad_added_to_main_grad = torch.ones_like(total), False
    ahead = Ahead(PARTS, group) if gathered_ahead else None
    wide = first_in_chunks(column, mine[0], PARTS, ahead)[0].relu()
    wide = wide if ahead is None else gather_ahead(wide, mine[0], ahead)
    out, left = second_in_chunks(row, wide, PARTS)
    out.backward(own(cotangent))
    assert left is None and total.grad_added_to_main_grad
    total.grad = total.main_grad - 1
    torch.testing.assert_close(out, own(expected))
    for at in (0, 1, 2, 3):
        if at != 2 or biased:
            torch.testing.assert_close(mine[at].grad, own(gradient_of(whole[at]), dim=int(at == 3)))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 3))
def test_tokens_are_found_in_parts_and_put_back(parts: list[int], ranks: int, padding: int) -> None:
    """Of a sequence that ranks have one after another, gathered part by part; padding follows it."""
    sequence = torch.arange(1, sum(parts) * ranks + 1)
    by_rank = [own.split(parts) for own in sequence.view(ranks, sum(parts))]
    rows = torch.cat([own[part] for part in range(len(parts)) for own in by_rank])
    tokens = max(0, len(sequence) - padding)
    order = Order.of_chunks(tuple(parts), ranks, tokens, torch.device("cpu"))
    assert torch.equal(order.chosen(rows), sequence[:tokens])
    assert torch.equal(order.placed(sequence[:tokens]), rows.where(rows <= tokens, 0))
    assert torch.equal(order.tokens, rows - 1)


def test_orders_go_backward_as_their_adjoints() -> None:
    order, x, back = Order.of_chunks((1, 2), 2, 5, torch.device("cpu")), shared(6, 2, seed=0), shared(5, 2, seed=1)
    rows, tokens = x.clone().requires_grad_(), back.clone().requires_grad_()
    order.chosen(rows).backward(back)
    order.placed(tokens).backward(x)
    assert torch.equal(gradient_of(rows), order.placed(back)) and torch.equal(gradient_of(tokens), order.chosen(x))


def test_parts_are_even_and_no_more_than_tokens() -> None:
    mlp: Any = SimpleNamespace(exchange_chunks=4)
    assert [chunk_sizes(mlp, tokens) for tokens in (10, 3, 1, 0)] == [(3, 3, 2, 2), (1, 1, 1), (1,), (0,)]
    assert chunk_sizes(Overlapping(), 10) == (10,)


@given(st.integers(1, 9), st.integers(0, 40000))
def test_long_parts_are_whole_tiles_and_about_as_long(parts: int, tokens: int) -> None:
    mlp: Any = SimpleNamespace(exchange_chunks=parts)
    *long, last = found = chunk_sizes(mlp, tokens)
    assert sum(found) == tokens and len(found) == max(1, min(parts, tokens)) and (tokens == 0 or min(found) > 0)
    assert tokens < 64 * parts**2 or all(each % 64 == 0 and abs(each - tokens / parts) <= 32 for each in long)
    assert max(found) < 2 * max(1, last), "no part is waited for twice as long as another"


def test_layers_that_are_not_ours_are_refused() -> None:
    for kind in (MLPModule, PackedSelfAttention):
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        for name in ("linear_fc1", "linear_fc2", "linear_qkv", "linear_proj"):
            module.add_module(name, nn.Linear(1, 1))
        with pytest.raises(TypeError, match=f"{kind.__name__} of Linear exchanges"):
            overlap_exchanges(nn.Sequential(module), 2)


STEPS = [
    ("qwen2_5_vl", "tp:2", "tp:2", 2, "--vision-tp_overlap 3 --text-tp_overlap 2"),
    ("qwen3_vl", "tp:2", "tp:2", 2, "--vision-tp_overlap 2 --text-tp_overlap 4"),
    ("qwen2_5_vl", "sp:2", "tp:2", 2, "--text-tp_overlap 3 --text-recompute selective"),
    ("qwen2_5_vl", "dp:2", "tp:2", 2, "--text-tp_overlap 3 --text-recompute full --model.freeze text"),
    ("qwen3_vl", "tp:2,dp:2", "tp:2,pp:2", 4, "--vision-tp_overlap 2 --vision-zero 3 --text-tp_overlap 2"),
    ("qwen3_vl", "dp:4", "tp:2,cp:2", 4, "--text-tp_overlap 2 --text-offload.activations true"),
    ("qwen2_5_vl", "sp:2", "tp:2", 2, "--text-tp_overlap 3 --model.compile layers"),
    (
        "qwen3_vl",
        "tp:2",
        "tp:2",
        2,
        "--text-tp_overlap 3 --text-recompute selective --vision-tp_overlap 2",
    ),
    ("qwen2_5_vl", "tp:2,cp:2", "tp:2,sp:2", 4, "--text-tp_overlap 2 --vision-tp_overlap 2"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    choice = {"text_layers": 2, "vision_layers": 2, "full_layers": (1,), "deepstack": (0,)}
    families = ("qwen2_5_vl", "qwen3_vl")
    return {f: write_model(tmp_path_factory.mktemp(f), ModelChoice(family=f, **choice)) for f in families}


@pytest.mark.parametrize("family, vision, text, ranks, more", thinned(STEPS, 7))
@on_ranks("ranks")
def test_steps(family: str, vision: str, text: str, ranks: int, more: str, models: dict[str, Path]) -> None:
    more += " --model.dtype float32 --optimizer.name sgd"
    flags = flags_of(models[family], vision, text, more)
    without = [f for i, f in enumerate(flags) if "tp_overlap" not in f and "tp_overlap" not in flags[i - 1]]
    assert len(without) < len(flags)
    found, expected = (train(each, 2) for each in (flags, without))
    assert_equal(found, expected, exactly=False)


@pytest.mark.parametrize(
    "family, vision, text, ranks, more",
    [
        ("qwen2_5_vl", "tp:2", "tp:2", 2, "--text-recompute selective --vision-chunk 3"),
        ("qwen3_vl", "sp:2", "tp:2", 2, "--text-recompute full --model.dtype bfloat16 --model.freeze vision"),
        ("qwen2_5_vl", "tp:2", "tp:2", 2, "--text-lora.r 2 --text-offload.activations true"),
        ("qwen3_vl", "tp:2,dp:2", "tp:2,dp:2", 4, "--vision-zero 2 --text-zero 3"),
    ],
)
@on_ranks("ranks")
def test_with_one_chunk_steps_are_the_same_to_the_bit(
    family: str, vision: str, text: str, ranks: int, more: str, models: dict[str, Path]
) -> None:
    """As where each layer gathers its input itself."""
    flags = flags_of(models[family], vision, text, f"{more} --optimizer.name sgd")
    found = train(flags, 2)
    without = [mock.patch.object(module, "ahead_of", return_value=None) for module in (attention, mlp)]
    with without[0], without[1]:
        expected = train(flags, 2)
    assert_equal(found, expected, exactly=True)


@on_ranks(2)
def test_an_input_is_gathered_beside_the_activation() -> None:
    """The order of issue of a pair of layers with an activation between them."""
    group, rank, done = world(), dist.get_rank(), list[str]()
    layers: list[Any] = [object.__new__(kind) for kind in (ColumnLinear, RowLinear)]
    first, second = layers
    for each, shape in ((first, (6, 5)), (second, (5, 6))):
        nn.Module.__init__(each)
        each.weight = nn.Parameter(shared(*shape, seed=rank))
        each.bias, each.sequence_parallel, each.tp_group = None, True, group
        each.allreduce_dgrad, each.input_size_per_partition, each.input_size = False, 6, 12
    hidden = shared(4, 1, 5, seed=9).requires_grad_()
    ahead = ahead_of(first, (4,))
    assert ahead is not None
    wide, _ = first_in_chunks(first, hidden, (4,), ahead)
    wide.register_hook(lambda _: done.append("activation"))
    out, _ = second_in_chunks(second, gather_ahead(wide.relu(), hidden, ahead), (4,))
    names = {id(each.weight): f"weight {number}" for number, each in enumerate(layers)}

    def noted(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (done.append(name), function(*args, **kwargs))[1]

    def gradient(parameter: Tensor, *factors: Tensor) -> Tensor:
        done.append(names[id(parameter)])
        return gradient_of_weight(parameter, *factors)

    with (
        mock.patch.object(dist, "all_gather_into_tensor", noted("gather", dist.all_gather_into_tensor)),
        mock.patch.object(dist, "reduce_scatter_tensor", noted("reduce", dist.reduce_scatter_tensor)),
        mock.patch("megatron_hetero.models.layers.linear.gradient_of_weight", gradient),
    ):
        out.backward(torch.ones_like(out))
    assert done == ["gather", "weight 1", "gather", "activation", "reduce", "weight 0"]


def test_nothing_is_gathered_early_without_a_backward_pass_or_for_frozen_weights() -> None:
    def linear(**own: Any) -> Any:
        weight = nn.Parameter(torch.ones(2, 2))
        return SimpleNamespace(
            **{"exchanges_in_chunks": True, "sequence_parallel": True, "weight": weight, "tp_group": None} | own
        )

    whole, frozen, alone = linear(), linear(weight=torch.ones(2, 2)), nn.Linear(1, 1)
    assert ahead_of(whole, (4,)) is not None
    assert [ahead_of(each, (4,)) for each in (frozen, alone, linear(sequence_parallel=False))] == [None] * 3
    with torch.no_grad():
        assert ahead_of(whole, (4,)) is None
