"""Sparse MLPs equal a block of `transformers` in one process, wherever tokens and experts are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from megatron_hetero.groups.local_group import SilentGroup
from megatron_hetero.groups.megatron import prepare, tensor_parallel
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import Share, load_slices
from megatron_hetero.layout.axes import EXPERTS, MAIN
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.layers import experts as layer
from megatron_hetero.models.layers import grouped
from megatron_hetero.models.layers.backend import TORCH
from megatron_hetero.models.layers.dispatch import Dispatch, Sizes, block
from megatron_hetero.models.layers.experts import ExpertMLP, ExpertMLPModule, _Experts, chunks
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.parts import LayerCall, Site
from megatron_hetero.models.layers.recompute import NO_RECOMPUTE, Recompute
from tests.support.pool import Pool

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
ROWS = [
    *EMPTY,
    Row("dp:1@0"),
    Row("dp:4,ep:1"),
    Row("dp:4,ep:2", shared=True),
    Row("dp:4,ep:4"),
    Row("dp:4,ep:4", experts=5, top_k=1),
    Row("dp:4,ep:4", experts=16, top_k=8, ffn=7),
    Row("tp:4,ep:4", shared=True),
    Row("tp:4,ep:2", shared=True, split=False),
    Row("tp:2,dp:2,ep:4", experts=7, top_k=3, split=False),
    Row("tp:2,cp:2,ep:4", recompute=Recompute("none", chunk=5)),
    Row("dp:4,ep:1", recompute=Recompute("none", chunk=1)),
    Row("dp:4,ep:4", experts=5, top_k=1, recompute=Recompute("none", chunk=2), dtype=torch.float64),
    Row("dp:4,ep:2", experts=7, top_k=3, recompute=Recompute("selective", chunk=3)),
    Row("sp:2,dp:2,ep:2", recompute=Recompute("selective")),
    Row("dp:4,ep:4", dtype=torch.float64),
    Row("dp:4,ep:4", experts=4, top_k=4),
]


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


ON_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_layer_equals_transformers(row: Row, pools: Callable[[int], Pool]) -> None:
    results = pools(4).run(differences, row)
    limit = 1e-12 if row.dtype == torch.float64 else 2e-6
    assert all(difference <= limit for found in results for difference in found.values()), results


COUNTS = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 5, 0, 33), (64, 0, 0, 0)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("one_kernel", [True, False], ids=["one kernel", "loop"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_experts_with_no_rows_or_one(
    counts: tuple[int, ...], one_kernel: bool, chunk: int, dtype: torch.dtype, device: str
) -> None:
    """On a GPU with one kernel for all experts in bfloat16, the loop is what others run."""
    generator, options = torch.Generator().manual_seed(sum(counts)), {"dtype": dtype, "device": device}
    site: Any = SimpleNamespace(recompute=Recompute("none", chunk), compile_layers=False)
    module = _Experts(ExpertMLP(24, 20, 4, 1, "mlp."), 4, site, options)
    chosen = torch.arange(4).repeat_interleave(torch.tensor(counts))[torch.randperm(sum(counts), generator=generator)]
    first, second, x, weights, cotangent = (
        torch.randn(*shape, generator=generator).bfloat16().double().requires_grad_()
        for shape in ((4, 48, 24), (4, 24, 24), (len(chosen), 24), (len(chosen),), (len(chosen), 24))
    )
    order = chosen.argsort(stable=True)
    gate, up = torch.einsum("ni,noi->no", x[order], first[chosen[order]]).chunk(2, 1)
    inner = torch.nn.functional.silu(gate) * up * weights[:, None]
    expected = torch.einsum("ni,noi->no", inner, second[chosen[order]])
    of_expected = torch.autograd.grad(expected, (x, weights, first, second), cotangent)

    module.first.data.copy_(first.detach().flatten(0, 1))
    module.second.data.copy_(second.detach().flatten(0, 1))
    rows, factors = (tensor.detach().to(**options).requires_grad_() for tensor in (x, weights))
    loops = mock.patch.object(layer, "is_grouped", return_value=False)
    with contextlib.nullcontext() if one_kernel else loops:
        out = module(rows, factors, Dispatch.of(chosen.to(device)[:, None], 4, SilentGroup(1)))
        out.backward(cotangent.detach().to(**options))
    found = (out, rows.grad, factors.grad, module.first.grad, module.second.grad)
    for one, other in zip(found, (expected, *of_expected), strict=True):
        assert one is not None and one.numel() == other.numel()
        assert _apart(one.view(other.shape).double(), other) <= (2e-6 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(
    "ends, limit, wanted",
    [
        ((3, 3, 5, 9), 5, [(0, 3, 0, 5), (3, 4, 5, 9)]),
        ((0, 0, 12, 12, 13), 5, [(0, 2, 0, 0), (2, 3, 0, 5), (2, 3, 5, 10), (2, 3, 10, 12), (3, 5, 12, 13)]),
        ((0, 7), 3, [(0, 1, 0, 0), (1, 2, 0, 3), (1, 2, 3, 6), (1, 2, 6, 7)]),
        ((7, 7), 7, [(0, 2, 0, 7)]),
        ((8, 8), 7, [(0, 1, 0, 7), (0, 1, 7, 8), (1, 2, 8, 8)]),
    ],
)
def test_chunks_have_whole_experts_or_a_part_of_one(
    ends: tuple[int, ...], limit: int, wanted: list[tuple[int, ...]]
) -> None:
    found = chunks(ends, limit)
    assert [(e.start, e.stop, r.start, r.stop) for e, r, _ in found] == wanted
    starts = (0, *ends)
    assert [continues for *_, continues in found] == [rows > starts[first] for first, _, rows, _ in wanted]


def chunked(chunk: int, dtype: torch.dtype, top_k: int = 2) -> dict[str, Tensor]:
    """What `experts` give for 1,024 tokens, and gradients, all of one sign so that errors of sums add up."""
    part, generator = ExpertMLP(64, 32, 4, top_k, "mlp."), torch.Generator().manual_seed(7)
    site: Any = SimpleNamespace(recompute=Recompute("none", chunk), compile_layers=False)
    module = _Experts(part, 4, site, {"dtype": dtype, "device": "cpu"})

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator).bfloat16().to(dtype)

    for parameter in module.parameters():
        parameter.data.copy_(drawn(*parameter.shape) / 8)
    dispatch = Dispatch.of(drawn(1024, 4).float().topk(top_k).indices, 4, SilentGroup(1))
    x, weights, cotangent = drawn(1024, 64), drawn(1024 * top_k), drawn(1024 * top_k, 64)
    out = module(x.requires_grad_(), weights.requires_grad_(), dispatch)
    out.backward(cotangent)
    gradients = {name: p.grad for name, p in (("x", x), ("weights", weights), *module.named_parameters())}
    return {"out": out.detach()} | {name: grad for name, grad in gradients.items() if grad is not None}


@pytest.mark.parametrize("pieces", [2, 16, 128])
def test_gradients_of_chunks_are_as_exact_as_those_of_one_product(pieces: int) -> None:
    exact, whole = chunked(0, torch.float32), chunked(0, torch.bfloat16)
    found = chunked(1024 // pieces, torch.bfloat16)
    for name, expected in exact.items():
        errors = [float((x[name].float() - expected).norm() / expected.norm()) for x in (found, whole)]
        assert errors[0] <= 1.2 * errors[1] + 1e-4, (name, errors)


def test_a_chunk_writes_gradients_of_its_experts_only() -> None:
    written = []
    real = grouped.outer_products

    def counted(*given: Any) -> Tensor:
        written.append(len(found := real(*given)))
        return found

    with mock.patch.object(grouped, "outer_products", counted):
        chunked(600, torch.float32)
    assert sum(written) == 2 * 4 and len(written) >= 4


def test_chunks_count_tokens() -> None:
    """Of which each is as many pairs as it has experts."""
    with mock.patch.object(layer, "chunks", side_effect=layer.chunks) as cut:
        chunked(1024, torch.float32)
        assert not cut.called
        chunked(1023, torch.float32)
        cut.assert_called_once_with(mock.ANY, 2046)


@pytest.mark.parametrize(
    "dtype, capability, one_kernel",
    [
        (torch.bfloat16, (7, 5), False),
        (torch.bfloat16, (8, 0), False),
        (torch.bfloat16, (8, 9), False),
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 3), True),
        (torch.bfloat16, (11, 0), False),
        (torch.bfloat16, (12, 0), False),
        (torch.float32, (9, 0), False),
    ],
)
def test_gpus_with_one_kernel_for_all_experts(
    dtype: torch.dtype, capability: tuple[int, int], one_kernel: bool
) -> None:
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability), FakeTensorMode():
        assert layer.is_grouped(torch.empty(3, 16, dtype=dtype, device="cuda"), 16, 32) is one_kernel
        assert not layer.is_grouped(torch.empty(3, 12, dtype=torch.bfloat16, device="cuda"), 12)


def test_blocks_of_experts() -> None:
    for experts in (1, 5, 6, 128):
        for ranks in (1, 2, 3, 4, 5):
            blocks = [block(experts, rank, ranks) for rank in range(ranks)] if ranks <= experts else []
            sizes = [stop - start for start, stop in blocks]
            assert [start for start, _ in blocks] == np.cumsum([0, *sizes])[:-1].tolist()
            assert not sizes or (sum(sizes) == experts and max(sizes) - min(sizes) <= 1 and min(sizes) > 0)


def test_expected_sizes() -> None:
    sizes = Sizes.expected(1000, 8, 8, 1.5)
    assert sum(sizes.sent) == 8 * round(1000 * (1 - (7 / 8) ** 8)) and sizes.pairs == 12000
    assert sum(sizes.received) == pytest.approx(1.5 * sum(sizes.sent), abs=8)
