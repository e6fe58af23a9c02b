"""Layers whose exchanges over tp are fused with products, or begin early: by themselves, and in whole steps."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.platform import CPU
from megatron_hetero.models.layers import attention, linear, mlp
from megatron_hetero.models.layers.linear import (
    FUSED,
    ColumnLinear,
    RowLinear,
    fuse_exchanges,
    gathered_product,
    gradient_of_weight,
    scattered_product,
)
from megatron_hetero.models.layers.low_rank import adapted
from megatron_hetero.models.layers.overlapped import ahead_of, gather_ahead
from megatron_hetero.train import start
from megatron_hetero.train.start import share_memory
from tests.support import fused
from tests.support.folders import ModelChoice, write_model
from tests.support.matrix import thinned
from tests.support.pool import world
from tests.support.ranks import on_ranks
from tests.support.symmetric import emulated
from tests.unit.models.choices import assert_equal, flags_of
from tests.unit.models.steps import train

FUSING = [emulated, contextlib.nullcontext]
"""PyTorch's fused products in emulated symmetric memory, and collectives in their place as on a CPU."""


def shared(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def pair_of_layers(first: Tensor, second: Tensor, bias: Tensor | None = None, added: Tensor | None = None) -> list[Any]:
    """A column-parallel and a row-parallel layer with these weights and biases of a rank."""
    layers: list[Any] = [object.__new__(kind) for kind in (ColumnLinear, RowLinear)]
    for layer, weight, own in zip(layers, (first, second), (bias, added), strict=True):
        nn.Module.__init__(layer)
        layer.weight, layer.bias = nn.Parameter(weight), own if own is None else nn.Parameter(own)
        layer.sequence_parallel, layer.tp_group, layer.allreduce_dgrad = True, world(), False
        layer.input_size_per_partition, layer.input_size = 1, 2
    return layers


@pytest.mark.parametrize("fusing", FUSING, ids=["symmetric", "collectives"])
@pytest.mark.parametrize(
    "tokens, biased, early", [(4, True, False), (1, False, True), (3, True, True), (0, True, True)]
)
@on_ranks(3)
def test_two_fused_layers(fusing: Any, tokens: int, biased: bool, early: bool) -> None:
    """Against the same two products on one rank: outputs, and gradients of the input, of weights and of biases."""
    rank, hidden, ffn = dist.get_rank(), 5, 12
    x, first, second = shared(3 * tokens, 1, hidden, seed=0), shared(ffn, hidden, seed=1), shared(hidden, ffn, seed=2)
    bias, added, cotangent = shared(ffn, seed=3), shared(hidden, seed=4), shared(3 * tokens, 1, hidden, seed=5)
    whole = [each.clone().requires_grad_() for each in (x, first, second, bias, added)]
    expected = (whole[0] @ whole[1].t() + whole[3] * biased).relu() @ whole[2].t() + whole[4] * biased
    expected.backward(cotangent)

    def own(t: Tensor, dim: int = 0) -> Tensor:
        return t.detach().chunk(3, dim=dim)[rank].clone() if len(t) else t.detach()

    biases = (own(bias), added.clone()) if biased else (None, None)
    column, row = pair_of_layers(own(first), own(second, 1), *biases)
    row.weight.main_grad, row.weight.grad_added_to_main_grad = torch.ones_like(row.weight), False
    hidden_states = own(x).requires_grad_()
    with fusing({}):
        fuse_exchanges(nn.ModuleList([column, row]), gpu=False)
        ahead = ahead_of(column) if early else None
        inner = adapted(column, hidden_states, None, ahead)[0].relu()
        inner = inner if ahead is None else gather_ahead(inner, hidden_states, ahead)
        out, left = adapted(row, inner)
        out.backward(own(cotangent))
    assert (column.fused, row.fused, left, row.weight.grad_added_to_main_grad) == (True, True, None, True)
    torch.testing.assert_close(out, own(expected))
    torch.testing.assert_close(hidden_states.grad, own(gradient_of(whole[0])))
    torch.testing.assert_close(column.weight.grad, own(gradient_of(whole[1])))
    torch.testing.assert_close(row.weight.main_grad - 1, own(gradient_of(whole[2]), 1))
    if biased:
        torch.testing.assert_close(column.bias.grad, own(gradient_of(whole[3])))
        dist.all_reduce(row.bias.grad)
        torch.testing.assert_close(row.bias.grad, gradient_of(whole[4]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@on_ranks(3)
def test_fused_products(dtype: torch.dtype) -> None:
    """As on GPUs, in emulated symmetric memory."""
    memories = dict[str, Any]()
    with emulated(memories):
        fused.check(world(), CPU, dtype)
    assert [memory.size for memory in memories.values()] == [256 * 2048 * dtype.itemsize]
    fused.check(world(), CPU, dtype)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fused_products_on_gpus() -> None:
    ranks = ["--nproc-per-node", str(torch.cuda.device_count())]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks, "-m", "tests.support.fused"]
    assert subprocess.run(command, timeout=300).returncode == 0


def test_narrow_layers_are_not_fused_on_gpus() -> None:
    """Of each kind one is as wide as has to be, and one is narrower."""

    def layer(kind: type, *shape: int) -> Any:
        made: Any = object.__new__(kind)
        nn.Module.__init__(made)
        made.weight = nn.Parameter(torch.empty(shape, device="meta"))
        return made

    wide = [layer(ColumnLinear, FUSED, 1), layer(RowLinear, 1, FUSED)]
    narrow = [layer(ColumnLinear, FUSED - 1, FUSED), layer(RowLinear, FUSED, FUSED - 1)]
    model = nn.ModuleList([*wide, *narrow, nn.Linear(1, 1)])
    fuse_exchanges(model, gpu=True)
    assert [each.fused for each in (*wide, *narrow)] == [True] * 2 + [False] * 2
    fuse_exchanges(model, gpu=False)
    assert all(each.fused for each in narrow)


@on_ranks(2)
def test_ranks_of_several_hosts_share_no_memory() -> None:
    """Nor do those whose GPUs cannot read each other's."""
    reserve = mock.Mock()
    with mock.patch.object(start, "reserve_symmetric_memory", reserve):
        share_memory("text", world())
        with (
            mock.patch("socket.gethostname", return_value=f"host-{dist.get_rank()}"),
            pytest.raises(UserError, match="tp_overlap.*host-0 .* rank 0 and host-1 .* rank 1.*inside a host"),
        ):
            share_memory("text", world())
        assert reserve.mock_calls == [mock.call(world())]
        reserve.side_effect = RuntimeError("no peer access")
        with pytest.raises(UserError, match="text.tp_overlap.*cannot share memory: no peer access.*NVLink"):
            share_memory("text", world())
        reserve.side_effect = torch.OutOfMemoryError("out of memory")
        with pytest.raises(torch.OutOfMemoryError):
            share_memory("text", world())


@on_ranks(2)
def test_activations_that_do_not_fit_are_exchanged_by_collectives() -> None:
    """Symmetric memory never grows."""
    x, matrix, memories = torch.ones(4, 1, 8), torch.ones(8, 4), dict[str, Any]()
    with emulated(memories), mock.patch.object(linear, "SYMMETRIC", 2 * x.nbytes - 1):
        assert gathered_product(x, matrix, world())[1].shape == (8, 1, 4) and not memories
        assert scattered_product(x, matrix, world()).shape == (2, 1, 4) and memories
        memories.clear()
    with mock.patch.object(linear, "SYMMETRIC", 2 * x.nbytes):
        assert not linear._fits(x, x.numel()), "a CPU has none"


STEPS = [
    ("qwen2_5_vl", "tp:2", "tp:2", 2, "--vision-tp_overlap true --text-tp_overlap true"),
    ("qwen3_vl", "tp:2", "tp:2", 2, "--vision-tp_overlap true --text-tp_overlap true --vision-chunk 3"),
    ("qwen2_5_vl", "sp:2", "tp:2", 2, "--text-tp_overlap true --text-recompute selective"),
    ("qwen2_5_vl", "dp:2", "tp:2", 2, "--text-tp_overlap true --text-recompute full --model.freeze text"),
    ("qwen3_vl", "tp:2,dp:2", "tp:2,pp:2", 4, "--vision-tp_overlap true --vision-zero 3 --text-tp_overlap true"),
    ("qwen3_vl", "dp:4", "tp:2,cp:2", 4, "--text-tp_overlap true --text-offload.activations true"),
    ("qwen2_5_vl", "sp:2", "tp:2", 2, "--text-tp_overlap true --model.compile layers"),
    (
        "qwen3_vl",
        "tp:2",
        "tp:2",
        2,
        "--text-tp_overlap true --text-recompute selective --vision-tp_overlap true",
    ),
    ("qwen2_5_vl", "tp:2,cp:2", "tp:2,sp:2", 4, "--text-tp_overlap true --vision-tp_overlap true"),
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
    expected = train(without, 2)
    memories = dict[str, Any]()
    with emulated(memories):
        assert_equal(train(flags, 2), expected, exactly=False)
    assert memories, "products were fused"
    assert_equal(train(flags, 2), expected, exactly=False)


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
def test_early_gathers_change_no_bit(
    family: str, vision: str, text: str, ranks: int, more: str, models: dict[str, Path]
) -> None:
    """Of steps where each layer gathers its input itself."""
    flags = flags_of(models[family], vision, text, f"{more} --optimizer.name sgd")
    found = train(flags, 2)
    without = [mock.patch.object(module, "ahead_of", return_value=None) for module in (attention, mlp)]
    with without[0], without[1]:
        expected = train(flags, 2)
    assert_equal(found, expected, exactly=True)


@on_ranks(2)
def test_an_input_is_gathered_beside_the_activation() -> None:
    """The order of issue of a pair of layers with an activation between them."""
    rank, done = dist.get_rank(), list[str]()
    first, second = layers = pair_of_layers(shared(6, 5, seed=rank), shared(5, 6, seed=rank))
    hidden = shared(4, 1, 5, seed=9).requires_grad_()
    ahead = ahead_of(first)
    assert ahead is not None
    wide, _ = adapted(first, hidden, None, ahead)
    wide.register_hook(lambda _: done.append("activation"))
    out, _ = adapted(second, gather_ahead(wide.relu(), hidden, ahead))
    names = {id(each.weight): f"weight {number}" for number, each in enumerate(layers)}

    def noted(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (done.append(name), function(*args, **kwargs))[1]

    def gradient(parameter: Tensor, *factors: Tensor) -> Tensor:
        done.append(names[id(parameter)])
        return gradient_of_weight(parameter, *factors)

    with (
        mock.patch.object(dist, "all_gather_into_tensor", noted("gather", dist.all_gather_into_tensor)),
        mock.patch.object(dist, "reduce_scatter_tensor", noted("reduce", dist.reduce_scatter_tensor)),
        mock.patch.object(linear, "gradient_of_weight", gradient),
    ):
        out.backward(torch.ones_like(out))
    assert done == ["gather", "weight 1", "gather", "activation", "reduce", "weight 0"]


@on_ranks(2)
def test_nothing_is_gathered_early_without_a_backward_pass_or_for_frozen_weights() -> None:
    column, row = pair_of_layers(torch.ones(2, 2), torch.ones(2, 2))
    assert ahead_of(column) is not None
    assert [ahead_of(each) for each in (row, nn.Linear(1, 1))] == [None] * 2
    with torch.no_grad():
        assert ahead_of(column) is None
    column.sequence_parallel = False
    assert ahead_of(column) is None
    column.sequence_parallel = True
    column.weight.requires_grad_(False)
    assert ahead_of(column) is None
