"""Low-rank adapters of a Megatron `GPTModel`: those of a model with merged weights, in any layout."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from megatron_hetero import (
    AdamW,
    Graph,
    Layout,
    UserError,
    build,
    build_optimizers,
    finish_gradients,
    load_checkpoint,
    lora,
    prepare_megatron,
    save_checkpoint,
)
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import TensorSlice, load_slices
from megatron_hetero.step.library_modules import trained_modules
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.unit.step import gpt, running

GUIDE = (Path(__file__).parents[3] / "docs/library.md").read_text(encoding="utf-8")
SIZES: dict[str, Any] = {"num_query_groups": 2, "gated_linear_unit": True, "add_bias_linear": False, "num_layers": 2}
R, ALPHA = 3, 5.0
KEYS = gpt.HIDDEN // 2
"""Rows of keys: 2 groups of 4 heads."""
ADAPTERS: dict[str, Any] = {"r": R, "alpha": ALPHA, "seed": 4}


def whole_model(rank: int, **sizes: Any) -> GPTModel:
    """In one process, with adapters of which both matrices have random values."""
    model = gpt.whole(rank, **SIZES | sizes)
    lora(model, **ADAPTERS)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.B"):
                parameter.normal_(std=0.3, generator=generator)
    return model


def whole_values(model: nn.Module, values: str = "data") -> dict[str, Tensor]:
    """Tensors of the whole model, those of each projection apart; or their gradients."""
    found = dict[str, Tensor]()
    for path, parameter in model.named_parameters():
        own: Any = getattr(parameter, values)
        if own is None:
            continue
        if not hasattr(parameter, "stored_as"):
            found[path] = own.clone()
            continue
        within, (slices,) = parameter.stored_as  # pyright: ignore[reportAttributeAccessIssue]
        for each in slices:
            size = each.rows[1] - each.rows[0], own.shape[1]
            name = path.removesuffix(within) + each.name
            known: Any = found.get(name, own.new_zeros(0, own.shape[1]))
            assert len(known) == each.rows[0] and own[each.place].shape == size
            found[name] = torch.cat([known, own[each.place]])
    return found


Parts = list[tuple[Any, tuple[TensorSlice, ...]]]
"""Each parameter of this rank with the slices of whole tensors that it is."""


def parts_of(topology: Topology, model: Any) -> Parts:
    """Those of a model without an optimizer."""
    return [
        (parameter, module.maps[module.holders.rank()][name])
        for module in trained_modules(topology, {"text": model})
        for name, parameter in module.parameters.items()
    ]


def part_of(topology: Topology, *, tied: bool = False, **options: Any) -> Any:
    layout, groups = topology.layouts["text"], topology.collection("text")
    sequence_parallel = options.pop("sequence_parallel", True) and layout.tp > 1
    return gpt.model(
        gpt.configuration(layout, sequence_parallel=sequence_parallel, **SIZES | options), groups, tied=tied
    )


@torch.no_grad()
def fill(parts: Parts, whole: dict[str, Tensor]) -> None:
    for parameter, slices in parts:
        load_slices(parameter, slices, [whole[each.name.removeprefix("text.")][each.source] for each in slices])


def part_like(topology: Topology, reference: GPTModel, **options: Any) -> tuple[Any, Parts]:
    """This rank's part of a model, with adapters, and with its values."""
    model = part_of(topology, **options)
    lora(model, **ADAPTERS)
    parts = parts_of(topology, model)
    fill(parts, whole_values(reference))
    return model, parts


def apart(parts: Parts, whole: dict[str, Tensor], values: str = "data") -> float:
    """The largest relative distance of this rank's values of trained parameters."""
    worst = 0.0
    for parameter, slices in parts:
        own = getattr(parameter, values)
        for each in slices if parameter.requires_grad else ():
            expected = whole[each.name.removeprefix("text.")][each.source]
            if expected.abs().max() == 0:
                assert own[each.place].abs().max() == 0, each.name
            worst = max(worst, gpt.apart(own[each.place], expected))
    return worst


# --------------------------------------------------------------------------------------------- one process


def interleaved(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One matrix of those of the heads, as Megatron has it: the queries of a group, its keys, its values."""
    groups = SIZES["num_query_groups"]
    return torch.cat([each.view(groups, -1, each.shape[-1]) for each in (queries, keys, values)], dim=1).flatten(0, 1)


def merged_updates(whole: dict[str, Tensor], layer: str) -> Tensor:
    """What the adapters add to the weight of a layer."""

    def product(projection: str) -> Tensor:
        name = f"{layer}.{projection}lora_"
        return ALPHA / R * whole[f"{name}B.weight"] @ whole[f"{name}A.weight"]

    if layer.endswith("linear_qkv"):
        return interleaved(product("q_proj."), product("k_proj."), product("v_proj."))
    if layer.endswith("linear_fc1"):
        return torch.cat([product("gate_proj."), product("up_proj.")])
    return product("")


@on_ranks(1)
def test_adapters_are_those_of_each_projection() -> None:
    """Outputs equal those of merged weights, and gradients follow from theirs: dA = s Bᵀ dW, dB = s dW Aᵀ."""
    running.topology_of_world(1, text="dp:1")
    model, plain = whole_model(0), gpt.whole(0, **SIZES)
    whole, layers = whole_values(model), [n for n, p in model.named_modules() if getattr(p, "lora", None) is not None]
    assert len(layers) == 4 * SIZES["num_layers"]
    weights: dict[str, Any] = dict(plain.named_parameters())
    with torch.no_grad():
        for layer in layers:
            weights[f"{layer}.weight"] += merged_updates(whole, layer)
    batch = gpt.samples(3)
    loss, expected = gpt.gradients(plain, batch, 10)
    found, _ = gpt.gradients(model, batch, 10)
    assert found == pytest.approx(loss, rel=1e-6)
    of_ours = whole_values(model, "grad")
    assert len(of_ours) == 2 * len(layers) + 6 * SIZES["num_layers"], "three A's and B's of qkv, two of the gated MLP"
    for layer in layers:
        of_layer = {name: each for name, each in whole.items() if name.startswith(f"{layer}.") and "lora_" in name}
        for name in of_layer:
            twin = name.replace("lora_A", "lora_!").replace("lora_B", "lora_A").replace("lora_!", "lora_B")
            # dW of the projection: what a change of its B alone picks out of the gradient of the whole weight.
            step = {each: torch.zeros_like(values) for each, values in of_layer.items()}
            generator = torch.Generator().manual_seed(1)
            step[name], step[twin] = torch.randn(of_layer[name].shape, generator=generator), of_layer[twin]
            along = (merged_updates(step, layer) * expected[f"{layer}.weight"]).sum()
            torch.testing.assert_close((of_ours[name] * step[name]).sum(), along, rtol=1e-4, atol=1e-6)


@on_ranks(1)
def test_first_values_change_nothing() -> None:
    running.topology_of_world(1, text="dp:1")
    plain, model = gpt.whole(0, **SIZES), gpt.whole(0, **SIZES)
    layer: Any = model.get_submodule("decoder.layers.1.mlp.linear_fc2")
    names = lora(model, r=4, rslora=True, alpha=2, targets=["decoder.layers.1.*", "linear_fc2"])
    assert [name.removeprefix("decoder.layers.") for name in names] == [
        "0.mlp.linear_fc2", "1.self_attention.linear_proj", "1.self_attention.linear_qkv", "1.mlp.linear_fc1",
        "1.mlp.linear_fc2",
    ]  # fmt: skip
    (sample,) = gpt.samples(1)
    assert torch.equal(gpt.losses_of(model, sample), gpt.losses_of(plain, sample))
    assert layer.lora.shape.scales == (1.0,)
    trains = {name.partition(".lora.")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trains == set(names)


# ------------------------------------------------------------------------------------------------- layouts

ROWS = [
    ("tp:2,pp:2", {}),
    ("tp:4", {}),
    ("tp:2,dp:2", {"sequence_parallel": False}),
    ("tp:2,dp:2", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    ("tp:4", {"sequence_parallel": False}),
    ("pp:2,dp:2", {}),
    ("tp:2,pp:2", {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
]


@pytest.mark.parametrize("text, options", thinned(ROWS, 3))
@on_ranks(4, timeout_s=60)
def test_layouts_train_as_one_process(text: str, options: dict[str, Any]) -> None:
    if options.get("recompute_granularity"):
        masks = cache(lambda size: torch.ones(size, size, device="cpu").triu(1).bool())
        # On a CPU a literal `device="cuda"` is refused where layers are computed again, in the backward pass.
        with mock.patch("megatron.core.fusions.fused_softmax.get_default_causal_mask", masks):
            return compare(text, options)
    return compare(text, options)


def compare(text: str, options: dict[str, Any]) -> None:
    """Gradients and weights of three steps."""
    topology = running.topology_of(text=text)
    sizes = {"num_query_groups": 4} if topology.layouts["text"].tp == 4 else {}
    reference, batch = whole_model(topology.rank, **sizes), gpt.samples(4)
    tokens = sum(sample.supervised for sample in batch)
    model, parts = part_like(topology, reference, **options | sizes)
    before = whole_values(reference)
    loss, _ = gpt.gradients(reference, batch, tokens)
    mine, counted = running.backward(topology, model, batch)
    total = running.tokens_of(topology, counted)
    assert running.total_loss(topology, mine, total) == pytest.approx(loss, rel=1e-5)
    finish_gradients(topology, {"text": model}, total)
    assert apart(parts, whole_values(reference, "grad"), "grad") < 3e-5
    model.zero_grad()
    reference.zero_grad()
    optimizer = build_optimizers(topology, {"text": model}, AdamW(lr=1e-2, weight_decay=0.1), clip_grad=0.5)
    alone = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        gpt.gradients(reference, batch, tokens)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        alone.step()
        _, counted = running.backward(topology, model, batch)
        assert optimizer.step(tokens=running.tokens_of(topology, counted)).item() == pytest.approx(
            norm.item(), rel=1e-4
        )
        optimizer.zero_grad()
    after = whole_values(reference)
    assert apart(parts, after) < 1e-3
    assert all(torch.equal(after[name], before[name]) == ("lora_" not in name) for name in before)


@on_ranks(4, timeout_s=60)
def test_first_values_are_the_same_in_every_layout() -> None:
    running.topology_of(text="dp:4")
    reference = gpt.whole(0, **SIZES)
    lora(reference, **ADAPTERS)
    whole = whole_values(reference)
    first = {name: each for name, each in whole.items() if name.endswith("lora_A.weight")}
    assert len({each.sum().item() for each in first.values()}) == len(first) == 7 * SIZES["num_layers"]
    assert all(0.9 < each.abs().max() * each.shape[1] ** 0.5 <= 1 for each in first.values())
    for text in ("tp:4", "tp:2,pp:2", "dp:4"):
        topology = running.topology_of(text=text)
        model = part_of(topology)
        lora(model, **ADAPTERS)
        assert apart(parts_of(topology, model), whole) == 0


@on_ranks(4, timeout_s=60)
def test_a_checkpoint_resumes_in_any_layout(tmp_path: Path) -> None:
    folder = [tmp_path]
    dist.broadcast_object_list(folder)
    batch, results = gpt.samples(4), list[tuple[Any, Parts]]()
    for first, second in (("tp:2,pp:2", "tp:2,dp:2"), ("dp:4", "dp:4")):
        for text in (first, second):
            topology = running.topology_of(text=text)
            results.append(part_like(topology, whole_model(topology.rank)))
            optimizer = build_optimizers(topology, {"text": results[-1][0]}, AdamW(lr=1e-2))
            known = load_checkpoint(folder[0] / first, optimizer)
            assert (known is None) == (len(results) % 2 == 1)
            _, counted = running.backward(topology, results[-1][0], batch)
            optimizer.step(tokens=running.tokens_of(topology, counted))
            if known is None:
                save_checkpoint(folder[0] / first, optimizer, step=1)
    _, (_, parts), _, (alone, _) = results
    assert apart(parts, whole_values(alone)) < 1e-4


# ----------------------------------------------------------------------------------------------- the guide


def encoder(seed: int = 2) -> Any:
    """A small encoder of `transformers`."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": gpt.HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=16, patch_size=8, vision_use_head=False)).train()


def with_peft(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "fc1"]))


def pictures(number: int) -> Tensor:
    return torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def weighted(model: Any, given: Tensor) -> Tensor:
    """A loss of the outputs of an encoder."""
    out = model(pixel_values=given).last_hidden_state
    return (out * torch.linspace(-1, 1, out[0].numel()).view_as(out[0]).sin()).sum()


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp"])
@on_ranks(2, timeout_s=60)
def test_an_encoder_with_adapters_of_peft(wrapper: str, tmp_path: Path) -> None:
    """Under dp it trains as in one process, and one rank writes its PEFT folder."""
    folder = [tmp_path]
    dist.broadcast_object_list(folder)
    topology = build(Graph({"vision": []}, width=gpt.HIDDEN, dtype=torch.float32), vision="dp:2")
    alone, inner, given = with_peft(encoder()), with_peft(encoder(topology.rank)), pictures(4)
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
            dist.broadcast(parameter, 0)
        if topology.rank == 0 or wrapper == "fsdp":  # Those of the first replica replace others.
            inner.load_state_dict(alone.state_dict())
    model = running.wrapped(inner, wrapper, topology, "vision")
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0}
    algorithm = AdamW(**settings) if wrapper == "plain" else partial(torch.optim.AdamW, **settings)
    optimizer = build_optimizers(topology, {"vision": model}, algorithm, clip_grad=0.5)
    reference = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], **settings)
    for _ in range(3):
        (weighted(alone, given) / 7).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        weighted(model, topology.shard("vision", given)).backward()
        assert optimizer.step(tokens=7).item() == pytest.approx(norm.item(), rel=1e-4)
        optimizer.zero_grad()
    for (name, own), expected in zip(inner.named_parameters(), alone.parameters(), strict=True):
        found: Any = own.detach()
        whole = found.full_tensor() if wrapper == "fsdp" else found
        assert gpt.apart(whole, expected.detach()) < 1e-3, name
    if wrapper != "fsdp" and topology.rank == 0:
        from peft import PeftModel

        inner.save_pretrained(folder[0] / "adapter")
        loaded = PeftModel.from_pretrained(encoder(), folder[0] / "adapter").train()
        assert gpt.apart(weighted(loaded, given).detach(), weighted(alone, given).detach()) < 1e-4


@on_ranks(4, timeout_s=60)
def test_the_guide() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from peft import LoraConfig, get_peft_model

    section = GUIDE.partition("### Low-rank adapters\n")[2].partition("\n### ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    layout = Layout.parse("tp:2,dp:2", 4)
    own = Graph, GPTModel, LoraConfig, AdamW, build, build_optimizers, get_gpt_layer_local_spec, get_peft_model, lora
    losses = list[Tensor]()

    def loss_of(vision: Any, text: Any) -> Tensor:
        sample = gpt.samples(8)[-1]
        losses.append(weighted(vision, pictures(1)) + gpt.loss_of(text, sample))
        return losses[-1]

    names: dict[str, Any] = {
        **{each.__name__: each for each in (*own, prepare_megatron)},
        "torch": torch,
        "hidden": gpt.HIDDEN,
        "config": gpt.configuration(layout, sequence_parallel=True, **SIZES),
        "vocabulary": gpt.VOCABULARY,
        "length": gpt.LENGTH,
        "encoder": encoder(),
        "loss_of": loss_of,
        "tokens": 8,
    }
    exec(example, names)
    assert names["norm"] > 0
    trained = [name for m in ("vision", "text") for name, p in names[m].named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)
    before = losses[-1].item()
    for _ in range(30):
        names["optimizer"].zero_grad()
        loss_of(names["vision"], names["text"]).backward()
        names["optimizer"].step(tokens=8)
    assert losses[-1].item() < before


# ------------------------------------------------------------------------------------------------ bad input


@on_ranks(1)
def test_what_cannot_have_adapters_is_refused() -> None:
    running.topology_of_world(1, text="dp:1")
    model: Any = gpt.whole(0, **SIZES)
    with pytest.raises(UserError, match=r"lora: targets: found `q_proj`, expected decoder.*linear_qkv.*matches none"):
        lora(model, r=2, targets=["q_proj"])
    with pytest.raises(UserError, match=r"lora: model: found Linear, expected Megatron's"):
        lora(nn.Linear(2, 2), r=1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"r": 0}, r"lora: r: found 0, expected an integer ≥ 1"),
        ({"r": 2.0}, r"lora: r: found 2\.0, expected an integer"),
        ({"r": 2, "alpha": 0}, r"lora: alpha: found 0, expected a number > 0"),
        ({"r": 2, "alpha": float("nan")}, r"lora: alpha: found nan"),
        ({"r": 2, "targets": ()}, r"lora: targets: found \(\), expected a list"),
        ({"r": 2, "targets": [0]}, r"lora: targets: found \[0\]"),
        ({"r": 2, "targets": "linear_qkv"}, r"found 'linear_qkv', .* Write targets=\['linear_qkv'\]"),
        ({"r": 1 + KEYS}, rf"lora: r: found {1 + KEYS}, expected ≤ {KEYS}, .*linear_qkv \(k_proj\) is \[{KEYS}, "),
    ]
    for arguments, message in refused:
        with pytest.raises(UserError, match=message):
            lora(model, **arguments)
    assert len(lora(gpt.whole(0, **SIZES), r=KEYS)) == 8, "the highest rank is fine"

    class TELayerNormColumnParallelLinear(nn.Linear):
        """As Transformer Engine's: with a norm inside."""

    model.decoder.layers[0].self_attention.linear_qkv = TELayerNormColumnParallelLinear(2, 2)
    with pytest.raises(UserError, match=r"layers\.0\.self_attention\.linear_qkv: found TELayerNormColumn.* `get_gpt_"):
        lora(model, r=1)
    assert all(p.requires_grad for p in model.parameters()), "a refused model is as before"
    lora(model, r=1, targets=["linear_fc1"])
    with pytest.raises(UserError, match=r"has adapters already"):
        lora(model, r=1, targets=["linear_fc1"])
    with pytest.raises(UserError, match=r"dist_checkpointing does not know adapters"):
        model.decoder.layers[0].mlp.linear_fc1.sharded_state_dict()
    experts = gpt.whole(0, num_moe_experts=2, **SIZES)
    with pytest.raises(UserError, match=r"local_experts\.0\.linear_fc1: found a layer "):
        lora(experts, r=1)
    assert lora(experts, r=1, targets=["linear_qkv", "linear_proj"])
