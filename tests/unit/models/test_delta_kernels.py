"""Kernels of gated delta nets: which run where, and that the optional packages compute what PyTorch does.

The packages run on GPUs alone. What they are called with is tested everywhere, on stand-ins with their signatures and
checks; tests marked `cuda` run the real ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hetero.groups.platform import CPU
from megatron_hetero.models.layers import delta_kernels
from megatron_hetero.models.layers.delta_kernels import (
    choose_convolution,
    choose_rule,
    conv1d_convolution,
    convolution_for,
    fla_rule,
    rule_for,
)
from megatron_hetero.models.layers.delta_rule import delta_rule
from megatron_hetero.models.layers.packages import CAUSAL_CONV1D, FLA, OptionalPackage, Status, find, unusable
from megatron_hetero.models.layers.sequences import Sequences
from megatron_hetero.models.layers.short_convolution import convolved
from tests.support.stand_ins.delta_net import causal_conv1d_fn, chunk_gated_delta_rule

GPU = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = ["fla", "causal_conv1d"]
PACKS = {
    "ragged": (7, 1, 4, 70, 2),
    "one": (9,),
    "one token": (1,),
    "single tokens": (1, 1, 1),
    "empty ones": (0, 3, 0, 0, 2, 0),
    "chunks": (64, 63, 65),
}
rule = partial(fla_rule, function=chunk_gated_delta_rule)
convolution = partial(conv1d_convolution, function=causal_conv1d_fn)


# --------------------------------------------------------------- which kernel runs


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_packages_run_on_gpus_in_half_precision(capability: tuple[int, int], dtype: torch.dtype) -> None:
    for widths in ((128, 128), (64, 256), (8, 8), (256, 24)):
        assert choose_rule("cuda", dtype, *widths, capability, ["fla"]) == "fla"
        assert choose_rule("cuda", dtype, *widths, capability, ["causal_conv1d"]) == "torch"
    for sizes in ((1, 8192, 4), (100_000, 8, 2), (4_194_240, 1024, 3)):
        assert choose_convolution("cuda", dtype, *sizes, capability, ["causal_conv1d"]) == "causal_conv1d"
        assert choose_convolution("cuda", dtype, *sizes, capability, ["fla"]) == "torch"


@pytest.mark.parametrize(
    "device, dtype, capability",
    [("cpu", BF16, (9, 0)), ("cuda", FP32, (9, 0)), ("cuda", FP16, (7, 5)), ("meta", BF16, (9, 0))],
    ids=["cpu", "fp32", "Turing", "meta"],
)
def test_packages_do_not_run_elsewhere(device: str, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    assert choose_rule(device, dtype, 128, 128, capability, BOTH) == "torch"
    assert choose_convolution(device, dtype, 100, 64, 4, capability, BOTH) == "torch"


@pytest.mark.parametrize("widths", [(264, 128), (128, 264), (12, 64), (64, 20), (127, 127)], ids=str)
def test_heads_that_fla_does_not_take(widths: tuple[int, int]) -> None:
    assert choose_rule("cuda", BF16, *widths, (9, 0), BOTH) == "torch"


@pytest.mark.parametrize(
    "sizes",
    [(100, 12, 4), (100, 64, 5), (100, 64, 1), (4_194_241, 8, 4), (600_000, 8192, 4)],
    ids=["channels", "many taps", "one tap", "tokens", "elements"],
)
def test_convolutions_that_causal_conv1d_does_not_take(sizes: tuple[int, int, int]) -> None:
    assert choose_convolution("cuda", BF16, *sizes, (9, 0), BOTH) == "torch"


def test_a_cpu_takes_pytorch() -> None:
    assert rule_for(CPU, BF16) is delta_rule and convolution_for(CPU, BF16) is convolved


class Machine:
    """A GPU of compute capability 9.0 with these packages, whose tensors are on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.installed: dict[OptionalPackage, Status] = {}
        self.compiles = True
        self.ran: list[str] = []
        functions = {FLA: chunk_gated_delta_rule, CAUSAL_CONV1D: causal_conv1d_fn}
        monkeypatch.setattr(delta_kernels, "find", lambda package: self.installed.get(package, Status(None)))
        monkeypatch.setattr(delta_kernels, "_compiles", lambda _: self.compiles)
        monkeypatch.setattr(delta_kernels, "cuda_capability", lambda _: (9, 0))
        monkeypatch.setattr(delta_kernels, "_function", lambda package: self.noted(package.module, functions[package]))
        monkeypatch.setattr(delta_kernels, "delta_rule", self.noted("torch", delta_rule))
        monkeypatch.setattr(delta_kernels, "convolved", self.noted("torch", convolved))

    def noted(self, name: str, function: Any) -> Any:
        def run(*inputs: Any, **options: Any) -> Any:
            self.ran.append(name)
            return function(*inputs, **options)

        return run

    def runs(self, dtype: torch.dtype = BF16, width: int = 16) -> list[str]:
        """What runs for a rule and for a convolution."""
        for choice in (rule_for, convolution_for):
            choice.cache_clear()
        self.ran.clear()
        sequences = Sequences((3, 2), CPU)
        inputs = [x.detach().to(FP32) for x in rule_inputs(sequences, (1, 2), (width, 16))]
        run: Any = rule_for(GPU, dtype)
        run(*inputs, sequences)
        convolution_for(GPU, dtype)(torch.zeros(5, width), torch.zeros(width, 4), sequences)
        return list(self.ran)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(monkeypatch)
    for choice in (rule_for, convolution_for):
        choice.cache_clear()


def test_what_is_installed_runs(machine: Machine) -> None:
    assert machine.runs() == ["torch", "torch"]
    machine.installed = {FLA: Status("0.6.0")}
    assert machine.runs() == ["fla", "torch"]
    machine.installed = {FLA: Status("0.6.0"), CAUSAL_CONV1D: Status("1.7.0")}
    assert machine.runs() == ["fla", "causal_conv1d"]
    assert machine.runs(FP32) == ["torch", "torch"] and machine.runs(width=12) == ["torch", "torch"]


@pytest.mark.parametrize(
    "found",
    [Status("0.5.2"), Status("0.6.0", "ImportError: x"), Status("0.6.0", lacks="triton>=3.7.1 (found 3.6.0)")],
    ids=["old", "broken", "old Triton"],
)
def test_what_is_unusable_does_not_run(machine: Machine, found: Status) -> None:
    machine.installed = {FLA: found, CAUSAL_CONV1D: Status("1.5.4")}
    assert machine.runs() == ["torch", "torch"]


def test_fla_needs_a_compiler(machine: Machine) -> None:
    machine.installed, machine.compiles = {FLA: Status("0.6.0"), CAUSAL_CONV1D: Status("1.7.0")}, False
    assert machine.runs() == ["torch", "causal_conv1d"]


# --------------------------------------------------------------- what they compute


def rule_inputs(sequences: Sequences, heads: tuple[int, int], widths: tuple[int, int], seed: int = 0) -> list[Tensor]:
    """Queries, keys, values, decays and betas in fp64, for numbers of key and value heads and their widths."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(sequences.total, *shape, generator=generator, dtype=torch.float64)

    few, many = heads
    q, k, v = drawn(few, widths[0]), drawn(few, widths[0]), drawn(many, widths[1])
    return [x.requires_grad_() for x in (q, k, v, -drawn(many).exp(), drawn(many).sigmoid())]


def compare(ours: Any, expected: Any, inputs: list[Tensor], sequences: Sequences, dtype: torch.dtype = FP32) -> None:
    """Compare output and gradients of two functions of `inputs`, in a dtype but for decays, and of `sequences`."""
    results = []
    for function in (ours, expected):
        given = [x.detach().to(FP32 if i == 3 else dtype).requires_grad_() for i, x in enumerate(inputs)]
        out = function(*given, sequences)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append([out.detach(), *torch.autograd.grad(out, given, cotangent.to(out))])
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        # Decays of first tokens have no gradient. What is stored in half precision between the steps is rounded.
        error = (got.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=0.01)
        assert error < (16 if dtype == FP32 else 2) * torch.finfo(dtype).eps


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)], ids=str)
@pytest.mark.parametrize("widths", [(16, 16), (8, 24)], ids=str)
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_fla_equals_pytorch(lengths: tuple[int, ...], widths: tuple[int, int], heads: tuple[int, int]) -> None:
    sequences = Sequences(lengths, CPU)
    inputs = rule_inputs(sequences, heads, widths)
    compare(rule, delta_rule, inputs, sequences)


def test_fla_saves_its_inputs_alone() -> None:
    sequences = Sequences((3, 4), CPU)
    inputs = [x.detach().requires_grad_() for x in rule_inputs(sequences, (1, 2), (16, 16))]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        run: Any = rule
        run(*inputs, sequences)
    assert {x.data_ptr() for x in saved} <= {x.data_ptr() for x in inputs} and saved


def convolution_inputs(rows: int, channels: int, taps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, channels), (channels, taps))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_causal_conv1d_equals_pytorch(lengths: tuple[int, ...], taps: int) -> None:
    sequences = Sequences(lengths, CPU)
    inputs = convolution_inputs(sequences.total, 16, taps)
    compare(convolution, convolved, inputs, sequences)


def sliced(x: Tensor, first: int, width: int) -> Tensor:
    """`x`, whose rows are parts of rows of that width."""
    whole = x.new_zeros(len(x), width)
    return torch.cat((whole[:, :first], x, whole[:, first + x.shape[1] :]), dim=1)[:, first : first + x.shape[1]]


LAYOUTS = {
    "rows of a wider tensor": lambda x: sliced(x, 8, 32),
    "rows at odd places": lambda x: sliced(x, 3, 32),
    "odd strides": lambda x: sliced(x, 0, 21),
    "channels first": lambda x: x.t().contiguous().t(),
    "a row for all": lambda x: x[:1].expand(len(x), -1),
}


@pytest.mark.parametrize("lengths", [(3, 4), (1,)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_conv1d_takes_inputs_in_any_layout(layout: str, lengths: tuple[int, ...]) -> None:
    sequences, laid_out = Sequences(lengths, CPU), LAYOUTS[layout]
    inputs = convolution_inputs(sequences.total, 16, 4)
    ours, theirs = (lambda x, *others, f=f: f(laid_out(x), *others) for f in (convolution, convolved))
    compare(ours, theirs, inputs, sequences)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_conv1d_takes_gradients_in_any_layout(layout: str) -> None:
    sequences = Sequences((3, 4), CPU)
    x, weight = (each.float().requires_grad_() for each in convolution_inputs(7, 16, 4))
    cotangent = LAYOUTS[layout](torch.randn(7, 16, generator=torch.Generator().manual_seed(1)))
    results = [torch.autograd.grad(f(x, weight, sequences), (x, weight), cotangent) for f in (convolution, convolved)]
    torch.testing.assert_close(*results)


def test_a_convolution_without_gradients() -> None:
    sequences = Sequences((3, 4), CPU)
    x, weight = convolution_inputs(7, 16, 4)
    torch.testing.assert_close(convolution(x, weight, sequences), convolved(x, weight, sequences))


# --------------------------------------------------------------- the packages themselves


REAL = pytest.mark.parametrize(
    "package, stand_in", [(FLA, chunk_gated_delta_rule), (CAUSAL_CONV1D, causal_conv1d_fn)], ids=["fla", "conv1d"]
)


@REAL
def test_stand_ins_have_the_signatures_of_the_packages(package: OptionalPackage, stand_in: Any) -> None:
    if why := unusable(package, find(package)):
        pytest.skip(f"{package.module} {why}")
    theirs = inspect.signature(delta_kernels._function(package)).parameters.values()
    ours = inspect.signature(stand_in).parameters.values()
    assert [(x.name, x.kind, x.default) for x in theirs] == [(x.name, x.kind, x.default) for x in ours]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("widths", [(128, 128), (64, 32)], ids=str)
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_fla_equals_pytorch_on_a_gpu(
    lengths: tuple[int, ...], widths: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    if why := unusable(FLA, find(FLA)):
        pytest.skip(f"fla {why}")
    sequences = Sequences(lengths, GPU)
    inputs = [x.to(GPU) for x in rule_inputs(sequences, heads, widths)]
    compare(rule_for(GPU, dtype), delta_rule, inputs, sequences, dtype)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_causal_conv1d_equals_pytorch_on_a_gpu(lengths: tuple[int, ...], taps: int, dtype: torch.dtype) -> None:
    if why := unusable(CAUSAL_CONV1D, find(CAUSAL_CONV1D)):
        pytest.skip(f"causal_conv1d {why}")
    sequences = Sequences(lengths, GPU)
    inputs = [x.to(GPU) for x in convolution_inputs(sequences.total, 64, taps)]
    compare(convolution_for(GPU, dtype), convolved, inputs, sequences, dtype)
