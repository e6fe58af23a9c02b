"""Gated attention with partial rotary embedding and norms whose weights are centred at zero, against Qwen3.5's of
`transformers` on every sample alone; and layers of one language model that differ in attention and norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.data.token_shards import SequenceShard
from megatron_hetero.estimate import measured
from megatron_hetero.estimate.allocations import META
from megatron_hetero.groups.megatron import ModuleGroups, prepare, prepare_globals, without_processes
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import Share, load_slices
from megatron_hetero.job.module import ModuleJob
from megatron_hetero.layout.axes import Limit
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.modules import resolve
from megatron_hetero.layout.pipeline import cut_stages
from megatron_hetero.models.families.qwen3_vl.shapes import TextShape, VisionShape
from megatron_hetero.models.layers import attention, layer
from megatron_hetero.models.layers.attention import SelfAttention
from megatron_hetero.models.layers.backend import TORCH
from megatron_hetero.models.layers.kernels import torch_flash
from megatron_hetero.models.layers.linear import fuse_exchanges
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.parts import FORWARD, AttentionPart, Site, Tokens
from megatron_hetero.models.layers.recompute import Recompute
from megatron_hetero.models.layers.rotary import MultimodalRotary
from megatron_hetero.models.shapes import ModelShapes
from tests.support import head_passes
from tests.support.ranks import on_ranks
from tests.unit.models.packs import assign

PLATFORM = Platform(CPU, "gloo")
HIDDEN, HEADS, DIM, WIDTH, THETA = 32, 8, 16, 8, 100.0
SECTIONS, TURNS = [2, 1, 1], (0, 1, 2, 0)
PACKS = ((16, 7, 1, 3), (3, 2), (1,))
STORED = "q_proj", "k_proj", "v_proj", "o_proj"


def gated_attention(kv_heads: int, stored: tuple[str, ...] = STORED, *, biased: bool = False) -> SelfAttention:
    norm = Norm(DIM, 1e-6, offset=1)
    return SelfAttention(
        *(HIDDEN, HEADS, kv_heads, DIM),
        *(stored, True, False, biased, biased),
        *(norm, ("q_norm", "k_norm")),
        gated=True,
    )


def theirs(kv_heads: int, *, biased: bool = False) -> tuple[Qwen3_5Attention, Qwen3_5TextRotaryEmbedding]:
    rope = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": WIDTH / DIM}
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=DIM,
        attention_bias=biased,
        rope_parameters=rope | {"mrope_section": SECTIONS},
    )
    config._attn_implementation = "sdpa"
    module, generator = Qwen3_5Attention(config, 3), torch.Generator().manual_seed(0)  # pyright: ignore[reportArgumentType]
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return module, Qwen3_5TextRotaryEmbedding(config)


def results_of_theirs(module: Any, rotary: Any, x: Tensor, positions: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The output for a pack [n, 1, hidden], sample by sample."""
    outs = []
    for sample, own in zip(x.split(lengths), positions.split(lengths, dim=1), strict=True):
        batch = sample.transpose(0, 1)
        outs.append(module(batch, rotary(batch, own[:, None]), None)[0].transpose(0, 1))
    return torch.cat(outs)


def groups_of(layout: str) -> ModuleGroups:
    prepare(PLATFORM)
    prepare_globals(seed=0)
    return Topology.build({"text": Layout.parse(layout, dist.get_world_size())}, PLATFORM).collection("text")


def compare(layout: str, kv_heads: int, *, overlaps: bool = False, biased: bool = False, **of_site: Any) -> None:
    """Output and all gradients of a layer under `layout` are those of transformers."""
    groups = groups_of(layout)
    module, rotary = theirs(kv_heads, biased=biased)
    part, tp = gated_attention(kv_heads, biased=biased), groups.tp.size()
    assert part.tensors() == {name: tuple(p.shape) for name, p in module.named_parameters()}
    model = part.build(Site(groups, PLATFORM, TORCH, torch.float32, tp > 1, **of_site), 0)
    slices, whole = part.slices("", Share(groups.tp.rank(), tp)), dict(module.named_parameters())
    assert list(slices) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        load_slices(parameter, slices[name], [whole[s.name].detach()[s.source] for s in slices[name]])
    if overlaps:
        fuse_exchanges(model, gpu=False)
    for lengths in PACKS:
        total, generator = sum(lengths), torch.Generator().manual_seed(1)
        x, c = (torch.randn(total, 1, HIDDEN, generator=generator) for _ in "xc")
        positions = torch.randint(0, 40, (3, total), generator=generator)
        module.zero_grad()
        expected = results_of_theirs(module, rotary, x.requires_grad_(), positions, lengths)
        expected.backward(c)

        mine, params = assign(lengths, groups, True, "ragged")
        share = max(1, -(-len(mine) // tp))
        rows = slice(share * groups.tp.rank(), share * (groups.tp.rank() + 1))
        own, own_c = (F.pad(f.detach()[mine], (0, 0, 0, 0, 0, share * tp - len(mine)))[rows] for f in (x, c))
        table = MultimodalRotary(THETA, WIDTH, TURNS).table(positions[:, mine])
        out, bias = model(own.requires_grad_(), table, params)
        out = out if bias is None else out + bias
        out.backward(own_c)
        tokens = mine[rows]
        assert own.grad is not None and x.grad is not None
        torch.testing.assert_close(out[: len(tokens)], expected.detach()[tokens], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own.grad[: len(tokens)], x.grad[tokens], rtol=1e-4, atol=1e-5)
        gathered = {name: torch.zeros_like(p) for name, p in whole.items()}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            for each in slices[name]:
                gathered[each.name][each.source] += parameter.grad[each.place]
            parameter.grad = None
        for name, found in gathered.items():
            dist.all_reduce(found)
            torch.testing.assert_close(found, whole[name].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["none", "selective"])
@on_ranks(1)
def test_one_process(how: str) -> None:
    for kv_heads in (8, 2, 1):
        compare("dp:1", kv_heads, recompute=Recompute(how), biased=kv_heads == 2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("layout", ["tp:2", "sp:2", "cp:2"])
@on_ranks(2)
def test_two_ranks(layout: str) -> None:
    compare(layout, 2)
    compare(layout, 1, recompute=Recompute("selective"))
    compare(layout, 2, overlaps=True)


@pytest.mark.parametrize("layout, kv_heads", [("tp:4", 2), ("tp:2,sp:2", 1), ("sp:2,cp:2", 2), ("sp:4", 2)])
@on_ranks(4)
def test_four_ranks_with_copies_of_keys(layout: str, kv_heads: int) -> None:
    compare(layout, kv_heads)


@on_ranks(2)
def test_as_the_compiler_gets_it() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for file in (attention, layer):
            patch.setattr(file, "run", lambda function, *inputs: function(*inputs))
        for layout in ("tp:2", "sp:2", "cp:2"):
            compare(layout, 2, compile_layers=True)
            compare(layout, 1, compile_layers=True, recompute=Recompute("selective"))


@on_ranks(2)
def test_as_on_a_gpu() -> None:
    """With heads normed and rotated in one pass, for which the projection is saved, with gates and values."""
    with pytest.MonkeyPatch.context() as patch:
        head_passes.replace_kernels(patch, attention)
        patch.setattr(layer, "run", lambda function, *inputs: function(*inputs))
        for layout in ("tp:2", "sp:2", "cp:2"):
            for how in ("none", "selective"):
                compare(layout, 2, recompute=Recompute(how), compile_layers=True)
                compare(layout, 1, recompute=Recompute(how), biased=True)


@on_ranks(1)
def test_saved_projections_may_be_laid_out_in_another_way() -> None:
    """As after hooks that copy what is saved, of which gates and values are views."""
    with pytest.MonkeyPatch.context() as patch:
        head_passes.replace_kernels(patch, attention)
        for how in ("none", "selective"):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
            ):
                compare("dp:1", 2, recompute=Recompute(how))


def test_one_tensor_of_queries_with_gates_keys_and_values() -> None:
    """A folder may store them as one: the shares are those of three tensors, one below the other."""
    one, three = gated_attention(2, ("qkv", "o_proj")), gated_attention(2)
    assert one.tensors()["qkv.weight"] == ((2 * HEADS + 4) * DIM, HIDDEN)
    offsets = {"q_proj.weight": 0, "k_proj.weight": 2 * HEADS * DIM, "v_proj.weight": (2 * HEADS + 2) * DIM}
    for share in (Share(0, 1), Share(1, 2), Share(3, 4)):
        moved = [
            (each.rows[0] + offsets[each.name], each.rows[1] + offsets[each.name], each.at)
            for each in three.slices("", share)["linear_qkv.weight"]
        ]
        assert moved == [(*each.rows, each.at) for each in one.slices("", share)["linear_qkv.weight"]]


def test_gates_are_products_that_count() -> None:
    part = gated_attention(2)
    plain, tokens = replace(part, gated=False), Tokens([5, 3])
    more = part.operations(tokens).of(FORWARD) - plain.operations(tokens).of(FORWARD)
    assert more == 2 * 8 * HIDDEN * HEADS * DIM


# ----------------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1)
def test_zero_centred_norms(dtype: torch.dtype) -> None:
    """Computed, and its gain added, in fp32, and rounded once, as theirs."""
    site = Site(groups_of("dp:1"), PLATFORM, TORCH, dtype, sequence_parallel=False)
    norm: Any = Norm(64, 1e-6, offset=1).build(site, 0)
    # In bfloat16 the sum of one and these is one.
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0)) / 700
    reference = Qwen3_5RMSNorm(64).to(dtype)
    norm.weight.data.copy_(weight)
    reference.weight.data.copy_(weight)
    found = []
    for each in (norm, reference):
        x = torch.randn(9, 1, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        out = each(x)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out))
        found.append([out.detach(), x.grad, each.weight.grad])
    torch.testing.assert_close(*found)
    plain: Any = Norm(64, 1e-6).build(site, 0)
    plain.weight.data.copy_(1 + weight.to(dtype).float())
    if dtype == torch.bfloat16:
        assert not torch.equal(plain(x), found[0][0]), "the gain is not rounded"


@on_ranks(1)
def test_zero_centred_layer_norms() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        site = Site(groups_of("dp:1"), PLATFORM, TORCH, dtype, sequence_parallel=False)
        built: list[Any] = [Norm(24, 1e-6, rms=False, offset=offset).build(site, 0) for offset in (1, 0)]
        built[0].weight.data.zero_()
        x = torch.randn(5, 1, 24).to(dtype)
        torch.testing.assert_close(built[0](x), built[1](x))


# ---------------------------------------------------------------------------------- layers that differ


@dataclass(frozen=True)
class MixedShape(TextShape):
    """Every second layer has gated attention; all norms are centred at zero."""

    def norm(self, number: int) -> Norm:
        return replace(super().norm(number), offset=1)

    def attention(self, number: int) -> AttentionPart:
        plain = super().attention(number)
        assert isinstance(plain, SelfAttention)
        return replace(plain, gated=True) if number % 2 else plain

    @property
    def turns(self) -> tuple[int, ...]:
        return super().turns[: self.head_dim // 4]


@pytest.mark.parametrize("head_dim, flash", [(256, True), (288, False)])
def test_plans_measure_the_kernel_for_the_head_of_a_layer(head_dim: int, flash: bool) -> None:
    """Not for the part of it that is rotated, which fits either kernel."""
    shape = MixedShape(2, 64, 4, 2, head_dim, 48, 64, False, 1e4, (head_dim // 2, 0, 0), 1e-6)
    layout, stages = Layout.parse("dp:1", 1), cut_stages(2, 1)
    job = ModuleJob("text", "text", shape, "", layout, stages, frozenset(), ModuleConfig(), torch.bfloat16)
    alone = measured.Measured.of(job, gpu=True, imbalance=1)
    assert shape.rotary.width == head_dim // 2
    for number in (0, 1):
        with without_processes(META):
            built = measured._built(alone, measured.Submodule("layer", number))
        assert (built.layers[0].self_attention.core_attention.kernel is torch_flash) == flash
    shard = SequenceShard(512, 512, 1, (512,), (512,), AttentionSegments((512,), (512,)))
    plain, gated = (measured.measure(alone, measured.Submodule("layer", number), shard).saved for number in (0, 1))
    assert gated - plain == 512 * 4 * head_dim * 2, "the gate: the rest is computed again"


def test_stages_are_cut_by_costs_of_layers() -> None:
    class Dear(MixedShape):
        def layer_costs(self, tokens: int) -> Sequence[float]:
            layers = self.architecture.layers
            return [each.operations(Tokens([tokens])).of(FORWARD) for each in layers]

    plain = TextShape(4, 32, 4, 2, 16, 48, 64, False, 1e4, (4, 2, 2), 1e-6)
    assert plain.layer_costs(1024) is None
    costs = Dear(**vars(plain)).layer_costs(1024)
    assert costs[0] == costs[2] < costs[1] == costs[3]
    assert [stage.last for stage in cut_stages(4, 3, costs=costs)] == [1, 3, 4]


def test_a_family_gives_each_layer_its_own_attention_and_norms() -> None:
    plain = TextShape(4, 32, 4, 2, 16, 48, 64, False, 1e4, (4, 2, 2), 1e-6)
    mixed = MixedShape(**vars(plain))
    tensors, before = mixed.architecture.tensors, plain.architecture.tensors
    changed = {name for name, shape in tensors.items() if shape != before[name]}
    assert tensors.keys() == before.keys()
    assert changed == {f"model.layers.{number}.self_attn.q_proj.weight" for number in (1, 3)}
    norms = [norm for each in mixed.architecture.layers for norm in each.norms]
    final = next(end.part for end in mixed.architecture.ends if end.name == "final_layernorm")
    assert {norm.offset for norm in [*norms, final]} == {1}  # pyright: ignore[reportAttributeAccessIssue]
    assert mixed.rotary.width == 8 and plain.rotary.width == 16
    assert mixed.rotary.table(torch.zeros(3, 5, dtype=torch.int64)).shape == (2, 5, 8)


@dataclass(frozen=True)
class Unlimited(SelfAttention):
    """A kind of layer whose exchange over sp takes any number of heads."""

    @property
    def limits(self) -> tuple[Limit, ...]:
        return (Limit(("tp",), self.heads, "unlimited attention"),)


@dataclass(frozen=True)
class OtherShape(TextShape):
    def attention(self, number: int) -> AttentionPart:
        plain = super().attention(number)
        fields: dict[str, Any] = vars(plain) | {"heads": 6, "kv_heads": 6}
        return Unlimited(**fields) if number % 2 == 0 else plain


def test_limits_of_a_layout_are_those_of_its_layers() -> None:
    plain = TextShape(4, 32, 4, 2, 16, 48, 64, False, 1e4, (4, 2, 2), 1e-6)
    assert plain.architecture.limits == (Limit(("tp", "sp"), 4),)
    vision = VisionShape(1, 32, 4, 8, 3, 14, 2, 2, 32, 1e4, table_side=2, deepstack=())
    shape = ModelShapes({"vision": vision}, OtherShape(**vars(plain))).module_shapes()["text"]
    assert resolve({"text": "tp:2,sp:2"}, {"text": shape}, 4)["text"].sp == 2
    for text, found in (
        ("sp:8", "attention of layers 1, 3 has 4 heads, tp:1 and sp:8, expected tp·sp to divide 4"),
        ("tp:4", "unlimited attention of layers 0, 2 has 6 heads and tp:4, expected tp to divide 6"),
    ):
        with pytest.raises(UserError, match=found):
            resolve({"text": text}, {"text": shape}, 8)
