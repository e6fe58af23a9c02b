"""Layers and ends as values: operations by hand and by PyTorch's own counter, the order of weights, mixed layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, WeightMap, held, split_rows
from megatron_hetero.layout.pipeline import PipelineStage, cut_stages
from megatron_hetero.models.architecture import Architecture, End
from megatron_hetero.models.layers.attention import SelfAttention
from megatron_hetero.models.layers.ends import Head, Merger, PatchEmbedding, TokenEmbedding
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.parts import FORWARD, LayerCall, Operations, Passes, Site, Tokens
from megatron_hetero.models.stages import ModuleStage
from tests.support.stages import lone_site

NORM = Norm(8, 1e-6)
GATED = MLP(8, 16, ("gate", "up", "down"))
PICTURES, WINDOWS = [16, 8], [8, 8, 8]


def attention(heads: int = 2, kv_heads: int = 2, *, causal: bool = False, windowed: bool = False) -> SelfAttention:
    return SelfAttention(8, heads, kv_heads, 4, ("q", "k", "v", "out"), causal, windowed)


def layer(mlp: Any = GATED, **kind: Any) -> Layer:
    return Layer(attention(**kind), mlp, (NORM, NORM), ("norm1", "norm2"))


def encoder(mlp: Any = GATED, deeper: tuple[int, ...] = ()) -> Architecture:
    merger = Merger(8, 4, 6, NORM, ("norm", "fc1", "fc2"))
    return Architecture(
        End("patch_embed", PatchEmbedding((12,), 8, bias=False), "patch_embed.", "first"),
        (layer(mlp), *[layer(mlp, windowed=True)] * 3),
        (
            End("merger", merger, "merger.", "last", output="rows", projector=True),
            *(End(f"merger_{i}", merger, f"mergers.{i}.", i, output=f"rows.{i}", projector=True) for i in deeper),
        ),
        "blocks.",
    )


def decoder(layers: int = 2, tied: bool = False) -> Architecture:
    head = End("output_layer", Head(32, 8), "head.", "last")
    return Architecture(
        End("embedding", TokenEmbedding(32, 8), "table.", "first"),
        (layer(kv_heads=1, causal=True),) * layers,
        (
            End("final_layernorm", NORM, "norm.", "last"),
            replace(head, stored="table.", copies="embedding") if tied else head,
        ),
        "layers.",
    )


# ------------------------------------------------------------------------------------------------ operations


def test_an_encoder_by_hand() -> None:
    embedding = 2 * 24 * 12 * 8
    blocks = 4 * 2 * 24 * (8 * 24 + 8 * 8 + 3 * 8 * 16)
    full = 1 * 2 * 2 * 8 * (16 * 16 + 8 * 8)
    windowed = 3 * 2 * 2 * 8 * (3 * 8 * 8)
    merger = 2 * 6 * (32 * 32 + 32 * 6)
    tokens = Tokens(PICTURES, WINDOWS)
    found = encoder().operations(tokens, passes=FORWARD)
    assert found == embedding + blocks + full + windowed + merger
    # In training every product is computed three times, but the input needs no gradient.
    assert encoder().operations(tokens) == 3 * found - embedding
    # Stages share the operations.
    stages = cut_stages(4, 3, module="vision")
    assert sum(encoder().operations(tokens, stage, FORWARD) for stage in stages) == found


def test_an_encoder_without_gates_and_with_more_mergers() -> None:
    tokens = Tokens(PICTURES, WINDOWS)
    plain = MLP(8, 16, ("up", "down"), "gelu_tanh", gated=False)
    found, gated = (a.operations(tokens, passes=FORWARD) for a in (encoder(plain, deeper=(1, 2)), encoder()))
    merger = encoder().ends[0].part.operations(tokens).of(FORWARD)
    assert found == gated - 4 * 2 * 24 * 8 * 16 + 2 * merger


def test_a_decoder_by_hand() -> None:
    blocks = 2 * 2 * 8 * (8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 16)
    causal = 2 * 2 * 2 * 8 * (1 + 2 + 3 + 1 + 2 + 3 + 4 + 5)
    logits = 2 * 4 * 8 * 32
    tokens = Tokens([3, 5], supervised=4)
    assert decoder().operations(tokens, passes=FORWARD) == blocks + causal + logits
    assert decoder().operations(tokens) == 3 * (blocks + causal + logits)


def test_frozen_parts_cost_what_the_gradients_of_others_need() -> None:
    inputs, weights = Passes(inputs=True, weights=False), Passes(inputs=False, weights=True)
    assert Operations(10, 0).of(inputs) == Operations(10, 0).of(weights) == 20
    assert Operations(0, 10).of(inputs) == Operations(0, 10).of(weights) == 30
    tokens, merger = Tokens(PICTURES, WINDOWS), encoder().ends[0].part
    frozen = encoder().operations(tokens, passes=FORWARD, projector=weights)
    assert frozen - encoder().operations(tokens, passes=FORWARD) == merger.operations(tokens).of(FORWARD)


def test_nothing_costs_nothing() -> None:
    assert encoder().operations(Tokens([])) == decoder().operations(Tokens([])) == 0


def test_windows_must_hold_what_the_sequences_hold() -> None:
    with pytest.raises(AssertionError, match="16 tokens, windows 8"):
        encoder().operations(Tokens([16], [8]))


def test_a_decoder_against_pytorch() -> None:
    """Causal attention is half of what PyTorch counts for one that is not, so it is taken out and put back."""
    length, heads = 6, 2
    x = torch.randn(length, 8, requires_grad=True)
    weights = [torch.randn(shape, requires_grad=True) for shape in ((8, 8), (8, 4), (8, 4), (8, 8))]
    gate, up, down = (torch.randn(shape, requires_grad=True) for shape in ((8, 16), (8, 16), (16, 8)))
    head = torch.randn(8, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        q, k, v = (x @ w for w in weights[:3])
        k, v = (t.view(length, heads, 2).repeat_interleave(2, dim=-1) for t in (k, v))
        q = q.view(length, heads, 4)
        scores = torch.einsum("qhd,khd->hqk", q, k).softmax(-1)
        y = torch.einsum("hqk,khd->qhd", scores, v).reshape(length, 8) @ weights[3]
        logits = ((torch.relu(y @ gate) * (y @ up)) @ down) @ head
        logits.sum().backward()
    causal = 3 * 4 * 8 * (length * (length + 1) // 2)
    whole = 3 * 4 * 8 * length * length
    found = decoder(layers=1).operations(Tokens([length], supervised=length))
    assert found - causal + whole == counter.get_total_flops()


# ---------------------------------------------------------------------------------------- a kind of one's own


@dataclass(frozen=True)
class Doubling:
    """An MLP of another kind, with parameters of two views: a gain of its own on each rank of the view `far`."""

    hidden: int
    widths = ()
    first_product = 0
    views = (MAIN, "far")

    def tensors(self) -> TensorShapes:
        return {"gain": (1,), "far": (self.hidden,)}

    def weight_map(self, stored: str, share: Share, view: str = MAIN) -> WeightMap:
        if view == "far":
            return {"far": split_rows(f"{stored}far", self.hidden, share)}
        return {"gain": split_rows(f"{stored}gain", 1, Share(0, 1))}

    def operations(self, tokens: Tokens) -> Operations:
        return Operations(tokens.total)

    def build(self, site: Site, number: int) -> torch.nn.Module:
        return _Doubling()


class _Doubling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.full((1,), 2.0))

    def forward(self, hidden: torch.Tensor, call: LayerCall) -> tuple[torch.Tensor, None]:
        return hidden * self.gain, None


MIXED = replace(decoder(3), layers=(layer(causal=True), layer(Doubling(8), causal=True), layer(causal=True)))


def test_layers_of_one_module_may_differ() -> None:
    assert "layers.1.gain" in MIXED.tensors and "layers.1.gate.weight" not in MIXED.tensors
    plain, tokens = decoder(3), Tokens([5])
    mlp = GATED.operations(tokens).of(FORWARD)
    by_stage = [MIXED.operations(tokens, stage, FORWARD) for stage in cut_stages(3, 3)]
    assert by_stage[0] - by_stage[1] == mlp - 5 and sum(by_stage) == MIXED.operations(tokens, passes=FORWARD)
    assert plain.views == (MAIN,) and MIXED.views == (MAIN, "far")


def test_each_parameter_is_in_the_map_of_its_view() -> None:
    main, far = (MIXED.weight_map("", Share(1, 2), PipelineStage.whole(3), view) for view in (MAIN, "far"))
    assert "layers.1.mlp.gain" in main and "layers.0.mlp.linear_fc1.weight" in main
    assert list(far) == ["layers.1.mlp.far"] and far["layers.1.mlp.far"][0].rows == (8, 8)
    of_ranks = held([MIXED.weight_map("", Share(rank, 2), PipelineStage.whole(3), "far") for rank in range(2)])
    assert of_ranks[0]["layers.1.mlp.far"].sharded


# --------------------------------------------------------------------------------------------- torch modules


@pytest.fixture(scope="module")
def site() -> Site:
    return lone_site()


@pytest.mark.parametrize("architecture", [decoder(), decoder(tied=True), encoder(deeper=(0, 2))])
@pytest.mark.parametrize("pp", [1, 2])
def test_the_map_is_in_the_order_of_the_torch_module(architecture: Architecture, pp: int, site: Site) -> None:
    for stage in cut_stages(len(architecture.layers), pp):
        model = ModuleStage(architecture, site, stage)
        names = [stage.global_name(name) for name, _ in model.named_parameters()]
        assert names == list(architecture.weight_map("", Share(0, 1), stage))


def test_one_part_is_built_alone_and_without_memory(site: Site) -> None:
    with torch.device("meta"):
        parts = [decoder().build(part, site) for part in (1, "embedding", "final_layernorm", "output_layer")]
    names = [[name for name, _ in part.named_parameters()] for part in parts]
    assert names[1:] == [["word_embeddings.weight"], ["weight"], ["weight"]]
    expected = decoder().layers[1].weight_map("", Share(0, 1))
    assert names[0] == list(expected)


def test_a_stage_of_layers_that_differ_runs(site: Site) -> None:
    model = ModuleStage(MIXED, site, PipelineStage(1, 2, False, False))
    only: Any = model.layers[0]
    hidden = torch.randn(4, 1, 8)
    plan: Any = SimpleNamespace(ids=None)
    normed = only.pre_mlp_layernorm(hidden)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(only.self_attention, "forward", lambda hidden, *_: (torch.zeros_like(hidden), None))
        found = model._run(hidden, torch.zeros(2, 4, 4), plan, {})
    torch.testing.assert_close(found, hidden + 2 * normed)
