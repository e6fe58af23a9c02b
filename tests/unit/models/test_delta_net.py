"""Gated delta nets under every axis, against Qwen3.5's of `transformers` on every sample alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.megatron import ModuleGroups, prepare, prepare_globals
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import Share, held, load_slices
from megatron_hetero.layout.axes import Limit
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.modules import resolve
from megatron_hetero.models.families.qwen3_vl.shapes import TextShape, VisionShape
from megatron_hetero.models.layers import delta_net
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.backend import TORCH
from megatron_hetero.models.layers.delta_net import DeltaNet
from megatron_hetero.models.layers.linear import fuse_exchanges
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.parts import AttentionPart, Site, Tokens
from megatron_hetero.models.layers.recompute import Recompute
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.shapes import ModelShapes
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.unit.models.delta_nets import HIDDEN, KEY_DIM, TAPS, VALUE_DIM, matrix, theirs
from tests.unit.models.packs import assign

PLATFORM = Platform(CPU, "gloo")
ROUNDING = 1e-4
"""Largest error of an output or gradient over its norm."""
PACKS = ((16, 7, 1, 3), (65, 2, 127), (1,), (3, 64, 63))


def delta(key_heads: int, value_heads: int) -> DeltaNet:
    norm = Norm(VALUE_DIM, 1e-6)
    return DeltaNet(HIDDEN, key_heads, value_heads, KEY_DIM, VALUE_DIM, TAPS, norm, stored="")


def groups_of(layout: str) -> ModuleGroups:
    prepare(PLATFORM)
    prepare_globals(seed=0)
    return Topology.build({"text": Layout.parse(layout, dist.get_world_size())}, PLATFORM).collection("text")


def compare(
    layout: str, heads: tuple[int, int] = (2, 4), *, overlaps: bool = False, how: str = "ragged", **of_site: Any
) -> None:
    """Output and all gradients of a layer under `layout` are those of transformers, sample by sample."""
    groups = groups_of(layout)
    module, part, tp = theirs(heads), delta(*heads), groups.tp.size()
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
    if overlaps:
        fuse_exchanges(model, gpu=False)
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
            # Sums of terms a thousand times as large, which transformers' own misses by 4e-4.
            close(found.view_as(grad), grad, 1e-3 if name == "A_log" else ROUNDING)


def close(found: Tensor, expected: Tensor, error: float = ROUNDING) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).detach().norm()) <= error * float(expected.detach().norm()) + 1e-6


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
    compare(layout, overlaps=True)


FOUR_RANKS = [
    ("tp:4", (2, 4)),
    ("tp:2,sp:2", (1, 6)),
    ("sp:2,cp:2", (1, 3)),
    ("sp:4", (2, 6)),
    ("cp:4", (2, 6)),
    ("cp:4", (1, 3)),
    ("tp:2,cp:2", (2, 6)),
    ("tp:4", (3, 12)),
    ("sp:4", (1, 1)),
]


@pytest.mark.parametrize("layout, heads", thinned(FOUR_RANKS, 2))
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


# ------------------------------------------------------------------------------------------ sequences of a pack


def built(groups: ModuleGroups, heads: tuple[int, int], **of_site: Any) -> Any:
    """A layer with some weights, the same on all ranks without tp."""
    layer = delta(*heads).build(Site(groups, PLATFORM, TORCH, torch.float32, groups.tp.size() > 1, **of_site), 0)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return layer


def seen_across(groups: ModuleGroups, model: Any, lengths: tuple[int, ...], target: tuple[int, int]) -> Tensor:
    """Norms of the gradients of all tokens of a pack of a sum of the outputs of the tokens [start, stop)."""
    total, generator = sum(lengths), torch.Generator().manual_seed(1)
    x, c = (torch.randn(total, 1, HIDDEN, generator=generator) for _ in "xc")
    mine, params = assign(lengths, groups, True, "even")
    own = x[mine].requires_grad_()
    out, _ = model(own, torch.zeros(2, len(mine), 2), params)
    counts = torch.tensor((mine >= target[0]) & (mine < target[1]))
    (out * c[mine])[counts].sum().backward()
    assert own.grad is not None
    found = torch.zeros(total)
    found[mine] = own.grad.flatten(1).norm(dim=1)
    dist.all_reduce(found)
    return found


@pytest.mark.parametrize("layout", ["dp:2", "sp:2", "cp:2"])
@on_ranks(2)
def test_tokens_have_gradients_of_their_own_sequence_alone(layout: str) -> None:
    """Exactly zero elsewhere. In one sequence of the same tokens they are not, for the state and the convolution."""
    groups = groups_of(layout)
    for how in ("none", "selective"):
        model = built(groups, (2, 4), recompute=Recompute(how))  # pyright: ignore[reportArgumentType]
        for lengths in ((5, 1, 2, 3, 70, 4), (64, 64, 65), (1, 1, 1)):
            for start, stop in pairwise(accumulate(lengths, initial=0)):
                found = seen_across(groups, model, lengths, (start, stop))
                assert (found[start:stop] > 0).all()
                assert not found[:start].any() and not found[stop:].any(), (lengths, start)
        merged = seen_across(groups, model, (5 + 1 + 2,), (6, 8))
        assert merged[:6].all(), "two tokens are reached by the convolution alone, the others through the state"


@on_ranks(1)
def test_sequences_by_themselves_are_those_of_a_pack() -> None:
    """Outputs do not depend on what else is in the pack, nor where: not even in rounding of other sequences' state."""
    groups = groups_of("dp:1")
    model, lengths = built(groups, (2, 4)), (3, 1, 66, 2)
    x = torch.randn(sum(lengths), 1, HIDDEN, generator=torch.Generator().manual_seed(1))
    found = []
    for scale in (1.0, 1e4):  # Of all sequences but the third.
        others = torch.full((sum(lengths), 1, 1), scale)
        others[4:70] = 1
        _, params = assign(lengths, groups, True, "even")
        out, _ = model(x * others, torch.zeros(2, len(x), 2), params)
        found.append(out[4:70])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_chunks_of_sequences_of_unknown_lengths_are_refused() -> None:
    groups = groups_of("cp:2")
    model, lengths = built(groups, (2, 4)), (8, 5)
    mine, params = assign(lengths, groups, True, "even")
    without = AttentionParams(params.full, params.sp_lengths, params.cp_lengths)
    with pytest.raises(AssertionError, match="unknown lengths"):
        model(torch.zeros(len(mine), 1, HIDDEN), torch.zeros(2, len(mine), 2), without)
    alone = AttentionParams(PackedSegments.of(lengths, CPU), (13,), (13,))
    assert alone.sequences.lengths == lengths, "those of one member are whole"


# ------------------------------------------------------------------------------- limits, copies and operations


@dataclass(frozen=True)
class WithDeltaNets(TextShape):
    """Three of four layers are gated delta nets."""

    def attention(self, number: int) -> AttentionPart:
        return super().attention(number) if number % 4 == 3 else delta(2, 6)


def module_shape(layers: int) -> Any:
    text = WithDeltaNets(layers, HIDDEN, 4, 2, 16, 48, 64, False, 1e4, (4, 2, 2), 1e-6)
    vision = VisionShape(1, HIDDEN, 4, 8, 3, 14, 2, 2, HIDDEN, 1e4, table_side=2, deepstack=())
    return ModelShapes({"vision": vision}, text).module_shapes()["text"]


def test_layouts_are_limited_by_value_heads_over_tp_alone() -> None:
    assert delta(2, 6).limits == (Limit(("tp",), 6, "delta net", "value heads"),)
    with pytest.raises(
        UserError,
        match=r"found delta net of layers 0, 1, 2, 4, … has 6 value heads and tp:4, expected tp to divide 6",
    ):
        resolve({"text": "tp:4"}, {"text": module_shape(8)}, 4)
    with pytest.raises(UserError, match="found attention of layers 3, 7 has 4 heads and tp:3, expected tp to divide 4"):
        resolve({"text": "tp:3"}, {"text": module_shape(8)}, 3)
    only = module_shape(3)  # Delta nets alone.
    for text, ranks in (("sp:5", 5), ("cp:7", 7), ("sp:4,cp:4", 16), ("tp:6,sp:5,cp:3", 90), ("tp:3", 3)):
        assert str(resolve({"text": text}, {"text": only}, ranks)["text"]).startswith(text)


@pytest.mark.parametrize(
    "heads, tp, copies", [((2, 8), 2, 1), ((2, 8), 4, 2), ((2, 8), 8, 4), ((2, 6), 3, 3), ((1, 4), 4, 4)]
)
def test_key_heads_are_copied_where_tp_does_not_divide_them(heads: tuple[int, int], tp: int, copies: int) -> None:
    """Rows of key heads have as many copies over all ranks, all else has one; and nothing is missing."""
    part = delta(*heads)
    maps = [part.slices("", Share(rank, tp)) for rank in range(tp)]
    rows_of_keys, values = 2 * heads[0] * KEY_DIM, heads[1] * VALUE_DIM
    for name in maps[0]:
        times = Counter[tuple[str, int, int]]()
        for of_rank in maps:
            for each in of_rank[name]:
                columns = range(*each.columns) if each.columns else range(1)
                times.update((each.name, row, column) for row in range(*each.rows) for column in columns)
        for (tensor, row, _), number in times.items():
            of_keys = tensor in ("in_proj_qkv.weight", "conv1d.weight") and row < rows_of_keys
            assert number == (tp if name.startswith("norm.") else copies if of_keys else 1), (name, tensor, row)
        for tensor in {each.name for each in maps[0][name]}:
            rows, columns = part.tensors()[tensor][0], values if name == "out_proj.weight" else 1
            assert sum(of == tensor for of, _, _ in times) == rows * columns
    for of_rank in held(maps):
        replicated = {name for name, each in of_rank.items() if each.replicated_slices}
        assert replicated == ({"conv_weight", "in_proj.weight"} if copies > 1 else set())
    of_one = part.heads_of(tp)
    assert of_one.value_count == heads[1] // tp and of_one.key_count == heads[0] * copies // tp


def test_operations_are_linear_in_tokens() -> None:
    part = delta(2, 6)
    one = part.operations(Tokens([1]))
    products = [shape for name, shape in part.tensors().items() if "proj" in name]
    assert one.linear == 2 * sum(map(prod, products))
    assert one.attention == 3 * 2 * 6 * KEY_DIM * VALUE_DIM, "of the state with a key, a value and a query"
    for sequences in ((5,), (4000,), (3, 1, 66), (1,) * 70, ()):
        assert part.operations(Tokens(sequences)) == tuple(sum(sequences) * each for each in one)


@on_ranks(1)
def test_bfloat16_is_no_less_exact_than_transformers() -> None:
    """Errors of outputs and gradients, against fp32 on the same rounded values, beside those of transformers' own."""
    groups, heads, lengths = groups_of("dp:1"), (2, 4), (127, 64, 3)
    errors = dict[str, list[float]]()
    for seed in range(4):
        exact = theirs(heads)
        generator = torch.Generator().manual_seed(seed)
        for parameter in exact.parameters():
            parameter.data.normal_(std=0.3, generator=generator).copy_(parameter.bfloat16())
        x, c = (torch.randn(1, sum(lengths), HIDDEN, generator=generator).bfloat16().float() for _ in "xc")

        def alone(module: Any, dtype: torch.dtype, x: Tensor = x, c: Tensor = c) -> dict[str, Tensor]:
            own = x.detach().to(dtype).requires_grad_()
            out = torch.cat([module(each) for each in own.split(lengths, dim=1)], dim=1)
            out.backward(c.to(dtype))
            gradients = {name: p.grad.float() for name, p in module.named_parameters() if p.grad is not None}
            assert own.grad is not None
            return {"out": out.detach().float(), "x": own.grad.float(), **gradients}

        want = alone(exact, torch.float32)
        half = theirs(heads).bfloat16()
        half.load_state_dict(exact.state_dict())
        peer = alone(half, torch.bfloat16)

        part = delta(*heads)
        model = part.build(Site(groups, PLATFORM, TORCH, torch.bfloat16, False), 0)
        slices, whole = part.slices("", Share(0, 1)), dict(half.named_parameters())
        for name, parameter in model.named_parameters():
            load_slices(parameter, slices[name], [matrix(whole[s.name].detach())[s.source] for s in slices[name]])
        _, params = assign(lengths, groups, True, "even")
        own = x.detach().bfloat16().transpose(0, 1).requires_grad_()
        out, _ = model(own, torch.zeros(2, sum(lengths), 2), params)
        out.backward(c.bfloat16().transpose(0, 1))
        assert own.grad is not None
        ours = {"out": out.detach().transpose(0, 1).float(), "x": own.grad.transpose(0, 1).float()}
        ours |= {name: torch.zeros_like(matrix(p)).float() for name, p in whole.items()}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            for each in slices[name]:
                ours[each.name][each.source] += parameter.grad[each.place].float()
        for name, exactly in want.items():
            mine, other = (float((each.view_as(exactly) - exactly).norm()) for each in (ours[name], peer[name]))
            errors.setdefault(name, []).append(mine / other)
    for name, ratios in errors.items():
        assert sum(ratios) / len(ratios) < 1.2, (name, ratios)
