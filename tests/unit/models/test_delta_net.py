"""Gated delta nets under every axis, against Qwen3.5's of `transformers` on every sample alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from megatron_hetero.groups.megatron import ModuleGroups, prepare, prepare_globals
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import Share, load_slices
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.layers import delta_net
from megatron_hetero.models.layers.backend import TORCH
from megatron_hetero.models.layers.delta_net import DeltaNet
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.overlapped import overlap_exchanges
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.layers.recompute import Recompute
from tests.support.ranks import on_ranks
from tests.unit.models.packs import assign

PLATFORM = Platform(CPU, "gloo")
HIDDEN, KEY_DIM, VALUE_DIM, TAPS = 32, 8, 12, 4
PACKS = ((16, 7, 1, 3), (65, 2, 127), (1,), (3, 64, 63))


def delta(key_heads: int, value_heads: int) -> DeltaNet:
    norm = Norm(VALUE_DIM, 1e-6)
    return DeltaNet(HIDDEN, key_heads, value_heads, KEY_DIM, VALUE_DIM, TAPS, norm, stored="")


def theirs(key_heads: int, value_heads: int) -> Qwen3_5GatedDeltaNet:
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        linear_conv_kernel_dim=TAPS,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    module, generator = Qwen3_5GatedDeltaNet(config, 0), torch.Generator().manual_seed(0)  # pyright: ignore[reportArgumentType]
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return module


def groups_of(layout: str) -> ModuleGroups:
    prepare(PLATFORM)
    prepare_globals(seed=0)
    return Topology.build({"text": Layout.parse(layout, dist.get_world_size())}, PLATFORM).collection("text")


def compare(
    layout: str, heads: tuple[int, int] = (2, 4), *, parts: int = 1, how: str = "ragged", **of_site: Any
) -> None:
    """Output and all gradients of a layer under `layout` are those of transformers, sample by sample."""
    groups = groups_of(layout)
    module, part, tp = theirs(*heads), delta(*heads), groups.tp.size()
    assert part.tensors() == {name: tuple(p.shape) for name, p in module.named_parameters()} | {}
    model = part.build(Site(groups, PLATFORM, TORCH, torch.float32, tp > 1, **of_site), 0)
    slices, whole = part.slices("", Share(groups.tp.rank(), tp)), dict(module.named_parameters())
    assert list(slices) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        load_slices(
            parameter,
            slices[name],
            [
                whole[s.name].detach().flatten(1)[s.source]
                if whole[s.name].dim() > 1
                else whole[s.name].detach()[s.source]
                for s in slices[name]
            ],
        )
    if parts > 1:
        overlap_exchanges(model, parts)
    for lengths in PACKS:
        total, generator = sum(lengths), torch.Generator().manual_seed(1)
        x, c = (torch.randn(total, 1, HIDDEN, generator=generator) for _ in "xc")
        module.zero_grad()
        samples = x.requires_grad_().transpose(0, 1).split(lengths, dim=1)
        expected = torch.cat([module(each) for each in samples], dim=1).transpose(0, 1)
        expected.backward(c)

        mine, params = assign(lengths, groups, True, how)
        share = max(1, -(-len(mine) // tp))
        rows = slice(share * groups.tp.rank(), share * (groups.tp.rank() + 1))
        own, own_c = (F.pad(f.detach()[mine], (0, 0, 0, 0, 0, share * tp - len(mine)))[rows] for f in (x, c))
        out, bias = model(own.requires_grad_(), torch.zeros(2, len(mine), 2), params)
        assert bias is None
        out.backward(own_c)
        tokens = mine[rows]
        assert own.grad is not None and x.grad is not None
        close(out[: len(tokens)], expected.detach()[tokens])
        close(own.grad[: len(tokens)], x.grad[tokens])
        gathered = {
            name: torch.zeros_like(p).flatten(1) if p.dim() > 1 else torch.zeros_like(p) for name, p in whole.items()
        }
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            for each in slices[name]:
                gathered[each.name][each.source] += parameter.grad[each.place]
            parameter.grad = None
        for name, found in gathered.items():
            dist.all_reduce(found)
            grad = whole[name].grad
            assert grad is not None
            close(found.view_as(grad), grad)


def close(found: Tensor, expected: Tensor) -> None:
    """Those of `A_log` are sums of terms a thousand times as large, which transformers' own misses by 4e-4."""
    assert found.shape == expected.shape
    assert float((found - expected).detach().norm()) <= 1e-3 * float(expected.detach().norm()) + 1e-6


@pytest.mark.parametrize("how", ["none", "selective"])
@on_ranks(1)
def test_one_process(how: str) -> None:
    for heads in ((1, 1), (2, 4), (3, 3), (1, 4)):
        compare("dp:1", heads, recompute=Recompute(how))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("layout", ["tp:2", "sp:2", "cp:2"])
@on_ranks(2)
def test_two_ranks(layout: str) -> None:
    compare(layout)
    compare(layout, (1, 2), recompute=Recompute("selective"))
    compare(layout, parts=3)


@pytest.mark.parametrize(
    "layout, heads",
    [
        ("tp:4", (2, 4)),
        ("tp:2,sp:2", (1, 6)),
        ("sp:2,cp:2", (1, 3)),
        ("sp:4", (2, 6)),
        ("cp:4", (2, 6)),
        ("cp:4", (1, 3)),
        ("tp:2,cp:2", (2, 6)),
        ("tp:4", (3, 12)),
        ("sp:4", (1, 1)),
    ],
)
@on_ranks(4)
def test_four_ranks_with_uneven_heads(layout: str, heads: tuple[int, int]) -> None:
    compare(layout, heads)


@on_ranks(2)
def test_as_the_compiler_gets_it() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_net, "run", lambda function, *inputs: function(*inputs))
        for layout in ("tp:2", "sp:2", "cp:2"):
            compare(layout, compile_layers=True)
            compare(layout, (1, 2), compile_layers=True, recompute=Recompute("selective"))
