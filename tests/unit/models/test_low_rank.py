"""Low-rank adapters beside linear layers and beside experts, against W + scale * B A by autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.lora import LoraConfig
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.groups.local_group import SilentGroup
from megatron_hetero.groups.megatron import module_groups, prepare, tensor_parallel
from megatron_hetero.hf.weight_map import Share, load_slices
from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.adapters import Lora, linear_layers, with_adapters
from megatron_hetero.models.layers import experts as layer
from megatron_hetero.models.layers import grouped
from megatron_hetero.models.layers.dispatch import Dispatch, block
from megatron_hetero.models.layers.experts import ExpertMLP, _Experts
from megatron_hetero.models.layers.linear import ColumnLinear, RowLinear
from megatron_hetero.models.layers.low_rank import BRows, ExpertsLowRank, LowRank, LowRankShape, adapted
from megatron_hetero.models.layers.recompute import Recompute, not_saving, recompute
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.stages import ModuleStage
from megatron_hetero.models.weights import tensors_of, weight_map
from tests.support.folders import ModelChoice, write_model
from tests.support.pool import world
from tests.support.ranks import on_ranks
from tests.support.shapes import shapes_of_folder
from tests.support.stages import PLATFORM, lone_site

LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-2}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).bfloat16().to(dtype)


def apart(one: Tensor | None, other: Tensor) -> float:
    assert one is not None and one.numel() == other.numel()
    one, other = one.detach().double().view(other.shape), other.detach()
    return float((one - other).norm() / other.norm().clamp(min=1.0))


# --------------------------------------------------------------------------------------------- linear layers

INPUTS, OUTPUTS = 12, 20
SHAPES = {
    "one": LowRankShape(INPUTS, OUTPUTS, 3, (1.0,), (BRows((0, OUTPUTS), 0),), False),
    "scaled": LowRankShape(INPUTS, OUTPUTS, 3, (0.5,), (BRows((0, OUTPUTS), 0),), False),
    "two": LowRankShape(INPUTS, OUTPUTS, 2, (2.0, 2.0), (BRows((0, 8), 0), BRows((8, 20), 1)), False),
    "interleaved": LowRankShape(
        INPUTS, OUTPUTS, 4, (2.0, 0.5, 1.5), (BRows((0, 6), 0), BRows((6, 8), 1), BRows((8, 10), 2), BRows((10, 16), 0),
                                              BRows((16, 18), 1), BRows((18, 20), 2)), False,
    ),
    "some rows": LowRankShape(INPUTS, OUTPUTS, 4, (0.5,), (BRows((6, 8), 0), BRows((16, 18), 0)), False),
    "the middle and the end": LowRankShape(
        INPUTS, OUTPUTS, 3, (3.0, 1.0), (BRows((4, 6), 1), BRows((9, 20), 0)), False
    ),
}  # fmt: skip


def added_of(shape: LowRankShape, a: Tensor, b: Tensor) -> Tensor:
    """The matrix [outputs, inputs] that A and B are, one row of B after the other."""
    numbers = [(row, each.projection) for each in shape.rows for row in range(*each.interval)]
    rows = {
        at: shape.scales[number] * b[place] @ a[number * shape.r : (number + 1) * shape.r]
        for place, (at, number) in enumerate(numbers)
    }
    return torch.stack([rows.get(at, a.new_zeros(shape.inputs)) for at in range(shape.outputs)])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", SHAPES)
def test_products_and_gradients(name: str, tokens: int, dtype: torch.dtype) -> None:
    shape, site = SHAPES[name], replace(lone_site(), dtype=dtype)
    module = LowRank(shape, site)
    exact = [drawn(*p.shape, seed=n).requires_grad_() for n, p in enumerate(module.parameters())]
    x, weight, cotangent = drawn(tokens, 1, 12, seed=2), drawn(20, 12, seed=3), drawn(tokens, 1, 20, seed=4)
    expected = x.requires_grad_() @ (weight + added_of(shape, *exact)).t()
    wanted = torch.autograd.grad(expected, (x, *exact), cotangent)

    for parameter, values in zip(module.parameters(), exact, strict=True):
        parameter.data.copy_(values.detach())
    given = x.detach().to(dtype).requires_grad_()
    base = given @ weight.to(dtype).t()
    out = module.add(base, given)
    out.backward(cotangent.to(dtype))
    for one, other in zip((out, given.grad, module.A.grad, module.B.grad), (expected, *wanted), strict=True):
        assert apart(one, other) <= LIMITS[dtype]


def test_what_a_layer_gives_is_added_to_in_place_unless_it_is_a_view() -> None:
    module = LowRank(SHAPES["one"], lone_site())
    for parameter in module.parameters():
        parameter.data.fill_(1.0)
    x, whole = torch.ones(3, 1, 12), torch.zeros(3, 2, 20)
    out = torch.zeros(3, 1, 20)
    assert module.add(out, x) is out and out.eq(36.0).all()
    assert module.add(whole[:, :1], x).eq(36.0).all() and not whole.any()


def test_gradients_are_added_to_main_grad() -> None:
    """Those of several micro-batches, without a tensor for each."""
    module: Any = LowRank(SHAPES["scaled"], lone_site())
    for number, parameter in enumerate(module.parameters()):
        parameter.data.copy_(drawn(*parameter.shape, seed=number))
    x = drawn(5, 1, 12, seed=2, dtype=torch.float32).requires_grad_()
    plain = torch.autograd.grad(module.add(x.new_zeros(5, 1, 20), x, (5,)).sum(), list(module.parameters()))
    for parameter in module.parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones_like(parameter), False
    for _ in range(2):
        module.add(x.new_zeros(5, 1, 20), x, (5,)).sum().backward()
    for parameter, gradient in zip(module.parameters(), plain, strict=True):
        assert parameter.grad_added_to_main_grad
        torch.testing.assert_close(parameter.main_grad, 1 + 2 * gradient)


class Collectives:
    """Counts collectives, and the elements that they send."""

    NAMES = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"

    def __init__(self) -> None:
        self.found = list[tuple[str, int]]()

    @contextlib.contextmanager
    def counted(self) -> Iterator[list[tuple[str, int]]]:
        with contextlib.ExitStack() as stack:
            for name in self.NAMES:
                stack.enter_context(mock.patch.object(dist, name, self._counting(name, getattr(dist, name))))
            # Megatron-Core's names for them.
            for own, name in (("all_gather", self.NAMES[0]), ("reduce_scatter", self.NAMES[1])):
                mappings = tensor_parallel.mappings
                stack.enter_context(mock.patch.object(mappings, f"dist_{own}_func", getattr(dist, name)))
            yield self.found

    def _counting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, **options: Any) -> Any:
            sent = tensors[0] if name == "all_reduce" else tensors[1]
            self.found.append((name, sent.numel()))
            return real(*tensors, **options)

        return call


@pytest.mark.parametrize("fused, splits", [(False, True), (True, True), (False, False)])
@on_ranks(2)
def test_exchanges_over_tp(fused: bool, splits: bool) -> None:
    """Two layers with adapters against one rank: values, gradients, and one collective of low rank for each layer and
    pass, beside those of the layers.
    """
    prepare(PLATFORM)
    group, rank, tokens, hidden, ffn, r = world(), dist.get_rank(), 5, 7, 16, 3
    site: Any = SimpleNamespace(
        groups=SimpleNamespace(tp=group), tp=2, splits_activations=splits, dtype=torch.float64,
        platform=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    x, cotangent = drawn(2 * tokens, 1, hidden, seed=0), drawn(2 * tokens, 1, hidden, seed=1)
    names = "first", "second", "first A", "first B", "second A", "second B"
    sizes = (ffn, hidden), (hidden, ffn), (r, hidden), (ffn, r), (r, ffn), (hidden, r)
    whole = {name: drawn(*size, seed=2 + n) for n, (name, size) in enumerate(zip(names, sizes, strict=True))}
    leaves = {name: values.clone().requires_grad_() for name, values in whole.items()}
    given = x.clone().requires_grad_()
    wide = given @ (leaves["first"] + 2 * leaves["first B"] @ leaves["first A"]).t()
    expected = wide.relu() @ (leaves["second"] + 0.5 * leaves["second B"] @ leaves["second A"]).t()
    expected.backward(cotangent)

    def mine(t: Tensor, dim: int = 0) -> Tensor:
        return t.detach().chunk(2, dim=dim)[rank].clone()

    common: Any = {"bias": None, "tp_group": group, "skip_bias_add": False, "sequence_parallel": splits, "fused": fused}
    column: Any = SimpleNamespace(weight=mine(whole["first"]), allreduce_dgrad=not splits, **common)
    row: Any = SimpleNamespace(
        weight=mine(whole["second"], 1), input_size_per_partition=ffn // 2, input_size=ffn, **common
    )

    class Called(SimpleNamespace):
        def __call__(self, given: Tensor) -> Any:
            return self.forward(self, given)

    column, row = Called(forward=ColumnLinear.forward, **vars(column)), Called(forward=RowLinear.forward, **vars(row))
    column.lora = LowRank(LowRankShape(hidden, ffn // 2, r, (2.0,), (BRows((0, ffn // 2), 0),), False), site)
    row.lora = LowRank(LowRankShape(ffn // 2, hidden, r, (0.5,), (BRows((0, hidden), 0),), True), site)
    values = {
        column.lora.A: whole["first A"], column.lora.B: mine(whole["first B"]),
        row.lora.A: mine(whole["second A"], 1), row.lora.B: whole["second B"],
    }  # fmt: skip
    for parameter, value in values.items():
        parameter.data.copy_(value)
    local = (mine(x) if splits else x.clone()).requires_grad_()
    with Collectives().counted() as found:
        hidden_states, _ = adapted(column, local)
        out, _ = adapted(row, hidden_states.relu())
        forward = list(found)
        out.backward(mine(cotangent) if splits else cotangent)
    torch.testing.assert_close(out, mine(expected) if splits else expected)
    torch.testing.assert_close(local.grad, mine(given.grad) if splits else given.grad)  # pyright: ignore[reportArgumentType]
    gradients: dict[str, Any] = {
        "first A": column.lora.A,
        "first B": column.lora.B,
        "second A": row.lora.A,
        "second B": row.lora.B,
    }
    for name, parameter in gradients.items():
        gradient, wanted = parameter.grad.clone(), leaves[name].grad
        assert wanted is not None
        is_split = {"first B": 0, "second A": 1}.get(name)
        if is_split is None and getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=group)
        torch.testing.assert_close(gradient, wanted if is_split is None else mine(wanted, is_split))

    low = [size for _, size in found if size in (tokens * r, 2 * tokens * r)]
    kinds = [kind for kind, size in found if size in (tokens * r, 2 * tokens * r)]
    if splits:
        assert kinds == ["all_gather_into_tensor", "reduce_scatter_tensor"] * 2
        assert low == [tokens * r, 2 * tokens * r] * 2
        assert len(found) == 8, "no weight trains: nothing is gathered for their gradients"
        assert len(forward) == 4
    else:
        assert kinds == ["all_reduce"] * 2 and [kind for kind, _ in forward] == ["all_reduce"] * 2
        assert len(found) == 4


def saved_by(function: Callable[[], Tensor]) -> dict[int, int]:
    """Bytes of the storages that autograd saves in a call, parameters excepted."""
    found = dict[int, Tensor]()

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter) and not isinstance(x._base, nn.Parameter):
            found[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = function()
    assert out.requires_grad
    return {place: x.untyped_storage().nbytes() for place, x in found.items()}


def test_beside_a_frozen_layer_only_the_input_and_low_rank_products_are_saved() -> None:
    site = lone_site()
    linear = site.column_linear(12, 20, bias=False)
    linear.weight.requires_grad_(False)
    hidden = torch.randn(64, 1, 12).requires_grad_()
    assert not saved_by(lambda: adapted(linear, hidden * 2)[0])
    for name, shape in SHAPES.items():
        linear.lora = LowRank(shape, site)
        x = hidden * 2
        found = saved_by(lambda x=x: adapted(linear, x)[0])
        low = 64 * len(shape.scales) * shape.r * 4
        scales = [len(shape.scales) * shape.r * 4] if len(set(shape.scales)) > 1 else []
        assert sorted(found.values()) == sorted([x.nbytes, low, *scales]), name

        def recomputed() -> Tensor:
            x: Tensor = recompute(lambda x: x * 2, hidden)
            with not_saving(x):
                return adapted(linear, x)[0]

        assert sorted(saved_by(recomputed).values()) == sorted([hidden.nbytes, low, *scales]), name


# ------------------------------------------------------------------------------------------------- experts


@dataclass(frozen=True)
class Row:
    """Experts with adapters. `r`: rank of the adapters of each parameter, 0 for none. `base`: whether that trains."""

    r: tuple[int, int]
    scales: tuple[float, float] = (2.0, 0.5)
    base: bool = False


ROWS = [Row((8, 8)), Row((16, 0)), Row((0, 8), (1.0, 1.0)), Row((8, 16), base=True)]
COUNTS = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 5, 0, 33), (9, 9, 9, 9)]


def experts_of(row: Row, chunk: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Four experts of widths 24 and 20, the latter padded, with adapters."""
    site: Any = SimpleNamespace(
        recompute=Recompute("none", chunk), compile_layers=False, dtype=dtype, platform=SimpleNamespace(device="cpu")
    )
    module = _Experts(ExpertMLP(24, 20, 4, 1, "mlp."), 4, site, {"dtype": dtype, "device": "cpu"})
    sizes = {"first": (24, 48), "second": (24, 24)}
    for (name, (inputs, outputs)), r, scale in zip(sizes.items(), row.r, row.scales, strict=True):
        getattr(module, name).requires_grad_(row.base)
        if r:
            module.add_module(f"{name}_lora", ExpertsLowRank(4, r, inputs, outputs, scale, site))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("one_kernel", [True, False], ids=["one kernel", "loop"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_experts(row: Row, counts: tuple[int, ...], one_kernel: bool, chunk: int, dtype: torch.dtype) -> None:
    module = experts_of(row, chunk, dtype)
    chosen = torch.arange(4).repeat_interleave(torch.tensor(counts))
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(sum(counts)))]
    exact = {name: drawn(*p.shape, seed=n) / 4 for n, (name, p) in enumerate(module.named_parameters())}
    for name, parameter in module.named_parameters():
        parameter.data.copy_(exact[name])
        exact[name].requires_grad_(parameter.requires_grad)
    x, weights, cotangent = (
        drawn(len(chosen), 24, seed=20),
        drawn(len(chosen), seed=21),
        drawn(len(chosen), 24, seed=22),
    )

    def merged(name: str, scale: float) -> Tensor:
        """The matrices of all experts."""
        base = exact[name].view(4, -1, exact[name].shape[1])
        if (a := exact.get(f"{name}_lora.A")) is None:
            return base
        return base + scale * exact[f"{name}_lora.B"].view(4, base.shape[1], -1) @ a.view(4, -1, base.shape[2])

    for each in (x, weights):
        each.requires_grad_()
    order = chosen.argsort(stable=True)
    gate, up = torch.einsum("ni,noi->no", x[order], merged("first", row.scales[0])[chosen[order]]).chunk(2, 1)
    inner = nn.functional.silu(gate) * up * weights[:, None]
    expected = torch.einsum("ni,noi->no", inner, merged("second", row.scales[1])[chosen[order]])
    trained = {name: values for name, values in exact.items() if values.requires_grad}
    wanted = torch.autograd.grad(expected, (x, weights, *trained.values()), cotangent)

    rows, factors = (tensor.detach().to(dtype).requires_grad_() for tensor in (x, weights))
    loops = mock.patch.object(layer, "is_grouped", return_value=False)
    with contextlib.nullcontext() if one_kernel else loops:
        out, _ = module.of_pairs(rows, factors, Dispatch.of(chosen[:, None], factors[:, None], 4, SilentGroup(1)))
        out.backward(cotangent.to(dtype))
    parameters = dict(module.named_parameters())
    found = (out, rows.grad, factors.grad, *(parameters[name].grad for name in trained))
    for one, other in zip(found, (expected, *wanted), strict=True):
        assert apart(one, other) <= LIMITS[dtype]
    assert all(parameter.grad is None for parameter in parameters.values() if not parameter.requires_grad)


@pytest.mark.parametrize("chunk", [0, 7])
def test_frozen_experts_compute_no_gradients_of_weights_and_save_no_inputs(chunk: int) -> None:
    """But rows, and without chunks gate and up; beside them what is of low rank."""
    chosen = torch.arange(4).repeat(10)[:, None]
    for row, low in ((Row((8, 8)), 16), (Row((8, 0)), 8)):
        module = experts_of(row, chunk)
        for parameter in module.parameters():
            parameter.data.zero_()
        rows, weights = torch.randn(40, 24).requires_grad_(), torch.randn(40).requires_grad_()
        dispatch = Dispatch.of(chosen, weights[:, None], 4, SilentGroup(1))
        with mock.patch.object(grouped, "outer_products", side_effect=grouped.outer_products) as outer:
            out, _ = module.of_pairs(rows * 1, weights * 1, dispatch)
            out.sum().backward()
        calls = [call.args[3].shape[1:] for call in outer.call_args_list]
        assert calls and all(8 in shape for shape in calls), "of A and B alone"
        run = module.of_pairs
        found = sorted(saved_by(lambda run=run, r=rows, w=weights, d=dispatch: run(r * 1, w * 1, d)[0]).values())
        wide = [] if chunk else [40 * 48, *[40 * 8] * (low // 8)]
        assert found == sorted(4 * each for each in (40 * 24, 40, *wide))


# ---------------------------------------------------------------------------------------- adapters of a model

MOE = ModelChoice(family="qwen3_vl_moe", text_layers=2, vision_layers=2, deepstack=(0,), experts=5, expert_ffn=9)
SHARED = ModelChoice(
    family="qwen3_5_moe", text_layers=2, vision_layers=2, deepstack=(0,), head_dim=32, delta_dims=(32, 24),
    attention_every=2, experts=6, expert_ffn=9,
)  # fmt: skip
CHOICES = {"qwen3_vl_moe": MOE, "qwen3_5_moe": SHARED}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelShapes]:
    folders: dict[str, Path] = {}

    def get(family: str, **settings: Any) -> ModelShapes:
        if family not in folders:
            folders[family] = write_model(tmp_path_factory.mktemp(family) / "model", CHOICES[family])
        rows = {"text": ModuleConfig(lora=LoraConfig(**settings))}
        return with_adapters(shapes_of_folder(folders[family]), rows) if settings else shapes_of_folder(folders[family])

    return get


@pytest.mark.parametrize("family", CHOICES)
def test_every_linear_layer_but_router_and_head_has_adapters(family: str, shapes: Callable[..., ModelShapes]) -> None:
    plain = shapes(family)
    names = {name.rpartition("layers.0.")[2] for name, _ in linear_layers(plain["text"].architecture)}
    fused = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert fused <= names and not any(name.endswith(("gate", "lm_head", "embed_tokens")) for name in names)
    assert {f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")} <= names or family == "qwen3_vl_moe"
    stored, own = tensors_of("text", shapes(family, r=2)), tensors_of("text", plain)
    experts = MOE.experts if family == "qwen3_vl_moe" else SHARED.experts
    sizes = {name.rpartition("layers.1.mlp.experts.")[2]: size for name, size in stored.items() if name not in own}
    width = own["model.layers.1.mlp.experts.0.down_proj.weight"][0]
    assert sizes["gate_up_proj.lora_A.weight"] == (experts * 2, width)
    assert sizes["gate_up_proj.lora_B.weight"] == (experts * 18, 2)
    assert sizes["down_proj.lora_A.weight"] == (experts * 2, 9)
    assert sizes["down_proj.lora_B.weight"] == (experts * width, 2)


@pytest.mark.parametrize("targets, layers", [
    (("gate_up_proj",), {"mlp.experts.gate_up_proj"}),
    (("experts.down_proj",), {"mlp.experts.down_proj"}),
    (("*.experts.*",), {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
    (("down_proj",), {"mlp.experts.down_proj", "mlp.shared_expert.down_proj"}),
    (("model.language_model.layers.0.mlp.experts.down_proj",), {"mlp.experts.down_proj"}),
])  # fmt: skip
def test_targets_name_experts(targets: tuple[str, ...], layers: set[str], shapes: Callable[..., ModelShapes]) -> None:
    added = shapes("qwen3_5_moe", r=2, targets=targets)["text"].added
    assert isinstance(added, Lora)
    assert {each.name.partition("layers.0.")[2] for each in added.adapters if "layers.0." in each.name} == layers


@pytest.mark.parametrize("entry", ["shared_expert_gate", "mlp.gate", "lm_head", "experts.3.up_proj", "input_layernorm"])
def test_what_is_no_linear_layer_is_refused_by_name(entry: str, shapes: Callable[..., ModelShapes]) -> None:
    with pytest.raises(UserError, match=rf"{entry} is no linear layer"):
        shapes("qwen3_5_moe", r=2, targets=(entry,))


def test_ranks_are_at_most_the_widths_of_one_expert(shapes: Callable[..., ModelShapes]) -> None:
    shapes("qwen3_vl_moe", r=9, targets=("down_proj",))
    with pytest.raises(UserError, match=r"experts\.down_proj is \[\d+, 9\]"):
        shapes("qwen3_vl_moe", r=10, targets=("down_proj",))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_expert_has_its_adapter_beside_its_matrix(ranks: int, shapes: Callable[..., ModelShapes]) -> None:
    """On every rank the product of its shares is its share of the product, padding included."""
    model, experts, r, wide = shapes("qwen3_vl_moe", r=3), MOE.experts, 8, 16
    stored, place = tensors_of("text", model), "model.layers.1.mlp.experts"
    values = {name: drawn(*size, seed=n, dtype=torch.float32) for n, (name, size) in enumerate(stored.items())}
    for fused, kinds in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        a, b = (values[f"{place}.{fused}.lora_{each}.weight"] for each in "AB")
        for expert, product in enumerate(b.view(experts, -1, 3) @ a.view(experts, 3, -1)):
            parts = zip(kinds, product.chunk(len(kinds)), strict=True)
            values |= {f"{place}.{expert}.{kind}.weight": part for kind, part in parts}
    hidden = values[f"{place}.0.gate_proj.weight"].shape[1]
    seen = set[str]()
    for rank in range(ranks):
        own = weight_map("text", model, Share(rank, ranks), view=EXPERTS.name)
        start, stop = block(experts, rank, ranks)
        sizes = {"first": (2 * wide, hidden), "second": (hidden, wide)}
        sizes |= {"first_lora.A": (r, hidden), "first_lora.B": (2 * wide, r)}
        sizes |= {"second_lora.A": (r, wide), "second_lora.B": (hidden, r)}
        local = dict[str, Tensor]()
        for name, (rows, columns) in sizes.items():
            slices, local[name] = own[f"layers.1.mlp.experts.{name}"], torch.ones((stop - start) * rows, columns)
            load_slices(local[name], slices, [values[each.name][each.source] for each in slices])
            local[name] = local[name].view(stop - start, rows, columns)
            seen.update(f"{each.name} {row}" for each in slices for row in range(*each.rows))
        for name in ("first", "second"):
            torch.testing.assert_close(local[f"{name}_lora.B"] @ local[f"{name}_lora.A"], local[name])
    of_layer = {name: size for name, size in stored.items() if name.startswith(place)}
    assert seen == {f"{name} {row}" for name, (rows, _) in of_layer.items() for row in range(rows)}


def test_the_torch_module_has_its_parameters_in_the_order_of_the_map(shapes: Callable[..., ModelShapes]) -> None:
    site = replace(lone_site(), groups=module_groups(lambda *_: SilentGroup(1), None, [EXPERTS]))
    for family, settings in (("qwen3_vl_moe", {}), ("qwen3_5_moe", {"targets": ("down_proj", "in_proj_z")})):
        model = shapes(family, r=3, **settings)
        stage = ModuleStage(model["text"].architecture, site)
        names = [name for name, _ in stage.named_parameters()]
        for view in ("main", EXPERTS.name):
            own = weight_map("text", model, Share(0, 1), PipelineStage.whole(2), view)
            assert [name for name in names if name in own] == list(own)
            names = [name for name in names if name not in own]
        assert not names


def test_new_adapters_add_nothing(shapes: Callable[..., ModelShapes]) -> None:
    added = shapes("qwen3_vl_moe", r=3)["text"].added
    assert added is not None
    name, generator = "model.layers.0.mlp.experts.down_proj", torch.Generator().manual_seed(0)
    a, b = (added.initial(f"{name}.lora_{kind}.weight", (5 * 3, 16), generator) for kind in "AB")
    assert not b.any() and 0.2 < a.abs().max() <= 0.25 and a.abs().min() < 0.05


@pytest.mark.parametrize("kind", ["linear", "experts", "experts in chunks"])
def test_padding_stays_zero(kind: str) -> None:
    """That of ranks and of widths, whatever weight decay and moments do."""
    of_a, of_b = torch.arange(32) % 8 < 3, torch.arange(8) < 3
    rows_of_b, inner = torch.arange(4 * 48) % 24 < 20, torch.arange(24) < 20
    chosen = torch.arange(4).repeat(9)[:, None]
    dispatch = Dispatch.of(chosen, torch.ones_like(chosen), 4, SilentGroup(1))
    if kind == "linear":
        module: Any = LowRank(SHAPES["interleaved"], lone_site())
        real = {"A": torch.arange(12) % 4 < 3, "B": torch.arange(4) < 3}
    else:
        module = experts_of(Row((8, 8)), chunk=7 * (kind != "experts"))
        real = {"first_lora.A": of_a, "first_lora.B": of_b, "second_lora.A": of_a, "second_lora.B": of_b}
        module.first.data.normal_().mul_(rows_of_b[:, None])
        module.second.data.normal_().mul_(inner)
    x, weights = torch.randn(9, 1, 12).requires_grad_(), torch.randn(36).requires_grad_()
    rows = torch.randn(36, 24).requires_grad_()
    masks = dict[str, Tensor]()
    for name, kept in real.items():
        parameter = module.get_parameter(name)
        mask = kept[:, None] if name.endswith("A") else kept[None]
        mask = mask * rows_of_b[:, None] if name == "first_lora.B" else mask
        mask = mask * inner if name == "second_lora.A" else mask
        masks[name] = mask.expand_as(parameter)
        parameter.data.normal_().mul_(masks[name])
    optimizer = torch.optim.AdamW([module.get_parameter(name) for name in real], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        if kind == "linear":
            module.add(torch.zeros(9, 1, 20), x, (9,)).square().sum().backward()
        else:
            module.of_pairs(rows, weights, dispatch)[0].square().sum().backward()
        optimizer.step()
    for name, mask in masks.items():
        parameter = module.get_parameter(name)
        assert not parameter[~mask].any() and parameter[mask].ne(0).all()
