"""Layers of Transformer Engine, by a stand-in with the signatures and checks of its versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.groups.megatron import ModuleGroups, prepare, prepare_globals
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.layers.attention import AttentionParams, SelfAttention
from megatron_hetero.models.layers.backend import TORCH, te_backend
from megatron_hetero.models.layers.compiled import NormWeights, normed
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.packages import TRANSFORMER_ENGINE, find, unusable
from megatron_hetero.models.layers.parts import Backend, Site
from megatron_hetero.models.layers.segments import PackedSegments
from tests.support.matrix import thinned
from tests.support.pool import Pool, Pools
from tests.support.ranks import on_ranks
from tests.support.stand_ins import transformer_engine, transformer_engine_versions
from tests.unit.models.packs import assign

PLATFORM = Platform(CPU, "gloo")
VERSIONS = transformer_engine_versions()
HEADS, DIM = 8, 16
LAYERS = {"causal": (True, False), "full": (False, False), "windowed": (False, True)}
"""Whether a kind is causal, and whether it attends inside windows."""
HOPPER, AMPERE = (9, 0), (8, 0)
COLUMN, ROW, THEIRS, OURS = "TEColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention", "TorchAttention"


@pytest.fixture(scope="module", params=thinned(VERSIONS, len(VERSIONS) - 1))
def with_te(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Two workers that find a version of Transformer Engine installed."""
    packages = transformer_engine(request.param, tmp_path_factory.mktemp("packages"))
    pool = Pool(2, tmp_path_factory.mktemp("pool"), packages)
    yield lambda ranks: pool
    pool.close()


@pytest.mark.parametrize("kv_heads", thinned([2, 8], 2))
@pytest.mark.parametrize(
    "layout, of_full_layers", [("dp:2", THEIRS), ("tp:2", THEIRS), ("sp:2", OURS), ("cp:2", OURS)], ids=str
)
@on_ranks(2, fixture="with_te")
def test_layers_compute_what_those_on_pytorch_do(layout: str, of_full_layers: str, kv_heads: int) -> None:
    """Transformer Engine's attention has a fixed number of heads: where `sp` scatters them, it would refuse them."""
    full = [COLUMN, of_full_layers, ROW]
    expected = {"causal": full, "full": full, "windowed": [COLUMN, THEIRS, ROW]}
    assert compared_with_pytorch(layout, kv_heads, HOPPER) == expected


@on_ranks(2, fixture="with_te")
def test_before_hopper_attention_is_ours() -> None:
    assert compared_with_pytorch("dp:2", 2, AMPERE) == {layer: [COLUMN, OURS, ROW] for layer in LAYERS}


@on_ranks(2, fixture="with_te")
def test_norms_compute_what_those_on_pytorch_do() -> None:
    groups = prepared("tp:2")
    x = torch.randn(9, 1, HEADS * DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    for rms, offset in ((True, 0), (False, 0), (True, 1), (False, 1)):
        theirs, ours = (
            Norm(HEADS * DIM, 1e-5, rms, offset).build(
                Site(groups, PLATFORM, backend, torch.bfloat16, sequence_parallel=True), 0
            )
            for backend in (te_backend(HOPPER), TORCH)
        )
        assert type(theirs).__module__.startswith("transformer_engine")
        for norm in (theirs, ours) if offset else ():
            norm.weight.data = torch.linspace(-0.01, 0.01, HEADS * DIM).bfloat16()
            of_compiler = normed(x, *NormWeights.of(norm))
            torch.testing.assert_close(of_compiler, norm(x))
        torch.testing.assert_close(theirs(x), ours(x))
        for parameter, expected in zip(theirs.parameters(), ours.parameters(), strict=True):
            assert (parameter.dtype, parameter.shape) == (expected.dtype, expected.shape)


@on_ranks(2, fixture="with_te")
def test_the_version_is_found_and_can_be_imported() -> None:
    found = find(TRANSFORMER_ENGINE)
    assert found.version in VERSIONS and unusable(TRANSFORMER_ENGINE, found) == ""


def prepared(layout: str) -> ModuleGroups:
    prepare(PLATFORM)
    prepare_globals(seed=0)
    return Topology.build({"text": Layout.parse(layout, dist.get_world_size())}, PLATFORM).collection("text")


def compared_with_pytorch(layout: str, kv_heads: int, capability: tuple[int, int]) -> dict[str, list[str]]:
    """Check that each kind of layer on a GPU of `capability` computes what layers on plain PyTorch do. Returns its
    classes.
    """
    groups = prepared(layout)
    return {name: compare(groups, kv_heads, capability, *kind) for name, kind in LAYERS.items()}


def compare(
    groups: ModuleGroups,
    kv_heads: int,
    capability: tuple[int, int],
    causal: bool,
    windowed: bool,
) -> list[str]:
    theirs, ours = (_attention(p, groups, kv_heads, causal, windowed) for p in (te_backend(capability), TORCH))
    assigned = assign((16, 7, 2, 9), groups, causal, "even")
    own = len(assigned.mine)
    windows = PackedSegments.of([own - own // 3, own // 3], CPU)
    params = AttentionParams(assigned.params.full, assigned.params.sp_lengths, assigned.params.cp_lengths, windows)
    random = torch.Generator().manual_seed(dist.get_rank())
    x, c = (torch.randn(own, 1, HEADS * DIM, generator=random).bfloat16() for _ in "xc")
    angles = torch.randn(own, DIM, generator=random)
    table = torch.stack((angles.cos(), angles.sin()))
    results = [_passes(model, x, c, table, params) for model in (theirs, ours)]
    for name, got, expected in zip(("output", "input", *dict(ours.named_parameters())), *results, strict=True):
        error = (got - expected).float().norm() / expected.float().norm()
        assert error < 0.01, f"{name}: relative error {error}"
    return [type(part).__name__ for part in (theirs.linear_qkv, theirs.core_attention, theirs.linear_proj)]


def _passes(model: Any, x: Tensor, c: Tensor, table: Tensor, params: AttentionParams) -> list[Any]:
    """The output, the gradient of the input and those of the weights."""
    x = x.clone().requires_grad_()
    out, bias = model(x, table, params)
    out = out if bias is None else out + bias
    out.backward(c)
    return [out.detach(), *(p.grad for p in (x, *model.parameters()))]


def _attention(backend: Backend, groups: ModuleGroups, kv_heads: int, causal: bool, windowed: bool) -> Any:
    stored = "qkv", "out"
    part = SelfAttention(HEADS * DIM, HEADS, kv_heads, DIM, stored, causal, windowed, qkv_bias=True, out_bias=True)
    model: Any = part.build(Site(groups, PLATFORM, backend, torch.bfloat16, sequence_parallel=False), 0)
    of_rank, of_all = (torch.Generator().manual_seed(seed) for seed in (1 + groups.tp.rank(), 0))
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.1, generator=of_all if name == "linear_proj.bias" else of_rank)
    return model
