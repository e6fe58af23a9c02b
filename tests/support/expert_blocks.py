"""A block with experts on the ranks of a layout, beside the same block of `transformers`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from megatron_hetero.groups.megatron import prepare, tensor_parallel
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import Share, load_slices
from megatron_hetero.layout.axes import EXPERTS, MAIN
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.layers.backend import TORCH
from megatron_hetero.models.layers.dispatch import block
from megatron_hetero.models.layers.experts import ExpertMLP, ExpertMLPModule
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.parts import LayerCall, Site
from megatron_hetero.models.layers.recompute import NO_RECOMPUTE, Recompute

HIDDEN, TOKENS = 24, (7, 0, 12, 5)
"""Width, and tokens of the ranks that have tokens of their own."""


class Row(NamedTuple):
    """A layout, and what differs in the layer."""

    layout: str
    experts: int = 6
    top_k: int = 2
    ffn: int = 20
    shared: bool = False
    split: bool = True
    recompute: Recompute = NO_RECOMPUTE
    dtype: torch.dtype = torch.float32
    tokens: tuple[int, ...] = TOKENS
    idle: bool = False
    """Whether no token chooses an expert of the last rank."""


EMPTY = [
    Row("dp:4,ep:4", idle=True),
    Row("dp:4,ep:4", experts=12, idle=True, recompute=Recompute("none", chunk=3)),
    Row("dp:4,ep:4", tokens=(0, 0, 1, 0), top_k=1),
    Row("tp:2,dp:2,ep:4", experts=7, top_k=3, tokens=(0, 1), split=False, idle=True),
    Row("dp:4,ep:1", tokens=(0, 1, 0, 2)),
]
"""Ranks without tokens, or whose experts get none or one."""


def part_of(row: Row) -> ExpertMLP:
    names = [f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")]
    shared = MLP(HIDDEN, 20, tuple(names)) if row.shared else None
    return ExpertMLP(HIDDEN, row.ffn, row.experts, row.top_k, "mlp.", shared)


def block_of(row: Row) -> Any:
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        num_experts=row.experts,
        num_experts_per_tok=row.top_k,
        moe_intermediate_size=row.ffn,
        shared_expert_intermediate_size=20,
        norm_topk_prob=True,
    )
    torch.manual_seed(3)
    found = Qwen2MoeSparseMoeBlock(config).to(row.dtype)
    for name, parameter in found.named_parameters():
        parameter.data.normal_(std=0.5 if name == "gate.weight" else parameter.shape[-1] ** -0.5)
    if row.idle:
        found.gate.weight.data.abs_()[block(row.experts, 3, 4)[0] :] *= -1
    if not row.shared:
        found.shared_expert_gate.weight.data.fill_(0.0)
        found.shared_expert.down_proj.weight.data.fill_(0.0)
    return found


def stored_of(tensors: dict[str, Tensor], row: Row) -> dict[str, Tensor]:
    """By canonical name, from the block's own."""
    found = {f"mlp.{name}": tensor for name, tensor in tensors.items() if not name.startswith("experts.")}
    for expert in range(row.experts):
        gate, up = tensors["experts.gate_up_proj"][expert].chunk(2)
        names = {"gate_proj": gate, "up_proj": up, "down_proj": tensors["experts.down_proj"][expert]}
        found |= {f"mlp.experts.{expert}.{kind}.weight": tensor for kind, tensor in names.items()}
    return found


def differences(row: Row, platform: Platform | None = None) -> dict[str, float]:
    """Relative differences of outputs, input gradients and gradients of all parameters of this rank."""
    prepare(platform := platform or Platform(CPU, "gloo"))
    layout = Layout.parse(row.layout, dist.get_world_size(), views=[EXPERTS])
    topology = Topology.build({"text": layout}, platform, megatron=[])
    if dist.get_rank() not in layout:
        return {}
    groups, part, reference = topology.collection("text"), part_of(row), block_of(row)
    site = Site(groups, platform, TORCH, row.dtype, row.split, row.recompute)
    module = part.build(site, 0)
    at = layout.coordinate(dist.get_rank())
    shares = {MAIN: Share(at.tp, layout.tp), EXPERTS: Share(groups.along("ep").rank(), groups.along("ep").size())}
    maps = {name: own for view, share in shares.items() for name, own in part.weight_map("", share, view.name).items()}
    stored = stored_of(dict(reference.named_parameters()), row)
    assert part.tensors() == {name: tuple(t.shape) for name, t in stored.items() if row.shared or "shared" not in name}
    for name, parameter in module.named_parameters():
        read = [stored[each.name][each.source] for each in maps[name]]
        load_slices(parameter, maps[name], read)

    everything = torch.randn(4, max(row.tokens), HIDDEN, generator=torch.manual_seed(5), dtype=row.dtype)
    weights = torch.randn(4, max(row.tokens), HIDDEN, generator=torch.manual_seed(6), dtype=row.dtype)
    everything = everything.abs() if row.idle else everything
    own = topology.rank // layout.tp
    count = row.tokens[own]
    real = [everything[i, : row.tokens[i]] for i in range(layout.size // layout.tp)]
    given: Any = torch.cat(real).requires_grad_()
    expected = reference(given[None])[0]
    cotangent = torch.cat([weights[i, : row.tokens[i]] for i in range(len(real))])
    expected.backward(cotangent)
    begin = sum(row.tokens[:own])
    out_there, grad_there = (x.detach()[begin : begin + count] for x in (expected, given.grad))

    padded = max(1, -(-count // layout.tp)) * layout.tp
    hidden = torch.nn.functional.pad(real[own], (0, 0, 0, padded - count), value=9.0).unsqueeze(1).to(platform.device)
    leaf: Any = hidden.clone().requires_grad_()
    parts = (lambda x: x.chunk(layout.tp)[at.tp]) if row.split else (lambda x: x)
    out, bias = module(parts(leaf), LayerCall(count))
    assert bias is None
    upstream = torch.nn.functional.pad(weights[own, :count], (0, 0, 0, padded - count)).unsqueeze(1)
    out.backward(parts(upstream.to(platform.device)))
    if row.split and layout.tp > 1:
        dist.all_reduce(leaf.grad, group=groups.tp)
        out = tensor_parallel.gather_from_sequence_parallel_region(out.detach(), group=groups.tp)
    assert not leaf.grad[count:].any(), "padding is not routed"
    found = {"out": _apart(out[:count, 0], out_there), "input": _apart(leaf.grad[:count, 0], grad_there)}

    gradients = stored_of({name: p.grad for name, p in reference.named_parameters()}, row)
    parameters: dict[str, Any] = dict(module.named_parameters())
    for name, parameter in parameters.items():
        view = EXPERTS if name.startswith("experts.") else MAIN
        gradient = parameter.grad.clone()
        for axis in (*view.sum_axes, *(["tp"] if getattr(parameter, "sequence_parallel", False) else [])):
            dist.all_reduce(gradient, group=topology.group("text", axis))
        wanted = torch.zeros_like(gradient)
        load_slices(wanted, maps[name], [gradients[each.name][each.source] for each in maps[name]])
        found[name] = _apart(gradient, wanted)
    assert isinstance(module, ExpertMLPModule)
    loads = module.take_loads()
    assert not module.take_loads().any()
    dist.all_reduce(loads, group=topology.group("text", "tp"))
    dist.all_reduce(loads, group=topology.group("text", "sp", "cp", "dp"))
    chosen = reference.gate(given)[2]
    assert torch.equal(loads.cpu(), chosen.flatten().bincount(minlength=row.experts))
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    # With one expert its weight is 1, and the gradient of the router is rounding.
    one, other = one.detach().cpu(), other.detach().cpu()
    return float((one - other).norm() / other.norm().clamp(min=1.0))
