"""What workers run for which a Transformer Engine is installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.groups.megatron import prepare_globals
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import ModuleGroups, Topology
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.layers.attention import AttentionParams, SelfAttention
from megatron_hetero.models.layers.backend import TORCH, te_backend
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.layers.segments import PackedSegments
from tests.unit.models.jobs_attention import assign

PLATFORM = Platform(CPU, "gloo")
HEADS, DIM = 8, 16
LAYERS = {"causal": (True, False), "full": (False, False), "windowed": (False, True)}
"""Whether a kind is causal, and whether it attends inside windows."""


def attentions(layout: str, kv_heads: int, lengths: tuple[int, ...], capability: tuple[int, int]) -> dict[str, Any]:
    """For each kind of layer under `layout`: what of Transformer Engine it is made of on a GPU of `capability`, after
    it has been found to compute what layers on plain PyTorch do.
    """
    PLATFORM.prepare_megatron()
    prepare_globals(seed=0)
    groups = Topology.build({"text": Layout.parse(layout, dist.get_world_size())}, PLATFORM).collection("text")
    return {name: _compare(groups, kv_heads, lengths, capability, *kind) for name, kind in LAYERS.items()}


def _compare(
    groups: ModuleGroups,
    kv_heads: int,
    lengths: tuple[int, ...],
    capability: tuple[int, int],
    causal: bool,
    windowed: bool,
) -> list[str]:
    theirs, ours = (_attention(p, groups, kv_heads, causal, windowed) for p in (te_backend(capability), TORCH))
    assigned = assign(lengths, groups, causal, "even")
    own = len(assigned.mine)
    windows = PackedSegments.of([own - own // 3, own // 3], CPU)
    plan = AttentionParams(assigned.plan.full, assigned.plan.sp_lengths, assigned.plan.cp_lengths, windows)
    random = torch.Generator().manual_seed(dist.get_rank())
    x, c = (torch.randn(own, 1, HEADS * DIM, generator=random).bfloat16() for _ in "xc")
    angles = torch.randn(own, DIM, generator=random)
    table = torch.stack((angles.cos(), angles.sin()))
    results = [_passes(model, x, c, table, plan) for model in (theirs, ours)]
    for name, got, expected in zip(("output", "input", *dict(ours.named_parameters())), *results, strict=True):
        error = (got - expected).float().norm() / expected.float().norm()
        assert error < 0.01, f"{name}: relative error {error}"
    return [type(part).__name__ for part in (theirs.linear_qkv, theirs.core_attention, theirs.linear_proj)]


def _passes(model: Any, x: Tensor, c: Tensor, table: Tensor, plan: AttentionParams) -> list[Any]:
    """The output, the gradient of the input and those of the weights."""
    x = x.clone().requires_grad_()
    out, bias = model(x, table, plan)
    out = out if bias is None else out + bias
    out.backward(c)
    return [out.detach(), *(p.grad for p in (x, *model.parameters()))]


def _attention(provider: Any, groups: ModuleGroups, kv_heads: int, causal: bool, windowed: bool) -> Any:
    stored = "qkv", "out"
    part = SelfAttention(HEADS * DIM, HEADS, kv_heads, DIM, stored, causal, windowed, qkv_bias=True, out_bias=True)
    model: Any = part.build(Site(groups, PLATFORM, provider, torch.bfloat16, sequence_parallel=False), 0)
    of_rank, of_all = (torch.Generator().manual_seed(seed) for seed in (1 + groups.tp.rank(), 0))
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.1, generator=of_all if name == "linear_proj.bias" else of_rank)
    return model
