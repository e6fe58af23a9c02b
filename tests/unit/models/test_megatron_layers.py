"""Gated delta nets in a recipe of one's own, as docs/library.md has them, against `transformers` and one process."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hetero import (
    SGD,
    AdamW,
    Graph,
    Layout,
    UserError,
    build,
    build_optimizers,
    finish_gradients,
    load_checkpoint,
    prepare_megatron,
    save_checkpoint,
)
from megatron_hetero.data.token_shards import tokens_of
from megatron_hetero.groups.local_group import LocalGroup
from megatron_hetero.groups.megatron import module_groups
from megatron_hetero.groups.topology import Topology
from megatron_hetero.models.megatron_layers import GatedDeltaNet, packed_samples
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.unit.models.delta_nets import HIDDEN, KEY_DIM, TAPS, VALUE_DIM, matrix, theirs
from tests.unit.step import gpt, running

GUIDE = (Path(__file__).parents[3] / "docs/library.md").read_text(encoding="utf-8")
LENGTHS = ((16, 7, 1, 3), (5, 9, 2))
"""Samples of each replica."""


def config_of(layout: Any, heads: tuple[int, int], *, sequence_parallel: bool = True, **options: Any) -> Any:
    """A configuration of Megatron, as a recipe gives it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    own: dict[str, Any] = {"num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        linear_num_key_heads=heads[0],
        linear_num_value_heads=heads[1],
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        linear_conv_kernel_dim=TAPS,
        layernorm_epsilon=1e-6,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        calculate_per_token_loss=True,
        **own | options,
    )


def topology_of(text: str) -> Topology:
    topology = build(Graph({"text": []}, width=HIDDEN, dtype=torch.float32), text=text)
    prepare_megatron(topology, seed=1)
    return topology


def apart(layer: Any, whole: dict[str, Tensor], values: str = "data") -> float:
    """The largest relative distance of parts of whole tensors, over the parameters of this rank."""
    found, rank = [0.0], layer.groups.tp.rank()
    for parameter in layer.parameters():
        _, slices = parameter.stored_as
        of_parameter = getattr(parameter, values)
        for each in slices[rank]:
            expected = matrix(whole[each.name])[each.source]
            found.append(gpt.apart(of_parameter[each.place], expected))
    return max(found)


class Replicas:
    """Samples of all replicas, their outputs and gradients by `transformers`, sample by sample."""

    def __init__(self, module: nn.Module, topology: Topology):
        self.module, self.topology = module, topology
        generator = torch.Generator().manual_seed(1)
        dp = topology.layouts["text"].dp
        self.x, self.c = ([torch.randn(sum(n), 1, HIDDEN, generator=generator) for n in LENGTHS[:dp]] for _ in "xc")
        self.tokens = sum(map(sum, LENGTHS[:dp]))

    def expected(self) -> list[Tensor]:
        """Outputs, after a backward pass."""
        found = []
        for x, c, lengths in zip(self.x, self.c, LENGTHS, strict=False):
            x.grad = None
            samples = x.requires_grad_().transpose(0, 1).split(lengths, dim=1)
            out = torch.cat([self.module(each) for each in samples], dim=1).transpose(0, 1)
            out.backward(c)
            found.append(out.detach())
        return found

    def output(self, layer: Any) -> tuple[Tensor, Tensor, Any, int]:
        """Input and output of this rank's tokens, their places, and its replica."""
        layout, rank = self.topology.layouts["text"], self.topology.rank
        replica = layout.replica_of(rank)
        assert replica is not None
        own = tokens_of(layout, rank, LENGTHS[replica], sequence_parallel=layer.config.sequence_parallel)
        x = self.x[replica].detach()[own].requires_grad_()
        out, bias = layer(x, lengths=LENGTHS[replica])
        assert bias is None and out.shape == x.shape
        return x, out, own, replica


def compare(text: str, heads: tuple[int, int], algorithm: Any = None, **options: Any) -> None:
    """Outputs, gradients, their norm, and the weights after a step are those of one process."""
    topology = topology_of(text)
    module, layout = theirs(heads), topology.layouts["text"]
    layer = GatedDeltaNet(config_of(layout, heads, **options), pg_collection=topology.collection("text"))
    tensors = {f"model.layers.0.linear_attn.{name}": value for name, value in module.state_dict().items()}
    layer.load(tensors, "model.layers.0.linear_attn.")
    replicas = Replicas(module, topology)
    optimizer = build_optimizers(topology, {"text": layer}, algorithm, clip_grad=0.5) if algorithm else None
    module.zero_grad()
    expected = replicas.expected()
    x, out, own, replica = replicas.output(layer)
    out.backward(replicas.c[replica][own])
    of_x = replicas.x[replica].grad
    assert gpt.apart(out.detach(), expected[replica][own]) < 1e-5
    assert x.grad is not None and of_x is not None and gpt.apart(x.grad, of_x[own]) < 1e-5
    whole: dict[str, Any] = dict(module.named_parameters())
    for parameter in whole.values():
        parameter.grad /= replicas.tokens
    if optimizer is None:
        finish_gradients(topology, {"text": layer}, replicas.tokens)
        assert apart(layer, {name: p.grad for name, p in whole.items()}, "grad") < 3e-5
        return
    norm = optimizer.step(tokens=replicas.tokens)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(module.parameters(), 0.5).item(), rel=1e-5)
    torch.optim.SGD(module.parameters(), lr=10.0).step()
    optimizer.zero_grad()
    with torch.no_grad():  # Weights may be in shards.
        _, out, own, replica = replicas.output(layer)
    assert gpt.apart(out, replicas.expected()[replica][own]) < 3e-5


ROWS = [
    ("tp:2,cp:2", (2, 4)),
    ("tp:2,cp:2", (2, 6)),
    ("tp:2,sp:2", (1, 6)),
    ("sp:2,cp:2", (1, 3)),
    ("tp:4", (2, 4)),
    ("cp:2,dp:2", (1, 3)),
    ("tp:2,dp:2", (1, 2)),
]
SGDS = [None, SGD(lr=10.0), SGD(lr=10.0, zero=3), partial(torch.optim.SGD, lr=10.0)]


@pytest.mark.parametrize("text", ["tp:2", "cp:2", "sp:2"])
@on_ranks(2)
def test_two_ranks(text: str) -> None:
    for algorithm in SGDS:
        compare(text, (2, 4), algorithm)
    compare(text, (1, 2), sequence_parallel=False)
    compare(text, (1, 2), recompute_granularity="selective")


@pytest.mark.parametrize("text, heads", thinned(ROWS, 2))
@on_ranks(4)
def test_four_ranks(text: str, heads: tuple[int, int]) -> None:
    for algorithm in SGDS:
        compare(text, heads, algorithm)


# ------------------------------------------------------------------------------------------------- the guide


def examples() -> tuple[str, str]:
    """The code of the guide, with a layout and lengths to replace."""
    section = GUIDE.partition("### Gated delta nets\n")[2].partition("\n### ")[0]
    alone, in_a_spec = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert alone.count('"tp:2,cp:2"') == alone.count("[16, 7, 1, 4]") == 1
    return alone, in_a_spec


def names_of_the_guide(heads: tuple[int, int]) -> dict[str, Any]:
    """What its code imports, and what it takes for given but for `config`."""
    module, total = theirs(heads), 28
    generator = torch.Generator().manual_seed(1)
    embedded, c = (torch.randn(total, 1, HIDDEN, generator=generator) for _ in "xc")
    tensors = {
        f"model.language_model.layers.0.linear_attn.{name}": value for name, value in module.state_dict().items()
    }
    ours = AdamW, Graph, GatedDeltaNet, build, build_optimizers, packed_samples, prepare_megatron, tokens_of
    return {
        **{each.__name__: each for each in ours},
        "torch": torch,
        "hidden": HIDDEN,
        "module": module,
        "embedded": embedded,
        "tensors": tensors,
        "c": c,
        "loss_of": lambda out, own: (out * c[own]).sum(),
    }


LAYOUTS = ["tp:2,cp:2", "sp:2,cp:2", "cp:4", "tp:4", "tp:2,sp:2"]


@pytest.mark.parametrize("text", thinned(LAYOUTS, 3))
@on_ranks(4)
def test_the_guide(text: str) -> None:
    names = names_of_the_guide((2, 4))
    alone, _ = examples()
    names["config"] = config_of(Layout.parse(text, 4), (2, 4))
    exec(alone.replace("tp:2,cp:2", text), names)
    module, lengths, x = names["module"], names["lengths"], names["embedded"]
    expected = torch.cat([module(each) for each in x.transpose(0, 1).split(lengths, dim=1)], dim=1).transpose(0, 1)
    assert gpt.apart(names["out"].detach(), expected.detach()[names["own"]]) < 1e-5
    names["loss_of"](expected, range(len(x))).backward()
    norm = nn.utils.get_total_norm([p.grad for p in module.parameters()]).item() / len(x)
    assert names["norm"].item() == pytest.approx(norm, rel=1e-5)


def whole_tensors(layer: Any, values: str = "data") -> dict[str, Tensor]:
    """The stored tensors, or their gradients, of a layer that is in one process."""
    found = {
        name: torch.zeros(shape).flatten(1) if len(shape) > 1 else torch.zeros(shape)
        for name, shape in layer.part.tensors().items()
    }
    for parameter in layer.parameters():
        for each in parameter.stored_as[1][0]:
            found[each.name][each.source] = getattr(parameter, values)[each.place]
    return found


@pytest.mark.parametrize("text", thinned(LAYOUTS, 3))
@on_ranks(4, timeout_s=60)
def test_the_guide_in_a_spec(text: str) -> None:
    # Here, since they warn of what they import, and in the tests' own process warnings are errors.
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    topology, (_, example), heads, lengths = topology_of(text), examples(), (2, 4), [16, 7, 1, 4]
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(gpt.VOCABULARY, (2, 1, sum(lengths)), generator=generator)

    def model_of(config: Any, spec: Any, *args: Any, pg_collection: Any, **options: Any) -> Any:
        nonlocal reference
        alone = module_groups(lambda *_: LocalGroup((topology.rank,), topology.rank, "this rank"), None)
        reference = GPTModel(config_of(SimpleNamespace(tp=1), heads), spec, *args, pg_collection=alone, **options)
        with torch.no_grad():
            for parameter in others(reference).values():
                parameter.normal_(std=0.2, generator=generator)
        built = GPTModel(config, spec, *args, pg_collection=pg_collection, **options)
        with torch.no_grad():
            for name, own in others(built).items():
                own.copy_(gpt.shard(others(reference)[name], own, pg_collection))
        return built

    reference: Any = None
    names: dict[str, Any] = {
        **{
            each.__name__: each
            for each in (GatedDeltaNet, ModuleSpec, get_gpt_layer_local_spec, packed_samples, tokens_of)
        },
        "GPTModel": model_of,
        "config": config_of(topology.layouts["text"], heads),
        "groups": topology.collection("text"),
        "topology": topology,
        "vocabulary": gpt.VOCABULARY,
        "length": sum(lengths),
        "lengths": lengths,
        "tokens": tokens,
        "labels": labels,
    }
    exec(example, names)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    samples = zip([0, *ends], ends, strict=False)
    expected = torch.cat([reference(tokens[:, a:b], None, None, labels=labels[:, a:b]) for a, b in samples], dim=1)
    assert gpt.apart(names["losses"].detach(), expected.detach()[:, names["own"]]) < 1e-5
    expected.sum().backward()
    names["losses"].sum().backward()
    finish_gradients(topology, {"text": names["model"]}, 1)
    for name, own in others(names["model"]).items():
        assert gpt.apart(own.grad, gpt.shard(others(reference)[name].grad, own, names["groups"])) < 3e-5, name
    of_delta = [[p for p in m.modules() if isinstance(p, GatedDeltaNet)] for m in (names["model"], reference)]
    assert len(of_delta[0]) == 2
    for own, whole in zip(*of_delta, strict=True):
        assert apart(own, whole_tensors(whole)) == 0
        assert apart(own, whole_tensors(whole, "grad"), "grad") < 3e-5


def others(model: nn.Module) -> dict[str, Any]:
    """Parameters of Megatron's own layers."""
    return {name: p for name, p in model.named_parameters() if not hasattr(p, "stored_as")}


# ------------------------------------------------------------------------------------- weights and checkpoints


@on_ranks(4)
def test_new_weights_are_the_same_in_every_layout() -> None:
    heads, found = (2, 64), list[dict[str, Tensor]]()
    for text in ("dp:4", "tp:2,cp:2", "tp:4"):
        topology = topology_of(text)
        options = {"pg_collection": topology.collection("text"), "seed": 3}
        layer = GatedDeltaNet(config_of(topology.layouts["text"], heads), None, 2, **options)
        if not found:
            found.append(whole_tensors(layer))
            other = whole_tensors(GatedDeltaNet(layer.config, None, 1, **options))
            assert all(not torch.equal(other[n], t) for n, t in found[0].items() if n not in ("dt_bias", "norm.weight"))
        assert apart(layer, found[0]) == 0
    new = found[0]
    assert (new["dt_bias"] == 1).all() and (new["norm.weight"] == 1).all()
    # A is uniform in 0.01 to 16.
    assert new["A_log"].exp().mean().item() == pytest.approx(8, abs=2) and new["A_log"].exp().max() <= 16
    for name in ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_a.weight", "conv1d.weight", "out_proj.weight"):
        assert new[name].std().item() == pytest.approx(0.02, rel=0.1) and abs(new[name].mean().item()) < 2e-3, name


@on_ranks(4, timeout_s=60)
def test_a_checkpoint_resumes_in_any_layout(tmp_path: Path) -> None:
    """Two steps of AdamW, with a change of the layout between them, are those of one layout."""
    heads, folder = (2, 4), [tmp_path]
    dist.broadcast_object_list(folder)

    def trained(text: str, steps: int, *, resumes: bool) -> tuple[Tensor, Any, int]:
        topology = topology_of(text)
        layer = GatedDeltaNet(config_of(topology.layouts["text"], heads), pg_collection=topology.collection("text"))
        optimizer, replicas = build_optimizers(topology, {"text": layer}, AdamW(lr=0.1)), Replicas(layer, topology)
        if resumes:
            assert load_checkpoint(folder[0], optimizer) is not None
        for _ in range(steps):
            _, out, own, replica = replicas.output(layer)
            out.backward(replicas.c[replica][own])
            optimizer.step(tokens=replicas.tokens)
            optimizer.zero_grad()
        if not resumes and steps == 1:
            save_checkpoint(folder[0], optimizer, 1)
        _, out, own, replica = replicas.output(layer)
        return out.detach(), own, replica

    trained("tp:2,cp:2", 1, resumes=False)
    whole, own, _ = trained("tp:2,cp:2", 2, resumes=False)
    every = [torch.zeros(sum(LENGTHS[0]), 1, HIDDEN), torch.zeros(sum(LENGTHS[0]), 1, HIDDEN)]
    every[0][own], every[1][own] = whole, 1
    for each in every:
        dist.all_reduce(each)
    expected = every[0] / every[1]
    for text in ("tp:4", "sp:2,cp:2", "tp:2,sp:2"):
        found, own, _ = trained(text, 1, resumes=True)
        assert gpt.apart(found, expected[own]) < 1e-4, text


# ------------------------------------------------------------------------------------------- as Megatron calls it


@pytest.mark.parametrize("text, how", [("tp:2,cp:2", "whole"), ("tp:2,sp:2", "whole"), ("tp:2,cp:2", "cu_seqlens")])
@on_ranks(4)
def test_batches_and_packs_of_megatron(text: str, how: str) -> None:
    """Samples of one length in a batch, [length, samples, hidden], or packed as Megatron packs them, the second one
    with padding behind it.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    topology, module = topology_of(text), theirs((2, 4))
    layer = GatedDeltaNet(config_of(topology.layouts["text"], (2, 4)), pg_collection=topology.collection("text"))
    layer.load(module.state_dict())
    x = torch.randn(16, 3, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = module(x.transpose(0, 1)).transpose(0, 1)
    places = partial(tokens_of, topology.layouts["text"], topology.rank, sequence_parallel=True)
    if how == "whole":
        own = places([16])
        out, _ = layer(x[own], None, rotary_pos_emb=None, packed_seq_params=None)
    else:
        own = places([16, 16, 16])
        x, expected = (each.transpose(0, 1).reshape(-1, 1, HIDDEN) for each in (x, expected))
        ends, padded = torch.tensor([0, 16, 27, 43]), torch.tensor([0, 16, 32, 48])
        pack = PackedSeqParams("thd", ends, ends, padded, padded)
        out, _ = layer(x[own], None, packed_seq_params=pack)
        assert pack.lengths == (16, 16, 16)  # pyright: ignore[reportAttributeAccessIssue]
    assert gpt.apart(out, expected[own]) < 1e-5


@on_ranks(2)
def test_evaluation_in_inference_mode_before_a_step() -> None:
    topology = topology_of("cp:2")
    layer = GatedDeltaNet(config_of(topology.layouts["text"], (3, 9)), pg_collection=topology.collection("text"))
    replicas = Replicas(layer, topology)
    with torch.inference_mode():
        _, evaluated, _, _ = replicas.output(layer)
    x, out, _, _ = replicas.output(layer)
    out.sum().backward()
    assert x.grad is not None and torch.equal(out, evaluated)


@pytest.mark.parametrize("wrapper", ["megatron", "zero1", "fsdp"])
@on_ranks(4)
def test_wrappers(wrapper: str) -> None:
    from megatron.core.optimizer import OptimizerConfig

    topology, module, heads = topology_of("tp:2,dp:2"), theirs((2, 4)), (2, 4)
    layer = GatedDeltaNet(config_of(topology.layouts["text"], heads), pg_collection=topology.collection("text"))
    layer.load(module.state_dict())
    wrapped, replicas = running.wrapped(layer, wrapper, topology), Replicas(module, topology)
    settings: dict[str, Any] = {"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-2, "weight_decay": 0.0, "clip_grad": 0.5}
    config = OptimizerConfig(**settings, use_distributed_optimizer=wrapper == "zero1")
    algorithm = config if wrapper != "fsdp" else partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
    optimizer = build_optimizers(topology, {"text": wrapped}, algorithm, clip_grad=0.5)
    _, out, own, replica = replicas.output(wrapped)
    out.backward(replicas.c[replica][own])
    norm = optimizer.step(tokens=replicas.tokens)
    replicas.expected()
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad /= replicas.tokens
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(module.parameters(), 0.5).item(), rel=1e-5)
    torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0).step()
    with torch.no_grad():
        _, out, own, replica = replicas.output(wrapped)
    assert gpt.apart(out, replicas.expected()[replica][own]) < 1e-4


# --------------------------------------------------------------------------------------------------- refusals


@on_ranks(4)
def test_refusals() -> None:
    topology = topology_of("tp:4")
    layout, groups = topology.layouts["text"], topology.collection("text")
    with pytest.raises(UserError, match=r"found 6 .* and tp:4, expected tp to divide 6"):
        GatedDeltaNet(config_of(layout, (2, 6)), pg_collection=groups)
    with pytest.raises(UserError, match=r"found 4 value heads, .*the 3 key heads"):
        GatedDeltaNet(config_of(layout, (3, 4)), pg_collection=groups)
    with pytest.raises(UserError, match=r"found SimpleNamespace, .*Pass topology\.collection"):
        GatedDeltaNet(config_of(layout, (2, 4)), pg_collection=SimpleNamespace(tp=groups.tp, cp=groups.cp))
    layer, x = GatedDeltaNet(config_of(layout, (2, 4)), pg_collection=groups), torch.randn(5, 1, HIDDEN)
    with pytest.raises(UserError, match=r"found states of shape \[5, 1, 32\], expected \[2, 1, hidden\].* 3, 5 tokens"):
        layer(x, lengths=[3, 5])
    with pytest.raises(UserError, match="generate"):
        layer(x, inference_context=object())
    with pytest.raises(UserError, match="save_checkpoint"):
        layer.sharded_state_dict()
    tensors = theirs((2, 4)).state_dict()
    with pytest.raises(UserError, match=r"tensor layer\.A_log: found nothing, expected shape \[4\]"):
        layer.load({f"layer.{name}": t for name, t in tensors.items() if name != "A_log"}, "layer.")
    with pytest.raises(UserError, match=r"tensor A_log: found shape \[3\], expected shape \[4\]"):
        layer.load({**tensors, "A_log": torch.zeros(3)})


@pytest.mark.parametrize("wrapper", ["megatron", "fsdp"])
@on_ranks(4)
def test_copies_of_key_heads_in_a_wrapper_are_refused(wrapper: str) -> None:
    topology = topology_of("tp:2,dp:2")
    layer = GatedDeltaNet(config_of(topology.layouts["text"], (1, 2)), pg_collection=topology.collection("text"))
    wrapped = running.wrapped(layer, wrapper, topology)
    with pytest.raises(UserError, match=r"net\.(conv_weight|in_proj\.weight): found heads "):
        finish_gradients(topology, {"text": wrapped}, 1)
